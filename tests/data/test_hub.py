"""Data sets of the Hub: read through `datasets` from local folders in its layout, and every refusal. No network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyfed.data.datasets import load_dataset
from polyfed.errors import ConfigError
from tests.helpers.small_data import some_images, write_parquet

NAMES = {"label": ["ape", "bee", "cat"]}


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which ``someone/NAME`` is a data set; `datasets` looks there first."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "someone"


def write(folder: Path, train: int = 7, test: int = 4, shape: tuple[int, ...] = (6, 5, 3)) -> list[np.ndarray]:
    pictures = some_images(train + test, shape)
    for split, rows in (("train", range(train)), ("test", range(train, train + test))):
        labels = {"label": [row % 3 for row in rows], "user": [f"u{row % 2}" for row in rows]}
        chosen = [pictures[row] for row in rows]
        write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", chosen, labels, names=NAMES, features=False)
    return pictures


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dataset(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_sides_columns_and_users(owner: Path) -> None:
    pictures = write(owner / "animals")
    source = load_dataset("hub:someone/animals", columns=["user"], image_column="img")
    assert source.test is not None
    assert source.name == "hub:someone/animals"
    assert np.array_equal(source.train.x.permute(0, 2, 3, 1), np.stack(pictures[:7]))
    assert np.array_equal(source.test.x.permute(0, 2, 3, 1), np.stack(pictures[7:]))
    assert source.train.y.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert source.test.y.tolist() == [1, 2, 0, 1]
    assert source.train_columns["user"].tolist() == ["u0", "u1", "u0", "u1", "u0", "u1", "u0"]
    assert source.test_columns["user"].tolist() == ["u1", "u0", "u1", "u0"]
    assert source.mean == pytest.approx((np.stack(pictures[:7]) / 255).mean((0, 1, 2)))
    assert "did you mean 'user'" in refusal("hub:someone/animals", columns=["users"])
    assert "did you mean 'label'" in refusal("hub:someone/animals", label_column="labl")
    assert "expected a split 'validation'" in refusal("hub:someone/animals", train_splits=["validation"])


def test_declared_images_and_named_classes_in_folders_of_files(owner: Path) -> None:
    from PIL import Image

    pictures = some_images(4, (5, 6), seed=2)
    for number, picture in enumerate(pictures):
        path = owner / "letters" / ("train" if number < 3 else "test") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    for folder in ("train", "test"):
        for letter in "ab":
            (owner / "letters" / folder / letter).mkdir(exist_ok=True)
    Image.fromarray(pictures[0]).save(owner / "letters" / "test" / "a" / "9.png")
    source = load_dataset("hub:someone/letters")
    assert source.class_names == ("a", "b")
    assert source.train.x.shape == (3, 1, 5, 6)
    rows = {x.tobytes(): int(y) for x, y in zip(source.train.x[:, 0].numpy(), source.train.y, strict=True)}
    assert rows == {pictures[0].tobytes(): 0, pictures[1].tobytes(): 1, pictures[2].tobytes(): 0}


def test_configurations(owner: Path) -> None:
    for name, count in (("small", 3), ("large", 9)):
        write_parquet(
            owner / "sized" / name / "train-0.parquet", some_images(count), {"label": [0, 1, 2] * (count // 3)}
        )
    (owner / "sized" / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files: small/*.parquet\n"
        "- config_name: large\n  data_files: large/*.parquet\n---\n"
    )
    message = refusal("hub:someone/sized")
    assert "data.config" in message
    assert "small" in message
    assert "large" in message
    assert "did you mean 'large'" in refusal("hub:someone/sized", subset="larg")
    assert len(load_dataset("hub:someone/sized", subset="large").train) == 9


@pytest.mark.parametrize("name", ["", "../secret", "/etc/passwd", "a/b/c", "a b", "https://x/y"])
def test_names_that_are_none(name: str) -> None:
    assert "expected a data set of the Hub as 'hub:owner/name'" in refusal(f"hub:{name}")


def test_subset_is_the_hubs(tmp_path: Path) -> None:
    assert "'hub:owner/name' only" in refusal("digits", subset="small")
    assert "'hub:owner/name' only" in refusal("cifar10", revision="main")


def stand_in(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, version: str = "4.1.0") -> list[Any]:
    """A package `datasets` that only answers with an error; gives what `load_dataset` was asked."""
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        raise error or AssertionError

    module = SimpleNamespace(
        __version__=version,
        get_dataset_config_names=lambda *_, **__: ["default"],
        get_dataset_default_config_name=lambda *_, **__: "default",
        load_dataset=load_dataset,
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub\nmore"), "ConnectionError: Couldn't reach 'a/b' on the Hub"),
        (ValueError("whatever"), "ValueError: whatever"),
    ],
)
def test_errors_of_the_hub_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str) -> None:
    asked = stand_in(monkeypatch, error)
    message = refusal("hub:a/b", revision="v1")
    assert problem in message
    assert "at revision 'v1'" in message
    assert asked == [(("a/b", None), {"revision": "v1"})]  # and never trust_remote_code


def test_a_missing_or_old_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'polyfed[hub]'" in refusal("hub:a/b")
    stand_in(monkeypatch, version="3.6.0")
    assert "got 3.6.0" in refusal("hub:a/b")
