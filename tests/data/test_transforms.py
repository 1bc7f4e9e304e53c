"""Normalizing, augmenting, feature skew and public inputs: against slow, plain versions of the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data.dataset import public_inputs
from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import (
    AUGMENTATIONS,
    Prepare,
    add_noise,
    augment,
    augmentation,
    convert_channels,
    resize,
    rotate,
    tint,
)
from polyfed.errors import ConfigError
from tests.helpers.small_data import federate, purposes


def pictures(count: int = 64, channels: int = 3, height: int = 12, width: int = 10) -> torch.Tensor:
    values = np.random.default_rng(0).integers(1, 256, (count, channels, height, width), dtype=np.uint8)
    return torch.from_numpy(values)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_prepare_normalizes_each_channel() -> None:
    x, mean, std = pictures(), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ready = Prepare(mean, std)(x)
    by_hand = (x.double().numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert ready.dtype == torch.float32
    assert np.allclose(ready, by_hand, atol=1e-6)
    assert torch.equal(Prepare(mean, std)(x.reshape(4, 16, 3, 12, 10)).reshape(x.shape), ready)


def test_prepare_refuses() -> None:
    with pytest.raises(ConfigError, match="one positive std per mean"):
        Prepare((0.5,), (0.0,))
    with pytest.raises(ConfigError, match="one positive std per mean"):
        Prepare((0.5, 0.5), (0.5,))
    with pytest.raises(ConfigError, match=r"\(N, 1, H, W\)"):
        Prepare((0.5,), (0.5,))(pictures())
    with pytest.raises(ConfigError, match="uint8"):
        Prepare((0.5,), (0.5,))(torch.zeros(1, 1, 2, 2, dtype=torch.int64))


def augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return augment.apply(x, augment.draw(len(x), generator).to(x.device))


def test_augment_is_a_crop_of_the_padded_image_or_its_mirror() -> None:
    x = pictures(200)
    out = augmented(x, seeded())
    assert out.dtype == torch.uint8
    assert out.shape == x.shape
    seen = set()
    for before, after in zip(x.numpy(), out.numpy(), strict=True):
        padded = np.pad(before, ((0, 0), (4, 4), (4, 4)))
        found = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if np.array_equal(after[:, :, ::-1] if flip else after, padded[:, top : top + 12, left : left + 10])
        ]
        assert len(found) == 1
        seen.add(found[0])
    tops, lefts, flips = (sorted({one[i] for one in seen}) for i in range(3))
    assert tops == lefts == list(range(9))
    assert flips == [False, True]


def test_augment_repeats_by_generator_and_leaves_its_input() -> None:
    x = pictures()
    before = x.clone()
    assert torch.equal(augmented(x, seeded()), augmented(x, seeded()))
    assert not torch.equal(augmented(x, seeded()), augmented(x, seeded(1)))
    generator = seeded()
    assert not torch.equal(augmented(x, generator), augmented(x, generator))
    assert torch.equal(x, before)
    assert augmented(x[:0], seeded()).shape == (0, 3, 12, 10)


def test_augmentations_by_name() -> None:
    assert augmentation("none") is None
    assert augmentation("crop-flip") is augment
    assert set(AUGMENTATIONS) == {"none", "crop-flip"}
    with pytest.raises(ConfigError, match="did you mean 'crop-flip'"):
        augmentation("crop_flip")
    with pytest.raises(ConfigError, match=r"shape \(N, C, H, W\)"):
        augmented(torch.zeros(3, 4), seeded())


def test_resizing_keeps_type_range_and_labels() -> None:
    x = torch.randint(0, 256, (3, 2, 7, 7), dtype=torch.uint8)
    samples = LabeledSamples(x, torch.tensor([2, 0, 1]))
    larger = resize(samples, 14)
    assert larger.x.shape == (3, 2, 14, 14)
    assert larger.x.dtype == torch.uint8
    assert torch.equal(larger.y, samples.y)
    assert resize(samples, None) is samples
    assert resize(samples, 7) is samples
    flat = LabeledSamples(torch.full((2, 1, 5, 5), 200, dtype=torch.uint8), torch.tensor([0, 0]))
    assert torch.equal(resize(flat, 8).x, torch.full((2, 1, 8, 8), 200, dtype=torch.uint8))
    ramp = LabeledSamples(torch.arange(4.0).expand(1, 1, 4, 4), torch.tensor([0]))
    assert torch.allclose(resize(ramp, 2).x.mean(), ramp.x.mean())


def test_only_images_are_resized() -> None:
    with pytest.raises(ConfigError, match=r"data.image_size: expected images .* got inputs \(4, 3\)"):
        resize(LabeledSamples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)), 8)


def squares(count: int = 12, channels: int = 3, height: int = 8, width: int = 8, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    return torch.from_numpy(values)


def source(channels: int = 3, test: bool = True) -> DatasetSource:
    side = lambda n, seed: (squares(n, channels, seed=seed), np.arange(n) % 2)  # noqa: E731
    return from_tensors(side(160, 1), side(40, 2) if test else None, 2)


def deal(given: DatasetSource, seed: int = 0, **options: Any) -> FederatedDataset:
    return federate(
        given, **{"num_clients": 4, "partition": "iid", "split": "official:9:1", "rng": purposes(seed), **options}
    )


# the three rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quarter", [0, 1, 2, 3])
def test_quarter_turns_are_exact_and_anticlockwise(quarter: int) -> None:
    x = squares()
    assert torch.equal(rotate(x, 90.0 * quarter), torch.rot90(x, quarter, (2, 3)))


@pytest.mark.parametrize(("degrees", "height", "width"), [(30.0, 9, 9), (-75.0, 8, 8), (45.0, 7, 12)])
def test_other_turns_are_pillows(degrees: float, height: int, width: int) -> None:
    x = squares(3, 1, height, width)
    ours = rotate(x, degrees).numpy()[:, 0].astype(int)
    theirs = np.stack([Image.fromarray(p).rotate(degrees, Image.Resampling.BILINEAR) for p in x[:, 0].numpy()])
    inner = rotate(torch.full_like(x, 255), degrees)[:, 0].numpy() == 255  # at the rim Pillow does not blend with black
    assert inner.sum() > inner.size / 3
    assert np.abs(ours - theirs)[inner].max() <= 2


@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_noise_has_the_deviation_it_says(deviation: float) -> None:
    x = torch.full((2500, 1, 8, 8), 128, dtype=torch.uint8)
    moved = add_noise(x, deviation, np.random.default_rng(0)).double() - 128
    assert moved.mean().abs() < 0.3
    assert moved.std().item() == pytest.approx(255 * deviation, rel=0.02)


@pytest.mark.parametrize("angle", [0.0, 1.0, 3.5])
def test_tints_by_hand(angle: float) -> None:
    x, strength = squares(), 0.4
    gains = 1 + strength * np.cos(angle - 2 * np.pi * np.arange(3) / 3)
    assert gains.sum() == pytest.approx(3)
    by_hand = np.clip(np.rint(x.numpy() * gains[:, None, None]), 0, 255)
    assert np.abs(tint(x, strength, angle).numpy() - by_hand).max() <= 1  # a half may round either way
    gray = squares(4, 1)
    by_hand = (gray.numpy() / 255 - 0.5) * (1 + strength * np.cos(angle)) + 0.5 + strength * np.sin(angle) / 2
    by_hand = np.clip(np.rint(255 * by_hand), 0, 255)
    assert np.abs(tint(gray, strength, angle).numpy() - by_hand).max() <= 1


# clients -------------------------------------------------------------------------------------------------------------


def test_own_rows_are_skewed_alike_and_common_ones_never() -> None:
    plain, turned = (
        deal(source(), holdout=20, feature_shift=kind, feature_shift_strength=1.0) for kind in ("none", "rotation")
    )
    turns = set()
    for before, after in zip(plain.clients, turned.clients, strict=True):
        fits = [q for q in range(4) if torch.equal(torch.rot90(before.train.x, q, (2, 3)), after.train.x)]
        turns.add(fits[0])
        for part in ("validation", "test"):
            x = torch.rot90(getattr(before, part).x, fits[0], (2, 3))
            assert torch.equal(x, getattr(after, part).x)
            assert torch.equal(getattr(before, part).y, getattr(after, part).y)
    assert turns == {0, 1, 2, 3}  # four clients, spread evenly
    for kind in ("rotation", "noise"):  # noise spares nobody
        common = deal(
            source(), test="global", split="9:1:0", holdout=20, feature_shift=kind, feature_shift_strength=1.0
        )
        assert torch.equal(plain.holdout.x, common.holdout.x)
        assert common.test is not None
        assert torch.equal(common.test.x, squares(40, 3, seed=2))
        assert all(client.test is common.test for client in common.clients)


@pytest.mark.parametrize("kind", ["rotation", "noise", "color"])
def test_strength_zero_is_off_and_seeds_count(kind: str) -> None:
    def train(**options: Any) -> list[torch.Tensor]:
        return [client.train.x for client in deal(source(), **options).clients]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert same(train(), train(feature_shift=kind, feature_shift_strength=0.0))
    weak, strong = (
        train(feature_shift=kind, feature_shift_strength=0.1),
        train(feature_shift=kind, feature_shift_strength=0.9),
    )
    assert not same(weak, train())
    assert not same(weak, strong)
    assert same(weak, train(feature_shift=kind, feature_shift_strength=0.1))
    assert not same(weak, train(feature_shift=kind, feature_shift_strength=0.1, seed=1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"feature_shift": "rotate"}, "did you mean 'rotation'"),
        ({"feature_shift": "noise", "feature_shift_strength": 1.5}, "in 0..1, got 1.5"),
        ({"feature_shift": "noise", "feature_shift_strength": float("nan")}, "in 0..1"),
    ],
)
def test_skew_refuses(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        deal(source(), **options)


def picture_set(count: int, channels: int, height: int, width: int, seed: int = 0) -> DatasetSource:
    x = np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    return from_tensors((x, np.arange(count) % 3), name=f"set {seed}")


def draw(other: DatasetSource, task: DatasetSource, rows: int | None = None, seed: int = 0) -> torch.Tensor:
    return public_inputs(other, task, rows, np.random.default_rng(seed)).x


def test_colors_are_pillows() -> None:
    x = picture_set(5, 3, 6, 7).train.x
    gray = [np.asarray(Image.fromarray(p).convert("L")) for p in x.permute(0, 2, 3, 1).numpy()]
    assert np.array_equal(convert_channels(x, 1)[:, 0].numpy(), np.stack(gray))
    assert torch.equal(convert_channels(convert_channels(x, 1), 3)[:, 2], convert_channels(x, 1)[:, 0])
    assert torch.equal(convert_channels(convert_channels(x, 1), 1), convert_channels(x, 1))
    assert convert_channels(x, 3) is x
    with pytest.raises(ConfigError, match="2 channels"):
        convert_channels(x[:, :2], 3)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("theirs", [1, 3])
def test_images_get_the_tasks_shape(channels: int, theirs: int) -> None:
    task, other = picture_set(4, channels, 9, 6), picture_set(20, theirs, 12, 12, 1)
    public = public_inputs(other, task, 7, np.random.default_rng(0))
    assert public.x.shape == (7, channels, 9, 6)
    assert public.x.dtype == torch.uint8
    assert public.y.tolist() == [0] * 7  # their labels mean other classes
    flat = from_tensors((np.full((3, theirs, 5, 5), 99, dtype=np.uint8), [0, 1, 2]))
    assert torch.equal(draw(flat, task), torch.full((3, channels, 9, 6), 99, dtype=torch.uint8))


def test_rows_are_drawn_in_file_order_and_seeded() -> None:
    task, other = picture_set(4, 1, 6, 6), picture_set(40, 1, 6, 6, 1)
    chosen = draw(other, task, 10)
    places = [next(i for i, x in enumerate(other.train.x) if torch.equal(x, mine)) for mine in chosen]
    assert places == sorted(set(places))
    assert len(places) == 10
    assert torch.equal(chosen, draw(other, task, 10))
    assert not torch.equal(chosen, draw(other, task, 10, seed=1))
    assert torch.equal(draw(other, task), other.train.x)  # all of fewer than 5000
    assert len(draw(picture_set(5002, 1, 6, 6, 2), task)) == 5000


@pytest.mark.parametrize(
    ("other", "rows", "problem"),
    [
        (picture_set(4, 1, 6, 6), 5, "at most the 4 training rows of 'set 0', got 5"),
        (picture_set(4, 1, 6, 6), 0, "public_samples"),
        (from_tensors((np.zeros((4, 3)), [0, 1, 0, 1])), None, "images stored as uint8, 'tensors' has"),
    ],
)
def test_public_refuses(other: DatasetSource, rows: int | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        draw(other, picture_set(4, 1, 6, 6), rows)
