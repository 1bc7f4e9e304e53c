"""A client's personal model out of a finished run's folder, and what it says of new inputs.

Everything needed lies in the run folder's ``models/``: the weights, and `index.json`, which says what network they are
of and in what form it takes its inputs. Neither the data set nor the recipe is read.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor, nn

from polyfed.core.client import as_floats
from polyfed.core.companion import architectures_of
from polyfed.core.device import named_device
from polyfed.core.message import Message, from_bytes
from polyfed.core.method import Method
from polyfed.core.networks import exported
from polyfed.core.randomness import scoped_global
from polyfed.data.inputs import Form, Inputs, numbered, read
from polyfed.data.text import WORDS_FILE, Vocabulary, Words
from polyfed.data.transforms import Prepare
from polyfed.errors import RequestError, described
from polyfed.models.zoo import build
from polyfed.own_methods import method_class
from polyfed.recorded import SUM_FILE, parse_json

__all__ = ["ClientModel", "Predictions", "load_model", "predict"]

CHUNK = 128  # rows per forward pass


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A client's personal model, ready to score inputs.

    client: number. architecture: name. network: in eval mode, on `device`. method: whose `predict` makes the scores.
    state: the named tensors that `predict` sees. form: how inputs are stored. prepare: stored inputs to the network's.
    """

    client: int
    architecture: str
    network: nn.Module
    method: Method
    state: Message
    form: Form
    prepare: Callable[[Tensor], Tensor]
    device: torch.device

    def scores(self, x: Tensor) -> Tensor:
        """Scores (N, C), on the CPU, of inputs (N, ...) as the run stored them."""
        with torch.inference_mode():
            parts = [
                self.method.predict(self.network, self.prepare(p.to(self.device)), self.state) for p in x.split(CHUNK)
            ]
            return torch.cat(parts).cpu()


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says.

    names: of the inputs, a row's number or a file's name. scores: (N, C). labels: (N,) int64, where they are known.
    class_names: one per class. unknown: names of the texts of which the run knew no word, so that nothing but their
    length speaks in their scores.
    """

    names: tuple[str, ...]
    scores: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def __repr__(self) -> str:
        right = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        return f"Predictions({len(self.names)} inputs, {self.scores.shape[1]} classes{right})"

    @property
    def classes(self) -> Tensor:
        """The predicted classes, (N,) int64."""
        return self.scores.argmax(dim=1)

    @property
    def probabilities(self) -> Tensor:
        """(N, C): the softmax of the scores."""
        return self.scores.float().softmax(dim=1)

    @property
    def accuracy(self) -> float | None:
        """The share that is right; None without labels."""
        return None if self.labels is None else float((self.classes == self.labels).double().mean())

    def rows(self, probabilities: bool = False) -> list[dict[str, Any]]:
        """One per input: name, class, class_name, probability; on request ``probability_<class>`` of all classes."""
        rows = []
        for name, label, shares in zip(self.names, self.classes.tolist(), self.probabilities.tolist(), strict=True):
            called = self.class_names[label] if label < len(self.class_names) else str(label)
            row = {"name": name, "class": label, "class_name": called, "probability": shares[label]}
            every = {f"probability_{number}": share for number, share in enumerate(shares)}
            rows.append({**row, **(every if probabilities else {})})
        return rows

    def to_csv(self, probabilities: bool = False) -> str:
        """`rows` under a heading; probabilities with six decimals."""
        rows, stream = self.rows(probabilities), io.StringIO()
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        return stream.getvalue()


def predict(
    run: str | Path,
    client: int,
    data: str | Path | Tensor | NDArray[Any],
    *,
    device: str = "cpu",
    image_column: str | None = None,
    label_column: str | None = None,
    text_column: str | None = None,
    resize: bool = False,
) -> Predictions:
    """What a client's personal model says of new inputs.

    Args:
        run: a finished run's folder. client: number.
        data: files as `polyfed.data.inputs.read` takes them, or inputs (N, ...) as the run stored them.
        device: where the network computes.
        image_column, label_column, text_column: of Parquet files, where they cannot be told; of CSV files the last two.
        resize: bring images of another size to that of the run's, bilinear; without it they are refused.

    Raises:
        RequestError: see `load_model` and `polyfed.data.inputs.read`.
    """
    model = load_model(run, client, device)
    form = _resizing(model.form) if resize else model.form
    if isinstance(data, Tensor | np.ndarray):
        inputs = numbered(torch.as_tensor(data), form, "the tensor given")
    elif not isinstance(data, str | os.PathLike):
        raise RequestError(f"data: expected the path of files, or inputs as a tensor, got {described(data)}")
    else:
        inputs = read(Path(data), form, image_column, label_column, text_column)
    return _predicted(model, inputs)


def _resizing(form: Form) -> Form:
    """The form, for images of any size."""
    if not form.images:
        raise RequestError(f"resize is of images, got it where the run's inputs are {form}")
    height, width = form.shape[1:]
    return dataclasses.replace(form, image_size=(height, width))


def _predicted(model: ClientModel, inputs: Inputs) -> Predictions:
    try:
        scores = model.scores(inputs.x)
    except IndexError:
        if inputs.x.dtype != torch.int64:
            raise
        low, high = inputs.x.aminmax()
        raise RequestError(f"expected ids of the run's vocabulary, came {int(low)} to {int(high)}") from None
    return Predictions(inputs.names, scores, inputs.y, model.form.class_names, inputs.unknown)


# loading ----------------------------------------------------------------------------------------------------------


def load_model(run: str | Path, client: int, device: str = "cpu") -> ClientModel:
    """A client's personal model from a finished run's folder; nothing is unpickled.

    Networks and methods of your own ("package.module:name") are imported, from where the run found them.

    Raises:
        RequestError: no finished run, no such client, a damaged file, weights that do not fit the network, a network
            that a run folder cannot rebuild.
    """
    folder, place = Path(run) / "models", named_device(device)
    name, entry = _entry(Path(run), client)
    try:
        if not entry["zoo"]:
            raise RequestError(
                f"client {client}'s network came as a module, which a run folder does not hold; make it again and "
                f"load {folder / name} into it with safetensors.torch.load_model"
            )
        if entry.get("vectors") is not None:
            raise RequestError(
                f"client {client}'s network looks words up in the vectors of '{entry['vectors']}', which a run folder "
                f"does not hold; such runs are scored while they train"
            )
        form = Form(
            tuple(entry["input"]["shape"]),
            getattr(torch, entry["input"]["type"]),
            entry["image_size"],
            tuple(entry["class_names"]),
            tuple(entry.get("feature_names", ())),
            entry.get("label_column"),
            _vocabulary(entry, folder),
        )
        prepare = _prepare(entry["prepare"], client)
        method = _method(entry["method"], entry["knobs"], _folders(entry))
        files = {file: _checked(folder / file, wanted) for file, wanted in entry["sha256"].items()}
        state = next((from_bytes(data) for file, data in files.items() if file != name), {})
        with scoped_global(0):  # initial weights are drawn, and overwritten
            network = method.personal(_built(entry, method, form.shape))
        _fill(network, files[name], folder / name)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise RequestError(
            f"expected {folder / 'index.json'} as this version writes it, came another: {why}"
        ) from error
    state = {
        k: v.to(place) if isinstance(v, Tensor) else {n: t.to(place) for n, t in v.items()} for k, v in state.items()
    }
    return ClientModel(client, entry["architecture"], network.to(place).eval(), method, state, form, prepare, place)


def _prepare(said: Any, client: int) -> Callable[[Tensor], Tensor]:
    """From stored inputs to the network's, as an entry of the index says."""
    if said is None:
        raise RequestError(
            f"client {client}'s inputs went through a function of your own (prepare), which a run folder does not "
            "hold; make the network as models/README.md shows, and prepare its inputs as for the run"
        )
    return as_floats if said == "plain" else Prepare(tuple(said["mean"]), tuple(said["std"]), bool(said.get("table")))


