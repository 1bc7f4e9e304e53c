"""The diagonal of the Fisher information: how much the likelihood of single samples depends on each weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.functional.modes import eval_mode

_AT_A_TIME = 2**22  # numbers that the gradients of one layer may be together: 16 MiB, near the caches


def fisher_diagonal(model: nn.Module, x_B: Tensor, y_B: Tensor) -> dict[str, Tensor]:
    """sum_n (d log p(y_n | x_n) / d w)^2, entry by entry: the square of each sample's gradient, not of their sum.

    In eval mode, where no sample depends on another. Where all weights are those of linear layers, convolutions and
    BatchNorm with running statistics, each used once, one backward pass for all samples gives what goes in and out of
    every layer, and a sample's gradient is a product of the two. Other networks take a backward pass per sample.

    Args:
        model: gives logits (B, C). x_B: inputs as the model takes them. y_B: classes.

    Returns:
        Trainable parameter -> tensor of its shape.

    Source: Yang et al. (FedDPA), NeurIPS 2023 (the empirical Fisher information, before the mean).
    """
    with eval_mode(model):
        found = _layer_by_layer(model, x_B, y_B) if _has_known_layers(model) else None
        return _one_by_one(model, x_B, y_B) if found is None else found


def min_max_normalize(tensor: Tensor) -> Tensor:
    """(t - min t) / (max t - min t), in [0, 1]; a constant tensor, for which that is 0 / 0, becomes 0.

    >>> min_max_normalize(torch.tensor([2.0, 4.0, 3.0])), min_max_normalize(torch.tensor([5.0, 5.0]))
    (tensor([0.0000, 1.0000, 0.5000]), tensor([0., 0.]))
    """
    if not tensor.numel():
        return tensor.clone()
    low, high = tensor.aminmax()
    return (tensor - low) / torch.where(high > low, high - low, torch.ones_like(high))


def _one_by_one(model: nn.Module, x_B: Tensor, y_B: Tensor) -> dict[str, Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in trained.items()}
    for x, y in zip(x_B, y_B, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None].long())
        for name, g in zip(trained, torch.autograd.grad(loss, [*trained.values()], allow_unused=True), strict=True):
            if g is not None:
                total[name].addcmul_(g, g)
    return total


# layer by layer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What went into a layer, a copy, and what came out of it."""

    layer: Any
    x: Tensor
    y: Tensor


def _has_known_layers(model: nn.Module) -> bool:
    """Whether every trainable parameter is a weight or bias of one layer of a known kind, and of no other."""
    known = [p for layer in model.modules() if _is_known(layer) for p in layer.parameters()]
    trained = {p for p in model.parameters() if p.requires_grad}
    return len(known) == len(set(known)) and trained <= set(known)


def _is_known(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d):
        return layer.running_mean is not None
    return type(layer) is nn.Linear


def _layer_by_layer(model: nn.Module, x_B: Tensor, y_B: Tensor) -> dict[str, Tensor] | None:
    """None where a layer is not used just once, or what goes in is not one row per sample."""
    layers = {layer: name for name, layer in model.named_modules() if _is_known(layer) and _trains(layer)}
    calls: list[_Call] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append(_Call(layer, inputs[0].detach().clone(), output))  # a copy: others may write into it
        return output.clone()

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        logits = model(x_B)
    finally:
        for hook in hooks:
            hook.remove()
    once = sorted(id(call.layer) for call in calls) == sorted(map(id, layers))
    if not once or not all(_leads_with_samples(call, len(x_B)) for call in calls):
        return None
    loss = F.cross_entropy(logits, y_B.long(), reduction="sum")
    slopes = torch.autograd.grad(loss, [call.y for call in calls], allow_unused=True)
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for call, dy in zip(calls, slopes, strict=True):
            for name, square in _squares(call, torch.zeros_like(call.y) if dy is None else dy):
                found[f"{layers[call.layer]}.{name}".lstrip(".")] = square
    return {name: found[name] for name, p in model.named_parameters() if p.requires_grad}


def _leads_with_samples(call: _Call, count: int) -> bool:
    """Whether the first dimension is the samples', for all that can be seen of the shape."""
    sequences = isinstance(call.layer, nn.Linear) and call.x.dim() > 2
    return len(call.x) == count and not (sequences and call.x.shape[1] == count)


def _trains(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters())


def _squares(call: _Call, dy: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Parameter -> sum over the samples of its squared gradient, `dy` being the gradient of what came out."""
    layer, x = call.layer, call.x
    if isinstance(layer, nn.Linear):
        dy_BOL, x_BIL = (t.reshape(len(t), -1, t.shape[-1]).mT for t in (dy, x))
        yield "weight", _outer_squares(dy_BOL, x_BIL)
    elif isinstance(layer, nn.Conv2d):
        dy_BOL = dy.flatten(2)
        kernel: Any = layer.kernel_size, layer.dilation, layer.padding, layer.stride  # a padding in words is not known
        dy_groups, x_groups = (t.chunk(layer.groups, dim=1) for t in (dy_BOL, F.unfold(x, *kernel)))
        squares = [_outer_squares(*pair) for pair in zip(dy_groups, x_groups, strict=True)]
        yield "weight", torch.cat(squares).view_as(layer.weight)
    else:
        channels = (1, -1, *[1] * (x.dim() - 2))
        mean, var = (t.view(channels) for t in (layer.running_mean, layer.running_var))
        dy_BOL = dy.reshape(*dy.shape[:2], -1)
        if layer.affine:
            yield "weight", ((x - mean) / (var + layer.eps).sqrt() * dy).reshape(dy_BOL.shape).sum(2).square().sum(0)
    if getattr(layer, "bias", None) is not None:
        yield "bias", dy_BOL.sum(2).square().sum(0)


def _outer_squares(a_BOL: Tensor, b_BIL: Tensor) -> Tensor:
    """(O, I): sum_n (sum_l a_nol b_nil)^2."""
    if a_BOL.shape[2] == 1:
        return a_BOL[..., 0].square().mT @ b_BIL[..., 0].square()
    total = a_BOL.new_zeros(a_BOL.shape[1], b_BIL.shape[1])
    rows = max(1, _AT_A_TIME // total.numel())
    for a, b in zip(a_BOL.split(rows), b_BIL.split(rows), strict=True):
        total += (a @ b.mT).square().sum(0)
    return total
