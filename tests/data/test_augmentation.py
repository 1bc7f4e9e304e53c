"""Augmentation: crops found again in the padded image, and the views that stand for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.data.augmentation import Augmentation, augmentation
from polyfed.errors import ConfigError


def named(name: str) -> Augmentation:
    found = augmentation(name)
    assert found is not None
    return found


def pictures(count: int = 64, height: int = 12, width: int = 10) -> Tensor:
    values = np.random.default_rng(0).integers(1, 256, (count, 3, height, width), dtype=np.uint8)
    return torch.from_numpy(values)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augmented(x: Tensor, generator: torch.Generator, name: str = "crop-flip") -> Tensor:
    augment = named(name)
    return augment.apply(x, augment.draw(len(x), x.shape[1:], generator))


def place(before: Tensor, after: Tensor, padding: int) -> tuple[int, int, bool]:
    """Where in the padded image a crop begins, and whether it is mirrored."""
    height, width = before.shape[1:]
    padded = np.pad(before.numpy(), ((0, 0), (padding, padding), (padding, padding)))
    (found,) = [
        (top, left, flip)
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
        for flip in (False, True)
        if np.array_equal(after.flip(2) if flip else after, padded[:, top : top + height, left : left + width])
    ]
    return found


@pytest.mark.parametrize(
    ("size", "padding"), [((32, 30), 4), ((28, 28), 4), ((12, 10), 1), ((8, 8), 1), ((17, 40), 2)], ids=str
)
@pytest.mark.parametrize("name", ["crop", "crop-flip"])
def test_a_crop_of_the_image_padded_by_an_eighth_or_its_mirror(name: str, size: tuple[int, int], padding: int) -> None:
    x = pictures(200, *size)
    out = augmented(x, seeded(), name)
    assert (out.dtype, out.shape) == (torch.uint8, x.shape)
    seen = {place(before, after, padding) for before, after in zip(x, out, strict=True)}
    tops, lefts, flips = (sorted({one[i] for one in seen}) for i in range(3))
    assert tops == lefts == list(range(2 * padding + 1))
    assert flips == ([False] if name == "crop" else [False, True])


@pytest.mark.parametrize(("size", "padding", "shift"), [((32, 32), 4, 2), ((8, 8), 1, 1), ((24, 20), 3, 2)], ids=str)
def test_views_are_the_image_and_shifts_by_half_the_padding(size: tuple[int, int], padding: int, shift: int) -> None:
    x = pictures(3, *size)
    corners = [(0, 0), *((down, right) for down in (-shift, shift) for right in (-shift, shift))]
    expected = {(padding + down, padding + right, flip) for down, right in corners for flip in (False, True)}
    views = named("crop-flip").views(x.shape[1:])
    assert torch.equal(views[0](x), x)
    for image in range(len(x)):
        places = [place(x[image], view(x)[image], padding) for view in views]
        assert len(places) == 10
        assert set(places) == expected
    unflipped = [view(x) for view in named("crop").views(x.shape[1:])]
    assert torch.equal(torch.stack(unflipped), torch.stack([view(x) for view in views[:5]]))


def test_augment_repeats_by_generator_and_leaves_its_input() -> None:
    x = pictures()
    before = x.clone()
    assert torch.equal(augmented(x, seeded()), augmented(x, seeded()))
    assert not torch.equal(augmented(x, seeded()), augmented(x, seeded(1)))
    generator = seeded()
    assert not torch.equal(augmented(x, generator), augmented(x, generator))
    assert torch.equal(x, before)


def test_augmentations_by_name() -> None:
    assert augmentation("none") is None
    with pytest.raises(ConfigError, match="did you mean 'crop-flip'"):
        augmentation("crop_flip")
    with pytest.raises(ConfigError, match=r"images of shape \(N, C, H, W\)"):
        augmented(torch.zeros(3, 4), seeded())