def _vocabulary(entry: Mapping[str, Any], folder: Path) -> Vocabulary | None:
    """How the run read texts; None where its inputs were none, or its folder does not say."""
    texts = entry.get("texts")
    if texts is None:
        return None
    words = _checked(folder / WORDS_FILE, texts["sha256"]).decode().split("\n")[:-1]
    return Vocabulary(tuple(words), entry["input"]["shape"][0], texts["column"], entry["vocabulary"])


def _built(entry: Mapping[str, Any], method: Method, shape: tuple[int, ...]) -> nn.Module:
    """The network that the client trained, as an entry of the index says; its weights are any."""
    own, companion = entry["architecture"], entry.get("companion")
    words = None if entry.get("vocabulary") is None else Words(vocabulary=entry["vocabulary"]).ids
    builders = {
        name: functools.partial(
            build,
            name,
            shape,
            entry["classes"],
            entry["feature_dim"],
            words,
            fetch=False,
            beside=_folders(entry),
        )
        for name in (own, companion)
        if name is not None
    }
    architectures = architectures_of(method, builders, 0, torch.device("cpu"), companion=companion)
    return architectures.template(own, entry["variant"])


def _method(name: str, knobs: Mapping[str, Any], beside: Sequence[str]) -> Method:
    """The method with the knobs of a JSON file, in which tuples are lists."""
    kind = method_class(name, beside)
    return TypeAdapter(kind).validate_json(json.dumps(knobs)) if dataclasses.is_dataclass(kind) else kind()


