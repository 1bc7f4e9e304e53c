"""How the networks in a run folder's ``models/`` are loaded into their own classes: the text of its README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polyfed.core.architectures import Architectures
from polyfed.core.networks import exported
from polyfed.data.text import Words
from polyfed.models.adapt import Adapted
from polyfed.models.outside import source

_HEAD = """# The networks of this run

Each `client-*.safetensors` holds a client's weights under the keys of the network's own class; `index.json` says what
else belongs to it: the classes' names, the size of images, mean and standard deviation of its inputs. The lines below
run in this folder. `polyfed predict RUN --client 0 DATA` does all of it.
"""
_WORDS = """Inputs are texts: `words.txt` has the words that have ids, a line each, from 2 on; 0 is padding, 1 any other
word.
"""
_SHOWN = 10  # clients named per architecture


class Guide:
    """Gathers who has which network, and says how each is loaded.

    Args:
        architectures: makes networks by name.
    """

    def __init__(self, architectures: Architectures) -> None:
        self._architectures = architectures
        self._own: dict[str, nn.Module] = {}
        self._clients: dict[tuple[str, bool], list[int]] = {}
        self._about: dict[str, Mapping[str, Any]] = {}

    def add(self, number: int, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """One client: its number, its exported weights, and its entry in index.json."""
        name = about["architecture"]
        if name not in self._own:
            self._own[name], self._about[name] = self._architectures.as_built(name), about
        shapes = {key: tensor.shape for key, tensor in exported(self._own[name]).items()}
        as_built = shapes == {key: tensor.shape for key, tensor in weights.items()}
        self._clients.setdefault((name, as_built), []).append(number)

    def text(self) -> str:
        """The whole file."""
        words = [_WORDS] if any(about.get("texts") for about in self._about.values()) else []
        after = [f"Weights are those after round {about['round']}.\n" for about in self._about.values()][:1]
        sections = [self._section(*key, numbers) for key, numbers in self._clients.items()]
        return "\n".join([_HEAD, *after, *words, *sections])

    def _section(self, name: str, as_built: bool, numbers: list[int]) -> str:
        more = f", ... {numbers[-1]} ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
        who = f"Clients {', '.join(map(str, numbers[:_SHOWN]))}{more}."
        file = f"client-{numbers[0]:03d}.safetensors"
        if as_built and self._about[name].get("vectors") is None:
            load = f'model.load_state_dict(load_file("{file}"))'
            lines = ["from safetensors.torch import load_file", *self._made(name), load, "model.eval()"]
        elif as_built:
            file_of_vectors = self._about[name].get("vectors")
            who += f" The network looks words up in the vectors of '{file_of_vectors}', which are not here; these are"
            who += " its tensors by name."
            lines = _by_name(file)
        elif self._about[name]["zoo"]:
            who += " The method changed the network's shape, so polyfed makes it."
            lines = ["from polyfed.prediction import load_model", f'model = load_model("..", {numbers[0]}).network']
        else:
            who += " The method changed the network's shape; these are its tensors by name."
            lines = _by_name(file)
        return "\n".join([f"## {name}\n", f"{who}\n", "```python", *lines, "```\n"])

    def _made(self, name: str) -> list[str]:
        """The lines that make the network without weights."""
        own, about = self._own[name], self._about[name]
        if about["zoo"]:
            words = None if about.get("vocabulary") is None else Words(vocabulary=about["vocabulary"]).ids
            shape, beside = tuple(about["input"]["shape"]), about.get("modules", ())
            return source(name, own, shape, about["classes"], about["feature_dim"], words, beside)
        kind = type(own.original if isinstance(own, Adapted) else own)
        place = [f"from {kind.__module__} import {kind.__name__}"] if kind.__qualname__.isidentifier() else []
        return [*place, f"model = {kind.__name__}(...)  # with the arguments that it had for the run"]


def _by_name(file: str) -> list[str]:
    return ["from safetensors.torch import load_file", f'weights = load_file("{file}")']
