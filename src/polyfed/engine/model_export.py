"""Clients' personal models: handed out, and written into a run folder with what their users must know."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polyfed.core.client import Client, to_float
from polyfed.core.message import Message, clone, freeze
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory, network_of
from polyfed.core.modules import copy_network, export_state
from polyfed.core.server import Server
from polyfed.data.samples import TableColumns, own_means
from polyfed.data.text import TextConfig
from polyfed.data.transforms import Prepare
from polyfed.engine.executors.client_work import has_weights, working_copy
from polyfed.engine.personal_predictor import PersonalPredictor
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.scoring import uses_default_predict
from polyfed.engine.task import Task
from polyfed.errors import ConfigError
from polyfed.escaping import markdown_text, visible
from polyfed.functional.tied_tensors import find_ties
from polyfed.models.adapt import Adapted
from polyfed.models.third_party import python_source
from polyfed.registry import own_names


@dataclass
class ModelExport:
    """Hands out the personal models of a federation.

    Attributes:
        clients: by number. task: its class names have been filled in. settings: of the run folder's recipe.
        facts: of the method, "method" and "hyperparameters". by_name: architectures that a recipe can name.
    """

    method: Method
    clients: Sequence[Client]
    server: Server
    model_factory: ModelFactory
    task: Task
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    by_name: Mapping[str, object]

    def export(self, client_id: int) -> nn.Module:
        """A copy of the client's personal model, on the CPU; where it has none yet, what it would receive now.

        It is the client's network; a `PersonalPredictor` where the method predicts by more than the network's output.

        Raises:
            ConfigError: there is no such client, or it has not joined yet.
        """
        if client_id not in self.server.clients:
            here = ", ".join(map(str, self.server.clients))
            raise ConfigError(f"expected a client that is present ({here}), got {client_id}")
        personal = self._personal_client(client_id)
        network = copy_network(self.method.personal_model(personal.model))
        if not uses_default_predict(self.method):
            network = PersonalPredictor(self.method, network, clone(personal.method_state))
        return network.cpu().eval()

    def write(self, folder: RunFolder) -> None:
        """Write the models of everybody present into the run folder, and a guide to them."""
        alone = uses_default_predict(self.method)  # else what clients keep may have a say
        guide = ModelReadme(self.model_factory, alone)
        vocabulary = self.task.vocabulary
        with folder.models() as write:
            words = None if vocabulary is None else folder.write_vocabulary(vocabulary.words)
            for client in self.present():
                personal = self._personal_client(client.id)
                weights = export_state(self.method.personal_model(personal.model))
                about = self.about(client, words)
                state = {} if alone else personal.method_state
                write(client.id, weights, state, about)
                guide.add(client.id, weights, about)
        folder.write_readme(guide.text())

    def present(self) -> list[Client]:
        """The clients in the federation now."""
        return [client for client in self.clients if client.id in self.server.clients]

    def _personal_client(self, client_id: int) -> Client:
        """A working copy of the client with what it keeps; where that is nothing, after what it would receive now."""
        client = self.clients[client_id]
        variant = self.method.variant(self.server, client_id)
        message: Message | None = None
        if not has_weights(client, variant, self.model_factory):
            message = self.method.broadcast(self.server, client_id)
        worker = working_copy(client, variant, self.model_factory)
        worker.round = self.server.round
        if message is not None:
            self.method.receive(worker, freeze(message))
        return worker

    def about(self, client: Client, words: str | None) -> dict[str, Any]:
        """See `model_entry`."""
        chosen = self.model_factory.chosen
        return model_entry(
            client,
            self.method,
            self.task,
            self.settings,
            self.facts["method"],
            named=self.settings.get("models") is not None or client.architecture in self.by_name,
            auxiliary=None if chosen is None else chosen.network,
            variant=self.method.variant(self.server, client.id),
            round=self.server.round,
            words=words,
        )


def model_entry(
    client: Client,
    method: Method,
    task: Task,
    settings: Mapping[str, Any],
    method_name: str,
    *,
    named: bool,
    auxiliary: str | None,
    variant: str,
    round: int,
    words: str | None = None,
) -> dict[str, Any]:
    """What somebody who has neither the data nor the recipe must know to use the client's model.

    Args:
        client: with its data. task: its class names have been filled in. settings: of the run folder's recipe.
        method_name: by which it can be made again. named: whether a recipe can name the client's architecture.
        auxiliary, variant: networks. round: of the weights. words: of texts, the checksum of the file of words.
    """
    models = settings.get("models")
    data = settings.get("data", {})
    x = client.data.train.x
    prepare = client.prepare
    modules = settings.get("run", {}).get("modules")
    texts = task.vocabulary
    normalized = dataclasses.asdict(prepare) if isinstance(prepare, Prepare) else None
    plain = "plain" if prepare is to_float else None
    columns = task.columns
    table = None
    if isinstance(prepare, Prepare) and columns != TableColumns():
        fill = own_means(x, columns, prepare.mean)
        table = {"categories": columns.categories, "flags": columns.flags, "fill": fill}
        table |= {"decimal": columns.cells.decimal, "missing_words": columns.cells.missing}
    return {
        "architecture": client.architecture,
        "classes": client.classes,
        "class_names": list(client.class_names or task.class_names or ()),
        **({} if task.classes else {"target": dataclasses.asdict(client.data.train.scale)}),
        "feature_names": list(task.feature_names),
        "label_column": task.label_column,
        "vocabulary": None if texts is None else texts.most,
        "texts": None if texts is None else {"column": texts.column, "sha256": words, "tokens": texts.tokens},
        "vectors": data.get("word_vectors"),
        "samples": client.n,
        **({"name": client.name} if client.name else {}),
        "zoo": named,
        "feature_dim": None if models is None else models.get("feature_dim"),
        "input": {"shape": list(x.shape[1:]), "type": str(x.dtype).removeprefix("torch.")},
        "image_size": data.get("image_size"),
        "prepare": normalized or plain,
        "method": method_name,
        "hyperparameters": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        **({} if method.card.adapters is None else {"adapters": method.card.adapters.model_dump()}),
        "variant": variant,
        "auxiliary_model": auxiliary,
        "round": round,
        **({} if modules is None else {"modules": modules}),
        **({} if table is None else {"table": table}),
    }


_HEAD = """# The networks of this run

