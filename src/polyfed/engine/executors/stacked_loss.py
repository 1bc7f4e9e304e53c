"""Gradients of several clients' losses in one vectorized call: stacked weights, batches and contexts.

A context holds tensors, groups of tensors, reference networks, and plain values (a switch, a width). Clients whose
losses are computed as one must agree in all that is no tensor, and in the shapes of what is.

Shapes: K clients, B rows.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, Method, NotVectorizable, PrecomputedGradients, StepResult
from polyfed.core.modules import FrozenModel
from polyfed.functional.modes import dropout_layers
from polyfed.functional.tied_tensors import tensor_places
from polyfed.functional.vmapped import FewerKernels, RowShares

Tensors = dict[str, Tensor]
Unpack = Callable[[Sequence[Tensor]], Any]
_RAW = "raw gradient "  # before a name, among what is summed over the steps


def structure(value: Any, exact: bool = True) -> Hashable:
    """What two contexts, or parts of them, must have in common to be computed as one: shapes, and what is no tensor.

    Args:
        exact: False: types and dimensions only, which say of what kind the loss is.
    """
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape) if exact else value.dim()
    if isinstance(value, FrozenModel):
        return FrozenModel, structure(value.weights, exact)
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), structure(entry, exact)) for name, entry in value.items()))
    if isinstance(value, list | tuple):
        return type(value), tuple(structure(entry, exact) for entry in value)
    if value is None or isinstance(value, bool | str):
        return value
    return type(value), value if exact and isinstance(value, int | float) else None


class StackedContext:
    """The contexts of several clients, in tensors that a vectorized function takes.

    Args:
        contexts: of one exact `structure`.

    Attributes:
        tensors: those that differ stacked, (K, ...); those that are the same object for all as they are.
        axes: 0 or None for each, as `torch.vmap` wants it. networks: that some of the tensors are the weights of.

    Raises:
        NotVectorizable: an entry is neither a tensor nor the same for all.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self.tensors: list[Tensor] = []
        self.axes: list[int | None] = []
        self.networks: list[nn.Module] = []
        self._entries = {name: self._pack(name, [context[name] for context in contexts]) for name in contexts[0]}

    @property
    def shapes(self) -> Hashable:
        """What two of them have in common whose tensors may lie in the same places."""
        return tuple((t.dtype, t.shape, axis) for t, axis in zip(self.tensors, self.axes, strict=True))

    def holding(self, tensors: Sequence[Tensor]) -> StackedContext:
        """The same with other tensors."""
        other = copy.copy(self)
        other.tensors = list(tensors)
        return other

    def some(self, pick: Callable[[Tensor], Tensor]) -> StackedContext:
        """Those of some clients. pick: takes theirs of (K, ...)."""
        pairs = zip(self.tensors, self.axes, strict=True)
        return self.holding([tensor if axis is None else pick(tensor) for tensor, axis in pairs])

    def of_one(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """One client's context. tensors: its own, in place of those of all."""
        return {name: entry(tensors) for name, entry in self._entries.items()}

    def _pack(self, name: str, values: Sequence[Any]) -> Unpack:
        """What makes one client's value of its tensors, after those of all have been put among `tensors`."""
        first = values[0]
        kind = type(first)
        shared = all(value is first for value in values)
        if isinstance(first, Tensor):
            self.tensors.append(first if shared else torch.stack(list(values)))
            self.axes.append(None if shared else 0)
            return operator.itemgetter(len(self.tensors) - 1)
        if isinstance(first, FrozenModel):
            self.networks.append(first.network)
            weights = self._pack(name, [value.weights for value in values])
            return lambda tensors: first.holding(weights(tensors))
        if isinstance(first, Mapping):
            entries = {key: self._pack(name, [value[key] for value in values]) for key in first}
            return lambda tensors: {key: entry(tensors) for key, entry in entries.items()}
        if isinstance(first, list | tuple):
            parts = [self._pack(name, each) for each in zip(*values, strict=True)]
            make = kind._make if hasattr(kind, "_make") else kind  # of a named tuple
            return lambda tensors: make(part(tensors) for part in parts)
        if not shared and not (isinstance(first, int | float | str) and all(value == first for value in values)):
            raise NotVectorizable(f"'{name}' in the context of its loss is a {kind.__name__}, no tensor")
        return lambda tensors: first


class Gradients(NamedTuple):
    """Of one step of K clients. grads: by name. losses: (K,). sums: by name, also of raw gradients; all (K, ...)."""

    grads: Tensors
    losses: Tensor
    sums: Tensors


class StackedLoss:
    """`Method.gradients` of several clients of a network, as one.

    Args:
        method: whose loss. network: the template of all.
    """

    def __init__(self, method: Method, network: nn.Module) -> None:
        self.method, self.network = method, network
        self.drops = bool(dropout_layers(network))
        self.has_own_gradients = type(method).gradients is not Method.gradients
        self._loss = _Loss(method, network)

    def __call__(
        self, tensors: Tensors, batch: Batch, shares: Tensor, static: StackedContext, moving: StackedContext
    ) -> Gradients:
        """Gradients of those tensors that take one, and what the losses sum; buffers are written in place.

        Args:
            tensors: (K, ...) by name. batch: of x (K, B, ...). shares: each row's in the sum of its client's weights,
                and minus it, (K, 2, B). static, moving: the contexts, of the phase and of this step alone.
        """

        def loss(tensors: Tensors, batch: Batch, shares: Tensor, *given: Sequence[Tensor]) -> Any:
            with FewerKernels(RowShares(batch.w, *shares.unbind())):
                return self._loss.of(tensors, batch, _context(static, moving, given))

        axes = (tuple(static.axes), tuple(moving.axes))
        given = (tuple(static.tensors), tuple(moving.tensors))
        drawn = "different" if self.drops else "error"
        losses, sums = torch.func.vmap(loss, (0, 0, 0, *axes), randomness=drawn)(tensors, batch, shares, *given)
        leaves = {name: t for name, t in tensors.items() if t.requires_grad}
        taken = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(leaves, taken, strict=True) if grad is not None}
        losses = losses.detach()
        sums = {name: value.detach() for name, value in sums.items()}
        if not self.has_own_gradients:
            return Gradients(grads, losses, sums)

        def changed(
            own: Tensors, grads: Tensors, loss: Tensor, sums: Tensors, batch: Batch, *given: Sequence[Tensor]
        ) -> Any:
            context = _context(static, moving, given)
            step = StepResult({name: grads.get(name) for name in own}, loss, sums)
            made = self.method.gradients(PrecomputedGradients(step, context, own), batch, context)
            return {name: grad for name, grad in made.grads.items() if grad is not None}, made.loss, all_sums(made)

        weights = {name: t.detach() for name, t in leaves.items()}
        found = torch.func.vmap(changed, (0, 0, 0, 0, 0, *axes))(weights, grads, losses, sums, batch, *given)
        return Gradients(*found)


