"""Sums of rows by class, which add up over clients in any order.

    n[c] = rows of class c,  M[c] = sum of phi(x) over them,  S = sum of phi(x) phi(x)' over all rows

Of a client that has sent n and M alone, sum_c M_c M_c' / n_c stands for S, and `clients` counts it in each class that
it has rows of: what is added up then tells how clients' class means vary (`from_class_means`).

Where numbers are predicted there is one class, and phi(x) has the number behind it as one more feature. All is float64.
S is symmetric: its upper triangle is kept, row by row, as D (D + 1) / 2 numbers.

Shapes: N rows, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_ROWS = 4096  # rows that are float64 at the same time
ROUNDING = 1e-9  # share of the trace of S by which rounding may leave sums that no rows have


def sum_rows(phi_ND: Tensor, y_N: Tensor, classes: int, products: bool = True) -> dict[str, Tensor]:
    """The sums of rows: counts (C,) int64, sums (C, D), and products, the upper triangle of S.

    Args:
        y_N: classes in [0, C); or, with C = 0, floats, numbers to predict.
        products: whether S is wanted.
    """
    if not classes:
        phi_ND = torch.cat([phi_ND, y_N.unsqueeze(1)], dim=1)
        y_N = torch.zeros(len(y_N), dtype=torch.int64)
    counts = torch.bincount(y_N, minlength=classes or 1)
    width = phi_ND.shape[1]
    found = {"counts": counts, "sums": torch.zeros(len(counts), width, dtype=torch.float64)}
    square = torch.zeros(width, width, dtype=torch.float64) if products else None
    for rows, labels in zip(phi_ND.split(_ROWS), y_N.split(_ROWS), strict=True):
        wide = rows.double()
        found["sums"].index_add_(0, labels, wide)
        if square is not None:
            square += wide.T @ wide
    return found if square is None else found | {"products": pack(square)}


def add(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of the rows of both."""
    return {name: one[name] + other[name] for name in one}


def are_possible(sums: Mapping[str, Tensor], rows: int) -> bool:
    """Whether so many rows can have these sums: nothing varies by less than nothing within a class, no rows sum to 0.

    Where that holds of all that is added up, `discriminant` and `ridge` have a solution.
    """
    if int(sums["counts"].sum()) != rows or bool(sums["sums"][sums["counts"] == 0].any()):
        return False
    if "products" not in sums:
        return bool((sums["sums"] >= 0).all())  # counts of words
    products_DD = unpack(sums["products"], sums["sums"].shape[1])
    rounding = ROUNDING * products_DD.trace().clamp(min=0) + torch.finfo(torch.float64).tiny
    _, failed = torch.linalg.cholesky_ex(within(sums) + rounding * torch.eye(len(products_DD), dtype=torch.float64))
    return not failed


def from_class_means(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What stands for a client's sums where n and M are all that it has sent; classes that it lacks are left out.

    Added up over clients, `within` is sum_c sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)', and `divisor` sum_c (K_c - 1), of
    the K_c clients with rows of class c. If rows of a class are alike at all clients, their quotient is Sigma without
    bias, as the mean of n rows varies by Sigma / n.

    Source: Goswami et al., "Covariances for free", NeurIPS 2025 (FedCOF), which has a covariance for each class, here
    added up in proportion to K_c - 1.
    """
    n_C = at_least_one(sums["counts"])
    sums_CD = sums["sums"] * (n_C > 0).unsqueeze(1)
    products = pack((sums_CD.T / n_C.clamp(min=1)) @ sums_CD)
    return {"counts": n_C, "sums": sums_CD, "products": products, "clients": (n_C > 0).long()}


def at_least_one(counts: Tensor) -> Tensor:
    """Counts (C,), of which noise may leave less than one row: such a class is none, but for the largest."""
    return torch.where(counts >= counts.max().clamp(max=1), counts.clamp(min=1), 0)


def within(sums: Mapping[str, Tensor]) -> Tensor:
    """How rows, or the means that clients have sent, vary around the means of their classes; (D, D)."""
    known = sums["counts"] > 0
    n_C = sums["counts"][known].double()
    mu_CD = sums["sums"][known] / n_C.unsqueeze(1)
    return unpack(sums["products"], mu_CD.shape[1]) - (mu_CD.T * n_C) @ mu_CD


def divisor(sums: Mapping[str, Tensor]) -> float:
    """What `within` is divided by, so that it is the covariance of rows: N; of clients' means what they can vary by."""
    if "clients" in sums:
        return float((sums["clients"] - 1).clamp(min=0).sum())
    return float(sums["counts"].sum())


def pack(square_DD: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row, (D (D + 1) / 2,)."""
    rows, columns = torch.triu_indices(*square_DD.shape)
    return square_DD[rows, columns]


def unpack(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix (D, D) of which this is the upper triangle."""
    rows, columns = torch.triu_indices(width, width)
    square_DD = triangle.new_zeros(width, width)
    square_DD[rows, columns] = triangle
    square_DD[columns, rows] = triangle
    return square_DD
