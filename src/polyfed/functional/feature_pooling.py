"""Features of one common shape, made of any network's by linear maps, and back (FedIN's way to unequal cuts).

What enters the intermediate part is a vector (D), a map (c, h, w), or tokens (T, c) of a square of places, with or
without a class token in front. All are places with c channels each, and a summary: the class token, or the mean of all
places. With P (C, c) and the pooling matrices R (g, h) and S (g, w), all of them constants, the common form is g x g
places and the summary, with C channels:

    to_common    U_ij = P sum_ab R_ia S_jb X_ab,      u = P x        of places X and summary x
    from_common  the same with the pseudo-inverses of P, R and S

So `from_common` of `to_common` gives what went in where C >= c and g >= h, w, and the nearest to it (least squares)
elsewhere; `to_common` of `from_common` gives what went in where C <= c and g <= h, w, but for the summary of what has
no class token.

Source: a linear projection of s_in and s_out is the way that Chan et al., arXiv:2304.00759, name and leave open.

Shapes: M samples, c channels, h x w places, T tokens, C and g the common sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class FeatureLayout(NamedTuple):
    """What a sample's features are. token: whether a class token stands before the places."""

    channels: int
    height: int
    width: int
    token: bool = False


def layout(shape: Sequence[int]) -> FeatureLayout:
    """Reads the layout off the shape of one sample.

    Raises:
        ValueError: neither vector nor map, and no tokens of a square.

    >>> layout((64, 8, 8))
    FeatureLayout(channels=64, height=8, width=8, token=False)
    >>> layout((65, 384))
    FeatureLayout(channels=384, height=8, width=8, token=True)
    >>> layout((128,))
    FeatureLayout(channels=128, height=1, width=1, token=False)
    """
    if len(shape) == 1:
        return FeatureLayout(shape[0], 1, 1)
    if len(shape) == 3:
        return FeatureLayout(shape[0], shape[1], shape[2])
    if len(shape) == 2:
        tokens, channels = shape
        for token in (False, True):
            side = math.isqrt(tokens - token)
            if side and side**2 == tokens - token:
                return FeatureLayout(channels, side, side, token)
    raise ValueError(
        "expected a vector (D), a map (channels, height, width) or the tokens (T, width) of a square of places, with "
        f"or without a class token, got {tuple(shape)}"
    )


def random_orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random matrix (rows, columns), float32, with orthonormal rows, or columns where these are fewer.

    Its pseudo-inverse is its transpose.
    """
    matrix = torch.empty(rows, columns, dtype=torch.float64)
    torch.nn.init.orthogonal_(matrix, generator=generator)
    return matrix.float()


def pooling_matrix(size: int, to: int) -> Tensor:
    """R (to, size), float64: the mean over each of `to` bins of `size` places, as adaptive average pooling has them.

    Of full rank, also where there are more bins than places.

    >>> pooling_matrix(2, 4).T
    tensor([[1., 1., 0., 0.],
            [0., 0., 1., 1.]], dtype=torch.float64)
    """
    return functional.adaptive_avg_pool1d(torch.eye(size, dtype=torch.float64), to).T


def to_common(s: Tensor, matrix: Tensor, grid: int) -> Tensor:
    """Features (M, ...), see `layout`, in the common form (M, 1 + g g, C), the summary first; matrix is P."""
    at = layout(s.shape[1:])
    places = s[:, int(at.token) :].transpose(1, 2) if s.dim() == 3 else s
    places = places.reshape(len(s), at.channels, at.height, at.width)
    summary = s[:, 0] if at.token else places.mean(dim=(2, 3))
    pooled = _resized(places, pooling_matrix(at.height, grid), pooling_matrix(at.width, grid))
    common: Tensor = torch.cat([summary[:, None], pooled.flatten(2).transpose(1, 2)], dim=1) @ matrix.T
    return common


def from_common(u: Tensor, matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """Features (M, *shape) of a network of its own shape, from what `to_common` gives.

    matrix is P, of `random_orthogonal`. What has no class token has no use for the summary.
    """
    at = layout(shape)
    grid = math.isqrt(u.shape[1] - 1)
    own = u @ matrix
    places = own[:, 1:].transpose(1, 2).unflatten(2, (grid, grid))
    places = _resized(places, *(torch.linalg.pinv(pooling_matrix(size, grid)) for size in (at.height, at.width)))
    if len(shape) != 2:
        return places.reshape(len(u), *shape)
    tokens = places.flatten(2).transpose(1, 2)
    return torch.cat([own[:, :1], tokens], dim=1) if at.token else tokens


def _resized(places: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Places (M, c, h, w) with both sides multiplied by a matrix: (M, c, g, g)."""
    return rows.to(places) @ places @ columns.T.to(places)