class _Loss(nn.Module):
    """A method's loss as a module around the network, so that `functional_call` reaches the network's tensors."""

    def __init__(self, method: Method, model: nn.Module) -> None:
        super().__init__()
        self.method, self.model = method, model
        self._places = tensor_places(model)

    def forward(self, batch: Batch, context: Context) -> Any:
        outcome = self.method.loss(self.model, batch, context)
        return (outcome[0], dict(outcome[1])) if isinstance(outcome, tuple) else (outcome, {})

    def of(self, tensors: Tensors, batch: Batch, context: Context) -> Any:
        """Loss and sums of the network with these tensors, by their first names."""
        named = {f"model.{place}": tensors[name] for place, name in self._places.items() if name in tensors}
        return torch.func.functional_call(self, named, (batch, context), tie_weights=False)


def _context(static: StackedContext, moving: StackedContext, given: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    return {**static.of_one(given[0]), **moving.of_one(given[1])}


def all_sums(step: StepResult) -> Tensors:
    """All that is summed over the steps: numbers, and raw gradients under names of their own."""
    return {**step.sums, **{f"{_RAW}{name}": grad for name, grad in step.raw.items()}}


def split_sums(sums: Tensors) -> tuple[Tensors, Tensors]:
    """The sums of numbers, and those of raw gradients."""
    raw = {name.removeprefix(_RAW): total for name, total in sums.items() if name.startswith(_RAW)}
    return {name: total for name, total in sums.items() if not name.startswith(_RAW)}, raw
