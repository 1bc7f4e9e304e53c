"""What methods and engine do with a network by the names of its tensors: list, read, load, freeze."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.functional.modes import evaluating
from polyfed.models.split import Part, SplitModel

BODY: tuple[Part, ...] = ("extractor", "intermediate")  # all before the head
HEAD: tuple[Part, ...] = ("head",)


def trainable(module: nn.Module) -> tuple[tuple[str, ...], tuple[nn.Parameter, ...]]:
    """Names and parameters that take a gradient, in the module's order."""
    pairs = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return tuple(name for name, _ in pairs), tuple(p for _, p in pairs)


def split(module: nn.Module) -> SplitModel:
    """The module as the split model that `needs` made sure it is."""
    if not isinstance(module, SplitModel):
        raise TypeError(f"expected a SplitModel, came {type(module).__name__}")
    return module


def floats(module: nn.Module, buffers: bool = True, parts: Collection[Part] | None = None) -> dict[str, Tensor]:
    """What is averaged and sent of a network: parameters and float buffers by name, detached, not copied.

    Integer buffers (BatchNorm's batch counter) stay with their owner; without `buffers` so do all (its statistics).
    With `parts`, only what belongs to these parts of a split model.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sent = {name: t for name, t in module.state_dict().items() if buffers or name in parameters}
    if parts is not None:
        sent = {name: t for name, t in sent.items() if split(module).part_of(name) in parts}
    return {name: t.detach() for name, t in sent.items() if t.is_floating_point()}


def head_names(module: nn.Module) -> dict[str, str]:
    """A split model's own names of its head's tensors -> their names within the head, alike whatever holds it."""
    model = split(module)
    return dict(zip(model.names("head"), model.head.state_dict(), strict=True))


class Composite(nn.Module, abc.ABC):
    """A network around a client's own, that keeps the latter's names when it is exported."""

    @abc.abstractmethod
    def export(self) -> dict[str, Tensor]:
        """The tensors by their exported names; not copies."""


def exported(module: nn.Module) -> dict[str, Tensor]:
    """The state dict under the keys of the client's own module as it was before polyfed wrapped it; not copies."""
    return dict(module.export() if isinstance(module, SplitModel | Composite) else module.state_dict())


def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the module's tensors of the same names; the others keep their values.

    Raises:
        ValueError: an unknown name or another shape.
    """
    own = module.state_dict()
    unknown = sorted(tensors.keys() - own.keys())
    if unknown:
        raise ValueError(f"expected names of {type(module).__name__}, came '{unknown[0]}'")
    with torch.no_grad():
        for name, value in tensors.items():
            if own[name].shape != value.shape:
                raise ValueError(f"expected shape {tuple(own[name].shape)} for '{name}', came {tuple(value.shape)}")
            own[name].copy_(value)


class Frozen(nn.Module):
    """A reference network inside a loss: `model` with other weights, in eval mode, without gradient."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._call = _Call(model)
        self._weights = {f"model.{name}": value.detach() for name, value in weights.items()}

    def _evaluate(self, method: str, x: Tensor) -> Tensor:
        with torch.no_grad(), evaluating(self._call):
            result: Tensor = torch.func.functional_call(self._call, self._weights, (method, x))
        return result.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the reference network."""
        return self._evaluate("__call__", x)

    def represent(self, x: Tensor) -> Tensor:
        """Its representation."""
        return self._evaluate("represent", x)

    def extract(self, x: Tensor) -> Tensor:
        """What its extractor gives."""
        return self._evaluate("extract", x)


class _Call(nn.Module):
    """Lets `functional_call` reach any method of a network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any) -> Any:
        return getattr(self.model, method)(*args)


def frozen(model: nn.Module, weights: Mapping[str, Tensor]) -> Frozen:
    """A reference network for a loss (teacher, previous model): the template `model` holding `weights` (by name)."""
    return Frozen(model, weights)
