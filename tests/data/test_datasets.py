"""Loading: real files, small files in the Hugging Face layout, own arrays, the cache, and every refusal."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from polyfed.data import arrow_tables, cache
from polyfed.data.dataset import DatasetSource, channel_statistics, from_tensors, with_declared
from polyfed.data.datasets import load_dataset
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from tests.helpers.small_data import encode, some_images, write_parquet

NAMES = {"label": ["ape", "bee", "cat"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine training images in two files and four test images, RGB 6x5, three named classes."""
    pictures, place = some_images(13), tmp_path / "data" / "small"
    labels = [0, 1, 2] * 4 + [0]
    for name, rows in (
        ("train-00000-of-00002", slice(0, 5)),
        ("train-00001-of-00002", slice(5, 9)),
        ("test", slice(9, 13)),
    ):
        write_parquet(place / f"{name}.parquet", pictures[rows], {"label": labels[rows]}, names=NAMES)
    return place


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dataset(*args, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# real data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [True, False], ids=["its file", "its loader"])
def test_digits(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    if not found:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = load_dataset("digits")
    assert source.train.x.shape == (1797, 1, 8, 8)
    assert source.train.x.dtype == torch.uint8
    assert source.test is None
    assert np.array_equal(source.train.x[:, 0].numpy() // 15, load_digits().images)
    assert np.array_equal(source.train.y, load_digits().target)
    scaled = source.train.x.double() / 255
    assert source.mean == pytest.approx([scaled.mean().item()])
    assert source.std == pytest.approx([scaled.std(correction=0).item()])


@pytest.mark.slow
def test_fashion_mnist_in_full(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYFED_DATA", str(data_root))
    source = load_dataset("fashion_mnist")
    assert source.train.x.shape == (60000, 1, 28, 28)
    assert source.test is not None
    assert source.test.x.shape == (10000, 1, 28, 28)
    assert source.class_names[0] == "T - shirt / top"
    assert channel_statistics(source.train.x)[0] == pytest.approx(source.mean, abs=1e-4)
    assert channel_statistics(source.train.x)[1] == pytest.approx(source.std, abs=1e-4)
    assert np.bincount(source.train.y).tolist() == [6000] * 10
    assert source.train.y[:10].sort().values.tolist() == list(range(10))  # the folder's row order: data/README.md


@pytest.mark.parametrize(("rows", "within"), [(2000, 1e-2), pytest.param(10_000, 5e-3, marks=pytest.mark.slow)])
def test_cifar10_test_side_as_a_folder(rows: int, within: float, data_root: Path, tmp_path: Path) -> None:
    import datasets
    import pyarrow.parquet as pq

    (tmp_path / "cifar10").mkdir()
    first = pq.read_table(data_root / "cifar10" / "test.parquet").slice(0, rows)
    pq.write_table(first, tmp_path / "cifar10" / "train.parquet")
    source = load_dataset("cifar10", tmp_path)
    assert source.train.x.shape == (rows, 3, 32, 32)
    assert source.mean == (0.4914, 0.4822, 0.4465)
    assert channel_statistics(source.train.x)[0] == pytest.approx(source.mean, abs=within)
    assert source.class_names[:2] == ("airplane", "automobile")
    files = str(data_root / "cifar10" / "test.parquet")
    expected = datasets.load_dataset("parquet", data_files=files, split="train[:20]", cache_dir=str(tmp_path / "hf"))
    for row, sample in enumerate(expected):
        assert np.array_equal(source.train.x[row].permute(1, 2, 0), np.asarray(sample["img"]))
        assert source.train.y[row] == sample["label"]


# the Hugging Face layout ---------------------------------------------------------------------------------------------


def test_a_folder_under_root_is_found_by_its_name(folder: Path) -> None:
    source = load_dataset("small", folder.parent)
    assert isinstance(source, DatasetSource)
    assert np.array_equal(source.train.x.permute(0, 2, 3, 1), np.stack(some_images(13)[:9]))
    assert source.train.y.tolist() == [0, 1, 2] * 3
    assert source.test is not None
    assert source.test.y.tolist() == [0, 1, 2, 0]
    assert (source.name, source.class_names) == ("small", ("ape", "bee", "cat"))
    scaled = np.stack(some_images(13)[:9]) / 255
    assert source.mean == pytest.approx(scaled.mean((0, 1, 2)))
    assert source.std == pytest.approx(scaled.std((0, 1, 2)))


def test_parquet_takes_the_folder_itself_and_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(load_dataset("parquet", folder).train) == 9
    monkeypatch.setenv("POLYFED_DATA", str(folder))
    assert load_dataset("parquet").name == "small"
    monkeypatch.setenv("POLYFED_DATA", str(folder.parent))
    assert len(load_dataset("small").train) == 9


def test_reading_leaves_nothing_in_the_data_folder(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    load_dataset("parquet", folder)
    assert sorted(folder.rglob("*")) == before


def test_fine_and_coarse_labels(tmp_path: Path) -> None:
    for side in ("train", "test"):
        write_parquet(
            tmp_path / "animals" / f"{side}-00000-of-00001.parquet",
            some_images(4),
            {"fine_label": [0, 1, 2, 3], "coarse_label": [0, 0, 1, 1]},
            names={"fine_label": list("abcd"), "coarse_label": ["x", "y"]},
        )
    message = refusal("animals", tmp_path)
    assert "fine_label, coarse_label" in message
    assert "label_column" in message
    assert load_dataset("animals", tmp_path, label_column="fine_label").classes == 4
    assert load_dataset("animals", tmp_path, label_column="coarse_label").class_names == ("x", "y")
    assert "did you mean 'fine_label'" in refusal("animals", tmp_path, label_column="fine_labels")


def test_columns_are_found_by_name_without_features(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(3), {"labels": [2, 0, 1]}, image_name="image", features=False)
    source = load_dataset("parquet", tmp_path)
    assert source.train.y.tolist() == [2, 0, 1]
    assert source.test is None


def test_columns_can_be_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(2), {"kind": [0, 1]}, image_name="photo", features=False)
    assert "none among: photo, kind" in refusal("parquet", tmp_path)
    assert load_dataset("parquet", tmp_path, image_column="photo", label_column="kind").classes == 2


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        ([4, 0, 4], [1, 0, 1], ("0", "4")),
        ([1, 2, 3], [0, 1, 2], ("1", "2", "3")),
        ([2, 1, 0], [2, 1, 0], ("0", "1", "2")),
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        ([-1, 1, 1], [0, 1, 1], ("-1", "1")),
    ],
)
def test_labels_are_renumbered_only_where_needed(
    tmp_path: Path, labels: list[object], numbers: list[int], names: tuple[str, ...]
) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(3), {"label": labels})
    for _ in ("cold", "warm"):
        source = load_dataset("parquet", tmp_path)
        assert source.train.y.tolist() == numbers
        assert source.class_names == names


def test_named_classes_keep_their_numbers_even_when_some_do_not_occur(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(2), {"label": [2, 2]}, names=NAMES)
    source = load_dataset("parquet", tmp_path)
    assert source.train.y.tolist() == [2, 2]
    assert source.classes == 3


def test_validation_files_are_the_test_side_only_without_test_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-0.parquet", some_images(3), {"label": [0, 1, 2]})
    write_parquet(tmp_path / "data" / "validation-0.parquet", some_images(2), {"label": [0, 1]})
    test = load_dataset("parquet", tmp_path).test
    assert test is not None
    assert len(test) == 2
    write_parquet(tmp_path / "data" / "test-0.parquet", some_images(1), {"label": [0]})
    test = load_dataset("parquet", tmp_path).test
    assert test is not None
    assert len(test) == 1


def test_files_without_a_split_in_their_names_are_training_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "contest.parquet", some_images(2), {"label": [0, 1]})
    source = load_dataset("parquet", tmp_path)
    assert len(source.train) == 2
    assert source.test is None


