"""Sums of rows by class, which add up over clients in any order, and the linear models that they give in closed form.

    n[c] = rows of class c,  M[c] = sum of phi(x) over them,  S = sum of phi(x) phi(x)' over all rows

Where numbers are predicted there is one class, and phi(x) has the number behind it as one more feature. All is float64.
S is symmetric: its upper triangle is kept, row by row, as D (D + 1) / 2 numbers.

Shapes: N rows, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.functional.clipping import Normals
from polyfed.functional.noise import on_grid

_ROWS = 4096  # rows that are float64 at the same time
_ROUNDING = 1e-9  # share of the trace of S by which rounding may leave sums that no rows have


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
    return found if square is None else found | {"products": _pack(square)}


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
    rounding = _ROUNDING * products_DD.trace().clamp(min=0) + torch.finfo(torch.float64).tiny
    _, failed = torch.linalg.cholesky_ex(_within(sums) + rounding * torch.eye(len(products_DD), dtype=torch.float64))
    return not failed


# one release with noise ---------------------------------------------------------------------------------------------

_SHARES = {
    "counts": 0.05,
    "sums": 0.7,
    "products": 0.25,
}  # shares of a row's squared effect over the noise of each part
_FEWEST = 1.0  # rows of a class that is there
_FAR = 10.0  # deviations beyond which noise does not go


def add_noise(sums: Mapping[str, Tensor], noise: float, normals: Normals) -> dict[str, Tensor]:
    """Sums of rows of norm 1 at most as one Gaussian mechanism: a row changes all of it by 1 / noise over its noise.

    A row changes the counts by 1, M by phi and S by phi phi', both of norm 1 at most. A part with the share a of the
    squared effect has noise of the deviation noise / sqrt(a). What stands in S twice has sqrt(2) less, as it counts
    twice in the norm of phi phi'.

    All come out as floats on coarse grids (`noise.on_grid`), the counts, too.
    """
    is_diagonal = _diagonal(sums["sums"].shape[1])
    twice = {"products": torch.where(is_diagonal, 1.0, 0.5).double().sqrt()}
    noisy = {}
    for name, tensor in sums.items():
        std = noise / _SHARES[name] ** 0.5
        added = std * normals(tensor.shape) * twice.get(name, 1.0)
        noisy[name] = on_grid(tensor.double() + added, std)
    return noisy


def are_within(sums: Mapping[str, Tensor], rows: int, noise: float) -> bool:
    """Whether so many rows of norm 1 at most can have these sums, with the noise of `add_noise`; 0: without.

    No count is below 0, and all add up to n;  |M_c| <= n_c;  0 <= tr S and |S| <= n (Frobenius), as all are sums of
    n terms of norm 1 at most. d numbers of noise have a norm of at most sqrt(d) + 10 deviations, their sum is within
    10 sqrt(d): one in 1e22 honest clients is beyond. It looks at nothing but what was sent.
    """
    counts, width = sums["counts"].double(), sums["sums"].shape[1]
    std_n, std_m, std_s = (noise / _SHARES[name] ** 0.5 for name in ("counts", "sums", "products"))
    n = rows * (1 + _ROUNDING) + _ROUNDING
    most_C = counts + _FAR * std_n + _ROUNDING * n
    is_diagonal = _diagonal(width)
    products = torch.where(is_diagonal, sums["products"], sums["products"] * 2**0.5)
    trace = float(sums["products"][is_diagonal].sum())
    far = _FAR * std_s * width**0.5
    return bool(
        (most_C >= 0).all()
        and abs(float(counts.sum()) - rows) <= _FAR * std_n * len(counts) ** 0.5 + _ROUNDING * n
        and (sums["sums"].norm(dim=1) <= most_C + std_m * (width**0.5 + _FAR)).all()
        and -far - _ROUNDING * n <= trace <= n + far
        and float(products.norm()) <= n + std_s * (len(products) ** 0.5 + _FAR)
    )


def _diagonal(width: int) -> Tensor:
    """Which numbers of a triangle are on the diagonal."""
    rows, columns = torch.triu_indices(width, width)
    is_diagonal: Tensor = rows == columns
    return is_diagonal


def nearest_possible(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums with noise, made such that rows can have them: S varies by nothing less than 0 within classes.

    A class with less than one row is none, but for the largest.
    """
    counts = sums["counts"]
    known = counts >= counts.max().clamp(max=_FEWEST)
    n_C = torch.where(known, counts.clamp(min=_FEWEST), 0)
    found = {"counts": n_C, "sums": sums["sums"] * known.unsqueeze(1), "products": sums["products"]}
    within_DD = _within(found)
    values, vectors = torch.linalg.eigh(within_DD)
    nearest_DD = (vectors * values.clamp(min=0)) @ vectors.T
    return found | {"products": sums["products"] + _pack(nearest_DD - within_DD)}


