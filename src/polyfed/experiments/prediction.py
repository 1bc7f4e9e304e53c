"""A client's network out of a finished run's folder, and what it says of new inputs.

Everything needed lies in the run folder's ``models/``: the weights, and `index.json`, which says what network they are
of and in what form it takes its inputs. Neither the data set nor the recipe is read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
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
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.core.client import to_float
from polyfed.core.message import Message, first_nonfinite, flatten, from_bytes, unflatten
from polyfed.core.method import Method
from polyfed.core.model_factory import is_frozen, network_of
from polyfed.core.modules import export_state
from polyfed.core.randomness import seeded_global_rng
from polyfed.core.settings import AdapterSettings
from polyfed.data.federation_columns import Feature
from polyfed.data.inference_inputs import InputSpec, from_tensor, read
from polyfed.data.samples import TableColumns, TargetScale
from polyfed.data.text import FIRST_WORD, OF_PAPER, WORDS_FILE, Vocabulary
from polyfed.data.transforms import Prepare
from polyfed.engine.architectures import build_model_factory
from polyfed.engine.device import parse_device
from polyfed.engine.method_wrappers import adapted, personalized
from polyfed.engine.personal_predictor import PersonalPredictor
from polyfed.errors import ConfigError, described, kind_and_line
from polyfed.escaping import client_text, csv_text, one_line
from polyfed.functional import metrics
from polyfed.models.zoo import build
from polyfed.own_methods import method_class
from polyfed.records.fields import validated
from polyfed.records.read import SUM_FILE, check_links, parse_json
from polyfed.records.stored_files import ModelEntry, Normalization, TableForm
from polyfed.registry import check_trusted

__all__ = ["ClientModel", "Predictions", "load", "predict"]

CHUNK = 128  # rows per forward pass
_BUILDING = ("architecture", "auxiliary_model", "method", "hyperparameters")  # what of an entry networks are made by
_MOST = 2**24  # classes, words, or anything else that an entry of the index says how many there are of
_LARGEST_INPUT = 2**24  # numbers of one input
_ROOM = 2**31  # bytes that a network may take beside what its weights' file speaks for: auxiliary models, trials
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A client's network, ready to score inputs.

    client, name: number, and what it is called. architecture: name. network: in eval mode, on `device`. method: whose
    `predict` makes the scores. state: the named tensors that `predict` sees. form: how inputs are stored. prepare:
    stored inputs to the network's. scale: where numbers are predicted, what they were standardized with. stage:
    "received", as the server's next message makes it, or "personal", as the client keeps it.
    """

    client: int
    architecture: str
    network: nn.Module
    method: Method
    state: Message
    form: InputSpec
    prepare: Callable[[Tensor], Tensor]
    device: torch.device
    scale: TargetScale | None = None
    name: str = ""
    stage: str = "personal"

    @functools.cached_property
    def predictor(self) -> PersonalPredictor:
        """All of it as one module, from inputs as the run stored them to scores; in eval mode, on `device`."""
        return PersonalPredictor(self.method, self.network, self.state, self.prepare).eval()

    def scores(self, x: Tensor) -> Tensor:
        """Scores (N, C), on the CPU, of inputs (N, ...) as the run stored them."""
        with torch.inference_mode():
            return torch.cat([self.predictor(part.to(self.device)) for part in x.split(CHUNK)]).cpu()

    def predict(self, data: str | Path | Tensor | NDArray[Any]) -> Predictions:
        """What the model says of new inputs; data: see `polyfed.predict`.

        Raises:
            ConfigError: see `polyfed.data.inference_inputs.read`.
        """
        if isinstance(data, Tensor | np.ndarray):
            inputs = from_tensor(torch.as_tensor(data), self.form, "the tensor given")
        elif not isinstance(data, str | os.PathLike):
            raise ConfigError(f"data: expected the path of files, or inputs as a tensor, got {described(data)}")
        else:
            inputs = read(Path(data), self.form)
        try:
            scores = self.scores(inputs.x)
        except IndexError:
            if inputs.x.dtype != torch.int64:
                raise
            low, high = inputs.x.aminmax()
            raise ConfigError(f"expected ids of the run's vocabulary, got {int(low)} to {int(high)}") from None
        return Predictions(self, inputs.names, scores, inputs.y, inputs.unknown)


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says.

    model: whose. names: of the inputs, a row's number or a file's name. scores: (N, C), or (N, 1) where numbers are
    predicted. labels: (N,), where they are known: int64, or floats. unknown: names of the texts of which the run knew
    no word, so that nothing but their length speaks in their scores.
    """

    model: ClientModel
    names: tuple[str, ...]
    scores: Tensor
    labels: Tensor | None
    unknown: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if self.model.scale is not None:
            error = "" if self.rmse is None else f", RMSE {self.rmse:.4g}"
            return f"Predictions({len(self.names)} inputs, numbers{error})"
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
        """The share that is right; None without labels, or where numbers are predicted."""
        if self.labels is None or self.model.scale is not None:
            return None
        return float((self.classes == self.labels).double().mean())

    @property
    def values(self) -> Tensor:
        """The predicted numbers, (N,) float64, in their own unit.

        Raises:
            ConfigError: classes are predicted.
        """
        if self.model.scale is None:
            raise ConfigError("expected a model that predicts numbers, got one of classes; see `classes`")
        return self.model.scale.restored(self.scores[:, 0])

    @property
    def rmse(self) -> float | None:
        """The RMSE of the predicted numbers; None without labels, or where classes are predicted."""
        return None if self.labels is None or self.model.scale is None else metrics.rmse(self.values, self.labels)

    def rows(self) -> list[dict[str, Any]]:
        """One per input: name, class, class_name, probability; `probabilities` has those of all classes.

        Where numbers are predicted: name, prediction.
        """
        if self.model.scale is not None:
            pairs = zip(self.names, self.values.tolist(), strict=True)
            return [{"name": name, "prediction": value} for name, value in pairs]
        class_names = self.model.form.class_names
        rows = []
        for name, label, shares in zip(self.names, self.classes.tolist(), self.probabilities.tolist(), strict=True):
            called = class_names[label] if label < len(class_names) else str(label)
            rows.append({"name": name, "class": label, "class_name": called, "probability": shares[label]})
        return rows

    def to_csv(self) -> str:
        """`rows` under a heading; probabilities with six decimals."""
        rows = self.rows()
        lines = [{k: f"{v:.6f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        return csv_text(list(rows[0]), lines)


def predict(
    run: str | Path,
    client: int | str,
    data: str | Path | Tensor | NDArray[Any],
    *,
    stage: str | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> Predictions:
    """What a client's network says of new inputs.

    Args:
        run: a finished run's folder. client: number or name. stage: see `load`.
        data: files as `polyfed.data.inference_inputs.read` takes them, or inputs (N, ...) as the run stored them.
        device: where the network computes.
        trust: whether code that the folder names may be imported, see `load`.

    Raises:
        ConfigError: see `load` and `polyfed.data.inference_inputs.read`.
    """
    return load(run, client, device, trust, stage).predict(data)


# loading ----------------------------------------------------------------------------------------------------------


def load(
    run: str | Path,
    client: int | str | None = None,
    device: str = "cpu",
    trust: bool = False,
    stage: str | None = None,
) -> ClientModel:
    """A client's network from a finished run's folder; nothing is unpickled.

    Args:
        run: the folder, or that of a node, in its `state-dir`.
        client: number, or name; a whole number is a number. None: the only one.
        device: where the network computes.
        trust: whether networks and methods that are not polyfed's ("package.module:name") may be imported, from where
            the run found them. Who wrote the folder decides what that is: trust your own folders, and those whose code
            you have read.
        stage: "received", what the server sends it, or "personal", what it keeps; None: the one whose scores the run
            reports, and that gives these.

    Raises:
        ConfigError: no finished run, no such client or stage, code that is not trusted, a damaged file, a link, weights
            that do not fit the network, numbers that are not finite, a state that is missing or does not fit the
            classes, a network that a run folder cannot rebuild.
    """
    place = parse_device(device)
    number, entry = _stored_entry(Path(run), client)
    check_trusted(run, {key: entry.get(key) for key in _BUILDING}, trust)
    listed = Path(run) / "models" / "index.json"
    try:
        validated(ModelEntry, entry)
        _check_sizes(entry)
        model = _restored(listed.parent, number, entry, place, stage)
        kept = entry["keeps"][model.stage]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = kind_and_line(error)
        raise ConfigError(f"expected {listed} as this version writes it, got another: {why}") from error
    _check_usable(model, kept, entry["classes"], listed)
    return model


def _restored(
    folder: Path, number: int, entry: Mapping[str, Any], place: torch.device, stage: str | None
) -> ClientModel:
    title = client_text(number, entry.get("name", ""))
    stage, files = _files_of(entry, stage)
    if not entry["zoo"]:
        raise ConfigError(
            f"{title}'s network was given as a module, which a run folder does not hold; make it again and "
            f"load {folder / files['weights']} into it as the README.md beside it shows"
        )
    if entry.get("vectors") is not None:
        raise ConfigError(
            f"{title}'s network looks words up in the vectors of '{entry['vectors']}', which a run folder "
            f"does not hold; such runs are scored while they train"
        )
    form = InputSpec(
        tuple(entry["input"]["shape"]),
        _TYPES[entry["input"]["type"]],
        entry["image_size"],
        tuple(entry["class_names"]),
        tuple(entry.get("feature_names", ())),
        entry.get("label_column"),
        _vocabulary(entry, folder),
        *_table(entry),
    )
    prepare = _prepare(entry["prepare"], title)
    method = _method(entry)
    sums = entry["sha256"]
    path = folder / files["weights"]
    weights = _read_checked(path, sums[path.name])
    state = from_bytes(_read_checked(folder / files["state"], sums[files["state"]])) if "state" in files else {}
    with seeded_global_rng(0), _Room(path, len(weights)):  # initial weights are drawn, and overwritten
        network = method.personal_model(_built(entry, method, form))
    _fill(network, weights, path)
    target = entry.get("target")
    return ClientModel(
        number,
        entry["architecture"],
        network.to(place).eval(),
        method,
        unflatten({name: tensor.to(place) for name, tensor in flatten(state).items()}),
        form,
        prepare,
        place,
        None if target is None else TargetScale(target["mean"], target["std"]),
        one_line(entry.get("name", "")),
        stage,
    )


def _check_usable(model: ClientModel, kept: Sequence[str], classes: int, listed: Path) -> None:
    """Whether a model can score inputs: its numbers are finite, nothing is missing, and all fits the classes."""
    problem = None
    names = model.form.class_names
    if (bad := first_nonfinite({"weights": export_state(model.network), **model.state})) is not None:
        problem = f"finite numbers, got others in '{bad}'"
    elif sorted(model.state) != sorted(kept):
        problem = (
            f"the state that its method keeps ({', '.join(kept) or 'none'}), got "
            f"{', '.join(sorted(model.state)) or 'none'}"
        )
    elif len(names) not in (0, classes):
        problem = f"a name for each of {classes} classes, got {len(names)}"
    elif not all(map(math.isfinite, model.form.fill)):
        problem = "finite numbers in place of missing ones, got others"
    else:
        try:
            zeros = torch.zeros(1, *model.form.shape, dtype=model.form.dtype)
            with seeded_global_rng(0):
                scores = model.scores(zeros)
                if bool(scores.isnan().any()):  # as of networks that divide by the spread of an input
                    scores = model.scores((torch.arange(zeros.numel()) % 2).view_as(zeros).to(zeros))
            if scores.dim() != 2 or scores.shape[1] < (classes or 1):
                problem = f"scores of {classes or 1} classes, got some of the shape {tuple(scores.shape)}"
            elif bool(scores.isnan().any()):
                problem = "scores of an input of zeros and ones, got some that are no numbers"
        except Exception as error:  # what a network does may be anything
            problem = f"scores of an input of zeros, got {kind_and_line(error)}"
    if problem is not None:
        raise ConfigError(f"{client_text(model.client, model.name)}'s model in {listed.parent}: expected {problem}")


def _files_of(entry: Mapping[str, Any], stage: str | None) -> tuple[str, Mapping[str, str]]:
    """A stage, by default the one that the run scores, and the names of its files, which lie beside the list.

    Raises:
        ConfigError: the folder does not have the stage. ValueError: no name of a file of its kind.
    """
    kept = entry["stages"]
    if stage is None:
        stage = entry["stage"] if entry["stage"] in kept else "personal"
    if stage not in kept:
        raise ConfigError(f"stage: expected one that the run keeps ({', '.join(kept)}), got {described(stage)}")
    files = kept[stage]
    for file in files.values():
        if not re.fullmatch(r"[a-z]+(-\d+)?(\.state)?\.safetensors", file, re.ASCII):
            raise ValueError(f"expected files as personal-000.safetensors, got '{one_line(file):.60}'")
    return stage, files


def _prepare(stored: Any, title: str) -> Callable[[Tensor], Tensor]:
    """From stored inputs to the network's, as an entry of the index says."""
    if stored is None:
        raise ConfigError(
            f"{title}'s inputs went through a function of your own (prepare), which a run folder does not "
            "hold; load the weights into the network yourself, and prepare its inputs as for the run"
        )
    if stored == "plain":
        return to_float
    normalization = validated(Normalization, stored, "prepare")
    return Prepare(tuple(normalization.mean), tuple(normalization.std), bool(normalization.table))