def test_gray_and_jpeg_images(tmp_path: Path) -> None:
    gray = some_images(2, (4, 4))
    write_parquet(tmp_path / "gray" / "train.parquet", gray, {"label": [0, 1]})
    assert np.array_equal(load_dataset("gray", tmp_path).train.x[:, 0], np.stack(gray))
    flat = np.full((8, 8, 3), 77, dtype=np.uint8)
    write_parquet(tmp_path / "jpeg" / "train.parquet", [encode(flat, "JPEG")] * 2, {"label": [0, 1]})
    source = load_dataset("jpeg", tmp_path)
    assert (source.train.x.int() - 77).abs().max() <= 1
    assert min(source.std) > 0  # a channel without variation must not lead to a division by zero


# the cache -----------------------------------------------------------------------------------------------------------


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rows: list[str] = []
    decode = arrow_tables.decode
    monkeypatch.setattr(arrow_tables, "decode", lambda data, place: (rows.append(place), decode(data, place))[1])
    return rows


def same(a: DatasetSource, b: DatasetSource) -> bool:
    assert a.test is not None
    assert b.test is not None
    pairs = [(a.train.x, b.train.x), (a.train.y, b.train.y), (a.test.x, b.test.x), (a.test.y, b.test.y)]
    return all(torch.equal(*pair) for pair in pairs) and (a.class_names, a.mean) == (b.class_names, b.mean)


