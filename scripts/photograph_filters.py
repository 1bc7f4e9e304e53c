"""Make the filters of the map "photographs": centers of the patches of two photographs that scikit-learn ships.

    python scripts/photograph_filters.py            # writes src/polyfed/functional/feature_maps/photographs.safetensors

china.jpg and flower.jpg, in color and in gray (0.299 R + 0.587 G + 0.114 B), are scaled so that the shorter side has
32, 48, 64 and 96 pixels (bilinear, smoothed), and each channel of each to mean 0 and standard deviation 1. All their
patches of k x k pixels, k = 5 and 3, are normalized and whitened, as `functional.feature_maps.images` has it, and 256
centers found by ten steps of spherical k-means: a center becomes the sum of the z nearest to it by angle, then of norm
1. The first 32 centers are found by themselves, then 32 more beside them, which stay, then 64 and 128, so that the
first K of them serve for any K. They begin in random directions. In float64 it is not rounding that decides which
center is nearest. The file has float16.
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
_RIDGE = 0.03  # added to the variances of normalized patches, of which the largest are about 10
_THRESHOLD = 0.5  # of a center's response
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


def normalize_patches(x: Tensor, side: int) -> Tensor:
    """Normalized patches u (P, d) of prepared images (N, C, H, W): side x side pixels, d by channel, row and column."""
    patches_Pd = F.unfold(x, side).transpose(1, 2).flatten(0, 1)
    centered_Pd = patches_Pd - patches_Pd.mean(dim=1, keepdim=True)
    spread_P1 = centered_Pd.square().mean(dim=1, keepdim=True).sqrt()
    return centered_Pd / (spread_P1 + images.FLOOR)


def whitening(count: int, sum_d: Tensor, products_dd: Tensor) -> tuple[Tensor, Tensor]:
    """The mean m (d,) and Z (d, d), in float64, by the number of normalized patches, the sum of u and that of u u'."""
    mean_d = sum_d.double() / count
    covariance_dd = products_dd.double() / count - torch.outer(mean_d, mean_d)
    values_d, vectors_dd = torch.linalg.eigh(covariance_dd)
    scale_d = (values_d.clamp(min=0) + _RIDGE).rsqrt()
    return mean_d, (vectors_dd * scale_d) @ vectors_dd.T


def sum_nearest(whitened_Pd: Tensor, centers_Kd: Tensor) -> Tensor:
    """Per center the sum (K, d) of the z nearest to it by angle; centers of norm 1."""
    nearest_P = (whitened_Pd @ centers_Kd.T).argmax(dim=1)  # of a patch all angles have one length as denominator
    return torch.zeros_like(centers_Kd).index_add_(0, nearest_P, whitened_Pd)


def filters_of_centers(
    centers_Kd: Tensor, mean_d: Tensor, whitening_dd: Tensor, channels: int, side: int
) -> dict[str, Tensor]:
    """Directions (K, C, k, k) and offsets (K,), in float32: a response is direction . p / (spread of p + 0.3) - offset.

    The mean of a patch need not be taken from it, as a direction sums to zero.
    """
    directions_Kd = centers_Kd.double() @ whitening_dd
    offsets_K = directions_Kd @ mean_d + _THRESHOLD
    directions_Kd = directions_Kd - directions_Kd.mean(dim=1, keepdim=True)
    return {"directions": directions_Kd.float().view(-1, channels, side, side), "offsets": offsets_K.float()}


def find_centers(whitened_Pd: Tensor) -> Tensor:
    """Centers (K, d); those of a stage stay in all that follow."""
    generator = torch.Generator().manual_seed(0)
    centers_Kd = whitened_Pd[:0]
    for count in _STAGES:
        kept = len(centers_Kd)
        drawn_Kd = torch.randn(count - kept, whitened_Pd.shape[1], generator=generator, dtype=torch.float64)
        centers_Kd = torch.cat([centers_Kd, F.normalize(drawn_Kd, dim=1)])
        for _ in range(_STEPS):
            sums_Kd = sum_nearest(whitened_Pd, centers_Kd)
            moved_Kd = torch.where(sums_Kd.any(dim=1, keepdim=True), F.normalize(sums_Kd, dim=1), centers_Kd)
            centers_Kd = torch.cat([centers_Kd[:kept], moved_Kd[kept:]])
    return centers_Kd


def make_filters(channels: int, side: int) -> dict[str, Tensor]:
    """Directions (K, C, k, k) and offsets (K,)."""
    patches_Pd = torch.cat([normalize_patches(one, side) for one in photographs(channels)])
    mean_d, whitening_dd = whitening(len(patches_Pd), patches_Pd.sum(dim=0), patches_Pd.T @ patches_Pd)
    centers_Kd = find_centers((patches_Pd - mean_d) @ whitening_dd)
    return filters_of_centers(centers_Kd, mean_d, whitening_dd, channels, side)


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