def _vocabulary(entry: Mapping[str, Any], folder: Path) -> Vocabulary | None:
    """How the run read texts; None where its inputs were none, or its folder does not say."""
    texts = entry.get("texts")
    if texts is None:
        return None
    words = _read_checked(folder / WORDS_FILE, texts["sha256"]).decode().split("\n")[:-1]
    return Vocabulary(
        tuple(words),
        entry["input"]["shape"][0],
        texts["column"],
        entry["vocabulary"],
        texts.get("tokens", OF_PAPER),
    )


def _table(entry: Mapping[str, Any]) -> tuple[TableColumns, tuple[float, ...], Mapping[str, Feature]]:
    """Which features are categories or may be missing, what stands for those that are, and how files spell them."""
    stored = entry.get("table")
    if stored is None:
        return TableColumns(), (), {}
    form = validated(TableForm, stored, "table")
    count = len(entry["feature_names"])
    pairs = [tuple(pair) for pair in form.flags]
    last = list(range(count - len(pairs), count))
    fits = all(len(pair) == 2 and pair[0] < count for pair in pairs) and [pair[-1] for pair in pairs] == last
    if len(form.categories) not in (0, count) or not fits or count != entry["input"]["shape"][0]:
        raise ValueError(f"expected categories and flags of {count} features, got others")
    if len(form.fill) != len(pairs):
        raise ValueError(f"expected {len(pairs)} values for missing ones, got {len(form.fill)}")
    columns = TableColumns(tuple(map(tuple, form.categories)), tuple((one, other) for one, other in pairs))
    spelling = {name: Feature(**how) for name, how in (form.spelling or {}).items()}
    return columns, tuple(form.fill), spelling


