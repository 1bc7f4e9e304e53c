"""Inputs reconstructed from their features, or from sums over the features of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyfed.functional import class_statistics
from polyfed.functional.image_quality import total_variation

_SMALLEST_TARGET = 1e-12  # below it a target counts as zero
_SMALLEST_SHARE = 1e-6  # of the largest eigenvalue: below it one tells nothing


def invert_features(
    function: Callable[[Tensor], Tensor],
    s: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    tv: float,
    pixel: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Move x until f(x) is what was sent (FedIN, Chan et al., arXiv:2304.00759, section 4.3).

    The attacker knows f, its weights and its BatchNorm statistics (white box), and nothing of the images. Adam on
    loss_m = mean (f(x_m) - s_m)^2 / mean s_m^2 + tv TV(pixel x_m), for all m at once.

    The paper's objective is the first term, but for its scale, which Adam does not see; dividing by the size of the
    target gives one `tv` the same weight in every network. The losses are summed, and f must treat rows apart (eval
    mode), so that a result does not depend on what is attacked beside it.

    Args:
        function: f, inputs (M, C, H, W) to features shaped like `s`, row by row. Takes no gradient in its weights
            where these ask for none.
        s: what was sent, (M, ...).
        start: where x begins; the paper: standard normal noise.
        steps: of Adam. lr: its rate, in the network's units.
        tv: weight of the total variation, not negative; 0 is off.
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
        return off_M + tv * total_variation(x * pixel) if tv else off_M

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