def test_the_second_load_decodes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = count_decodes(monkeypatch)
    first = load_dataset("parquet", folder)
    assert len(decoded) == 13
    assert same(first, load_dataset("parquet", folder))
    assert len(decoded) == 13


def test_the_key_is_the_content_not_the_path_or_the_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset("parquet", folder)
    decoded = count_decodes(monkeypatch)
    moved = folder.rename(folder.parent / "moved")
    os.utime(moved / "test.parquet", (1, 1))
    assert same(first, load_dataset("parquet", moved))
    assert decoded == []
    write_parquet(moved / "test.parquet", some_images(4, seed=9), {"label": [0, 1, 2, 0]}, names=NAMES)
    assert not same(first, load_dataset("parquet", moved))
    assert len(decoded) == 13


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "text", "notes"])
def test_a_damaged_cache_is_rebuilt(
    folder: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    first = load_dataset("parquet", folder)
    (stored,) = private_cache.rglob("*.safetensors")
    whole = stored.read_bytes()
    if harm == "notes":
        (private_cache / "datasets" / "checksums.json").write_text("[1, 2")
    else:
        flipped = whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]
        stored.write_bytes({"cut": whole[: len(whole) // 2], "flip": flipped, "empty": b"", "text": b"hello"}[harm])
    assert same(first, load_dataset("parquet", folder))
    decoded = count_decodes(monkeypatch)
    assert same(first, load_dataset("parquet", folder))
    assert decoded == []
    assert not list(private_cache.rglob("*.tmp"))


def test_a_cache_that_cannot_be_written_is_passed_over(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "file"))
    assert len(load_dataset("parquet", folder).train) == 9
    monkeypatch.setenv("POLYFED_CACHE", "/proc/nowhere")
    assert len(load_dataset("parquet", folder).train) == 9


def test_the_default_cache_is_below_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POLYFED_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "polyfed" / "datasets"


# refusals ------------------------------------------------------------------------------------------------------------


def test_no_root_and_no_environment_says_what_is_needed() -> None:
    message = refusal("cifar10")
    assert "cifar10/train*.parquet" in message
    assert "POLYFED_DATA" in message
    assert "POLYFED_DATA" in refusal("parquet")
    assert "POLYFED_DATA" in refusal("cifar100")


def test_missing_files_say_where_they_were_looked_for(tmp_path: Path) -> None:
    assert str(tmp_path / "cifar10") in refusal("cifar10", tmp_path)
    assert str(tmp_path / "none") in refusal("parquet", tmp_path / "none")
    assert str(tmp_path) in refusal("parquet", tmp_path)


def test_unknown_names_suggest_the_nearest(folder: Path) -> None:
    assert "did you mean 'cifar10'?" in refusal("cifar-10")
    assert "did you mean 'small'?" in refusal("smal", folder.parent)
    assert "unknown dataset" in refusal("../small", folder.parent)
    assert "unknown dataset" in refusal("", folder.parent)


def test_a_test_side_alone_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "test.parquet", some_images(2), {"label": [0, 1]})
    assert "expected a training file" in refusal("parquet", tmp_path)


def test_two_data_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    for name in ("fine", "coarse"):
        write_parquet(tmp_path / name / "train.parquet", some_images(2), {"label": [0, 1]})
    assert "several: coarse, fine" in refusal("parquet", tmp_path)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.98])
