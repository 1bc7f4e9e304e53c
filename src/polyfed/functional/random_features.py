"""Fixed random maps of prepared inputs to features: patch filters, dilated convolutions, projections, counts of words.

A map is a dictionary of named tensors, drawn once and never trained. It is drawn for the form of an input:

    images (C, H, W)  `filters`: K patches k x k, mean removed, norm 1; ReLU of the convolution plus a bias, averaged
                      over g x g cells; g = 3 and k = 5, or g = 2 and k = 3 where a side has 8 or fewer (Coates and Ng,
                      "Selecting receptive fields in deep networks", NeurIPS 2011); then the square root, so that large
                      means vary less (Perronnin et al., "Improving the Fisher kernel", ECCV 2010)
    series (C, L)     `kernels`: K convolutions of 7, 9 or 11 weights over some of the channels, dilated; the maximum,
                      and the share of steps above zero (Dempster et al., "ROCKET", DMKD 2020)
    numbers (F,)      `projection`: ReLU of a random projection plus a bias; categories are one-hot (Rahimi and Recht,
                      "Random features for large-scale kernel machines", NeurIPS 2007)
    ids (L,), whole   `words`: how often each id occurs; 0 is padding

Shapes: N inputs, D features, K filters or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL_SIDE = 8  # pixels
_BIAS = 0.25  # standard deviation of a bias
_KERNEL_LENGTHS = (7, 9, 11)
_PADDING = 0  # the id of no word
_SMALLEST = 1e-8  # of a mean: its square root has a slope at 0, too
_IMAGES = 16  # at a time: their maps fit the caches, and their memory is used again


def draw_map(
    x: Tensor, features: int, generator: torch.Generator, categories: Sequence[int] = (), words: int = 0
) -> dict[str, Tensor]:
    """Draw a map for inputs like `x` (N, ...), which is read for its form alone.

    Args:
        features: D, or a few less where filters have several features each; of ids without known `words`.
        categories: of rows of a table, per feature, how many categories there are, 0 for a number.
        words: V, how many ids there are; 0: not known, so that ids share `features` counts.

    >>> [name for name in draw_map(torch.zeros(1, 3, 32, 32), 576, torch.Generator())]
    ['filters', 'bias', 'cells']
    """
    shape = x.shape[1:]
    if not x.is_floating_point():
        return {"words": torch.tensor(words or features)}
    if len(shape) == 3:
        return _draw_filters(shape, features, generator)
    if len(shape) == 2:
        return _draw_kernels(shape, features, generator)
    return _draw_projection(math.prod(shape), features, generator, categories)


def count_features(x: Tensor, features: int) -> int | None:
    """D of the map that `draw_map` draws for inputs like `x`; None for ids, of which it need not know how many."""
    shape = x.shape[1:]
    if not x.is_floating_point():
        return None
    if len(shape) == 3:
        return _cells(shape) ** 2 * max(1, features // _cells(shape) ** 2)
    return 2 * max(1, features // 2) if len(shape) == 2 else features


def apply_map(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The features (N, D) of prepared inputs (N, ...), in float32, where the inputs are."""
    here = {name: tensor.to(x.device) for name, tensor in drawn.items()}
    if "words" in here:
        return _count_words(int(drawn["words"]), x)
    if "filters" in here:
        return _pool_patches(here, x)
    if "kernels" in here:
        return _convolve(here, x)
    return _project(here, x)


# images --------------------------------------------------------------------------------------------------------------


