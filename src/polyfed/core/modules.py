"""What methods and engine do with a network by the names of its tensors: list, read, load, freeze."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.errors import ConfigError, first_line
from polyfed.functional.device_copies import move_together
from polyfed.functional.modes import eval_mode
from polyfed.functional.tied_tensors import call_with, without_ties
from polyfed.models.split import Part, SplitModel

BODY: tuple[Part, ...] = ("extractor", "intermediate")  # all before the head
HEAD: tuple[Part, ...] = ("head",)


_Network = TypeVar("_Network", bound=nn.Module)
_Trainable = tuple[tuple[str, ...], tuple[nn.Parameter, ...]]
_STEADY: dict[nn.Module, _Trainable] = {}  # what `cache_trainable` has found


def trainable_parameters(module: nn.Module) -> _Trainable:
    """Names and parameters that take a gradient, in the module's order."""
    if module in _STEADY:
        return _STEADY[module]
    pairs = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return tuple(name for name, _ in pairs), tuple(p for _, p in pairs)


@contextlib.contextmanager
def cache_trainable(module: nn.Module) -> Iterator[_Trainable]:
    """Within the block, `trainable_parameters` looks once: the network keeps its parameters and what they need.

    Looking costs as much as a small network's whole step.
    """
    _STEADY[module] = found = trainable_parameters(module)
    try:
        yield found
    finally:
        del _STEADY[module]


def as_split_model(module: nn.Module) -> SplitModel:
    """The module as the split model that `requirements` made sure it is."""
    if not isinstance(module, SplitModel):
        raise TypeError(f"expected a SplitModel, got {type(module).__name__}")
    return module


def float_state(module: nn.Module, buffers: bool = True, parts: Collection[Part] | None = None) -> dict[str, Tensor]:
    """What is averaged and sent of a network: parameters and float buffers by name, detached, not copied; each once.

    Integer buffers (BatchNorm's batch counter) stay with their owner; without `buffers` so do all (its statistics).
    With `parts`, only what belongs to these parts of a split model.
    """
    sent: Mapping[str, Tensor] = module.state_dict()
    if not buffers:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        sent = {name: t for name, t in sent.items() if name in parameters}
    if parts is not None:
        sent = {name: t for name, t in sent.items() if as_split_model(module).part_of(name) in parts}
    return without_ties({name: t.detach() for name, t in sent.items() if t.is_floating_point()})


def copy_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters by name, without buffers, as they are now; tied ones once."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def head_names(module: nn.Module) -> dict[str, str]:
    """A split model's own names of its head's tensors -> their names within the head, alike whatever holds it."""
    model = as_split_model(module)
    return dict(zip(model.names("head"), model.head.state_dict(), strict=True))


def copy_network(module: _Network, who: str = "") -> _Network:
    """A copy of a network; tensors that an earlier call has left in its attributes are copied without their graph.

    Args:
        who: whose it is, for the message; default: its class.

    Raises:
        ConfigError: something in it cannot be copied, such as a lock.
    """
    held = (tensor for layer in module.modules() for value in vars(layer).values() for tensor in _tensors_in(value))
    computed = {id(tensor): tensor.detach().clone() for tensor in held if not tensor.is_leaf}
    try:
        return copy.deepcopy(module, computed)
    except Exception as error:  # the network is the user's
        raise ConfigError(
            f"{who or type(module).__name__}: expected a network that copy.deepcopy can copy, got one with something "
            f"that it cannot ({first_line(error)}); keep that out of the network"
        ) from error


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """An attribute that is a tensor, and those in its lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from _tensors_in(part)


def redraw(module: nn.Module) -> None:
    """Draw the weights of its layers anew, from PyTorch's global generator; a layer that cannot do so keeps its own."""
    for layer in module.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()


class CompositeModel(nn.Module, abc.ABC):
    """A network around a client's own, that keeps the latter's names when it is exported."""

    @abc.abstractmethod
    def export(self) -> dict[str, Tensor]:
        """The tensors by their exported names; not copies."""


def export_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict under the keys of the client's own module as it was before anything wrapped it; not copies.

    Each tensor is there once, under its first name.
    """
    return without_ties(module.export() if isinstance(module, SplitModel | CompositeModel) else module.state_dict())


def load_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the module's tensors of the same names; the others keep their values.

    Raises:
        ValueError: an unknown name or another shape.
    """
    copy_into(module.state_dict(), tensors, type(module).__name__)


def copy_into(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], whose: str) -> None:
    """Copy `tensors` into those of `own` that have the same names; the others keep their values.

    Raises:
        ValueError: an unknown name or another shape; `whose` says whose names were expected.
    """
    if not tensors.keys() <= own.keys():
        raise ValueError(f"expected names of {whose}, got '{min(tensors.keys() - own.keys())}'")
    for name, value in tensors.items():
        if own[name].shape != value.shape:
            raise ValueError(f"expected shape {tuple(own[name].shape)} for '{name}', got {tuple(value.shape)}")
    if tensors:
        targets = [own[name] for name in tensors]
        with torch.no_grad():
            torch._foreach_copy_(targets, move_together(list(tensors.values()), [target.device for target in targets]))


class FrozenModel(nn.Module):
    """A network that a loss refers to, such as a teacher: `model` with `weights`, in eval mode, without gradient."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._call = _Call(model)
        self._weights = {f"model.{name}": value.detach() for name, value in weights.items()}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What it holds in the model's place."""
        return self._weights

    @property
    def network(self) -> nn.Module:
        """The template that it computes with."""
        return self._call.model

    def holding(self, weights: Mapping[str, Tensor]) -> FrozenModel:
        """The same network with other values of `weights`."""
        other = copy.copy(self)
        other._weights = dict(weights)
        return other

    def _evaluate(self, method: str, x: Tensor) -> Tensor:
        with torch.no_grad(), eval_mode(self._call):
            result: Tensor = call_with(self._call, self._weights, (method, x))
        return result.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the reference network."""
        return self._evaluate("__call__", x)

    def represent(self, x: Tensor) -> Tensor:
        """Its representation."""
        return self._evaluate("represent", x)


class _Call(nn.Module):
    """Lets `functional_call` reach any method of a network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any) -> Any:
        return getattr(self.model, method)(*args)


def batchnorm_layers(module: nn.Module) -> list[_BatchNorm]:
    """All BatchNorm layers, in the module's order."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def static_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of BatchNorm layers that keep none in training, by name, not copied."""
    static = {
        id(buffer) for layer in batchnorm_layers(module) if not layer.track_running_stats for buffer in layer.buffers()
    }
    return {name: t.detach() for name, t in module.named_buffers() if id(t) in static and t.is_floating_point()}
