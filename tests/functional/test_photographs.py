"""The filters of two photographs: what the file holds, and that the program makes it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from polyfed.functional.feature_maps.feature_map import count_features, draw_map

ROOT = Path(__file__).parents[2]


def images(channels: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(3, channels, height, width, generator=torch.Generator().manual_seed(height))


@pytest.mark.parametrize(
    ("shape", "most"),
    [((3, 32, 32), 2304), ((1, 28, 28), 2304), ((3, 8, 9), 1024), ((1, 8, 8), 1024), ((2, 9, 12), 4608)],
    ids=str,
)
def test_any_first_filters_up_to_all(shape: tuple[int, int, int], most: int) -> None:
    x = images(*shape)
    every = draw_map(x[:1], most, torch.Generator(), photographs=True)
    assert every(x).shape == (3, most)
    few = draw_map(x[:1], 301, torch.Generator(), photographs=True)
    assert few(x).shape == (3, count_features(x, 301, True))
    count = len(few.tensors["offsets"])
    assert all(torch.equal(few.tensors[name], every.tensors[name][:count]) for name in few.tensors)
    with pytest.raises(ValueError, match=rf"at most {most} features .* got {2 * most}; map = 'random' has any"):
        count_features(x, 2 * most, True)


def test_images_hold_a_patch() -> None:
    with pytest.raises(ValueError, match=r"at least 3 x 3 pixels .* got \(2, 9\)"):
        count_features(images(1, 2, 9), 20, True)


@pytest.mark.slow
def test_the_program_makes_the_file() -> None:
    """But for the last digits, as decoders of JPEG and processors differ."""
    made = runpy.run_path(str(ROOT / "scripts" / "photograph_filters.py"))["make_all"]()
    for channels, side in ((1, 8), (3, 8), (1, 32), (3, 32)):
        stored = draw_map(
            images(channels, side, side), 2304 if side == 32 else 1024, torch.Generator(), photographs=True
        )
        patch = 3 if side == 8 else 5
        for kind, tensor in stored.tensors.items():
            torch.testing.assert_close(
                made[f"{kind} {channels} x {patch} x {patch}"].float(), tensor, atol=0.01, rtol=0
            )
