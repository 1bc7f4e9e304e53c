"""Inputs of another data set for everybody: shape, color, draw, refusals, and what a recipe makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.config.recipe import Recipe
from polyfed.data.dataset import public_inputs
from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.transforms import convert_channels
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from tests.helpers.small_data import some_images, write_parquet


def pictures(count: int, channels: int, height: int, width: int, seed: int = 0) -> DatasetSource:
    x = np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    return from_tensors((x, np.arange(count) % 3), name=f"set {seed}")


def draw(other: DatasetSource, task: DatasetSource, rows: int | None = None, seed: int = 0) -> torch.Tensor:
    return public_inputs(other, task, rows, np.random.default_rng(seed)).x


def test_colors_are_pillows() -> None:
    x = pictures(5, 3, 6, 7).train.x
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
    task, other = pictures(4, channels, 9, 6), pictures(20, theirs, 12, 12, 1)
    public = public_inputs(other, task, 7, np.random.default_rng(0))
    assert public.x.shape == (7, channels, 9, 6)
    assert public.x.dtype == torch.uint8
    assert public.y.tolist() == [0] * 7  # their labels mean other classes
    flat = from_tensors((np.full((3, theirs, 5, 5), 99, dtype=np.uint8), [0, 1, 2]))
    assert torch.equal(draw(flat, task), torch.full((3, channels, 9, 6), 99, dtype=torch.uint8))


def test_rows_are_drawn_in_file_order_and_seeded() -> None:
    task, other = pictures(4, 1, 6, 6), pictures(40, 1, 6, 6, 1)
    chosen = draw(other, task, 10)
    places = [next(i for i, x in enumerate(other.train.x) if torch.equal(x, mine)) for mine in chosen]
    assert places == sorted(set(places))
    assert len(places) == 10
    assert torch.equal(chosen, draw(other, task, 10))
    assert not torch.equal(chosen, draw(other, task, 10, seed=1))
    assert torch.equal(draw(other, task), other.train.x)  # all of fewer than 5000
    assert len(draw(pictures(5002, 1, 6, 6, 2), task)) == 5000


@pytest.mark.parametrize(
    ("other", "rows", "said"),
    [
        (pictures(4, 1, 6, 6), 5, "at most the 4 training rows of 'set 0', got 5"),
        (pictures(4, 1, 6, 6), 0, "public_samples"),
        (from_tensors((np.zeros((4, 3)), [0, 1, 0, 1])), None, "images stored as uint8, 'tensors' has"),
    ],
)
def test_public_refuses(other: DatasetSource, rows: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw(other, pictures(4, 1, 6, 6), rows)


# in a recipe ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder ``plants`` of 12 RGB images of 10x10 pixels."""
    write_parquet(tmp_path / "plants" / "train.parquet", some_images(12, (10, 10, 3)), {"label": [0, 1] * 6})
    return tmp_path


def recipe(root: Path, seed: int = 0, **data: Any) -> Recipe:
    place = {"root": str(root)} if "public_dataset" in data else {}  # the digits need none
    return Recipe.from_dict(
        {
            "data": {"dataset": "digits", **place, "num_clients": 3, "limit_train": 300, **data},
            "models": {"architectures": ["digits-cnn1"]},
            "method": {"name": "local"},
            "run": {"seed": seed},
        }
    )


def test_public_inputs_reach_the_federation(root: Path) -> None:
    federation = build_federation(recipe(root, public_dataset="plants", public_samples=8))
    public = federation.clients[0].public
    assert public is not None
    assert (len(public), public.origin, tuple(public.samples.x.shape)) == (8, "other", (8, 1, 8, 8))
    client = federation.clients[0]
    assert torch.equal(public.prepare(public.samples.x), client.prepare(public.samples.x))


def test_a_holdout_beside_it_stays_set_aside(root: Path) -> None:
    both, held, none = (
        (build_federation(recipe(root, **options)).clients[0], DataCache().federated(recipe(root, **options)))
        for options in ({"public_dataset": "plants", "holdout": 30}, {"holdout": 30}, {})
    )
    assert both[0].public is not None
    assert held[0].public is not None
    assert (both[0].public.origin, len(both[0].public)) == ("other", 12)
    assert (held[0].public.origin, len(held[0].public)) == ("holdout", 30)
    assert none[0].public is None
    for one, two in zip(both[1].clients, held[1].clients, strict=True):
        assert torch.equal(one.train.x, two.train.x)
    assert torch.equal(both[1].holdout.x, held[1].holdout.x)


def test_the_draw_follows_the_seed_and_is_kept(root: Path) -> None:
    data = DataCache()
    a, b = (data.public(recipe(root, public_dataset="plants", public_samples=5)) for _ in range(2))
    c = data.public(recipe(root, 1, public_dataset="plants", public_samples=5))
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.samples is b.samples
    assert not torch.equal(a.samples.x, c.samples.x)


def test_the_task_itself_is_no_other_set(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows of the same one that no client gets are data\.holdout"):
        recipe(root, public_dataset="digits")
    with pytest.raises(ConfigError, match="another data set than dataset"):
        recipe(root, dataset="cifar100", public_dataset="cifar100-coarse")
    with pytest.raises(ConfigError, match="did you mean 'plants'"):
        build_federation(recipe(root, public_dataset="plant"))