def _built(entry: Mapping[str, Any], method: Method, form: InputSpec) -> nn.Module:
    """The network that the client trained, as an entry of the index says; its weights are any."""
    own = entry["architecture"]
    names = [own]
    auxiliary = entry.get("auxiliary_model")
    wanted = method.auxiliary_model
    if wanted is not None and auxiliary is not None:
        names.append(dataclasses.replace(wanted, network=auxiliary).architecture)
    words = None if entry.get("vocabulary") is None else FIRST_WORD + entry["vocabulary"]
    builders = {
        name: functools.partial(
            build,
            network_of(name),
            form.shape,
            entry["classes"] or 1,
            None if is_frozen(name) else entry["feature_dim"],
            words,
            fetch=is_frozen(name),
            beside=entry.get("modules", []),
            categories=form.columns.counts,
            feature_pool=entry.get("feature_pool", False),
            frozen=is_frozen(name),
        )
        for name in names
    }
    if entry.get("adapters") is not None:
        method = adapted(method, AdapterSettings(**entry["adapters"]))
    frozen = entry.get("frozen", {"seed": 0})
    model_factory = build_model_factory(method, builders, frozen["seed"], torch.device("cpu"), auxiliary=auxiliary)
    beside = model_factory.frozen_network
    if beside is not None and beside.checksum != frozen["sha256"]:
        raise ConfigError(
            f"expected the map '{beside.name}' as the run had it, got other weights: SHA-256 {beside.checksum:.12}... "
            f"instead of {frozen['sha256']:.12}..."
        )
    return model_factory.module(own, entry["variant"])


