"""Sums of rows by class, which add up over clients in any order.

    n[c] = rows of class c,  M[c] = sum of phi(x) over them,  S = sum of phi(x) phi(x)' over all rows

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


def within(sums: Mapping[str, Tensor]) -> Tensor:
    """N Sigma (D, D): how rows vary around the means of their classes."""
    known = sums["counts"] > 0
    n_C = sums["counts"][known].double()
    mu_CD = sums["sums"][known] / n_C.unsqueeze(1)
    return unpack(sums["products"], mu_CD.shape[1]) - (mu_CD.T * n_C) @ mu_CD


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
