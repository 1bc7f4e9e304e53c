"""The optimizer of clients and servers: PyTorch's own fused steps, called as functions.

``torch.optim``'s classes take a second to come (they import the compiler), hold 65 MiB in every process, and look into
every parameter anew at every step; the functions below them compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from polyfed.core.settings import Training

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8  # PyTorch's, and the papers'
_REMEMBERED = ("momentum", "mean", "square", "steps")  # what `Optimizer` keeps for a parameter


class Optimizer:
    """One phase's: its memory begins empty, unless `remember` brings it.

    Args:
        parameters: what moves, in place. training: which optimizer, momentum, weight decay.
        rate: the learning rate of the next step.
    """

    def __init__(self, parameters: Sequence[Tensor], training: Training, rate: float) -> None:
        self._parameters = [parameter.detach() for parameter in parameters]  # the same memory
        self._training, self.rate = training, rate
        self._kept: list[dict[str, Tensor]] = [{} for _ in parameters]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Move all parameters but those without a gradient, of which nothing is remembered either."""
        moving = [place for place, grad in enumerate(grads) if grad is not None]
        begun = [place for place in moving if self._kept[place]]
        for places in (begun, [place for place in moving if not self._kept[place]]):  # no fused step takes both
            if places:
                given = [_laid_like(self._parameters[place], grads[place]) for place in places]
                step = self._sgd if self._training.optimizer == "sgd" else self._adam
                step(places, given)

    def memory(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What is remembered of parameters that have these names: "momentum head.weight" and the like; not copies."""
        return {
            f"{what} {name}": tensor
            for name, kept in zip(names, self._kept, strict=True)
            for what, tensor in kept.items()
        }

    def remember(self, names: Sequence[str], memory: Mapping[str, Tensor]) -> None:
        """Go on from copies of an earlier `memory`; parameters that it lacks, or has in another shape, begin anew."""
        for kept, name, parameter in zip(self._kept, names, self._parameters, strict=True):
            known = {what: memory[f"{what} {name}"] for what in _REMEMBERED if f"{what} {name}" in memory}
            if all(tensor.shape in ((), parameter.shape) for tensor in known.values()):
                for what, tensor in known.items():
                    copied = tensor.to(parameter.device, copy=True)
                    kept[what] = _laid_like(parameter, copied) if copied.dim() else copied

    def begin(self) -> None:
        """Remember zeros, which gives the numbers of an empty memory; `first` then shares them."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            if self._training.optimizer != "sgd":
                kept |= _zeros(parameter)
            elif self._training.momentum:
                kept["momentum"] = torch.zeros_like(parameter)

    def first(self, count: int) -> Optimizer:
        """The same for the first rows of all parameters, in the same memory."""
        part = Optimizer([parameter[:count] for parameter in self._parameters], self._training, self.rate)
        part._kept = [{name: t[:count] if t.dim() else t for name, t in kept.items()} for kept in self._kept]
        return part

    def _sgd(self, places: Sequence[int], grads: list[Tensor]) -> None:
        momentum = self._training.momentum
        buffers = [self._kept[place].get("momentum") for place in places]
        with torch.no_grad():
            sgd(
                [self._parameters[place] for place in places],
                grads,
                buffers,
                fused=True,
                weight_decay=self._training.weight_decay,
                momentum=momentum,
                lr=self.rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        for place, buffer in zip(places, buffers, strict=True):
            if buffer is not None and momentum:
                self._kept[place]["momentum"] = buffer

    def _adam(self, places: Sequence[int], grads: list[Tensor]) -> None:
        parameters = [self._parameters[place] for place in places]
        for place, parameter in zip(places, parameters, strict=True):
            if not self._kept[place]:
                self._kept[place] = _zeros(parameter)
        means, squares, steps = ([self._kept[p][name] for p in places] for name in ("mean", "square", "steps"))
        step = adamw if self._training.optimizer == "adamw" else adam
        with torch.no_grad():
            step(
                parameters,
                grads,
                means,
                squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                lr=self.rate,
                weight_decay=self._training.weight_decay,
                eps=_EPSILON,
                maximize=False,
            )


def _zeros(parameter: Tensor) -> dict[str, Tensor]:
    """What Adam remembers of a parameter before the first step."""
    moments = {name: torch.zeros_like(parameter) for name in ("mean", "square")}
    return {**moments, "steps": torch.zeros((), device=parameter.device)}


def _laid_like(parameter: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient, or what is kept of some, with the parameter's strides.

    PyTorch's fused steps take these for granted without a word.
    """
    assert grad is not None
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
