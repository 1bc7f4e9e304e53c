"""The losses of several clients as one function of their stacked weights, batches and contexts.

A context holds tensors, groups of tensors, reference networks, and plain values (a switch, a width). Clients whose
losses are computed as one must agree in all that is no tensor, and in the shapes of what is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, Method, NotVectorizable
from polyfed.core.modules import FrozenModel
from polyfed.functional.tied_tensors import tensor_places
from polyfed.functional.vmapped import FewerKernels, RowShares

Tensors = dict[str, Tensor]
Losses = tuple[Tensor, Tensors]  # of the clients, (K,), and their sums by name, (K, ...)


class RecordingContext(Mapping[str, Any]):
    """A context that notes what is read of it, in `read`."""

    def __init__(self, entries: Context) -> None:
        self._entries = entries
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        self.read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class PartialContext(RecordingContext):
    """A context of which only some entries are at hand; `names` are those of all."""

    def __init__(self, entries: Context, names: Mapping[str, Any]) -> None:
        super().__init__(dict.fromkeys(names) | dict(entries))
        self._held = entries

    def __getitem__(self, name: str) -> Any:
        if name in self._entries and name not in self._held:
            raise NotVectorizable(f"its loss reads '{name}' of the context in some steps only")
        return self._held[name]


def structure(value: Any, exact: bool = False) -> Hashable:
    """What two contexts, or parts of them, must have in common to be looked at together.

    Args:
        exact: also what they must have in common to be computed as one: shapes, and numbers that are no tensors.
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
    if isinstance(value, int | float):
        return type(value), value if exact else None
    return type(value), id(value) if exact else None


class StackedContext:
    """The contexts of several clients, in tensors that a vectorized function takes.

    Args:
        contexts: of one exact `structure`.

    Attributes:
        tensors: those that differ stacked, (K, ...); those that are the same object for all as they are. axes: 0 or
        None for each, as `torch.vmap` wants it. networks: that some of them are the weights of. form: where they
        belong, for `unpacked`; holds none of them.

    Raises:
        NotVectorizable: an entry is neither a tensor nor the same for all.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self.tensors: list[Tensor] = []
        self.axes: list[int | None] = []
        self.networks: list[nn.Module] = []
        self.form = {name: self._pack(name, [context[name] for context in contexts]) for name in contexts[0]}

    def holding(self, tensors: list[Tensor]) -> StackedContext:
        """The same with other tensors."""
        other = copy.copy(self)
        other.tensors = tensors
        return other

    @property
    def shapes(self) -> Hashable:
        """What two of them must have in common for their tensors to lie in the same places."""
        return tuple((t.dtype, t.shape, axis) for t, axis in zip(self.tensors, self.axes, strict=True))

    def _pack(self, name: str, values: Sequence[Any]) -> Any:
        first = values[0]
        shared = all(value is first for value in values)
        if isinstance(first, Tensor):
            self.tensors.append(first if shared else torch.stack(list(values)))
            self.axes.append(None if shared else 0)
            return _Slot(len(self.tensors) - 1)
        if isinstance(first, FrozenModel):
            self.networks.append(first.network)
            return _Reference(first, self._pack(name, [value.weights for value in values]))
        if isinstance(first, Mapping):
            return {key: self._pack(name, [value[key] for value in values]) for key in first}
        if isinstance(first, list | tuple):
            return [type(first), *(self._pack(name, entries) for entries in zip(*values, strict=True))]
        if not shared and not (isinstance(first, int | float | str) and all(value == first for value in values)):
            raise NotVectorizable(f"'{name}' in the context of its loss is a {type(first).__name__}, no tensor")
        return _Constant(first)


def unpacked(form: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """One client's context; `tensors` are its own in place of a `StackedContext`'s."""
    return {name: _unpack(entry, tensors) for name, entry in form.items()}


class _Slot:
    def __init__(self, place: int) -> None:
        self.place = place


class _Constant:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Reference:
    def __init__(self, network: FrozenModel, weights: Any) -> None:
        self.network, self.weights = network, weights


def _unpack(entry: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(entry, _Slot):
        return tensors[entry.place]
    if isinstance(entry, _Constant):
        return entry.value
    if isinstance(entry, _Reference):
        return entry.network.holding(_unpack(entry.weights, tensors))
    if isinstance(entry, dict):
        return {key: _unpack(value, tensors) for key, value in entry.items()}
    kind, *parts = entry
    found = [_unpack(part, tensors) for part in parts]
    return kind(*found) if hasattr(kind, "_fields") else kind(found)


# losses -------------------------------------------------------------------------------------------------------------


class LossOf(nn.Module):
    """A method's loss as a module around the network, so that `functional_call` reaches the network's tensors."""

    def __init__(self, method: Method, model: nn.Module) -> None:
        super().__init__()
        self.method, self.model = method, model
        self._places = tensor_places(model)

    def forward(self, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """See `Method.loss`."""
        outcome = self.method.loss(self.model, batch, context)
        return (outcome[0], dict(outcome[1])) if isinstance(outcome, tuple) else outcome

    def named(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The network's tensors, given under their first names, by this module's names of where they lie."""
        return {f"model.{place}": tensors[name] for place, name in self._places.items() if name in tensors}


class StackedLoss:
    """A step's loss of several clients.

    Args:
        loss: of one. static, moving: what it reads of their contexts, in a phase and in this step alone.
        names: of all entries of such a context. drops: dropout layers draw a mask for each client.

    Attributes:
        given, axes: the contexts' tensors as `context` takes them, and as `torch.vmap` wants them.
    """

    def __init__(
        self, loss: LossOf, static: StackedContext, moving: StackedContext, names: Collection[str], drops: bool
    ) -> None:
        self.given = (tuple(static.tensors), tuple(moving.tensors))
        self.axes = (tuple(static.axes), tuple(moving.axes))
        self.context = functools.partial(_context, static.form, moving.form, tuple(names))
        drawn = "different" if drops else "error"
        one = functools.partial(_loss, loss, self.context)
        self._all = torch.func.vmap(one, in_dims=(0, 0, 0, *self.axes), randomness=drawn)

    def __call__(self, tensors: Tensors, batch: Batch, shares: Tensor) -> Losses:
        """Losses and sums of all. shares: each row's in the sum of its client's weights, and minus it, (K, 2, B)."""
        return self._all(tensors, batch, shares, *self.given)


def _context(
    static: Any, moving: Any, names: Sequence[str], static_tensors: Sequence[Tensor], moving_tensors: Sequence[Tensor]
) -> PartialContext:
    """One client's context."""
    held = {**unpacked(static, static_tensors), **unpacked(moving, moving_tensors)}
    return PartialContext(held, dict.fromkeys(names))


def _loss(
    loss: LossOf,
    context: Callable[..., PartialContext],
    tensors: Tensors,
    batch: Batch,
    shares: Tensor,
    *given: Sequence[Tensor],
) -> Losses:
    """One client's loss and sums."""
    with FewerKernels(RowShares(batch.w, *shares.unbind())):
        outcome: Any = torch.func.functional_call(
            loss, loss.named(tensors), (batch, context(*given)), tie_weights=False
        )
    return outcome if isinstance(outcome, tuple) else (outcome, {})
