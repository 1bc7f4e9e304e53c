"""Moments of pairs of columns, summed over whoever has both, and the linear model of any set of columns.

Features stand by column, so that a column that a client lacks takes nothing else with it: of a number z (standardized)
z and max(z - u, 0), u = -1.2, -0.4, 0.4, 1.2; of a category a 0/1 number each.

    client:   N_c[i, j] = rows of class c that have the columns i and j
              M_c[f, j] = sum over them of phi_f, i the column of f
              P[f, g] = sum over the rows of all classes that have both columns of phi_f phi_g
    added up: mu_c[f] = M_c[f, i] / N_c[i, i]
              Sigma[f, g] = (P[f, g] - sum_c M_c[f, j] M_c[g, i] / N_c[i, j]) / sum_c N_c[i, j],  0 where that is 0

A Gaussian without some of its columns is had by leaving their rows and columns of mu and Sigma out. Sigma's entries are
of different rows, so that it may have negative eigenvalues: these become 0 (the nearest matrix without any).

Moments of pairs of what is there: "pairwise deletion" (Little and Rubin, Statistical Analysis with Missing Data, 2002,
section 3.4). Where numbers are predicted they are one more column, which everybody has, with one feature, and all rows
are one class.

All is float64. Shapes: N rows, J columns, D features, C classes; a prime: those of one set of columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.functional.class_statistics import ROUNDING, pack, unpack

THRESHOLDS = (-1.2, -0.4, 0.4, 1.2)
_ANY = -3e38  # below any number, and finite, as what a run keeps must be
Sums = Mapping[str, Tensor]


def make_features(widths: Sequence[int]) -> dict[str, Tensor]:
    """What the features of columns are, (D,) each: its `column`, `category` (0: a number), `threshold` and `least`.

    Args:
        widths: per column, how many categories it has; 0: it is a number.

    >>> make_features([0, 2])["column"].tolist()
    [0, 0, 0, 0, 0, 1, 1]
    """
    rows: list[tuple[int, int, float, float]] = []
    for column, width in enumerate(widths):
        if width:
            rows += [(column, category, 0.0, 0.0) for category in range(1, width + 1)]
            continue
        rows.append((column, 0, 0.0, _ANY))
        rows += [(column, 0, threshold, 0.0) for threshold in THRESHOLDS]
    columns, categories, thresholds, least = zip(*rows, strict=True)
    return {
        "column": torch.tensor(columns),
        "category": torch.tensor(categories),
        "threshold": torch.tensor(thresholds, dtype=torch.float64),
        "least": torch.tensor(least, dtype=torch.float64),
    }


def find_features(made: Mapping[str, Tensor], z_NJ: Tensor) -> Tensor:
    """The features (N, D) of rows: standardized numbers, categories by their numbers."""
    z_ND = z_NJ[:, made["column"]]
    is_it_ND = (z_ND == made["category"]).to(z_ND.dtype)
    number_ND = torch.maximum(z_ND - made["threshold"], made["least"])
    return torch.where(made["category"] > 0, is_it_ND, number_ND)


def sum_rows(phi_ND: Tensor, has_NJ: Tensor, column_D: Tensor, y_N: Tensor, classes: int) -> dict[str, Tensor]:
    """N, A and P of rows: pairs (C, J (J + 1) / 2) int64, sums (C, D, J), products (D (D + 1) / 2,), upper triangles.

    Args:
        has_NJ: whether a row has a value in a column. column_D: of each feature.
        y_N: classes; with classes = 0 numbers to predict, which are one more column and feature behind the others.
    """
    phi_ND = torch.where(has_NJ[:, column_D], phi_ND.double(), 0.0)
    has_NJ = has_NJ.double()
    if not classes:
        phi_ND = torch.cat([phi_ND, y_N.double().unsqueeze(1)], dim=1)
        has_NJ = torch.cat([has_NJ, has_NJ.new_ones(len(has_NJ), 1)], dim=1)
        y_N = torch.zeros(len(y_N), dtype=torch.int64)
    of_class = [y_N == label for label in range(classes or 1)]
    pairs = [has_NJ[rows].T @ has_NJ[rows] for rows in of_class]
    return {
        "pairs": torch.stack([pack(square) for square in pairs]).long(),
        "sums": torch.stack([phi_ND[rows].T @ has_NJ[rows] for rows in of_class]),
        "products": pack(phi_ND.T @ phi_ND),
    }


def spread(sums: Sums, places: Tensor, features: Tensor, count: int, width: int) -> dict[str, Tensor]:
    """Sums of the columns at these places and of features among `count` columns and `width` features: others are 0."""
    classes = len(sums["sums"])
    pairs_CJJ = torch.zeros(classes, count, count, dtype=torch.int64)
    pairs_CJJ[:, places.unsqueeze(1), places] = _squares(sums["pairs"], len(places))
    sums_CDJ = torch.zeros(classes, width, count, dtype=torch.float64)
    sums_CDJ[:, features.unsqueeze(1), places] = sums["sums"]
    products_DD = torch.zeros(width, width, dtype=torch.float64)
    products_DD[features.unsqueeze(1), features] = unpack(sums["products"], len(features))
    return {
        "pairs": torch.stack([pack(square) for square in pairs_CJJ]),
        "sums": sums_CDJ,
        "products": pack(products_DD),
    }


def _squares(packed: Tensor, width: int) -> Tensor:
    return torch.stack([unpack(triangle, width) for triangle in packed])


def are_possible(sums: Sums, rows: int, places: Tensor, column_D: Tensor) -> bool:
    """Whether so many rows that have the columns at these places, and no others, can have these sums.

    column_D: of each feature.
    """
    pairs_CJJ = _squares(sums["pairs"], sums["sums"].shape[2])
    features = torch.isin(column_D, places)
    lacks = torch.ones(sums["sums"].shape[2], dtype=torch.bool)
    lacks[places] = False
    products_DD = unpack(sums["products"], len(column_D))
    foreign = (pairs_CJJ[:, lacks].any(), sums["sums"][:, ~features].any(), sums["sums"][:, :, lacks].any())
    if any(map(bool, foreign)) or bool(products_DD[~features].any()):
        return False
    most_CJ = pairs_CJJ.diagonal(dim1=1, dim2=2)
    if bool((pairs_CJJ < 0).any()) or int(most_CJ.sum(dim=0).max()) > rows:
        return False
    if bool((pairs_CJJ > torch.minimum(most_CJ.unsqueeze(1), most_CJ.unsqueeze(2))).any()):
        return False
    if not _are_sums_of_squares(sums["sums"], pairs_CJJ[:, column_D], products_DD.diagonal()):
        return False
    own_DD = products_DD[features][:, features]
    rounding = ROUNDING * own_DD.trace().clamp(min=0) + torch.finfo(torch.float64).tiny
    _, failed = torch.linalg.cholesky_ex(own_DD + rounding * torch.eye(len(own_DD), dtype=torch.float64))
    return not failed


def _are_sums_of_squares(sums_CDJ: Tensor, pairs_CDJ: Tensor, squares_D: Tensor) -> bool:
    """Whether sums are 0 without rows, and sum_c M_c[f, j]^2 / N_c[i, j] <= P[f, f] (Cauchy and Schwarz)."""
    if bool(sums_CDJ[pairs_CDJ == 0].any()):
        return False
    least_DJ = (sums_CDJ.square() / pairs_CDJ.clamp(min=1)).sum(dim=0)
    return bool((least_DJ <= squares_D.unsqueeze(1) * (1 + ROUNDING) + torch.finfo(torch.float64).tiny).all())


def count_empty_pairs(sums: Sums) -> int:
    """How many pairs of columns that there are rows of are in no row together."""
    pairs_JJ = unpack(sums["pairs"].sum(dim=0), sums["sums"].shape[2])
    has = pairs_JJ.diagonal() > 0
    return int((pairs_JJ[has][:, has] == 0).sum()) // 2


# a set of columns ----------------------------------------------------------------------------------------------------


def marginal(sums: Sums, column_D: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Mu (C, D') and Sigma (D', D') of some columns, as "mean" and "covariance", rows (C,) of each class, repaired ().

    A mean of a class that has no row with a column is that of all classes. rows are those of the class in the column
    that has most. repaired is the share of the trace that negative eigenvalues had.

    Args:
        column_D: of each feature. places: of the columns, sorted.
    """
    features = torch.isin(column_D, places)
    own_D = torch.searchsorted(places, column_D[features])  # which of `places` is the column's
    pairs_CJJ = _squares(sums["pairs"], sums["sums"].shape[2])[:, places][:, :, places].double()  # N_c[i, j]
    sums_CDJ = sums["sums"][:, features][:, :, places]  # M_c[f, j]
    products_DD = unpack(sums["products"], len(column_D))[features][:, features]  # P[f, g]
    n_CD = pairs_CJJ[:, own_D, own_D]
    total_CD = sums_CDJ[:, torch.arange(len(own_D)), own_D]  # M_c[f, i], i the column of f
    overall_D = total_CD.sum(dim=0) / n_CD.sum(dim=0).clamp(min=1)
    mean_CD = torch.where(n_CD > 0, total_CD / n_CD.clamp(min=1), overall_D)
    within_DD = products_DD.clone()
    rows_DD = torch.zeros_like(within_DD)
    for pairs_JJ, sums_DJ in zip(pairs_CJJ, sums_CDJ, strict=True):
        pairs_DD = pairs_JJ[own_D][:, own_D]
        sums_DD = sums_DJ[:, own_D]
        within_DD -= sums_DD * sums_DD.T / pairs_DD.clamp(min=1)
        rows_DD += pairs_DD
    covariance_DD, repaired = _nearest_possible(within_DD / rows_DD.clamp(min=1))
    rows_C = pairs_CJJ.diagonal(dim1=1, dim2=2).amax(dim=1)
    return {"mean": mean_CD, "covariance": covariance_DD, "rows": rows_C, "repaired": repaired}


def _nearest_possible(square_DD: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest symmetric matrix without negative eigenvalues (Frobenius); their sum over the trace."""
    values, vectors = torch.linalg.eigh(square_DD)
    trace = square_DD.trace().clamp(min=0)
    if values[0] >= -ROUNDING * trace:
        return square_DD, torch.zeros((), dtype=torch.float64)
    repaired = -values.clamp(max=0).sum() / trace.clamp(min=torch.finfo(torch.float64).tiny)
    return (vectors * values.clamp(min=0)) @ vectors.T, repaired
