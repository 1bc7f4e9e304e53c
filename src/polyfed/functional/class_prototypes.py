"""Class means of representations, and the header trained on them (FedGH; FedProto and FedTGP use the same means).

Shapes: N samples, M pairs (mean, class), C classes, S classes present, D feature width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.functional.clipping import clip_factors


def class_means(z_ND: Tensor, y_N: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean representation per class: Rbar^s = (1/|D^s|) sum over D^s of F(phi; x).

    The sums are float64: a class with one sample gives that sample's float32 representation bit for bit, and the order
    of the samples does not show. On a device they are a product of matrices, which adds in the same order each time,
    and nothing waits for it; one without float64 adds in float32.

    Args:
        z_ND: representations; no gradient is kept.
        y_N: their classes, integers in [0, C), in main memory.
        classes: C, the number of classes of the task.

    Returns:
        labels (S,) int32 ascending, without absent classes; means (S, D) float32, where ``z_ND`` lies; counts (S,)
        int64. Labels and counts are in main memory.

    Raises:
        ValueError: ``classes`` is below 1, shapes do not fit each other, or a class is out of range.

    Source: FedGH (Yi et al., ACM MM 2023), eq. 3.

    >>> class_means(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([2, 2, 0]), classes=3)[:2]
    (tensor([0, 2], dtype=torch.int32), tensor([[7.],
            [2.]]))
    """
    if classes < 1:
        raise ValueError(f"expected at least one class, got {classes}")
    if z_ND.dim() != 2 or y_N.shape != z_ND.shape[:1]:
        raise ValueError(f"expected z (N, D) and y (N,), got {tuple(z_ND.shape)} and {tuple(y_N.shape)}")
    y_N = y_N.to(torch.int64)
    if y_N.numel() and not bool(((y_N >= 0) & (y_N < classes)).all()):
        raise ValueError(f"expected classes in [0, {classes}), got {int(y_N.min())} to {int(y_N.max())}")
    labels_S, place_N, counts_S = y_N.unique(return_inverse=True, return_counts=True)
    z_ND = z_ND.detach()
    if z_ND.is_cpu:
        sums_SD = torch.zeros(len(labels_S), z_ND.shape[1], dtype=torch.float64)
        sums_SD.index_add_(0, place_N, z_ND.double())
        means_SD = sums_SD / counts_S.unsqueeze(1)
    else:
        wide = _widest_float(z_ND.device)
        is_member_SN = (labels_S.unsqueeze(1) == y_N).to(z_ND.device, wide)
        means_SD = is_member_SN @ z_ND.to(wide) / is_member_SN.sum(dim=1, keepdim=True)
    return labels_S.to(torch.int32), means_SD.float(), counts_S


def _widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it, as Apple's GPUs and many of Intel's are."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def header_sgd_step(
    weight_CD: Tensor, bias_C: Tensor, z_MD: Tensor, y_M: Tensor, w_M: Tensor, lr: float, clip: float | None
) -> tuple[Tensor, Tensor]:
    """One SGD step of a linear header on the weighted mean cross entropy over M pairs, by its closed form.

    With p_m = softmax(theta z_m + b) and v_m = w_m / sum w:
    grad theta = sum_m v_m (p_m - onehot(y_m)) z_m^T,  grad b = sum_m v_m (p_m - onehot(y_m)).

    Only the ratios of the weights count, so a weight has no effect on a single pair (scale ``lr`` there). If all are
    0 nothing moves.

    Args:
        weight_CD: theta.
        bias_C: b.
        z_MD: class means (prototypes).
        y_M: their classes, integers in [0, C).
        w_M: their weights, not negative.
        lr: eta_theta; 0 returns the header as it was.
        clip: largest norm of (grad theta, grad b) taken together; 0 or None: no limit.

    Returns:
        The new theta and b; the arguments are left alone.

    Raises:
        ValueError: shapes do not fit, or ``clip`` is negative.

    Source: FedGH, eq. 4; Jensen's inequality makes this a lower bound of the loss on all representations.
    """
    c, d = weight_CD.shape
    m = z_MD.shape[0]
    if bias_C.shape != (c,) or z_MD.shape != (m, d) or y_M.shape != (m,) or w_M.shape != (m,):
        raise ValueError(
            f"expected bias ({c},), z (M, {d}), y (M,), w (M,) for a header of shape ({c}, {d}), got "
            f"{tuple(bias_C.shape)}, {tuple(z_MD.shape)}, {tuple(y_M.shape)}, {tuple(w_M.shape)}"
        )
    if clip is not None and clip < 0:
        raise ValueError(f"expected clip of at least 0 (0 or None: off), got {clip}")
    w_M = w_M.to(weight_CD.dtype)
    total = w_M.sum()
    v_M = w_M / torch.where(total > 0, total, torch.ones_like(total))
    p_MC = torch.log_softmax(z_MD @ weight_CD.T + bias_C, dim=1).exp()
    onehot_MC = torch.nn.functional.one_hot(y_M.long(), c).to(p_MC.dtype)
    residual_MC = v_M.unsqueeze(1) * (p_MC - onehot_MC)
    grad_weight_CD = residual_MC.T @ z_MD
    grad_bias_C = residual_MC.sum(dim=0)
    if clip:
        norm = (grad_weight_CD.square().sum() + grad_bias_C.square().sum()).sqrt()
        shrink = clip_factors(norm, clip)
        grad_weight_CD = shrink * grad_weight_CD
        grad_bias_C = shrink * grad_bias_C
    return weight_CD - lr * grad_weight_CD, bias_C - lr * grad_bias_C
