"""How the networks in a run folder's ``models/`` are loaded into their own classes, and what they take in.

The text of its README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from polyfed.core.model_factory import ModelFactory, network_of
from polyfed.core.modules import export_state
from polyfed.data.text import FIRST_WORD, OF_PAPER, TextConfig
from polyfed.escaping import markdown_text, visible
from polyfed.functional.tied_tensors import find_ties
from polyfed.models.adapt import Adapted
from polyfed.models.split import unwrapped
from polyfed.models.third_party import python_source
from polyfed.registry import own_names

_HEAD = """# The networks of this run

Each `client-*.safetensors` holds a client's weights under the keys of the network's own class; `index.json` says what
else belongs to it: the classes' names, the size of images, mean and standard deviation of its inputs. The lines below
run in this folder. `polyfed predict RUN --client 0 DATA` does all of it, with `--trust-code` where the run is of a
method or networks of your own.
"""
_INPUTS = """## Inputs{whose}

As they are stored, inputs are {shape} of type {type}. The lines below make a batch of what a network takes, `x`, of
yours, as the run did with its own, and ask a model of above.
"""
_NO_SCORES = "# the method scores by more than the network's output: see `polyfed predict`"
_SHOWN = 10  # clients named per architecture, and classes


class ModelReadme:
    """Gathers who has which network, and says how each is loaded.

    Args:
        architectures: makes networks by name. scores: whether a network's output is what the method scores by.
    """

    def __init__(self, model_factory: ModelFactory, scores: bool = True) -> None:
        self._model_factory = model_factory
        self._scores = scores
        self._own: dict[str, nn.Module] = {}
        self._clients: dict[tuple[str, bool], list[int]] = {}
        self._about: dict[str, Mapping[str, Any]] = {}
        self._inputs: dict[str, list[int]] = {}  # the form of inputs, as JSON -> who has them
        self._loadable: set[int] = set()  # whose network the lines make

    def add(self, number: int, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """One client: its number, its exported weights, and its entry in index.json."""
        name = about["architecture"]
        if name not in self._own:
            self._own[name] = self._model_factory.build_raw(name)
            self._about[name] = about
        shapes = {key: tensor.shape for key, tensor in export_state(self._own[name]).items()}
        as_built = shapes == {key: tensor.shape for key, tensor in weights.items()}
        self._clients.setdefault((name, as_built), []).append(number)
        if (as_built and about.get("vectors") is None) or (not as_built and about["zoo"]):
            self._loadable.add(number)
        form = {key: about.get(key) for key in ("input", "prepare", "texts", "feature_names", "class_names")}
        form["numbers"] = "target" in about
        form["client"] = number if "table" in about else None  # what stands for missing values is a client's own
        self._inputs.setdefault(json.dumps(form), []).append(number)

    def text(self) -> str:
        """The whole file."""
        networks = [self._section(*key, numbers) for key, numbers in self._clients.items()]
        inputs = [self._section_of_inputs(json.loads(form), numbers) for form, numbers in self._inputs.items()]
        after = [f"Weights are those after round {about['round']}.\n" for about in self._about.values()][:1]
        return "\n".join([_HEAD, *after, *networks, *inputs])

    def _section_of_inputs(self, form: Mapping[str, Any], numbers: list[int]) -> str:
        whose = f" of clients {_listed(numbers)}" if len(self._inputs) > 1 else ""
        shape = " x ".join(map(str, ["N", *form["input"]["shape"]]))
        lines = _prepared(form, f"client-{numbers[0]:03d}.safetensors")
        if self._loadable.issuperset(numbers):
            lines.append("outputs = model(x)")
            said = _said_of_numbers(form["feature_names"]) if form["numbers"] else _said_of_outputs(form["class_names"])
            lines.append(said if self._scores else _NO_SCORES)
        head = _INPUTS.format(whose=whose, shape=shape, type=form["input"]["type"])
        return "\n".join([head, "```python", *lines, "```\n"])

    def _section(self, name: str, as_built: bool, numbers: list[int]) -> str:
        who = f"Clients {_listed(numbers)}."
        file = f"client-{numbers[0]:03d}.safetensors"
        if as_built and self._about[name].get("vectors") is None:
            lines = [*self._loaded(name, file), "model.eval()"]
        elif as_built:
            file_of_vectors = markdown_text(str(self._about[name].get("vectors")))
            who += f" The network looks words up in the vectors of '{file_of_vectors}', which are not here; these are"
            who += " its tensors by name."
            lines = _by_name(file)
        elif self._about[name]["zoo"]:
            who += " The method changed the network's shape, so polyfed makes it."
            about = self._about[name]
            own = own_names([name, about["auxiliary_model"], about["method"], about["hyperparameters"]])
            trust = ", trust=True" if own else ""  # code of one's own, which is to be read first
            lines = ["from polyfed.experiments.prediction import load_model"]
            lines.append(f'model = load_model("..", {numbers[0]}{trust}).network')
        else:
            who += " The method changed the network's shape; these are its tensors by name."
            lines = _by_name(file)
        return "\n".join([f"## {markdown_text(name)}\n", f"{who}\n", "```python", *lines, "```\n"])

    def _loaded(self, name: str, file: str) -> list[str]:
        """The lines that make the network with its weights."""
        made = ["from safetensors.torch import load_file", *self._made(name)]
        ties = find_ties(export_state(self._own[name], every_name=True))
        if not ties:
            return [*made, f'model.load_state_dict(load_file("{file}"))']
        return [
            *made,
            f'weights = load_file("{file}")',
            "same = {  # other names of tensors, each of which is in the file once",
            *(f"    {other!r}: {first!r}," for other, first in ties.items()),
            "}",
            "model.load_state_dict(weights | {other: weights[first] for other, first in same.items()})",
        ]

    def _made(self, name: str) -> list[str]:
        """The lines that make the network without weights."""
        own = self._own[name]
        about = self._about[name]
        if about["zoo"]:
            words = None if about.get("vocabulary") is None else TextConfig(vocabulary=about["vocabulary"]).ids
            shape = tuple(about["input"]["shape"])
            beside = about.get("modules", ())
            categories = [1 + len(names) if names else 0 for names in about.get("table", {}).get("categories", ())]
            outputs = about["classes"] or 1
            return python_source(network_of(name), own, shape, outputs, about["feature_dim"], words, beside, categories)
        kind = type(own.original if isinstance(own, Adapted) else unwrapped(own))
        place = [f"from {kind.__module__} import {kind.__name__}"] if kind.__qualname__.isidentifier() else []
        return [*place, f"model = {kind.__name__}(...)  # with the arguments that it had for the run"]


def _by_name(file: str) -> list[str]:
    return ["from safetensors.torch import load_file", f'weights = load_file("{file}")']


def _listed(numbers: Sequence[int]) -> str:
    """The first numbers, and how many there are."""
    more = f", ... {numbers[-1]} ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
    return f"{', '.join(map(str, numbers[:_SHOWN]))}{more}"


def _said_of_outputs(class_names: Sequence[str]) -> str:
    """The line that turns outputs into classes, with the first ones' names."""
    shown = [f"{number}: {name}" for number, name in enumerate(class_names[:_SHOWN])]
    names = ", ".join([*shown, *(["..."] if len(class_names) > _SHOWN else [])])
    return f"classes = outputs.argmax(dim=1)  # {visible(' '.join(names.split()))}"


