"""Inputs made again from what a client sent: from features of them, or from the change of weights that they caused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.message import Group
from polyfed.functional import class_statistics
from polyfed.functional.image_quality import total_variation
from polyfed.functional.modes import eval_mode, frozen_running_stats

_SMALLEST_TARGET = 1e-12  # below it a target counts as zero
_SMALLEST_NORM = 1e-20
_SMALLEST_SHARE = 1e-6  # of the largest eigenvalue: below it one tells nothing


def invert_features(
    function: Callable[[Tensor], Tensor],
    s: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    tv: Tensor,
    pixel: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Move x until f(x) is what was sent (FedIN, Chan et al., arXiv:2304.00759, section 4.3).

    The attacker knows f, its weights and its BatchNorm statistics (white box), and nothing of the images. Adam on
    loss_m = mean (f(x_m) - s_m)^2 / mean s_m^2 + tv_m TV(pixel x_m), for all m at once.

    The paper's objective is the first term, but for its scale, which Adam does not see; dividing by the size of the
    target gives one `tv` the same weight in every network. The losses are summed, and f must treat rows apart (eval
    mode), so that a result does not depend on what is attacked beside it.

    Args:
        function: f, inputs (M, C, H, W) to features shaped like `s`, row by row. Takes no gradient in its weights
            where these ask for none.
        s: what was sent, (M, ...).
        start: where x begins; the paper: standard normal noise.
        steps: of Adam. lr: its rate, in the network's units.
        tv: (M,) weights of the total variation, not negative; 0 is off.
        pixel: size of one of the network's units as a share of the brightness range, per channel (C, 1, 1) or one
            number; total variation is taken in shares of the range.

    Returns:
        x after the last step, (M, C, H, W), and the losses (M,) there; detached.
    """
    x = start.detach().clone().requires_grad_()
    size_M = s.detach().square().flatten(1).mean(dim=1).clamp(min=_SMALLEST_TARGET)
    optimizer = torch.optim.Adam([x], lr=lr)

    def losses() -> Tensor:
        off_M = (function(x) - s).square().flatten(1).mean(dim=1) / size_M
        return off_M + tv * total_variation(x * pixel) if bool(tv.any()) else off_M

    for _ in range(steps):
        (x.grad,) = torch.autograd.grad(losses().sum(), x)
        optimizer.step()
    return x.detach(), losses().detach()


def sums_as_features(
    sums: Mapping[str, Tensor], y: Tensor, phi: Callable[[Tensor], Tensor]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """All that sums say of the rows behind them, as a function of these rows: inputs (1, N, ...) to numbers (1, K).

    With S = V L V', of as many eigenvalues L as there are rows, and A = phi(x) V L^(-1/4):  A'A is L^(1/2), the sums of
    A by class are those of M, and phi(x) has no part outside of V. The power balances large and small eigenvalues: the
    latter tell rows from each other.

    Args:
        sums: of `class_statistics.sum_rows`, with products. y: (N,) the rows' classes, which the counts tell.

    Returns:
        The function, and its values for the rows.
    """
    width = sums["sums"].shape[1]
    values, vectors = torch.linalg.eigh(class_statistics.unpack(sums["products"], width))
    most = min(len(y), width)
    kept = values[-most:].clamp(min=float(values[-1]) * _SMALLEST_SHARE).float()
    v_DR = vectors[:, -most:].float()
    balance_R = kept**-0.25
    means_CR = (sums["sums"].float() @ v_DR) * balance_R
    gram_RR = torch.diag(kept.sqrt())
    weight = gram_RR.norm() / means_CR.norm()
    outside = gram_RR.norm() / (kept[0].sqrt() * len(y))

    def told(x: Tensor) -> Tensor:
        phi_ND = phi(x.squeeze(0))
        within_NR = phi_ND @ v_DR
        a_NR = within_NR * balance_R
        by_class_CR = torch.zeros_like(means_CR).index_add(0, y, a_NR)
        beyond_ND = phi_ND - within_NR @ v_DR.T
        parts = (a_NR.T @ a_NR, weight * by_class_CR, outside * beyond_ND)
        return torch.cat([part.flatten() for part in parts]).unsqueeze(0)

    nothing = torch.zeros(len(y) * width)
    return told, torch.cat([gram_RR.flatten(), (weight * means_CR).flatten(), nothing]).unsqueeze(0)


def invert_gradients(
    network: nn.Module,
    change: Group,
    y: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    tv: float,
    low: Tensor,
    high: Tensor,
) -> tuple[Tensor, float]:
    """Images whose gradient has the direction of a change: Adam on 1 - cos(grad, -change) + tv TV, by signed gradients.

    The attacker knows the weights that the client started from and those that it sent. The way between them stands for
    a gradient: after one step of SGD it is one, up to its length; after a round it is a sum of many, taken at other
    places. The gradient is that of the mean cross entropy at the network's weights, all images together; no dropout,
    BatchNorm by the batch's own statistics. The rate falls to 0 as half a cosine does.

    Args:
        network: holding the weights that the client started from. change: parameter name -> weights sent minus these.
        y: (N,) the classes, which the attacker knows or has guessed. start: (N, C, H, W), as the network takes it.
        steps: of Adam. lr: its first rate. tv: weight of the total variation, in shares of the brightness range.
        low, high: (C, 1, 1), what black and white are to the network.

    Returns:
        The images after the last step, and 1 - cos there, both detached.

    Source: gradient matching, Zhu et al., NeurIPS 2019; Geiping, Bauermeister, Droege, Moeller, NeurIPS 2020, eq. 4;
    signs and bounds as in its section 6.
    """
    named = [(name, p) for name, p in network.named_parameters() if name in change]
    if not named:
        raise ValueError("expected a change of the network's parameters, got none of them")
    towards = [-change[name].to(p) for name, p in named]
    size = _norm(towards)
    x = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr)

    def apart() -> Tensor:
        loss = functional.cross_entropy(network(x), y)
        grads = torch.autograd.grad(loss, [p for _, p in named], create_graph=True, allow_unused=True)
        pairs = [(g, t) for g, t in zip(grads, towards, strict=True) if g is not None]
        along = torch.stack([(g * t).sum() for g, t in pairs]).sum()
        return 1 - along / (_norm([g for g, _ in pairs]) * size).clamp(min=_SMALLEST_NORM)

    with eval_mode(network), frozen_running_stats(network):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            cost = apart() + tv * total_variation((x - low) / (high - low)).mean()
            (grad,) = torch.autograd.grad(cost, x)
            x.grad = grad.sign()
            optimizer.step()
            with torch.no_grad():
                x.copy_(x.clamp(low, high))
        return x.detach(), float(apart().detach())


def _norm(tensors: list[Tensor]) -> Tensor:
    """Of all of them as one vector; its derivative at 0 is 0."""
    return torch.stack([t.square().sum() for t in tensors]).sum().clamp(min=_SMALLEST_NORM).sqrt()
