"""Images mixed with others of their batch, patch by patch.

A map (H, W) says how much of the image itself remains at each pixel: 1 where nothing is mixed in. It is the same for
all images of a batch; each has a partner of its own.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor


def mixing_map(height: int, width: int, patches: int, alpha: float, draws: torch.Generator) -> Tensor:
    """A grid of patches, each with a share lambda ~ Beta(alpha, alpha), as a map (H, W).

    The grid has sqrt(patches) rows and columns. Each patch is shifted by up to a quarter of its height and width,
    drawn uniformly; what leaves the image is cut off. Where patches overlap, the first one counts, row by row; what
    none covers stays as it is.

    Args:
        patches: a square number. alpha: above 0; small values are near 0 or 1, as in CutMix, 1 is uniform.

    Source: FedKWAZ (NeurIPS 2025), hierarchical adaptive patch mixing, as its public code has it.
    """
    side = math.isqrt(patches)
    beta = random.Random(int(torch.randint(2**62, (), generator=draws)))
    shares = [beta.betavariate(alpha, alpha) for _ in range(patches)]
    down, right = (_shifts(size // side // 4, patches, draws) for size in (height, width))
    found = torch.ones(height, width)
    written = found.numpy()  # the same memory, in which a patch is written several times sooner
    for place in reversed(range(patches)):  # the first comes last, over the others
        row, column = divmod(place, side)
        rows = _from_to(row * height // side + down[place], (row + 1) * height // side + down[place])
        columns = _from_to(column * width // side + right[place], (column + 1) * width // side + right[place])
        written[rows, columns] = shares[place]
    return found


def _shifts(most: int, count: int, draws: torch.Generator) -> list[int]:
    """So many whole numbers from -most to most."""
    shifts: list[int] = torch.randint(-most, most + 1, (count,), generator=draws).tolist()
    return shifts


def _from_to(start: int, end: int) -> slice:
    return slice(max(start, 0), end)  # an end beyond the last pixel is the last one


def partners(order_N: Tensor, w_N: Tensor) -> Tensor:
    """A permutation (N,) by which rows of weight above 0, which stand first, have only such rows as partners.

    Args:
        order_N: one number in [0, 1) for each row, drawn at random: the smallest one's row is the first row's partner.
        w_N: row weights; 0 for padding rows at the end, so that a padded batch mixes like the batch itself.

    >>> partners(torch.tensor([0.5, 0.9, 0.1, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    tensor([2, 0, 1, 3])
    """
    return torch.where(w_N > 0, order_N, torch.full_like(order_N, 2.0)).argsort()


def mix(x_NCHW: Tensor, partners_N: Tensor, map_HW: Tensor) -> Tensor:
    """Images map x + (1 - map) x[partners]."""
    return map_HW * x_NCHW + (1 - map_HW) * x_NCHW[partners_N]
