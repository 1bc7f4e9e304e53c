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


def noise_images(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Inputs without content: Gaussian noise, for images (N, C, H, W) smooth on scales of 1, 2, 4 and 8 pixels in turn.

    Args:
        shape: (N, ...).
        dtype: uint8 gives images around middle grey (128, standard deviation 64, clamped); floats are standard normal.
        generator: on the CPU.

    Raises:
        ValueError: neither uint8 nor a float type.

    >>> noise_images((2, 1, 4, 4), torch.uint8, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 4, 4])
    """
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise ValueError(f"expected uint8 or a float type for inputs of noise, got {dtype}")
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 4:
        for place, scale in enumerate((2, 4, 8)[: max(0, len(noise) - 1)], 1):
            coarse = noise[place::4, :, : max(1, shape[2] // scale), : max(1, shape[3] // scale)]
            smooth = torch.nn.functional.interpolate(coarse, size=shape[2:], mode="bilinear")
            noise[place::4] = smooth / smooth.std(dim=(1, 2, 3), keepdim=True, correction=0).clamp(min=0.1)
    if dtype == torch.uint8:
        return (128 + 64 * noise).round().clamp(0, 255).to(torch.uint8)
    return noise.to(dtype)
