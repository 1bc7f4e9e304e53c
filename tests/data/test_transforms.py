"""Normalizing and public inputs: against slow, plain versions of the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data.dataset import public_inputs
from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare, convert_channels, resize
from polyfed.errors import ConfigError


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


@pytest.mark.parametrize(
    ("other", "rows", "problem"),
    [
        (picture_set(4, 1, 6, 6), 5, "at most the 4 training rows of 'set 0', got 5"),
        (from_tensors((np.zeros((4, 3)), [0, 1, 0, 1])), None, "images stored as uint8, 'tensors' has"),
    ],
)
def test_public_refuses(other: DatasetSource, rows: int | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        draw(other, picture_set(4, 1, 6, 6), rows)
