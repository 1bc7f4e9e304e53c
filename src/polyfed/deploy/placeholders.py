"""What the server has in place of clients' networks, weights and data, which are with their nodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.model_factory import Builder
from polyfed.data.samples import LabeledSamples
from polyfed.deploy.protocol import ClientHello
from polyfed.engine.weight_store import RowLayout, WeightRow, WeightStore
from polyfed.errors import ConfigError
from polyfed.models.split import SplitModel
from polyfed.models.zoo import build, without_memory
from polyfed.registry import MODELS

_SMALL_INPUT = 2**18
_SMALL = 2**25  # numbers that an input, and a network, may have whatever those of others are
_LARGEST = 2**28  # numbers that no network may have
_TIMES = 4  # ... and else this many times as many as those of others
UNSEEN = "extractor.unseen"  # the tensor by which a `PlaceholderModel` network in a message is known


class RemoteStore(WeightStore):
    """A store whose rows say of which network they are and hold nothing: the weights lie with the nodes."""

    def layout(self, architecture: str, variant: str = "") -> RowLayout:
        """See `WeightStore`; an empty one."""
        return RowLayout({})

    def allocate(self, architecture: str, variant: str = "") -> WeightRow:
        """See `WeightStore`; nothing can be written into it."""
        layout = self.layout(architecture, variant)
        return WeightRow(architecture, variant, layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


class PlaceholderModel(SplitModel):
    """Stands for a network that only its node has: what enters the head is zeros, the head is as the node told.

    Its body has one tensor without entries, by whose name a message with such a network in it is known.
    """

    def __init__(self, told: ClientHello, classes: int) -> None:
        super().__init__(told.architecture, told.feature_dim)
        self.extractor = _Named({UNSEEN.partition(".")[2]: [0]})
        self._classes = classes
        self.add_module("head", nn.Linear(told.feature_dim, classes) if told.linear else _Named(told.head))

    def extract(self, x: Tensor) -> Tensor:
        """(N, ...) to (N, D), zeros."""
        return torch.zeros(len(x), self.feature_dim, device=x.device)

    def transform(self, s_in: Tensor) -> Tensor:
        """As it is."""
        return s_in

    def forward(self, x: Tensor) -> Tensor:
        """(N, ...) to (N, C)."""
        z = self.represent(x)
        return self.head(z) if isinstance(self.head, nn.Linear) else z.new_zeros(len(z), self._classes)


class _Named(nn.Module):
    """Parameters of these names, with dots, and shapes, zeros."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        inner: dict[str, dict[str, Sequence[int]]] = {}
        for name, shape in shapes.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = shape
            else:
                self.register_parameter(first, nn.Parameter(torch.zeros(*shape)))
        for first, below in inner.items():
            self.add_module(first, _Named(below))


class _Blank(LabeledSamples):
    """Samples of which only their number and what an input looks like is known."""

    def __post_init__(self) -> None:
        """Nothing to check."""

    @property
    def largest_label(self) -> int:
        """Nobody knows: no more than the classes that were told."""
        return 0


def placeholder_samples(count: int, told: ClientHello) -> LabeledSamples:
    """So many samples of the kind that was told, which take no memory as long as only some of them are read."""
    x = torch.zeros((), dtype=getattr(torch, told.dtype)).expand(count, *told.shape)
    return _Blank(x, torch.zeros((), dtype=torch.int64).expand(count))


def can_build(said: ClientHello, recipe: Recipe) -> bool:
    """Whether the server can build a client's network: the recipe names it, or polyfed has it."""
    return said.words >= 0 and (said.architecture in recipe.models.architectures or said.architecture in MODELS)


def placeholder_builder(said: ClientHello, recipe: Recipe, classes: int) -> Builder:
    """What makes a client's network here, or what stands for it."""
    if not can_build(said, recipe):
        return functools.partial(PlaceholderModel, said, classes)
    words = said.words or None
    width = recipe.models.feature_dim
    shape = tuple(said.shape)
    return functools.partial(
        build,
        said.architecture,
        shape,
        classes,
        width,
        words,
        beside=recipe.beside,
        categories=said.categories,
    )


def check_size(said: ClientHello, first: ClientHello, recipe: Recipe, classes: int) -> None:
    """Whether a client's inputs, and the network that the server builds for it, are such as it can hold.

    Networks are weighed without being built. Where one cannot be, inputs are the measure.

    Args:
        first: of the most common kind, by which is measured.

    Raises:
        ConfigError: they are not.
    """
    inputs = _input_size(said)
    most_inputs = max(_SMALL_INPUT, _TIMES * _input_size(first))
    if inputs > most_inputs:
        raise ConfigError(f"client {said.client}: expected inputs of at most {most_inputs} numbers, got {inputs}")
    size = _size(said, recipe, classes) if can_build(said, recipe) else 0
    if size <= _SMALL:
        return
    usual = [first.model_copy(update={"architecture": name}) for name in recipe.models.architectures]
    most = min(_LARGEST, max(_SMALL, _TIMES * max(_size(one, recipe, classes) for one in usual)))
    if size > most:
        raise ConfigError(
            f"client {said.client}: expected a network of at most {most} numbers, got '{said.architecture}' for inputs "
            f"{tuple(said.shape)} with {size}; the recipe's models.architectures say how large networks are"
        )


def _input_size(said: ClientHello) -> int:
    """Numbers of an input, or of what a network keeps for words and categories."""
    return max(math.prod(said.shape), said.words, sum(said.categories))


def _size(said: ClientHello, recipe: Recipe, classes: int) -> int:
    """Numbers of a client's network; 0 of one that cannot be weighed."""
    try:
        with without_memory():
            return sum(tensor.numel() for tensor in placeholder_builder(said, recipe, classes)().state_dict().values())
    except (NotImplementedError, RuntimeError):
        return 0
