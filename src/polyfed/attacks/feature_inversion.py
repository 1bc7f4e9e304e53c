"""Inputs made from features: x is moved until f(x) is what was sent (FedIN, Chan et al., arXiv:2304.00759, 4.3).

The attacker knows f, its weights and its BatchNorm statistics (white box), and nothing of the images.

Shapes: M targets, each attacked on its own; x (M, C, H, W) as the network takes it; s (M, ...) features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from polyfed.functional.image_quality import total_variation

Watch = Callable[[int, Tensor, Tensor], None]

_SMALLEST = 1e-12  # below it a target counts as zero


def reconstruct(
    function: Callable[[Tensor], Tensor],
    s: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    tv: Tensor,
    pixel: Tensor | float = 1.0,
    watched: Collection[int] = (),
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """Adam on loss_m = mean (f(x_m) - s_m)^2 / mean s_m^2 + tv_m TV(pixel x_m), for all m at once.

    The paper's objective is the first term, but for its scale, which Adam does not see; dividing by the size of the
    target gives one `tv` the same weight whatever the network. The losses are summed, and f must treat rows apart (eval
    mode), so that a result does not depend on what is attacked beside it.

    Args:
        function: f, inputs (M, C, H, W) to features shaped like `s`, row by row. Takes no gradient in its weights
            where these ask for none.
        s: what was sent.
        start: where x begins; the paper: standard normal noise.
        steps: of Adam. lr: its rate, in the network's units.
        tv: (M,) weights of the total variation, not negative; 0 is off.
        pixel: size of one of the network's units as a share of the brightness range, per channel (C, 1, 1) or one
            number; total variation is taken in shares of the range.
        watched: steps after which `watch` is called; 0 is before the first.
        watch: called with the step, x and the losses (M,) there.

    Returns:
        x after the last step, (M, C, H, W), and the losses (M,) there; detached.
    """
    x = start.detach().clone().requires_grad_()
    size_M = s.detach().square().flatten(1).mean(dim=1).clamp(min=_SMALLEST)
    optimizer = torch.optim.Adam([x], lr=lr)

    def losses() -> Tensor:
        off_M = (function(x) - s).square().flatten(1).mean(dim=1) / size_M
        return off_M + tv * total_variation(x * pixel) if bool(tv.any()) else off_M

    for step in range(steps + 1):
        loss_M = losses()
        if watch is not None and step in watched:
            watch(step, x.detach(), loss_M.detach())
        if step < steps:
            (x.grad,) = torch.autograd.grad(loss_M.sum(), x)
            optimizer.step()
    return x.detach(), loss_M.detach()
