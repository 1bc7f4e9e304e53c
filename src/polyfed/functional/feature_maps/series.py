"""Random dilated convolutions: features of series (C, L).

K convolutions of 7, 9 or 11 weights over some of the channels (Dempster et al., "ROCKET", DMKD 2020); of each the share
of steps above zero and, as of images, the square root of the mean of the ReLU. ROCKET has the maximum in its place, and
MultiRocket (Tan et al., DMKD 2022) three more features, and the differences of the series; the closed form was better
without.

Shapes: N series, K kernels, D = 2 K features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_KERNEL_LENGTHS = (7, 9, 11)
_SMALLEST = 1e-8  # smallest mean: its square root has a slope there
_KERNELS, _BIAS_OF = "kernels of dilation ", "bias of dilation "


def draw_kernels(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
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


def convolve(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The features (N, D) of series: the roots of all means, then all shares."""
    roots = []
    share = []
    for dilation in sorted(int(name.removeprefix(_KERNELS)) for name in drawn if name.startswith(_KERNELS)):
        kernels = drawn[f"{_KERNELS}{dilation}"]
        padding = kernels.shape[-1] // 2 * dilation
        found = F.conv1d(x, kernels, drawn[f"{_BIAS_OF}{dilation}"], padding=padding, dilation=dilation).relu_()
        roots.append(found.mean(dim=2).clamp(min=_SMALLEST).sqrt())
        share.append((found > 0).to(x.dtype).mean(dim=2))
    place = drawn["place"]
    return torch.cat([torch.cat(roots, dim=1)[:, place], torch.cat(share, dim=1)[:, place]], dim=1)
