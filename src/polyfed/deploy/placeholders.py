"""Placeholders at the server for clients' networks, weights and data, which are with their nodes."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.model_factory import Builder, network_of
from polyfed.data.samples import LabeledSamples, OwnColumns, TableColumns
from polyfed.deploy.protocol import ClientHello, other_classes
from polyfed.engine.weight_store import RowLayout, WeightRow, WeightStore
from polyfed.errors import ConfigError
from polyfed.experiments.build import network_builder
from polyfed.models.split import SplitModel
from polyfed.models.zoo import without_memory
from polyfed.registry import MODELS

_SMALL_INPUT = 2**18
_SMALL = 2**25  # numbers that an input, and a network, may have whatever those of others are
_LARGEST = 2**28  # numbers that no network may have
_TIMES = 4  # ... and else this many times as many as those of others
UNSEEN = "extractor.unseen"  # the tensor that marks a `PlaceholderModel` in a message


class RemoteStore(WeightStore):
    """A store of empty rows that name their network: the weights are with the nodes."""

    def layout(self, architecture: str, variant: str = "") -> RowLayout:
        """See `WeightStore`; an empty one."""
        return RowLayout({})

    def allocate(self, architecture: str, variant: str = "") -> WeightRow:
        """See `WeightStore`; nothing can be written into it."""
        layout = self.layout(architecture, variant)
        return WeightRow(architecture, variant, layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


class PlaceholderModel(SplitModel):
    """Stands for a network that only its node has: its head, a linear layer, gets zeros.

    Its body has one tensor without entries, whose name marks a message with such a network in it.
    """

    def __init__(self, hello: ClientHello, classes: int) -> None:
        super().__init__(hello.architecture, hello.feature_dim)
        self.extractor = nn.Module()
        self.extractor.register_parameter(UNSEEN.partition(".")[2], nn.Parameter(torch.zeros(0)))
        self.add_module("head", nn.Linear(hello.feature_dim, classes))

    def extract(self, x: Tensor) -> Tensor:
        """(N, ...) to (N, D), zeros."""
        return torch.zeros(len(x), self.feature_dim, device=x.device)

    def transform(self, s_in: Tensor) -> Tensor:
        """As it is."""
        return s_in


class _Blank(LabeledSamples):
    """Samples of which only their number and what an input looks like is known."""

    def __post_init__(self) -> None:
        """Nothing to check."""

    @property
    def largest_label(self) -> int:
        """Unknown; within the task's classes."""
        return 0


def placeholder_samples(count: int, hello: ClientHello) -> LabeledSamples:
    """So many samples of a client's kind, which take no memory as long as only some of them are read."""
    x = torch.zeros((), dtype=getattr(torch, hello.dtype)).expand(count, *hello.shape)
    kind = torch.int64 if hello.class_names else torch.float32
    return _Blank(x, torch.zeros((), dtype=kind).expand(count))


def columns_of(hello: ClientHello, recipe: Recipe) -> OwnColumns | None:
    """Which of the federation's columns a client's table has; None where all have the same.

    Raises:
        ConfigError: it names columns that there are not.
    """
    features = recipe.data.features
    if features is None:
        return None
    if not hello.columns or hello.columns != sorted({*hello.columns}) or hello.columns[-1] >= len(features):
        raise ConfigError(
            f"client {hello.client}: expected some of the {len(features)} columns of data.features, each once and in "
            f"order, got {hello.columns[:10]}"
        )
    widths = tuple(len(feature.categories or ()) for feature in features.values())
    return OwnColumns(tuple(hello.columns), widths, tuple(hello.feature_names), TableColumns(), (), (), ())


def can_build(hello: ClientHello, recipe: Recipe) -> bool:
    """Whether the server can build a client's network: the recipe names it, or polyfed has it."""
    network = network_of(hello.architecture)
    return hello.words >= 0 and (network in recipe.models.architectures or network in MODELS)


def builder_of(name: str, hello: ClientHello, recipe: Recipe, classes: int) -> Builder:
    """Makes a network for a client's inputs."""
    return network_builder(recipe, name, hello.shape, classes, max(hello.words, 0) or None, hello.categories)


def placeholder_builder(hello: ClientHello, recipe: Recipe, classes: int) -> Builder:
    """Makes a client's network here, or its placeholder."""
    if not can_build(hello, recipe):
        return functools.partial(PlaceholderModel, hello, classes)
    return builder_of(hello.architecture, hello, recipe, classes)


def check_fit(hello: ClientHello, first: ClientHello, recipe: Recipe, classes: int) -> None:
    """Check that a client's task is that of the first, and that the server can hold its inputs and its network.

    Networks are weighed without being built. Where one cannot be, inputs are the measure.

    Raises:
        ConfigError: it does not fit, or there is no such network for such inputs; says which client's.
    """
    who = f"client {hello.client}"
    if recipe.data.test == "global" and hello.test != first.test:
        raise ConfigError(f"{who}: expected the {first.test} test rows of everybody, got {hello.test}")
    if hello.class_names != first.class_names:
        raise ConfigError(f"{who}: {other_classes(first.class_names, hello.class_names)}")
    inputs = _input_size(hello)
    most_inputs = max(_SMALL_INPUT, _TIMES * _input_size(first))
    if inputs > most_inputs:
        raise ConfigError(f"{who}: expected inputs of at most {most_inputs} numbers, got {inputs}")
    try:
        size = _size(hello, recipe, classes) if can_build(hello, recipe) else 0
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    if size <= _SMALL:
        return
    usual = [first.model_copy(update={"architecture": name}) for name in recipe.models.architectures]
    most = min(_LARGEST, max(_SMALL, _TIMES * max(_size(one, recipe, classes) for one in usual)))
    if size > most:
        raise ConfigError(
            f"{who}: expected a network of at most {most} numbers, got '{hello.architecture}' for "
            f"inputs {tuple(hello.shape)} with {size}; the recipe's models.architectures set the measure"
        )


def _input_size(hello: ClientHello) -> int:
    """Numbers of an input, or of a network's tables of words and categories."""
    return max(math.prod(hello.shape), hello.words, sum(hello.categories))


def _size(hello: ClientHello, recipe: Recipe, classes: int) -> int:
    """Numbers of a client's network; 0 of one that cannot be weighed."""
    try:
        with without_memory():
            return sum(tensor.numel() for tensor in placeholder_builder(hello, recipe, classes)().state_dict().values())
    except (NotImplementedError, RuntimeError):
        return 0
