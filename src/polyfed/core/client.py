"""A client: its own model, its own data, its own state between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.message import Message, State
from polyfed.core.randomness import generator
from polyfed.core.settings import Privacy, Training
from polyfed.data.samples import ClientData, Samples, from_dataset
from polyfed.errors import ConfigError, described

Prepare = Callable[[Tensor], Tensor]  # stored inputs -> what a model takes


def as_floats(x: Tensor) -> Tensor:
    """The plain preparation: bytes to floats in [0, 1]; anything else as it is."""
    return x.float().div(255) if x.dtype == torch.uint8 else x


@dataclass(frozen=True)
class PublicData:
    """Data that everybody may see. ``samples.x`` is (N, ...) as stored; a pair (x, y) becomes `Samples`.

    origin: "holdout", rows of the task's own data that no client has, or "other", inputs of another data set, whose
    labels mean nothing here.
    """

    samples: Samples
    prepare: Prepare = as_floats
    origin: Literal["holdout", "other"] = "holdout"

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", samples_of(self.samples, "public"))

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"PublicData({self.samples!r}, {self.origin})"


class Encoder(Protocol):
    """What is done to an upload at the client (`engine.plugin.Plugin.encode`)."""

    def encode(self, upload: Message, client: Client, method: Any, received: Message) -> Message:
        """What leaves the client in place of `upload`."""
        ...


class Client:
    """One participant.

    Users make it from a model and data; the federation gives it a number and the rest.

    Args:
        model: the client's own network (its present weights are where it starts), or the name of one that the
            federation builds for the client's inputs and the task's classes: as in a recipe ("digits-cnn1",
            "timm:resnet10t", "package.module:function"), or one of its `builders` (initial weights are then a function
            of the seed and the client's number).
        train: training samples; a pair (x, y) of tensors or arrays, x (N, ...), y (N,); or a
            ``torch.utils.data.Dataset`` or one of the package `datasets`, which is read once
            (`polyfed.data.samples.from_dataset`).
        test: test samples, likewise; without any, the client is not scored.
        validation: samples for choosing the best round; optional.
        prepare: turns stored inputs into what the model takes; default: bytes to [0, 1], floats unchanged.

    Attributes:
        id: 0-based number. architecture: name shared by all clients of the same network. classes: number of classes of
        the task. n: number of training samples. state: what the method keeps here between rounds (named tensors,
        replaced and never written into). round, exchange, phase: what is going on. context: what the method's
        `receive` returned, while the client trains. training, privacy: settings. plugins: what is done to its
        uploads before they leave it, in order. public: data shared by all, if any. weights: the client's own weights
        by name, None until it first has any. secret: 32 bytes that only it knows, by which noise on
        its uploads is drawn, and noise and batches of DP-SGD; None: they are drawn as everything is.
    """

    def __init__(
        self,
        model: nn.Module | str,
        train: Samples | tuple[Any, Any] | Any,
        test: Samples | tuple[Any, Any] | Any | None = None,
        validation: Samples | tuple[Any, Any] | Any | None = None,
        *,
        prepare: Prepare = as_floats,
    ) -> None:
        _check_model(model)
        self.given = model if isinstance(model, nn.Module) else None
        self.architecture = model if isinstance(model, str) else ""
        self.data = ClientData(
            samples_of(train, "train"), samples_of(validation, "validation"), samples_of(test, "test")
        )
        if not callable(prepare):
            raise ConfigError(f"prepare: expected a function of a batch of inputs, got {described(prepare)}")
        self.prepare = prepare
        self.n = len(self.data.train)
        if self.n == 0:
            raise ConfigError("expected at least one training sample per client, got none")
        self.id = -1
        self.classes = 0
        self.seed = 0
        self.round = 0
        self.exchange = "train"
        self.phase = ""
        self.context: Mapping[str, Any] = {}
        self.training = Training()
        self.privacy = Privacy()
        self.secret: bytes | None = None
        self.public: PublicData | None = None
        self.plugins: Sequence[Encoder] = ()
        self.state: State = {}
        self.weights: Mapping[str, Tensor] | None = None
        self.version = 0  # grows with every change to weights or state
        self.bound: nn.Module | None = None

    def __repr__(self) -> str:
        number = "" if self.id < 0 else f"{self.id}, "
        network = self.architecture or type(self.given).__name__
        parts = {"training": self.data.train, "validation": self.data.validation, "test": self.data.test}
        rows = ", ".join(f"{len(samples)} {name}" for name, samples in parts.items() if len(samples))
        return f"Client({number}{network}, {rows} samples)"

    @property
    def model(self) -> nn.Module:
        """The template network holding this client's weights: only while the client is at work."""
        if self.bound is None:
            raise ConfigError(f"client {self.id} holds a model only while it works; its weights are in client.weights")
        return self.bound

    @property
    def lr(self) -> float:
        """The learning rate of the client's present round, under the schedule of `training`."""
        return self.training.lr_at(self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """The client's stream for `purpose` in this exchange of this round."""
        return generator(self.seed, purpose, self.exchange, self.round, self.id)


def samples_of(data: Any, what: str) -> Samples:
    """Samples, given as such, as (x, y), as a data set or as None.

    Raises:
        ConfigError: none of these, or labels that are none; `what` it was to be, for the message.
    """
    if isinstance(data, Samples):
        return data.on_cpu()
    if data is None:
        return Samples(torch.empty(0), torch.empty(0, dtype=torch.int64))
    try:
        if isinstance(data, tuple | list) and len(data) == 2:
            return _paired(*data)
        if isinstance(data, Tensor | np.ndarray):
            raise ConfigError(f"expected a pair (x, y) of inputs and labels, got {described(data)} alone")
        if isinstance(data, tuple) and all(isinstance(part, Tensor | np.ndarray) for part in data):
            raise ConfigError(f"expected a pair (x, y) of inputs and labels, got {len(data)} tensors")
        return from_dataset(data)
    except ConfigError as problem:
        raise ConfigError(f"{what}: {problem}") from None


def _paired(inputs: Any, labels: Any) -> Samples:
    """Samples of inputs and labels."""
    x = _tensor(inputs, "inputs")
    y = _tensor(labels, "labels")
    if x.dim() == 0:
        raise ConfigError(f"expected inputs of shape (N, ...), got the single number {x.item()}")
    if y.is_floating_point():
        raise ConfigError(f"expected whole numbers as labels, got {y.dtype}; write y.long() if they are classes")
    if y.dim() == 2:
        write = "y.squeeze(1)" if y.shape[1] == 1 else "y.argmax(1), if rows have a one for the class"
        raise ConfigError(f"expected labels of shape (N,), got {tuple(y.shape)}; write {write}")
    return Samples(x.float() if x.dtype == torch.float64 else x, y.long()).on_cpu()


def _tensor(given: Any, what: str) -> Tensor:
    """Numbers as a tensor, which shares the memory of an array."""
    try:
        return torch.as_tensor(given)
    except Exception:  # a list of tensors, a table of pandas, or anything else, which may raise anything
        pass
    try:
        return torch.from_numpy(np.array(given))
    except (TypeError, ValueError, RuntimeError):
        hint = "; number the classes from 0" if what == "labels" else ""
        raise ConfigError(
            f"expected {what} as a tensor or an array of numbers, got {described(given)}, which cannot become one{hint}"
        ) from None


def _check_model(model: Any) -> None:
    """Whether it is a network, or the name of one."""
    if isinstance(model, nn.Module | str):
        return
    expected = "model: expected a network (torch.nn.Module) or the name of one"
    if isinstance(model, type | FunctionType):
        raise ConfigError(f"{expected}, got {described(model)}; write {model.__name__}(...), which makes one")
    raise ConfigError(f"{expected}, got {described(model)}")