def test_truncated_files(folder: Path, part: float) -> None:
    path = folder / "test.parquet"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    message = refusal("parquet", folder)
    assert "expected a whole Parquet file" in message
    assert "test.parquet" in message


def test_damage_inside_a_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", some_images(20), {"label": [0, 1] * 10})
    whole = bytearray(path.read_bytes())
    whole[4:200] = bytes(196)
    path.write_bytes(bytes(whole))
    assert "train.parquet" in refusal("parquet", tmp_path)


def test_text_named_parquet(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("label,img\n1,2\n")
    assert "expected a whole Parquet file" in refusal("parquet", tmp_path)


def test_no_image_and_no_label_column(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / "train.parquet", None, {"label": [0, 1]})
    assert "expected one image column" in refusal("a", tmp_path)
    write_parquet(tmp_path / "b" / "train.parquet", some_images(2), {})
    assert "expected one label column" in refusal("b", tmp_path)
    write_parquet(tmp_path / "c" / "train.parquet", some_images(2), {"label": [0.5, 1.5]}, features=False)
    assert "label_column" in refusal("c", tmp_path)
    assert "got type double" in refusal("c", tmp_path, label_column="label")
    assert "got type double" in refusal("c", tmp_path, image_column="label", label_column="label")


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        ([*some_images(1), *some_images(1, (6, 4, 3))], "got RGB 6x4 pixels in row 1"),
        ([*some_images(1), *some_images(1, (6, 5))], "got gray 6x5 pixels in row 1"),
        ([*some_images(1), b"no image"], "do not decode"),
        ([*some_images(1), encode(some_images(1, (40, 40, 3))[0])[:900]], "do not decode"),
        ([*some_images(1), None], "got none"),
        ([*some_images(1), *some_images(1, (6, 5, 4))], "got mode RGBA"),
    ],
)
def test_images_that_do_not_fit(tmp_path: Path, pictures: list[np.ndarray | bytes | None], said: str) -> None:
    write_parquet(tmp_path / "train.parquet", pictures, {"label": [0, 1]})
    message = refusal("parquet", tmp_path)
    assert said in message
    assert "row 1" in message


def test_test_images_must_have_the_training_shape(folder: Path) -> None:
    write_parquet(folder / "test.parquet", some_images(1, (7, 5, 3)), {"label": [0]}, names=NAMES)
    assert "got RGB 7x5" in refusal("parquet", folder)


def test_labels_that_do_not_fit(folder: Path) -> None:
    write_parquet(folder / "test.parquet", some_images(2), {"label": [0, 3]}, names=NAMES)
    assert "expected labels 0..2" in refusal("parquet", folder)
    write_parquet(folder / "test.parquet", some_images(2), {"label": [0, -1]}, names=NAMES)
    assert "got -1" in refusal("parquet", folder)
    write_parquet(folder / "test.parquet", some_images(2), {"label": [0, None]}, names=NAMES)
    assert "expected 'label' in every row, got an empty one in row 1" in refusal("parquet", folder)
    write_parquet(folder / "test.parquet", some_images(2), {"label": [0, 1]}, names={"label": ["x", "y", "z"]})
    assert "other names or classes" in refusal("parquet", folder)