def _method(entry: Mapping[str, Any]) -> Method:
    """The method with the hyperparameters of a JSON file, in which tuples are lists."""
    kind = method_class(entry["method"], entry.get("modules", []))
    method: Method = kind()
    if dataclasses.is_dataclass(kind):
        method = TypeAdapter(kind).validate_json(json.dumps(entry["hyperparameters"]))
    how = entry.get("personalize")
    return method if how is None else personalized(method, how)


def _check_sizes(entry: Mapping[str, Any]) -> None:
    """Whether what an entry of the index says of sizes can be."""
    shape = entry["input"]["shape"]
    size = entry["image_size"]
    numbers = [entry[key] for key in ("feature_dim", "vocabulary", "image_size") if entry.get(key) is not None]
    numbers.append(entry["classes"] if entry.get("target") is None else 1)
    if not shape or not all(1 <= number <= _MOST for number in [*shape, *numbers]):
        raise ValueError(f"expected sizes from 1 to {_MOST}, got {shape} and {numbers}")
    if size is not None and [size, size] != shape[1:]:
        raise ValueError(f"expected images of the size of the input, {shape[1:]}, got {size}")
    if math.prod(shape) > _LARGEST_INPUT:
        raise ValueError(f"expected an input of at most {_LARGEST_INPUT} numbers, got {shape}")


