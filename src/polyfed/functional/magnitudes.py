"""Sub-models of the entries that are largest in magnitude: the threshold of a share, a gradient that knows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def magnitude_threshold(tensors: Sequence[Tensor], share: float) -> Tensor:
    """The magnitude of the k-th largest entry of all tensors together, 0-d; k = floor(share * entries), at least 1.

    Args:
        tensors: at least one entry in all. share: in (0, 1].

    Raises:
        ValueError: no entry, or another share.

    >>> magnitude_threshold([torch.tensor([-3.0, 1.0]), torch.tensor([[2.0, -0.5]])], 0.5)
    tensor(2.)
    """
    count = sum(tensor.numel() for tensor in tensors)
    if not count or not 0 < share <= 1:
        raise ValueError(f"expected entries and a share above 0 and up to 1, got {count} and {share}")
    kept = max(1, int(share * count + 1e-9))  # 0.29 * 100 is a little less than 29
    magnitudes = torch.cat([tensor.detach().abs().flatten() for tensor in tensors])
    return magnitudes.kthvalue(count - kept + 1).values


def keep_large(tensor: Tensor, theta: Tensor) -> Tensor:
    """The entries of at least `theta` in magnitude, the others 0, with a gradient that knows of the threshold.

    The gradient is that of tensor * M, where M = [|x| >= theta] has the derivative 2 theta / (|x| + theta)^2 in |x|:
    M * (1 + 2 |x| theta / (|x| + theta)^2).

    Args:
        tensor: any shape. theta: 0-d, not negative; 0 leaves nothing out, with the plain gradient.

    Source: Wu et al. (FIARSE), NeurIPS 2024, threshold-controlled biased gradient descent.

    >>> x = torch.tensor([2.0, -1.0, 0.5], requires_grad=True)
    >>> y = keep_large(x, torch.tensor(1.0))
    >>> y.sum().backward()
    >>> y.detach(), x.grad  # 1 + 4 / 9, 1 + 2 / 4
    (tensor([ 2., -1.,  0.]), tensor([1.4444, 1.5000, 0.0000]))
    """
    x = tensor.detach()
    magnitude = x.abs()
    mask = (magnitude >= theta).to(x.dtype)
    bias = 2 * magnitude * theta / (magnitude + theta).square()  # NaN where both are 0
    slope = mask * (1 + bias.nan_to_num(0.0))
    return x * mask + (tensor - x) * slope