def test_an_empty_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [], {"label": np.array([], dtype=np.int64).tolist()}, names=NAMES)
    assert "expected" in refusal("parquet", tmp_path, label_column="label")


def test_columns_named_for_digits_are_refused() -> None:
    assert "digits" in refusal("digits", label_column="label")


# own arrays ----------------------------------------------------------------------------------------------------------


def test_from_tensors_takes_arrays_and_tensors() -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4), dtype=np.uint8)
    source = from_tensors((x, np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)), (torch.tensor(x[:2]), [3, 0]))
    assert source.classes == 4
    assert source.train.y.dtype == torch.int64
    assert source.mean == pytest.approx((x / 255).mean((0, 2, 3)))
    own = from_tensors(LabeledSamples(torch.rand(4, 7), torch.tensor([0, 1, 0, 1])), classes=5, name="mine")
    assert (own.classes, own.mean, own.test, own.name) == (5, (), None, "mine")
    wide = from_tensors((np.ones((2, 1, 3, 3)), torch.tensor([0, 1], dtype=torch.int32)))
    assert wide.train.x.dtype == torch.float32
    assert (wide.mean, wide.std) == ((0.0,), (1.0,))
    assert from_tensors((x[::-1], np.arange(6)[::-1])).train.y.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("train", "classes", "said"),
    [
        ((np.array([[0.0, np.nan]]), [0]), None, "NaN"),
        ((np.zeros((2, 3)), [0, 5]), 3, "got 5"),
        ((np.zeros((2, 3)), [0, -1]), 3, "got -1"),
        ((np.zeros((0, 3)), np.zeros(0, dtype=np.int64)), None, "N > 0"),
        ((np.zeros((2, 3)), [0.0, float("inf")]), None, "finite numbers to predict"),
        ((np.zeros((2, 3)), [0]), None, "as many labels"),
        ((np.zeros((2, 3)), [[0], [1]]), None, "shape (N,)"),
        ((np.zeros((2, 3), dtype=np.uint8), [0, 1]), None, "pass anything that is no image as floats"),
        ((np.zeros((2, 8, 8, 3), dtype=np.uint8), [0, 1]), None, "(N, channels, height, width)"),
        ((np.zeros((2, 3), dtype=np.int64), [0, 1]), None, "uint8 or float"),
        ((np.array([["a"], ["b"]]), [0, 1]), None, "expected numbers"),
        (7, None, "expected (x, y)"),
    ],
)
def test_from_tensors_refuses(train: object, classes: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_tensors(train, classes=classes)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_from_tensors_refuses_a_test_side_of_another_shape() -> None:
    with pytest.raises(ConfigError, match="like the training inputs"):
        from_tensors((np.zeros((2, 3)), [0, 1]), (np.zeros((2, 4)), [0, 1]))


def test_what_is_told_of_a_source_stands_in_place_of_its_own() -> None:
    """Rows keep their classes by name, under new numbers; inputs are normalized as is said."""
    x = np.zeros((4, 1, 2, 2), dtype=np.uint8)
    source = replace(from_tensors((x, [0, 1, 2, 1]), (x[:1], [2])), class_names=("a", "b", "c"))
    other = with_declared(source, ["c", "none", "b", "a"], [0.5], [0.25])
    assert [other.class_names[label] for label in other.train.y.tolist()] == ["a", "b", "c", "b"]
    assert other.test is not None
    assert other.test.y.tolist() == [0]
    assert (other.classes, other.mean, other.std) == (4, (0.5,), (0.25,))
    assert with_declared(source) is source
    with pytest.raises(ConfigError, match=r"data.class_names: expected 'c' of 'tensors' among them, which is missing"):
        with_declared(source, ["a", "b"])
    with pytest.raises(ConfigError, match=r"data.mean: expected 1 numbers for the inputs of 'tensors', got 2"):
        with_declared(source, None, [0.5, 0.5], [1.0, 1.0])