def _stored_entry(run: Path, client: int | str | None) -> tuple[int, Mapping[str, Any]]:
    """A client's number, and what the index says of its model.

    client: None for the only one whose model the folder holds.
    """
    check_links(run)
    if isinstance(client, bool) or not isinstance(client, int | np.integer | str | None):
        raise ConfigError(f"client: expected the number or the name of a client, got {described(client)}")
    of_node = (run / "models").exists() and not (run / "recipe.toml").exists()  # it writes them when it has finished
    if not (run / "result.json").exists() and not of_node:
        given = f"{run}, which holds no result.json" if run.is_dir() else f"{run}, which is no folder"
        raise ConfigError(f"expected the folder of a finished run, got {given}")
    path = run / "models" / "index.json"
    if not path.parent.exists():
        raise ConfigError(f"expected a run that keeps weights, got {run}, which has no folder 'models'")
    try:
        index = parse_json(_listed(path))
        if not isinstance(index, dict):
            raise ValueError(f"expected models by their files' names, got {described(index)}")
        known = {_number(number): dict(entry) for number, entry in index.items()}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"expected a list of models in {path}, got nothing readable: {error}") from None
    names = {number: str(entry.get("name", "")) for number, entry in known.items()}
    found = [number for number in names if client is None or str(number) == str(client)]
    if isinstance(client, str) and not found:
        found = [number for number, name in names.items() if name and name == one_line(client)]
    if len(found) == 1:
        return found[0], known[found[0]]
    known_clients = [client_text(number, name).removeprefix("client ") for number, name in names.items()]
    listed = ", ".join(known_clients[:10]) + (f", ... {known_clients[-1]}" if len(known_clients) > 10 else "")
    raise ConfigError(f"expected a client whose model is in {path.parent} ({listed}), got {described(client)}")


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text, re.ASCII):
        raise ValueError(f"expected numbers of clients, got '{one_line(text):.60}'")
    return int(text)


class _Room(TorchDispatchMode):
    """Within the block, a network that is far larger than the file with its weights is refused, before it is built."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = f"expected a network for the {size} bytes of weights in {path}, got settings of a larger one"
        self._left = _ROOM + 16 * size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        sizes = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        if sizes and all(isinstance(size, int) for size in sizes):  # what makes a tensor of nothing but its shape
            self._left -= 4 * math.prod(sizes)
            if self._left < 0:
                raise ConfigError(self._wanted)
        return function(*args, **(kwargs or {}))


def _listed(path: Path) -> bytes:
    """The list's bytes, as they were written, where their checksum lies beside it."""
    sums = path.with_name(SUM_FILE)
    if not sums.exists():
        return path.read_bytes()
    return _read_checked(path, sums.read_bytes()[:64].decode("ascii", "replace"))


def _read_checked(path: Path, wanted: str) -> bytes:
    """A file's bytes, as they were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ConfigError(f"{path} is damaged: it is not what its checksum says")
    return data


def _fill(network: nn.Module, data: bytes, path: Path) -> None:
    """Exported weights into the network: all of them, and of its shapes."""
    try:
        weights = safetensors.torch.load(data)
    except (SafetensorError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        raise ConfigError(f"expected weights as safetensors in {path}, got something else: {error}") from None
    own = export_state(network)
    if strange := sorted(own.keys() ^ weights.keys()):
        whose = "the network" if strange[0] in own else "the file"
        raise ConfigError(f"{path} does not fit the network as it is built now: only {whose} has '{strange[0]}'")
    with torch.no_grad():
        for name, tensor in own.items():
            stored = weights[name]
            if tensor.shape != stored.shape or tensor.is_floating_point() != stored.is_floating_point():
                found, built = (f"{tuple(one.shape)} {one.dtype}" for one in (stored, tensor))
                raise ConfigError(
                    f"{path} does not fit the network as it is built now: '{name}' is {found}, not {built}"
                )
            tensor.copy_(stored)
