"""Make the filters of the map "photographs": centers of the patches of two photographs that scikit-learn ships.

    python scripts/photograph_filters.py            # writes src/polyfed/functional/feature_maps/photographs.safetensors

china.jpg and flower.jpg, in color and in gray (0.299 R + 0.587 G + 0.114 B), are scaled so that the shorter side has
32, 48, 64 and 96 pixels (bilinear, smoothed), and each channel of each to mean 0 and standard deviation 1. All their
patches of k x k pixels, k = 5 and 3, are normalized and whitened, and 256 centers found by ten steps of spherical
k-means, as `functional.feature_maps.images` has it. The first 32 centers are found by themselves, then 32 more beside
them, which stay, then 64 and 128, so that the first K of them serve for any K. They begin in random directions. In
float64 it is not rounding that decides which center is nearest. The file has float16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import Tensor

from polyfed.functional.feature_maps import images

_SIZES = (32, 48, 64, 96)  # pixels of the shorter side
_STAGES = (32, 64, 128, 256)  # centers after each
_STEPS = 10  # of k-means, each stage
_LUMA = (0.299, 0.587, 0.114)
_FILE = Path(__file__).parents[1] / "src/polyfed/functional/feature_maps/photographs.safetensors"


def photographs(channels: int) -> list[Tensor]:
    """Images (1, C, H, W) in float64, of all sizes, normalized."""
    found = []
    for picture in load_sample_images().images:
        whole = torch.tensor(picture, dtype=torch.float64).permute(2, 0, 1).unsqueeze(0)
        if channels == 1:
            whole = (whole * torch.tensor(_LUMA, dtype=torch.float64).view(3, 1, 1)).sum(dim=1, keepdim=True)
        for size in _SIZES:
            scale = size / min(whole.shape[2:])
            small = F.interpolate(whole, scale_factor=scale, mode="bilinear", antialias=True)
            spread, mean = torch.std_mean(small, dim=(2, 3), keepdim=True)
            found.append((small - mean) / spread)
    return found


def find_centers(whitened_Pd: Tensor) -> Tensor:
    """Centers (K, d); those of a stage stay in all that follow."""
    generator = torch.Generator().manual_seed(0)
    centers_Kd = whitened_Pd[:0]
    for count in _STAGES:
        kept = len(centers_Kd)
        drawn_Kd = torch.randn(count - kept, whitened_Pd.shape[1], generator=generator, dtype=torch.float64)
        centers_Kd = torch.cat([centers_Kd, F.normalize(drawn_Kd, dim=1)])
        for _ in range(_STEPS):
            sums_Kd = images.sum_nearest(whitened_Pd, centers_Kd)
            moved_Kd = torch.where(sums_Kd.any(dim=1, keepdim=True), F.normalize(sums_Kd, dim=1), centers_Kd)
            centers_Kd = torch.cat([centers_Kd[:kept], moved_Kd[kept:]])
    return centers_Kd


def make_filters(channels: int, side: int) -> dict[str, Tensor]:
    """Directions (K, C, k, k) and offsets (K,)."""
    patches_Pd = torch.cat([images.normalize_patches(one, side) for one in photographs(channels)])
    mean_d, whitening_dd = images.whitening(len(patches_Pd), patches_Pd.sum(dim=0), patches_Pd.T @ patches_Pd)
    centers_Kd = find_centers((patches_Pd - mean_d) @ whitening_dd)
    return images.filters_of_centers(centers_Kd, mean_d, whitening_dd, channels, side)


def make_all() -> dict[str, Tensor]:
    """What the file holds."""
    found = {}
    for channels in (1, 3):
        for side in (3, 5):
            for kind, tensor in make_filters(channels, side).items():
                found[f"{kind} {channels} x {side} x {side}"] = tensor.half().contiguous()
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=_FILE, help="[%(default)s]")
    save_file(make_all(), parser.parse_args().out)


if __name__ == "__main__":
    main()