def _pack(square_DD: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(*square_DD.shape)
    return square_DD[rows, columns]


def unpack(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix (D, D) of which this is the upper triangle."""
    rows, columns = torch.triu_indices(width, width)
    square_DD = triangle.new_zeros(width, width)
    square_DD[rows, columns] = triangle
    square_DD[columns, rows] = triangle
    return square_DD


# closed forms --------------------------------------------------------------------------------------------------------


def discriminant(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with one shrunk covariance for all classes, without the classes' shares.

    mu_c = M_c / n_c,  Sigma = (S - sum_c n_c mu_c mu_c') / N,  A = (1 - s) Sigma + s tr(Sigma) / D I;
    W = A^-1 mu',  b_c = - mu_c' W_c / 2;  the mean over classes is taken from both, which changes no difference of
    scores. Classes without rows are left out: they get zeros.

    W (D, C) and b (C,), of the sums of one row at least; s in (0, 1].

    Source: Friedman, "Regularized discriminant analysis", JASA 1989, with lambda = 1 and gamma = s.
    """
    counts = sums["counts"]
    known = counts > 0
    n_C = counts[known].double()
    mu_CD = sums["sums"][known] / n_C.unsqueeze(1)
    width = mu_CD.shape[1]
    w_DC = _solve(_within(sums) / n_C.sum(), mu_CD.T, shrinkage)
    b_C = -(mu_CD.T * w_DC).sum(dim=0) / 2
    weight_DC = torch.zeros(width, len(counts), dtype=torch.float64)
    bias_C = torch.zeros(len(counts), dtype=torch.float64)
    weight_DC[:, known] = w_DC - w_DC.mean(dim=1, keepdim=True)
    bias_C[known] = b_C - b_C.mean()
    return weight_DC, bias_C


def ridge(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Ridge regression on centered rows: W = (Sigma + s / (1 - s) tr(Sigma) / D I)^-1 cov(phi, y),  b = mean y - mu' W.

    W (D, 1) and b (1,), of sums of numbers to predict; s in (0, 1).
    """
    rows = sums["counts"].sum().double()
    mean = sums["sums"][0] / rows
    width = len(mean) - 1
    second = unpack(sums["products"], len(mean)) / rows - torch.outer(mean, mean)
    weight_D1 = (1 - shrinkage) * _solve(second[:width, :width], second[:width, -1:], shrinkage)
    return weight_D1, mean[-1:] - mean[:width] @ weight_D1


def naive_bayes(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Multinomial naive Bayes of counts, without the classes' shares: W_vc = log p(v | c), b = 0.

    p(v | c) = (M_cv + a) / (sum_v M_cv + a D), a = s / (1 - s): at s = 1/2 every count is one more (Laplace).

    W (D, C) and b (C,), zeros for classes without rows; s in (0, 1).
    """
    known = sums["counts"] > 0
    added = shrinkage / (1 - shrinkage)
    raised_CD = sums["sums"] + added
    weight_DC = (raised_CD / raised_CD.sum(dim=1, keepdim=True)).log().T * known
    return weight_DC, torch.zeros(len(known), dtype=torch.float64)


def _within(sums: Mapping[str, Tensor]) -> Tensor:
    """N Sigma (D, D): how rows vary around the means of their classes."""
    known = sums["counts"] > 0
    n_C = sums["counts"][known].double()
    mu_CD = sums["sums"][known] / n_C.unsqueeze(1)
    return unpack(sums["products"], mu_CD.shape[1]) - (mu_CD.T * n_C) @ mu_CD


def _solve(sigma_DD: Tensor, right: Tensor, shrinkage: float) -> Tensor:
    """A^-1 right; where no feature varies, by A = I."""
    width = len(sigma_DD)
    scale = sigma_DD.trace().clamp(min=0) / width
    if scale <= 0:
        return right
    shrunk_DD = (1 - shrinkage) * sigma_DD + shrinkage * scale * torch.eye(width, dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(shrunk_DD, right)
    return solved


def log_posterior(scores_NC: Tensor, known_C: Tensor, prior_C: Tensor) -> Tensor:
    """Log probabilities of classes by linear scores and the classes' shares.

    Args:
        scores_NC: without shares. known_C: shares, or numbers, of the rows that the scores were made of. prior_C: those
            that count.

    Returns:
        (N, C); -inf for classes that one of both has no rows of. Where that is all of them, the shares are those of
        `known_C`.
    """
    usable_C = prior_C * (known_C > 0)
    usable_C = torch.where(usable_C.any(), usable_C, known_C)
    return torch.log_softmax(scores_NC + usable_C.to(scores_NC.dtype).log(), dim=1)