Each `client-*.safetensors` holds a client's weights under the keys of the network's own class; `index.json` says what
else belongs to it: the classes' names, the size of images, mean and standard deviation of its inputs. The lines below
run in this folder. `polyfed predict RUN --client 0 DATA` does all of it, and `polyfed export RUN FILE.pt2 --client 0`
writes all of it as a program that runs without polyfed; with `--trust` where the run is of a method or networks of
your own.
"""
_INPUTS = """## Inputs{whose}

As they are stored, inputs are {shape} of type {type}. The lines below make a batch of what a network takes, `x`, of
yours, as the run did with its own, and ask a model of above.
"""
_NO_SCORES = "# the method scores by more than the network's output: see `polyfed predict` and `polyfed export`"
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
        form = {key: about.get(key) for key in ("input", "prepare", "class_names")}
        form["numbers"] = "target" in about
        form["file"] = "texts.txt" if about.get("texts") is not None else "rows.csv"
        reads = about.get("texts") is not None or about.get("feature_names") or "table" in about
        form["read_by"] = number if reads else None
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
        lines = _prepared(form)
        if self._loadable.issuperset(numbers):
            lines.append("outputs = model(x)")
            lines.append(_prediction(form) if self._scores else _NO_SCORES)
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
        kind = type(own.original if isinstance(own, Adapted) else own)
        place = [f"from {kind.__module__} import {kind.__name__}"] if kind.__qualname__.isidentifier() else []
        return [*place, f"model = {kind.__name__}(...)  # with the arguments that it had for the run"]


def _by_name(file: str) -> list[str]:
    return ["from safetensors.torch import load_file", f'weights = load_file("{file}")']


def _listed(numbers: Sequence[int]) -> str:
    """The first numbers, and how many there are."""
    more = f", ... {numbers[-1]} ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
    return f"{', '.join(map(str, numbers[:_SHOWN]))}{more}"


def _prediction(form: Mapping[str, Any]) -> str:
    """The line that turns outputs into classes, with the first ones' names, or into numbers."""
    if form["numbers"]:
        return "# numbers = mean + std * outputs[:, 0], with the target's mean and std in index.json"
    class_names = form["class_names"]
    shown = [f"{number}: {name}" for number, name in enumerate(class_names[:_SHOWN])]
    names = ", ".join([*shown, *(["..."] if len(class_names) > _SHOWN else [])])
    return f"classes = outputs.argmax(dim=1)  # {visible(' '.join(names.split()))}"


def _prepared(form: Mapping[str, Any]) -> list[str]:
    """The lines that make `x`; rows of tables and texts are read by polyfed."""
    prepare = form["prepare"]
    if form["read_by"] is not None:
        return [
            "from pathlib import Path",
            "from polyfed.data import inference_inputs",
            "from polyfed.experiments.prediction import load_model",
            f'trained = load_model("..", {form["read_by"]})',
            f'x = trained.prepare(inference_inputs.read(Path("{form["file"]}"), trained.form).x)  # of your own',
        ]
    lines = ["import numpy as np", "import torch", 'x = torch.from_numpy(np.load("inputs.npy"))  # of your own']
    if prepare is None:
        return [*lines, "# here the function that the run was given as `prepare`, x = prepare(x)"]
    if form["input"]["type"] != "uint8":
        return lines
    if prepare == "plain":
        return [*lines, "x = x / 255"]
    constants = [f"{name} = torch.tensor({prepare[name]}).view(-1, 1, 1)" for name in ("mean", "std")]
    return [*lines, *constants, "x = (x / 255 - mean) / std"]
