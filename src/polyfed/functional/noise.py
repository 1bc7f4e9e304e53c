"""Noise on features (FedIN+Noise)."""

from __future__ import annotations

import torch
from torch import Tensor


def add_noise(s: Tensor, level: float, z: Tensor) -> Tensor:
    """Returns s + level * sigma * z. Sigma is one number, the population standard deviation over all entries of ``s``.

    So the standard deviation of what is added is ``level * sigma`` (variance ``level^2 sigma^2``). sigma is a constant
    for the gradient: d result / d s is the identity. It is a scale taken from private features, hence no differential
    privacy by itself.

    Args:
        s: features, any shape; every entry counts towards sigma, so leave padding rows out.
        level: 0.8 in the paper. At level 0 do not call this and do not draw ``z``: the generator's state must stay.
        z: standard normal draws of the same shape, drawn by the caller.

    Returns:
        A tensor of the shape and dtype of ``s``.

    Raises:
        ValueError: ``level`` is not positive, or ``z`` has another shape.

    Source: FedIN, section 4.3, eq. 5 and 6 (main text; the appendix reads N(0, 0.8 sigma^2)).
    """
    if not level > 0:
        raise ValueError(f"expected a noise level above 0 (at 0 draw nothing and do not call this), got {level}")
    if z.shape != s.shape:
        raise ValueError(f"expected draws of the features' shape {tuple(s.shape)}, got {tuple(z.shape)}")
    wide = s.detach().to(torch.promote_types(s.dtype, torch.float32))
    sigma = wide.std(correction=0)
    return s + (level * sigma * z).to(s.dtype)
