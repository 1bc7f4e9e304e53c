"""Feature skew: each rule against an oracle of its own, whom it touches, and that any two clients differ."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import FeatureShift, add_noise, rotate, tint
from polyfed.errors import ConfigError
from tests.helpers.small_data import federate, purposes


def pictures(count: int = 12, channels: int = 3, height: int = 8, width: int = 8, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    return torch.from_numpy(values)


def source(channels: int = 3, test: bool = True) -> DatasetSource:
    side = lambda n, seed: (pictures(n, channels, seed=seed), np.arange(n) % 2)  # noqa: E731
    return from_tensors(side(160, 1), side(40, 2) if test else None, 2)


def deal(given: DatasetSource, seed: int = 0, **options: Any) -> FederatedDataset:
    return federate(
        given, **{"num_clients": 4, "partition": "iid", "split": "official:9:1", "rng": purposes(seed), **options}
    )


# the three rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quarter", [0, 1, 2, 3])
def test_quarter_turns_are_exact_and_anticlockwise(quarter: int) -> None:
    x = pictures()
    assert torch.equal(rotate(x, 90.0 * quarter), torch.rot90(x, quarter, (2, 3)))


@pytest.mark.parametrize(("degrees", "height", "width"), [(30.0, 9, 9), (-75.0, 8, 8), (45.0, 7, 12)])
def test_other_turns_are_pillows(degrees: float, height: int, width: int) -> None:
    x = pictures(3, 1, height, width)
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
    x, strength = pictures(), 0.4
    gains = 1 + strength * np.cos(angle - 2 * np.pi * np.arange(3) / 3)
    assert gains.sum() == pytest.approx(3)
    by_hand = np.clip(np.rint(x.numpy() * gains[:, None, None]), 0, 255)
    assert np.abs(tint(x, strength, angle).numpy() - by_hand).max() <= 1  # a half may round either way
    gray = pictures(4, 1)
    by_hand = (gray.numpy() / 255 - 0.5) * (1 + strength * np.cos(angle)) + 0.5 + strength * np.sin(angle) / 2
    by_hand = np.clip(np.rint(255 * by_hand), 0, 255)
    assert np.abs(tint(gray, strength, angle).numpy() - by_hand).max() <= 1


# clients -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["rotation", "noise", "color"])
def test_any_two_clients_differ_and_bytes_stay_bytes(kind: str, channels: int) -> None:
    x = pictures(1200, channels, 8, 8)  # more than are changed at a time
    samples = LabeledSamples(x, torch.zeros(1200, dtype=torch.int64))
    skew = FeatureShift(kind, 0.3, 6, purposes(0))
    views = [skew(samples, client, "train") for client in range(6)]
    assert all(view.x.dtype == torch.uint8 and view.x.shape == x.shape for view in views)
    assert all(view.y is samples.y for view in views)
    for one, two in itertools.combinations(views, 2):
        assert not torch.equal(one.x[1000:], two.x[1000:])
    assert sorted(skew.place(client) for client in range(6)) == list(range(6))
    assert torch.equal(samples.x, pictures(1200, channels, 8, 8))  # the source itself is not written into


def test_noise_grows_evenly_over_the_clients() -> None:
    samples = LabeledSamples(torch.full((500, 1, 8, 8), 128, dtype=torch.uint8), torch.zeros(500, dtype=torch.int64))
    skew = FeatureShift("noise", 0.2, 4, purposes(1))
    by_place = {skew.place(c): skew(samples, c, "test").x.double().std().item() / 255 for c in range(4)}
    assert [by_place[p] for p in range(4)] == pytest.approx([0.05, 0.1, 0.15, 0.2], rel=0.05)


def test_noise_is_drawn_anew_for_each_client_and_each_of_its_sets() -> None:
    samples = LabeledSamples(torch.full((20, 1, 8, 8), 128, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64))
    skew = FeatureShift("noise", 0.2, 2, purposes(1))
    sets = list(itertools.product(range(2), ("train", "validation", "test")))
    noise = np.stack([skew(samples, *which).x.numpy().ravel() for which in sets])
    assert np.abs(np.corrcoef(noise) - np.eye(6)).max() < 0.15
    assert torch.equal(skew(samples, 1, "test").x.flatten(), torch.from_numpy(noise[-1]))  # and the same every time


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
        assert torch.equal(common.test.x, pictures(40, 3, seed=2))
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
    ("options", "said"),
    [
        ({"feature_shift": "rotate"}, "did you mean 'rotation'"),
        ({"feature_shift": "noise", "feature_shift_strength": 1.5}, "in 0..1, got 1.5"),
        ({"feature_shift": "noise", "feature_shift_strength": float("nan")}, "in 0..1"),
    ],
)
def test_skew_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deal(source(), **options)


def test_only_images_can_be_skewed() -> None:
    floats = from_tensors((np.zeros((40, 3)), np.arange(40) % 2))
    with pytest.raises(ConfigError, match="images stored as uint8"):
        deal(floats, split="8:1:1", feature_shift="rotation")
