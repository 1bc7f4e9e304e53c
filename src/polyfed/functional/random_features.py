"""Fixed random maps of prepared inputs to features: patch filters, dilated convolutions, projections, counts of words.

A map is drawn once and never trained. What it does follows from the names and shapes of its tensors, and not from their
numbers, so that it can be exported (`torch.export`). It is drawn for the form of an input:

    images (C, H, W)  `filters`: K patches k x k, mean removed, norm 1; ReLU of the convolution plus a bias, averaged
                      over g x g cells; g = 3 and k = 5, or g = 2 and k = 3 where a side has 8 or fewer (Coates and Ng,
                      "Selecting receptive fields in deep networks", NeurIPS 2011); then the square root, so that large
                      means vary less (Perronnin et al., "Improving the Fisher kernel", ECCV 2010)
    series (C, L)     `kernels of dilation ...`: K convolutions of 7, 9 or 11 weights over some of the channels; the
                      maximum, and the share of steps above zero (Dempster et al., "ROCKET", DMKD 2020)
    numbers (F,)      `projection`: ReLU of a random projection plus a bias; categories are one-hot (Rahimi and Recht,
                      "Random features for large-scale kernel machines", NeurIPS 2007)
    ids (L,), whole   `words`: how often each id occurs; 0 is padding

Unit features have norm 1 in every row, so that a sum of them, or of their products, changes by 1 with a row: what the
features of inputs without structure have in common (`common`, the mean over normal numbers) is projected out first, as
it is most of a row and tells nothing of its class. Both are done to each row by itself and look at no data.

Shapes: N inputs, D features, K filters or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL_SIDE = 8  # pixels
_BIAS = 0.25  # standard deviation of a bias
_KERNEL_LENGTHS = (7, 9, 11)
_PADDING = 0  # the id of no word
_SMALLEST = 1e-8  # smallest mean: its square root has a slope there
_KERNELS, _BIAS_OF = "kernels of dilation ", "bias of dilation "
_STRANGERS = 100  # inputs of normal numbers, for what features have in common
_WITHIN = 1 - 2**-20  # a unit feature's norm, which rounding then leaves below 1
_IMAGES = 16  # at a time: their maps fit the caches, and their memory is used again


@dataclass(frozen=True)
class FeatureMap:
    """phi, a map of prepared inputs to features. Its tensors, by name, are all that is to be stored of it."""

    tensors: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """The features (N, D) of prepared inputs (N, ...), in float32, where the inputs are; all finite.

        A row of which a feature is not finite is zeros: in a sum it would hide all others, and no noise would hide it.
        """
        here = {name: tensor.to(x.device) for name, tensor in self.tensors.items()}
        if "words" in here:
            words = len(self.tensors["words"])
            ids = x.flatten(1).long()
            rows = ids.shape[0]  # len(ids) would fix the number where it is exported
            counts = torch.zeros(rows, words, device=ids.device)
            return counts.scatter_add_(1, ids % words, (ids != _PADDING).float())
        phi_ND = _features(here, x)
        if "common" in here:
            without_ND = phi_ND - torch.outer(phi_ND @ here["common"], here["common"])
            phi_ND = F.normalize(without_ND, dim=1) * _WITHIN
        return torch.where(phi_ND.isfinite().all(dim=1, keepdim=True), phi_ND, 0.0)


def draw_map(
    x: Tensor,
    features: int,
    generator: torch.Generator,
    categories: Sequence[int] = (),
    words: int = 0,
    unit: bool = False,
) -> FeatureMap:
    """Draw a map for inputs like `x` (N, ...), which is read for its form alone.

    Args:
        features: D, or a few less where filters have several features each; of ids without known `words`.
        categories: of rows of a table, per feature, how many categories there are, 0 for a number.
        words: V, how many ids there are; 0: not known, so that ids share `features` counts.
        unit: whether rows of features have norm 1; not of ids.
    """
    shape = x.shape[1:]
    if not x.is_floating_point():
        return FeatureMap({"words": torch.arange(words or features, dtype=torch.int32)})
    if len(shape) == 3:
        drawn = _draw_filters(shape, features, generator)
    elif len(shape) == 2:
        drawn = _draw_kernels(shape, features, generator)
    else:
        drawn = _draw_projection(math.prod(shape), features, generator, categories)
    if unit:
        strangers = torch.randn(_STRANGERS, *shape, generator=generator)
        drawn["common"] = F.normalize(_features(drawn, strangers).mean(dim=0), dim=0)
    return FeatureMap(drawn)


def count_features(x: Tensor, features: int) -> int | None:
    """D of the map that `draw_map` draws for inputs like `x`; None for ids, of which it need not know how many."""
    shape = x.shape[1:]
    if not x.is_floating_point():
        return None
    if len(shape) == 3:
        return _cells(shape) ** 2 * max(1, features // _cells(shape) ** 2)
    return 2 * max(1, features // 2) if len(shape) == 2 else features


def _features(here: Mapping[str, Tensor], x: Tensor) -> Tensor:
    if "filters" in here:
        if torch.compiler.is_compiling():  # exported for any number of images
            return _pool_patches(here, x)
        return torch.cat([_pool_patches(here, images) for images in x.split(_IMAGES)])
    if "projection" in here:
        return _project(here, x)
    return _convolve(here, x)


# images --------------------------------------------------------------------------------------------------------------


def _draw_filters(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
    cells = _cells(shape)
    side = 2 * cells - 1
    count = max(1, features // cells**2)
    filters = torch.randn(count, shape[0], side, side, generator=generator)
    filters = filters - filters.mean(dim=(1, 2, 3), keepdim=True)
    filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    bias = _BIAS * torch.randn(count, generator=generator)
    return {"filters": filters, "bias": bias}


def _cells(shape: Sequence[int]) -> int:
    """g, cells of a side."""
    return 2 if min(shape[1:]) <= _SMALL_SIDE else 3


def _pool_patches(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    filters = drawn["filters"]
    side = filters.shape[-1]
    maps = F.conv2d(x, filters, drawn["bias"], padding=side // 2)
    means = F.adaptive_avg_pool2d(maps.relu_(), (side + 1) // 2).flatten(1)
    return means.clamp(min=_SMALLEST).sqrt()


# series --------------------------------------------------------------------------------------------------------------


def _draw_kernels(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Kernels of several lengths lie in the middle of the longest, those of some channels among zeros.

    Those of one dilation are a tensor, which has it in its name; `place` restores the order in which they are drawn.
    """
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
    drawn: dict[str, Tensor] = {}
    for dilation in dilations.unique().tolist():
        of_it = dilations == dilation
        drawn |= {f"{_KERNELS}{dilation}": kernels[of_it], f"{_BIAS_OF}{dilation}": bias[of_it]}
    return {**drawn, "place": dilations.argsort(stable=True).argsort()}


