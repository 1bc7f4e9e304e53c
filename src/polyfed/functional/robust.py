"""Robust centers: what K vectors agree on, whatever some of them say; who stands apart; and how far one may pull.

The mean of K vectors goes wherever a single one of them pulls. Here are the ways that stop it, for vectors (K, D), one
per client. Sums and distances are float64, results have the type of the vectors. Equal vectors are their own center,
bit for bit. The order of the vectors is nothing: exactly for medians and trimmed means, which sort; up to the rounding
of float64 sums for the geometric median and for distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

ENTRIES_AT_ONCE = 2**18  # numbers of each vector that are looked at together


def num_byzantine(count: int, share: float) -> int:
    """How many of `count` clients count as hostile: a share, rounded up, so that more than half of all are not."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


def trimmed_mean(vectors_KD: Tensor, cut: int) -> Tensor:
    """In every coordinate the mean of what is left without the `cut` smallest and the `cut` largest values. (D,)

    Raises:
        ValueError: nothing is left.

    Source: Yin et al., Byzantine-robust distributed learning, ICML 2018, definition 2.
    """
    count = len(vectors_KD)
    if not 0 <= 2 * cut < count:
        raise ValueError(f"expected a cut of less than half of {count} vectors, got {cut}")
    center = vectors_KD.new_empty(vectors_KD.shape[1])
    for columns in _columns(vectors_KD):
        ordered = vectors_KD[:, columns].sort(dim=0).values
        center[columns] = ordered[cut : count - cut].double().mean(dim=0).to(center.dtype)
    return center


def median(vectors_KD: Tensor) -> Tensor:
    """The median of every coordinate; of an even number of values, the mean of the middle two. (D,)

    Source: Yin et al., ICML 2018, definition 1.
    """
    return trimmed_mean(vectors_KD, (len(vectors_KD) - 1) // 2)


def geometric_median(vectors_KD: Tensor, steps: int = 50, smoothing: float = 1e-6, tolerance: float = 1e-9) -> Tensor:
    """The point with the least sum of distances to the vectors, by Weiszfeld's steps from their median. (D,)

    z <- sum_k b_k x_k / sum_k b_k,  b_k = 1 / max(smoothing * s, ||x_k - z||), s the median distance at the start.

    It ends early once a step is shorter than `tolerance` times s.

    Source: Pillutla et al., Robust aggregation for federated learning, IEEE TSP 2022, algorithm 2.
    """
    start = median(vectors_KD)
    distances_K = _distances(vectors_KD, start.double())
    scale = float(median(distances_K[:, None]))
    if not scale:  # more than half are there
        return start
    center = start.double()
    for _ in range(steps):
        weights_K = 1 / distances_K.clamp(min=smoothing * scale)
        weights_K /= weights_K.sum()
        new = torch.empty_like(center)
        for columns in _columns(vectors_KD):
            new[columns] = (weights_K[:, None] * vectors_KD[:, columns].double()).sum(dim=0)
        moved = float((new - center).norm())
        center = new
        distances_K = _distances(vectors_KD, center)
        if moved < tolerance * scale:
            break
    return center.to(vectors_KD.dtype)


def clip_to_median_norm(vectors_KD: Tensor) -> Tensor:
    """The vectors, those longer than the median of all their L2 norms brought to it. (K, D)"""
    norms_K = _distances(vectors_KD, None)
    shrink_K = median_norm_factors(norms_K)
    return torch.where(shrink_K[:, None] < 1, (vectors_KD * shrink_K[:, None]).to(vectors_KD.dtype), vectors_KD)


def median_norm_factors(sizes_K: Tensor) -> Tensor:
    """The factors, at most 1, that bring sizes down to their median. (K,) float64"""
    sizes = sizes_K.double()
    bound = median(sizes[:, None])[0]
    return torch.where(sizes > bound, bound / sizes, torch.ones_like(sizes))


def squared_distances(vectors_KD: Tensor) -> Tensor:
    """||x_i - x_j||^2 for all pairs. (K, K) float64"""
    found = torch.zeros((len(vectors_KD), len(vectors_KD)), dtype=torch.float64)
    for columns in _columns(vectors_KD):
        part = vectors_KD[:, columns].double()
        for place, row in enumerate(part):
            found[place] += (part - row).square().sum(dim=1).cpu()
    return found


def krum(distances_KK: Tensor, hostile: int) -> list[int]:
    """Multi-Krum: who stays, all but the `hostile` ones that are farthest from their nearest others; places, in order.

    The score of i is the mean of its squared distances to the K - hostile - 2 nearest others, one at least; of equal
    scores the first stay. Without anybody to compare with, i stays.

    Distances are squared, and NaN where two have nothing in common.

    Raises:
        ValueError: nobody would stay.

    Source: Blanchard et al., Machine learning with adversaries, NeurIPS 2017, section 4 and the multi-Krum of 6. The
    paper's score is a sum, of equally many distances for everybody.
    """
    count = len(distances_KK)
    if not 0 <= hostile < max(count, 1):
        raise ValueError(f"expected fewer hostile ones than the {count} there are, got {hostile}")
    near = max(1, count - hostile - 2)

    def score(place: int) -> float:
        others = [float(d) for j, d in enumerate(distances_KK[place]) if j != place and not math.isnan(d)]
        nearest = sorted(others)[:near]
        return math.fsum(nearest) / len(nearest) if nearest else -math.inf

    ranked = sorted(range(count), key=lambda place: (score(place), place))
    return sorted(ranked[: count - hostile])


def _columns(vectors_KD: Tensor) -> Iterator[slice]:
    width = vectors_KD.shape[1]
    yield from (slice(begin, min(begin + ENTRIES_AT_ONCE, width)) for begin in range(0, width, ENTRIES_AT_ONCE))


def _distances(vectors_KD: Tensor, center_D: Tensor | None) -> Tensor:
    """L2 distances to a point, or the lengths. (K,) float64"""
    squares = torch.zeros(len(vectors_KD), dtype=torch.float64, device=vectors_KD.device)
    for columns in _columns(vectors_KD):
        part = vectors_KD[:, columns].double()
        if center_D is not None:
            part = part - center_D[columns]
        squares += part.square().sum(dim=1)
    return squares.sqrt()