def _said_of_numbers(feature_names: Sequence[str]) -> str:
    """The line that turns outputs into the numbers that are predicted; of tables `about` has been read."""
    if feature_names:
        return 'numbers = about["target"]["mean"] + about["target"]["std"] * outputs[:, 0]'
    return "# numbers = mean + std * outputs[:, 0], with the target's mean and std in index.json"


# inputs --------------------------------------------------------------------------------------------------------------


def _prepared(form: Mapping[str, Any], file: str) -> list[str]:
    """The lines that make `x`."""
    shape = form["input"]["shape"]
    stored = form["input"]["type"]
    prepare = form["prepare"]
    if form["texts"] is not None:
        return _of_texts(shape[0], form["texts"].get("tokens", OF_PAPER))
    if form["client"] is not None:
        return _of_encoded_rows(form["client"])
    if form["feature_names"]:
        return _of_rows(file)
    if stored == "uint8" and len(shape) == 3 and shape[0] in (1, 3):
        lines = _of_images(*shape)
    else:
        lines = ["import numpy as np", "import torch", 'x = torch.from_numpy(np.load("inputs.npy"))  # of your own']
    if prepare is None:
        return [*lines, "# here the function that the run was given as `prepare`, x = prepare(x)"]
    if stored != "uint8":
        return lines
    if prepare == "plain":
        return [*lines, "x = x / 255"]
    constants = [f"{name} = torch.tensor({prepare[name]}).view(-1, 1, 1)" for name in ("mean", "std")]
    return [*lines, *constants, "x = (x / 255 - mean) / std"]


def _of_images(channels: int, height: int, width: int) -> list[str]:
    mode = {1: "L", 3: "RGB"}[channels]
    return [
        "import numpy as np",
        "import torch",
        "from PIL import Image",
        f'image = Image.open("image.png").convert("{mode}")  # one of your own',
        f"x = torch.from_numpy(np.array(image)).view(1, image.height, image.width, {channels}).permute(0, 3, 1, 2)",
        f"size = ({height}, {width})  # images of another one are resized as data.image_size does it",
        'x = torch.nn.functional.interpolate(x.float(), size, mode="bilinear", antialias=True).round()',
    ]


def _of_rows(file: str) -> list[str]:
    return [
        "import csv",
        "import json",
        "import torch",
        'with open("index.json", encoding="utf-8") as index:',
        f'    about = json.load(index)["{file}"]',
        'with open("rows.csv", newline="", encoding="utf-8") as rows:  # of your own',
        '    x = torch.tensor([[float(row[name]) for name in about["feature_names"]] for row in csv.DictReader(rows)])',
        'mean, std = (torch.tensor(about["prepare"][name]) for name in ("mean", "std"))',
        "x = (x - mean) / std",
    ]


def _of_encoded_rows(client: int) -> list[str]:
    return [
        "from pathlib import Path",
        "from polyfed.data import inference_inputs",
        "from polyfed.experiments.prediction import load_model",
        f'trained = load_model("..", {client})  # knows categories, and what stands for missing values',
        'x = trained.prepare(inference_inputs.read(Path("rows.csv"), trained.form).x)  # of your own',
    ]


def _of_texts(length: int, rule: str) -> list[str]:
    return [
        "import torch",
        "from polyfed.data.text import tokenize",
        'with open("words.txt", encoding="utf-8") as file:',
        f'    ids = {{word: number for number, word in enumerate(file.read().split("\\n")[:-1], {FIRST_WORD})}}',
        'texts = ["a text of your own", "another one"]',
        f"words = [tokenize(text, {rule!r})[:{length}] for text in texts]",
        "known = [[ids.get(word, 1) for word in text] for text in words]  # 1 is any word without an id",
        f"x = torch.tensor([text + [0] * ({length} - len(text)) for text in known])  # 0 is padding",
    ]