def _convolve(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    largest = []
    share = []
    for dilation in sorted(int(name.removeprefix(_KERNELS)) for name in drawn if name.startswith(_KERNELS)):
        kernels = drawn[f"{_KERNELS}{dilation}"]
        padding = kernels.shape[-1] // 2 * dilation
        found = F.conv1d(x, kernels, drawn[f"{_BIAS_OF}{dilation}"], padding=padding, dilation=dilation)
        largest.append(found.amax(dim=2))
        share.append((found > 0).to(x.dtype).mean(dim=2))
    place = drawn["place"]
    return torch.cat([torch.cat(largest, dim=1)[:, place], torch.cat(share, dim=1)[:, place]], dim=1)


# tables and texts ----------------------------------------------------------------------------------------------------


def _draw_projection(
    numbers: int, features: int, generator: torch.Generator, categories: Sequence[int]
) -> dict[str, Tensor]:
    """With categories, `column` says of each projected number what column it is of, `category` which one, -1: none."""
    counts = torch.tensor(categories or [0] * numbers)
    columns = counts.clamp(min=1)
    width = int(columns.sum())
    projection = torch.randn(width, features, generator=generator) / math.sqrt(width)
    drawn = {"projection": projection, "bias": _BIAS * torch.randn(features, generator=generator)}
    if not counts.any():
        return drawn
    column = torch.arange(len(counts)).repeat_interleave(columns)
    category = torch.cat([torch.arange(count) if count else torch.tensor([-1]) for count in counts.tolist()])
    return {**drawn, "column": column, "category": category, "last": counts[column] - 1}


def _project(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    x = x.flatten(1)
    if "category" in drawn:
        x = x[:, drawn["column"]]
        is_it = torch.minimum(x.long().clamp(min=0), drawn["last"]) == drawn["category"]
        x = torch.where(drawn["category"] < 0, x, is_it.to(x.dtype))
    return torch.relu(x @ drawn["projection"] + drawn["bias"])
