"""FedIN's pairs in one common shape, where clients' networks differ in width or family.

A client has two matrices: P_in (C, c) for the channels of what enters its intermediate part, P_out (F, D) for its
representation. It sends g x g places and their summary, with C channels, and F numbers (`functional.feature_pooling`);
it takes others' inputs back through the transpose of P_in, and compares its own outputs by way of P_out:

    l_IN = mean (P_out f(P_in' s_in; w_in) - s_out)^2

The matrices are orthogonal, and begin as a function of the run's seed and of the widths alone, so that networks of one
width have the same ones. Fixed ones stay so. Trained ones are each client's own: after its local training they take one
step against the mean gradient of l_IN, plus that of mean (P_in' P_in s_in - s_in)^2 + mean (P_out' P_out s_out -
s_out)^2 on what it is about to send, and become the nearest orthogonal matrices to that, so that a transpose goes on
being the inverse and no matrix shrinks to fit all pairs.

In a context: "p_in", "p_out", and "cut" (1, ...), a sample of what enters the intermediate part, for its shape.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, group
from polyfed.core.method import Context, Trained
from polyfed.core.modules import split
from polyfed.core.randomness import generator
from polyfed.functional.feature_pooling import from_common, layout, nearest_orthogonal, orthogonal, to_common
from polyfed.validation.effect import ActsWith

Projection = Literal["none", "fixed", "trained"]
Size = Annotated[int, Field(ge=1), ActsWith("projection", ("fixed", "trained"))]  # of the common shape
Rate = Annotated[float, Field(gt=0), ActsWith("projection", ("trained",))]
_MATRICES = ("p_in", "p_out")


@dataclass(frozen=True)
class Common:
    """The common shape of pairs: (1 + grid grid, channels) and (features).

    lr: step size of the matrices; None: they are fixed.
    """

    channels: int
    grid: int
    features: int
    lr: float | None = None

    def matrices(self, client: Client) -> dict[str, Tensor]:
        """What a context needs, of a client at work, on its network's device; trained ones take a gradient."""
        model = split(client.model)
        cut = inference.apply(model.extract, model, client.data.train.x[:1], client.prepare)
        if "projections" in client.state:
            own: Group = group(client.state, "projections")
        else:
            channels = layout(cut.shape[1:]).channels
            own = {
                "p_in": _initial(client.seed, "in", self.channels, channels),
                "p_out": _initial(client.seed, "out", self.features, model.feature_dim),
            }
        is_trained = self.lr is not None
        return {"cut": cut, **{name: own[name].to(cut, copy=True).requires_grad_(is_trained) for name in _MATRICES}}

    def project(self, pairs: Group, matrices: Group) -> dict[str, Tensor]:
        """Pairs of the client's own shapes in the common one."""
        p_in, p_out = (matrices[name].to(pairs["s_in"].device) for name in _MATRICES)
        return {"s_in": to_common(pairs["s_in"], p_in, self.grid), "s_out": pairs["s_out"] @ p_out.T}

    def upload(self, client: Client, pairs: Group, trained: Trained) -> dict[str, Tensor]:
        """The client's own pairs as they are sent after training; moves its matrices first, where they are trained."""
        matrices = self.matrices(client)
        if self.lr is not None:
            matrices |= _trained(matrices, pairs, trained, self.lr, self.grid)
            client.state |= {"projections": {name: matrices[name].cpu() for name in _MATRICES}}
        return self.project(pairs, matrices)


def loss_in(model: Any, context: Context) -> Tensor:
    """l_IN on the pairs "s_in" and "s_out" of a context, which are in the common shape where it has matrices."""
    s_in = context["s_in"]
    s_out = context["s_out"]
    if "p_in" in context:
        found = model.transform(from_common(s_in, context["p_in"], context["cut"].shape[1:])) @ context["p_out"].T
    else:
        found = model.transform(s_in)
    loss: Tensor = (found - s_out).square().mean()
    return loss


def trained_matrices(context: Context) -> dict[str, Tensor]:
    """The matrices of a context that are trained, by name."""
    return {name: context[name] for name in _MATRICES if name in context and context[name].requires_grad}


@functools.lru_cache(maxsize=64)
def _initial(seed: int, cut: str, size: int, width: int) -> Tensor:
    return orthogonal(size, width, generator(seed, f"projection {cut}", size, width))


def _trained(matrices: Group, pairs: Group, trained: Trained, lr: float, grid: int) -> dict[str, Tensor]:
    """The matrices after their step, by the gradients of l_IN (`trained.raw`, over "in_steps") if there were pairs."""
    p_in = matrices["p_in"].detach().requires_grad_()
    p_out = matrices["p_out"].detach().requires_grad_()
    s_in = pairs["s_in"].to(p_in)
    s_out = pairs["s_out"].to(p_in)
    with torch.enable_grad():
        again = from_common(to_common(s_in, p_in, grid), p_in, s_in.shape[1:])
        lost = (again - s_in).square().mean() + (s_out @ p_out.T @ p_out - s_out).square().mean()
    grads = dict(zip(_MATRICES, torch.autograd.grad(lost, (p_in, p_out)), strict=True))
    for name, total in trained.raw.items():
        grads[name] = grads[name] + total / trained.sums["in_steps"]
    return {name: nearest_orthogonal(matrices[name].detach() - lr * g) for name, g in grads.items()}