def _draw_filters(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
    cells = _cells(shape)
    side = 2 * cells - 1
    count = max(1, features // cells**2)
    filters = torch.randn(count, shape[0], side, side, generator=generator)
    filters = filters - filters.mean(dim=(1, 2, 3), keepdim=True)
    filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    bias = _BIAS * torch.randn(count, generator=generator)
    return {"filters": filters, "bias": bias, "cells": torch.tensor(cells)}


def _cells(shape: Sequence[int]) -> int:
    """g, cells of a side."""
    return 2 if min(shape[1:]) <= _SMALL_SIDE else 3


def _pool_patches(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    filters = drawn["filters"]
    cells = int(drawn["cells"])
    found = []
    for images in x.split(_IMAGES):
        maps = F.conv2d(images, filters, drawn["bias"], padding=filters.shape[-1] // 2)
        found.append(F.adaptive_avg_pool2d(maps.relu_(), cells).flatten(1))
    return torch.cat(found).clamp(min=_SMALLEST).sqrt()


# series --------------------------------------------------------------------------------------------------------------


def _draw_kernels(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Kernels of several lengths lie in the middle of the longest, those of some channels among zeros."""
    channels, steps = shape
    count = max(1, features // 2)
    longest = max(_KERNEL_LENGTHS)
    choice = torch.randint(len(_KERNEL_LENGTHS), (count,), generator=generator)
    lengths = torch.tensor(_KERNEL_LENGTHS)[choice]
    from_middle = (torch.arange(longest) - longest // 2).abs()
    within = from_middle <= (lengths // 2).unsqueeze(1)  # (K, longest)
    most = math.log2(channels)
    wanted = (2 ** (most * torch.rand(count, generator=generator))).round()
    ranks = torch.rand(count, channels, generator=generator).argsort(dim=1)
    used = ranks < wanted.unsqueeze(1)  # (K, channels)
    mask = used.unsqueeze(2) & within.unsqueeze(1)
    kernels = torch.randn(count, channels, longest, generator=generator) * mask
    numbers = mask.sum(dim=(1, 2)).view(-1, 1, 1)
    kernels = (kernels - kernels.sum(dim=(1, 2), keepdim=True) / numbers) * mask
    kernels = kernels / kernels.flatten(1).norm(dim=1).view(-1, 1, 1)
    reach = torch.log2(((steps - 1) / (lengths - 1)).clamp(min=1))
    dilations = (2 ** (reach * torch.rand(count, generator=generator))).long()
    bias = 2 * torch.rand(count, generator=generator) - 1
    return {"kernels": kernels, "bias": bias, "dilations": dilations}


def _convolve(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    kernels = drawn["kernels"]
    dilations = drawn["dilations"]
    half = kernels.shape[-1] // 2
    largest = x.new_empty(len(x), len(kernels))
    share = x.new_empty(len(x), len(kernels))
    for dilation in dilations.unique().tolist():
        of_it = (dilations == dilation).nonzero().squeeze(1)
        found = F.conv1d(x, kernels[of_it], drawn["bias"][of_it], padding=half * dilation, dilation=dilation)
        largest[:, of_it] = found.amax(dim=2)
        share[:, of_it] = (found > 0).to(x.dtype).mean(dim=2)
    return torch.cat([largest, share], dim=1)


# tables and texts ----------------------------------------------------------------------------------------------------


def _draw_projection(
    numbers: int, features: int, generator: torch.Generator, categories: Sequence[int]
) -> dict[str, Tensor]:
    counts = torch.tensor(categories or [0] * numbers)
    width = int(counts.clamp(min=1).sum())
    projection = torch.randn(width, features, generator=generator) / math.sqrt(width)
    return {
        "projection": projection,
        "bias": _BIAS * torch.randn(features, generator=generator),
        "categories": counts,
    }


def _project(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    x = x.flatten(1)
    parts = []
    for place, count in enumerate(drawn["categories"].tolist()):
        column = x[:, place]
        parts.append(F.one_hot(column.long().clamp(0, count - 1), count).to(x) if count else column.unsqueeze(1))
    return torch.relu(torch.cat(parts, dim=1) @ drawn["projection"] + drawn["bias"])


def _count_words(words: int, ids: Tensor) -> Tensor:
    ids = ids.flatten(1).long()
    counts = torch.zeros(len(ids), words, device=ids.device)
    return counts.scatter_add_(1, ids % words, (ids != _PADDING).float())
