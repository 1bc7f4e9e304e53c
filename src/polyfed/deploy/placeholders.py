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

_SMALL = 2**18  # numbers of an input, or words, for which no network is too large
_LARGEST = 2**28  # numbers of a network
UNSEEN = "extractor.unseen"  # the tensor by which a `PlaceholderModel` network in a message is known


class RemoteStore(WeightStore):
    """A store whose rows say of which network they are and hold nothing: the weights lie with the nodes."""

    def layout(self, architecture: str, variant: str = "") -> RowLayout:
        """See `WeightStore`; an empty one."""
        return RowLayout({})

    def allocate(self, architecture: str, variant: str = "") -> WeightRow:
        """See `WeightStore`; nothing can be written into it."""
        layout = self.layout(architecture, variant)
        return WeightRow(architecture, variant, layout, 0, torch.zeros(layout.nbytes, dtype=torch.uint8))


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
    """Samples that are not looked at."""

    def __post_init__(self) -> None:
        """Nothing to check, which would take memory for all of them."""


def placeholder_samples(count: int, told: ClientHello) -> LabeledSamples:
    """So many samples of the kind that was told, which take no memory."""
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


def check_size(said: ClientHello, recipe: Recipe, classes: int) -> None:
    """Whether a network that the server builds for a client is one that it can hold; weighed without being built.

    Raises:
        ConfigError: it is not.
    """
    if not can_build(said, recipe) or max(math.prod(said.shape), said.words, *said.categories) <= _SMALL:
        return
    try:
        with without_memory():
            count = sum(tensor.numel() for tensor in placeholder_builder(said, recipe, classes)().state_dict().values())
    except (NotImplementedError, RuntimeError):  # one that cannot be weighed so
        return
    if count > _LARGEST:
        raise ConfigError(
            f"client {said.client}: expected a network of at most {_LARGEST} numbers, got '{said.architecture}' for "
            f"inputs {tuple(said.shape)} with {count}"
        )
