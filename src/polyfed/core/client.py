"""A client: its model, data, and state between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from polyfed.core.message import Message, State
from polyfed.core.randomness import generator
from polyfed.core.settings import Privacy, Training
from polyfed.data.samples import (
    ClientData,
    LabeledSamples,
    OwnColumns,
    SelectedSamples,
    TargetScale,
    samples_of,
    target_scale,
)
from polyfed.errors import ConfigError, described
from polyfed.escaping import client_text, one_line

Prepare = Callable[[Tensor], Tensor]  # stored inputs -> model inputs


def to_float(x: Tensor) -> Tensor:
    """The default preparation: bytes to floats in [0, 1]; other types unchanged."""
    return x.float().div(255) if x.dtype == torch.uint8 else x


@dataclass(frozen=True)
class PublicData:
    """Public data. ``samples.x`` is (N, ...) as stored; a pair (x, y) is converted to `LabeledSamples`.

    origin: "holdout", rows of the task's data that no client has, or "other", inputs of another data set, whose labels
    are not used.
    """

    samples: LabeledSamples
    prepare: Prepare = to_float
    origin: Literal["holdout", "other"] = "holdout"

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", samples_of(self.samples, "public"))

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"PublicData({self.samples!r}, {self.origin})"


class Encoder(Protocol):
    """Transforms an upload at the client (`engine.plugin.Plugin.encode`)."""

    def encode(self, upload: Message, client: Client, method: Any, received: Message) -> Message:
        """The message to send in place of `upload`."""
        ...


class Client:
    """A client of the federation.

    Made from a model and data; the federation sets all other attributes.

    Args:
        model: the client's network with its initial weights; or a name that the federation builds for the client's
            inputs and the task's classes, as in a recipe ("digits-cnn1", "timm:resnet10t", "package.module:function")
            or one of its `builders`. Initial weights are then a function of the seed and the client's number.
        train: training samples; a pair (x, y) of tensors or arrays, x (N, ...), y (N,), whole numbers for classes and
            floats for numbers to predict, which are standardized by these rows; or a
            ``torch.utils.data.Dataset`` or one of the package `datasets`, read once
            (`polyfed.data.samples.from_dataset`).
        test: test samples, likewise; without any, the client is not evaluated.
        validation: samples for choosing the best round; optional.
        prepare: converts stored inputs to model inputs; default: bytes to [0, 1], floats unchanged.
        class_names: what the client's classes are called, where clients have label spaces of their own: its labels 0,
            1, ... are these, and its network has as many outputs.
        name: what the client is called beside its number: the hospital, the user, the folder of its data.
        columns: of its table, where clients have different ones (`ClientData.columns`).

    Attributes:
        id: number, from 0.
        architecture: name shared by all clients with the same network.
        classes: number of classes of the task; 0: numbers are predicted.
        n: number of training samples.
        state: the method's state between rounds (named tensors, replaced and never modified in place).
        round, exchange, phase: number or name of the present one.
        context: result of the method's `receive`, during training.
        training, privacy: settings.
        plugins: transform uploads before they are sent, in order.
        public: public data, if any.
        words: of texts, how many ids there are; 0: not known. categories: of a table, per feature how many numbers
            stand for categories; () where none has any.
        weights: the client's own weights by name; None before it has any.
        secret: 32 private bytes, from which noise on uploads, and noise and batches of DP-SGD, are drawn; None: the
            seed is used.
    """

    def __init__(
        self,
        model: nn.Module | str,
        train: LabeledSamples | tuple[Any, Any] | Any,
        test: LabeledSamples | tuple[Any, Any] | Any | None = None,
        validation: LabeledSamples | tuple[Any, Any] | Any | None = None,
        *,
        prepare: Prepare = to_float,
        class_names: Sequence[str] = (),
        name: str = "",
        columns: OwnColumns | None = None,
    ) -> None:
        _check_model(model)
        self.given = model if isinstance(model, nn.Module) else None
        self.architecture = model if isinstance(model, str) else ""
        self.data = _in_own_unit(
            ClientData(samples_of(train, "train"), samples_of(validation, "validation"), samples_of(test, "test"))
        )
        self.columns = columns
        if not callable(prepare):
            raise ConfigError(f"prepare: expected a function of a batch of inputs, got {described(prepare)}")
        self.prepare = prepare
        self.class_names = tuple(class_names)
        if not isinstance(name, str):
            raise ConfigError(f"name: expected a text, got {described(name)}")
        self.name = one_line(name)
        self.n = len(self.data.train)
        if self.n == 0:
            raise ConfigError("expected at least one training sample per client, got none")
        self.own_classes: Sequence[int] | None = None  # None: those of its training rows
        self.missing: SelectedSamples | None = None  # test rows of classes that it never had, where these are scored
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
        self.words = 0
        self.categories: tuple[int, ...] = ()
        self.plugins: Sequence[Encoder] = ()
        self.state: State = {}
        self.weights: Mapping[str, Tensor] | None = None
        self.version = 0  # incremented by every change of weights or state
        self.bound: nn.Module | None = None

    def __repr__(self) -> str:
        number = "" if self.id < 0 else f"{self.id}, "
        number += f"'{self.name}', " if self.name else ""
        network = self.architecture or type(self.given).__name__
        parts = {"training": self.data.train, "validation": self.data.validation, "test": self.data.test}
        rows = ", ".join(f"{len(samples)} {name}" for name, samples in parts.items() if len(samples))
        return f"Client({number}{network}, {rows} samples)"

    @property
    def title(self) -> str:
        """The client in messages: "client 3 ('north')"."""
        return client_text(self.id, self.name)

    @property
    def title_with_network(self) -> str:
        """The same with its architecture: "client 3 ('north', 'mlp-16-32')"."""
        return client_text(self.id, self.name, self.architecture)

    @property
    def model(self) -> nn.Module:
        """The template network with this client's weights; only while the client is at work."""
        if self.bound is None:
            raise ConfigError(f"{self.title} holds a model only while it works; its weights are in client.weights")
        return self.bound

    @property
    def lr(self) -> float:
        """Learning rate of the present round, by the schedule of `training`."""
        return self.training.lr_at(self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """The client's random stream for `purpose` in this exchange and round."""
        return generator(self.seed, purpose, self.exchange, self.round, self.id)


def _in_own_unit(data: ClientData) -> ClientData:
    """Rows with numbers to predict standardized by the training rows, unless they are; test rows stay as they are.

    Scores are in the unit of the numbers as they were given.
    """
    if not (data.train.are_numbers and len(data.train) and data.train.scale == TargetScale()):
        return data
    scale = target_scale(data.train.y)
    train, validation = (
        part.standardized(scale) if part.are_numbers else part for part in (data.train, data.validation)
    )
    return replace(data, train=train, validation=validation)


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module | str):
        return
    expected = "model: expected a network (torch.nn.Module) or the name of one"
    if isinstance(model, type | FunctionType):
        raise ConfigError(f"{expected}, got {described(model)}; write {model.__name__}(...), which makes one")
    raise ConfigError(f"{expected}, got {described(model)}")
