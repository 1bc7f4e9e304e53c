"""LPIPS, the distance that the FedIN paper reports: only where its package and pre-trained network can be had."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from polyfed.errors import kind_and_line

_SMALLEST = 32  # pixels a side that AlexNet's layers need


class Lpips:
    """LPIPS by AlexNet (Zhang et al., CVPR 2018), or the reason why there is none.

    Attributes:
        missing: why it is not computed; "" where it is.
    """

    def __init__(self, shape: tuple[int, ...], device: str) -> None:
        """Load the network.

        Args:
            shape: of one image, (C, H, W). device: where it computes.
        """
        self.missing = ""
        channels, height, width = shape
        if channels not in (1, 3) or min(height, width) < _SMALLEST:
            self.missing = f"its network takes gray or RGB images of at least {_SMALLEST} x {_SMALLEST} pixels"
            return
        try:
            lpips = importlib.import_module("lpips")
        except ImportError as error:
            self.missing = f"the package 'lpips' cannot be imported ({error})"
            return
        try:
            self._network = lpips.LPIPS(net="alex", verbose=False).to(device).eval()
        except Exception as error:  # whatever stops the package from getting its pre-trained weights
            self.missing = f"its pre-trained network cannot be had ({kind_and_line(error)})"

    def __call__(self, x: Tensor, y: Tensor) -> list[float] | None:
        """Distances of images (N, C, H, W) in [0, 1], pair by pair; None where it is missing."""
        if self.missing:
            return None
        with torch.inference_mode():
            pairs = [(2 * each - 1).expand(-1, 3, -1, -1) for each in (x, y)]
            return [float(value) for value in self._network(*pairs).flatten()]
