"""Sums of rows of norm 1 (`class_statistics`) as one release with noise, and what such sums can be.

Shapes: D features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.functional.class_statistics import ROUNDING, at_least_one, pack, within
from polyfed.functional.clipping import Normals
from polyfed.functional.noise import on_grid

# shares of a row's squared effect over the noise of each part
_SHARES = {"counts": 0.05, "sums": 0.7, "products": 0.25}
_SHARES_OF_MEANS = {"counts": 0.05, "sums": 0.95}  # without S
_FAR = 10.0  # deviations beyond which noise does not go


def add_noise(sums: Mapping[str, Tensor], noise: float, normals: Normals) -> dict[str, Tensor]:
    """Sums of rows of norm 1 at most as one Gaussian mechanism: a row changes all of it by 1 / noise over its noise.

    A row changes the counts by 1, M by phi and S by phi phi', both of norm 1 at most. A part with the share a of the
    squared effect has noise of the deviation noise / sqrt(a). What stands in S twice has sqrt(2) less, as it counts
    twice in the norm of phi phi'. Without S, M has its share, too.

    All come out as floats on coarse grids (`noise.on_grid`), the counts, too.
    """
    is_diagonal = _diagonal(sums["sums"].shape[1])
    twice = {"products": torch.where(is_diagonal, 1.0, 0.5).double().sqrt()}
    noisy = {}
    for name, tensor in sums.items():
        std = _deviation(sums, name, noise)
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
    std_n, std_m = (_deviation(sums, name, noise) for name in ("counts", "sums"))
    n = rows * (1 + ROUNDING) + ROUNDING
    most_C = counts + _FAR * std_n + ROUNDING * n
    return bool(
        (most_C >= 0).all()
        and abs(float(counts.sum()) - rows) <= _FAR * std_n * len(counts) ** 0.5 + ROUNDING * n
        and (sums["sums"].norm(dim=1) <= most_C + std_m * (width**0.5 + _FAR)).all()
        and ("products" not in sums or _are_products_within(sums, n, noise))
    )


def _are_products_within(sums: Mapping[str, Tensor], n: float, noise: float) -> bool:
    std = _deviation(sums, "products", noise)
    width = sums["sums"].shape[1]
    is_diagonal = _diagonal(width)
    products = torch.where(is_diagonal, sums["products"], sums["products"] * 2**0.5)
    trace = float(sums["products"][is_diagonal].sum())
    far = _FAR * std * width**0.5
    most: float = n + std * (len(products) ** 0.5 + _FAR)
    return -far - ROUNDING * n <= trace <= n + far and float(products.norm()) <= most


def _deviation(sums: Mapping[str, Tensor], name: str, noise: float) -> float:
    """Of the noise on a part of the sums."""
    shares = _SHARES if "products" in sums else _SHARES_OF_MEANS
    return noise / math.sqrt(shares[name])


def _diagonal(width: int) -> Tensor:
    """Which numbers of a triangle are on the diagonal."""
    rows, columns = torch.triu_indices(width, width)
    is_diagonal: Tensor = rows == columns
    return is_diagonal


def nearest_possible(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums with noise, made such that rows can have them: S varies by nothing less than 0 within classes.

    A class with less than one row is none, but for the largest.
    """
    n_C = at_least_one(sums["counts"])
    found = {"counts": n_C, "sums": sums["sums"] * (n_C > 0).unsqueeze(1), "products": sums["products"]}
    within_DD = within(found)
    values, vectors = torch.linalg.eigh(within_DD)
    nearest_DD = (vectors * values.clamp(min=0)) @ vectors.T
    return found | {"products": sums["products"] + pack(nearest_DD - within_DD)}
