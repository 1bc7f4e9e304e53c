"""`Method.gradients` of several clients in one vectorized call: stacked weights, batches and contexts.

A context holds tensors, groups of tensors, reference networks, and plain values (a switch, a width). Clients whose
losses are computed as one agree in all that is no tensor, and in the shapes of what is.

Shapes: K clients, B rows.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.core.method import Batch, Context, Method, PrecomputedGradients, StepResult
from polyfed.core.modules import FrozenModel
from polyfed.functional.losses import mean_cross_entropy, weighted_mean
from polyfed.functional.modes import dropout_layers
from polyfed.functional.tied_tensors import tensor_places

Tensors = dict[str, Tensor]


def structure(value: Any) -> Hashable:
    """What contexts, or parts of them, share that can be computed as one: shapes of tensors, and all else itself."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, FrozenModel):
        return id(value.network), structure(value.weights)
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), structure(entry)) for name, entry in value.items()))
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return type(value), value if is_plain else id(value)


def own_tensors(module: nn.Module) -> Tensors:
    """Parameters and buffers that are part of a client's weights, tied ones once."""
    held = module.state_dict()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t for name, t in named.items() if name in held}


def without_values(network: nn.Module) -> nn.Module:
    """A copy of the network whose own tensors have shapes alone; in a call each client's take their place."""
    own = own_tensors(network).values()
    empty = {id(t): torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for t in own}
    return copy.deepcopy(network, empty)


class StackedContext:
    """The contexts of several clients, in tensors that a vectorized function takes.

    Args:
        contexts: of one `structure`.

    Attributes:
        tensors: those that differ stacked, (K, ...); those that are the same object for all as they are.
        axes: 0 or None for each, as `torch.vmap` wants it.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self.tensors: list[Tensor] = []
        self.axes: list[int | None] = []
        self._entries = {name: self._pack([context[name] for context in contexts]) for name in contexts[0]}

    def holding(self, tensors: Sequence[Tensor]) -> StackedContext:
        """The same with other tensors."""
        other = copy.copy(self)
        other.tensors = list(tensors)
        return other

    def some(self, rows: slice | Tensor) -> StackedContext:
        """That of some of the clients."""
        pairs = zip(self.tensors, self.axes, strict=True)
        return self.holding([tensor if axis is None else tensor[rows] for tensor, axis in pairs])

    def with_inputs(self, inputs: Sequence[Context]) -> StackedContext:
        """The same with entries of one step, each client's; their tensors come last."""
        if not inputs or not inputs[0]:
            return self
        other = self.holding(self.tensors)
        other.axes = list(self.axes)
        packed = {name: other._pack([each[name] for each in inputs]) for name in inputs[0]}
        other._entries = {**self._entries, **packed}
        return other

    def of_one(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """One client's context. tensors: its own, in place of those of all."""
        return {name: entry(tensors) for name, entry in self._entries.items()}

    def _pack(self, values: Sequence[Any]) -> Callable[[Sequence[Tensor]], Any]:
        """What makes one client's value of its tensors, after those of all have been put among `tensors`."""
        first = values[0]
        if isinstance(first, Tensor):
            shared = all(value is first for value in values)
            self.tensors.append(first if shared else torch.stack(list(values)))
            self.axes.append(None if shared else 0)
            return operator.itemgetter(len(self.tensors) - 1)
        if isinstance(first, FrozenModel):
            weights = self._pack([value.weights for value in values])
            return lambda tensors: first.holding(weights(tensors))
        if isinstance(first, Mapping):
            entries = {key: self._pack([value[key] for value in values]) for key in first}
            return lambda tensors: {key: entry(tensors) for key, entry in entries.items()}
        return lambda tensors: first


class StackedLoss:
    """`Method.gradients` of several clients of a network, as one.

    Args:
        method: whose loss. network: that of all, `without_values`.
    """

    def __init__(self, method: Method, network: nn.Module) -> None:
        self.method, self.network = method, network
        self._loss = _Loss(method, network)
        self._has_own_gradients = type(method).gradients is not Method.gradients
        self._randomness = "different" if dropout_layers(network) else "error"

    def gradients(self, tensors: Tensors, batch: Batch, context: StackedContext) -> StepResult:
        """All clients' `StepResult`, (K, ...) each; buffers are written in place.

        Args:
            tensors: (K, ...) by name; of those that take a gradient it is taken. batch: of x (K, B, ...).
        """

        def loss(tensors: Tensors, batch: Batch, given: Sequence[Tensor]) -> Any:
            with FewerKernels():
                return self._loss.of(tensors, batch, context.of_one(given))

        vectorized = torch.func.vmap(loss, (0, 0, context.axes), randomness=self._randomness)
        losses, sums = vectorized(tensors, batch, context.tensors)
        leaves = {name: t for name, t in tensors.items() if t.requires_grad}
        # no client's loss depends on another's weights
        taken = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(leaves, taken, strict=True) if grad is not None}
        step = StepResult(grads, losses.detach(), {name: value.detach() for name, value in sums.items()}, {})
        if not self._has_own_gradients:
            return step

        def changed(own: Tensors, step: StepResult, batch: Batch, given: Sequence[Tensor]) -> Any:
            one = context.of_one(given)
            step = step._replace(grads={name: step.grads.get(name) for name in own})
            made = self.method.gradients(PrecomputedGradients(step, one, own), batch, one)
            found = {name: grad for name, grad in made.grads.items() if grad is not None}
            return found, made.loss, dict(made.sums), dict(made.raw)

        weights = {name: t.detach() for name, t in leaves.items()}
        changes = torch.func.vmap(changed, (0, 0, 0, context.axes))
        return StepResult(*changes(weights, step, batch, context.tensors))


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


class FewerKernels(TorchFunctionMode):
    """Within the block vmap computes linear layers and cross entropy in fewer kernels.

    The numbers are the same up to rounding, and a GPU has them sooner.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is mean_cross_entropy:
            return _mean_cross_entropy(*arguments)
        if function is F.linear:
            return _linear(*arguments, **named)
        return function(*arguments, **named)


def _mean_cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
    """`losses.mean_cross_entropy`, of which vmap also looks for rows to ignore, of which there are none."""
    likelihood_N = torch.log_softmax(logits_NC, dim=1).gather(1, y_N.unsqueeze(1)).squeeze(1)
    return weighted_mean(-likelihood_N, w_N)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose product of rows with a bias vmap also multiplies by 1, forward and backward."""
    if x.dim() != 2 or bias is None:
        return F.linear(x, weight, bias)
    return x @ weight.t() + bias