def _folders(entry: Mapping[str, Any]) -> Sequence[str]:
    """Where the run found modules of its user's own."""
    folders = entry.get("modules", [])
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise ValueError(f"expected a list of folders as 'modules', got {folders!r:.60}")
    return folders


def _entry(run: Path, client: int) -> tuple[str, Mapping[str, Any]]:
    """The name of a client's weights, and what the index says of them."""
    if isinstance(client, bool) or not isinstance(client, int | np.integer):
        raise RequestError(f"client: expected the number of a client, got {described(client)}")
    if not (run / "result.json").exists():
        came = f"{run}, which holds no result.json" if run.is_dir() else f"{run}, which is no folder"
        raise RequestError(f"expected the folder of a finished run, came {came}")
    path = run / "models" / "index.json"
    try:
        index, name = dict(parse_json(_listed(path))), f"client-{client:03d}.safetensors"
        if name in index:
            return name, dict(index[name])
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"expected a list of models in {path}, came nothing readable: {error}") from None
    numbers = [file.removeprefix("client-").partition(".")[0].lstrip("0") or "0" for file in index]
    known = ", ".join(numbers[:10]) + (f", ... {numbers[-1]}" if len(numbers) > 10 else "")
    raise RequestError(f"expected a client whose model is in {path.parent} ({known}), came {client}")


def _listed(path: Path) -> bytes:
    """The list's bytes, as they were written, where their checksum lies beside it."""
    sums = path.with_name(SUM_FILE)
    return _checked(path, sums.read_bytes()[:64].decode("ascii", "replace")) if sums.exists() else path.read_bytes()


def _checked(path: Path, wanted: str) -> bytes:
    """A file's bytes, as they were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from None
    if hashlib.sha256(data).hexdigest() != wanted:
        raise RequestError(f"{path} is damaged: it is not what its checksum says")
    return data


def _fill(network: nn.Module, data: bytes, path: Path) -> None:
    """Exported weights into the network: all of them, and of its shapes."""
    try:
        weights = safetensors.torch.load(data)
    except (SafetensorError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        raise RequestError(f"expected weights as safetensors in {path}, came something else: {error}") from None
    own = exported(network)
    if strange := sorted(own.keys() ^ weights.keys()):
        whose = "the network" if strange[0] in own else "the file"
        raise RequestError(f"{path} does not fit the network as it is built now: only {whose} has '{strange[0]}'")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:
                built, came = tuple(tensor.shape), tuple(weights[name].shape)
                raise RequestError(
                    f"{path} does not fit the network as it is built now: '{name}' is {came}, not {built}"
                )
            tensor.copy_(weights[name])
