"""Entangled representations: one mixture of a client's class means, and a header trained on such mixtures (FedRE).

Shapes: M mixtures, S classes of a client, C classes, D feature width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entangle(rows_SD: Tensor, labels_S: Tensor, weights_S: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mixture of the rows, and that of their one-hot labels, by the same weights, which are divided by their sum.

    Args:
        rows_SD: one row per class. labels_S: these classes, each once. weights_S: positive.

    Returns:
        The representation (D,) of the type of `rows_SD`, and the label encoding (C,), which sums to 1.

    Raises:
        ValueError: shapes do not fit, there is no row, or a weight is not positive.

    Source: Yao et al. (FedRE), CVPR 2026, the entangled representation and the entangled-label encoding.

    >>> entangle(torch.tensor([[4.0, 0.0], [0.0, 8.0]]), torch.tensor([2, 0]), torch.tensor([1.0, 3.0]), classes=3)
    (tensor([1., 6.]), tensor([0.7500, 0.0000, 0.2500]))
    """
    if rows_SD.dim() != 2 or not labels_S.shape == weights_S.shape == rows_SD.shape[:1] or not len(labels_S):
        shapes = f"{tuple(rows_SD.shape)}, {tuple(labels_S.shape)} and {tuple(weights_S.shape)}"
        raise ValueError(f"expected rows (S, D), labels (S,) and weights (S,) of S > 0, got {shapes}")
    if not bool((weights_S > 0).all()):
        raise ValueError(f"expected positive weights, got {float(weights_S.min())}")
    shares_S = (weights_S / weights_S.sum()).to(rows_SD)
    encoding_C = rows_SD.new_zeros(classes)
    encoding_C[labels_S.long()] = shares_S
    return shares_S @ rows_SD, encoding_C


def soft_header_sgd_step(
    weight_CD: Tensor, bias_C: Tensor, z_MD: Tensor, encodings_MC: Tensor, lr: float
) -> tuple[Tensor, Tensor]:
    """One SGD step of a linear header on the cross entropy to label encodings, summed over M mixtures, in closed form.

    With p_m = softmax(theta z_m + b) and q_m the encoding:
    grad theta = sum_m (p_m - q_m) z_m^T,  grad b = sum_m (p_m - q_m).

    Args:
        weight_CD: theta. bias_C: b. z_MD: mixtures.
        encodings_MC: q, rows that sum to 1.
        lr: 0 returns the header as it was.

    Returns:
        The new theta and b; the arguments are left alone.

    Raises:
        ValueError: shapes do not fit.

    Source: FedRE, the loss of the global classifier.
    """
    c, d = weight_CD.shape
    m = z_MD.shape[0]
    if bias_C.shape != (c,) or z_MD.shape != (m, d) or encodings_MC.shape != (m, c):
        shapes = f"{tuple(bias_C.shape)}, {tuple(z_MD.shape)} and {tuple(encodings_MC.shape)}"
        raise ValueError(f"expected bias ({c},), z (M, {d}) and encodings (M, {c}), got {shapes}")
    residual_MC = torch.softmax(z_MD @ weight_CD.T + bias_C, dim=1) - encodings_MC
    return weight_CD - lr * residual_MC.T @ z_MD, bias_C - lr * residual_MC.sum(dim=0)
