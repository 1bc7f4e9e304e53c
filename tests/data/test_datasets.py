"""Data sets: by name, in the Hugging Face layout, of one's own functions and arrays; the cache, and every refusal."""

from __future__ import annotations

import datetime
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.data import arrow_tables
from polyfed.data.dataset import DatasetSource, from_tensors, with_declared
from polyfed.data.datasets import load_dataset
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import resize
from polyfed.errors import ConfigError
from polyfed.registry import DATASETS
from tests.helpers.refusals import refusal
from tests.helpers.small_data import encode, purposes, reading, some_images, write_parquet

NAMES = {"label": ["ape", "bee", "cat"]}
WRITERS, PAGES = [f"w{row % 3}" for row in range(13)], [10 * row for row in range(13)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine training images in two files and four test images, RGB 6x5, three classes, a writer and a page each."""
    pictures, place = some_images(13), tmp_path / "data" / "small"
    labels = [0, 1, 2] * 4 + [0]
    for name, rows in (
        ("train-00000-of-00002", slice(0, 5)),
        ("train-00001-of-00002", slice(5, 9)),
        ("test", slice(9, 13)),
    ):
        columns = {"label": labels[rows], "writer": WRITERS[rows], "page": PAGES[rows]}
        write_parquet(place / f"{name}.parquet", pictures[rows], columns, names=NAMES)
    return place


def refused(name: str, root: Path | None = None, **options: Any) -> str:
    return refusal(lambda: load_dataset(name, root, **options))


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


def test_a_folder_under_root_is_found_by_its_path(folder: Path) -> None:
    source = load_dataset("parquet:small", folder.parent)
    assert isinstance(source, DatasetSource)
    assert np.array_equal(source.train.x.permute(0, 2, 3, 1), np.stack(some_images(13)[:9]))
    assert source.train.y.tolist() == [0, 1, 2] * 3
    assert source.test is not None
    assert source.test.y.tolist() == [0, 1, 2, 0]
    assert (source.name, source.class_names) == ("parquet:small", ("ape", "bee", "cat"))
    scaled = np.stack(some_images(13)[:9]) / 255
    assert source.mean == pytest.approx(scaled.mean((0, 1, 2)))
    assert source.std == pytest.approx(scaled.std((0, 1, 2)))


def test_further_columns_follow_their_rows(folder: Path) -> None:
    source = load_dataset(f"parquet:{folder}", columns=["writer", "page"])
    assert source.train_columns["page"].tolist() == PAGES[:9]
    assert source.train_columns["writer"].tolist() == WRITERS[:9]
    assert source.test_columns["page"].tolist() == PAGES[9:]
    few, fewer = (source.limited(count, 1, purposes(3)) for count in (5, 4))
    assert (len(few.train), len(fewer.train), len(few.test or ())) == (5, 4, 1)
    rows = [PAGES.index(page) for page in few.train_columns["page"]]
    assert torch.equal(few.train.x, source.train.x[rows])
    assert torch.equal(few.train.y, source.train.y[rows])
    assert set(fewer.train_columns["page"]) < set(few.train_columns["page"])
    assert few.test_columns["page"].tolist() == fewer.test_columns["page"].tolist()
    assert len({tuple(source.limited(5, None, purposes(seed)).train_columns["page"]) for seed in range(9)}) > 4
    assert source.limited(None, None, purposes(3)).train is source.train
    assert load_dataset(f"parquet:{folder}").train_columns == {}
    assert "did you mean 'writer'" in refused(f"parquet:{folder}", columns=["writers"])


def test_columns_can_be_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(2), {"kind": [0, 1]}, image_name="photo", features=False)
    assert "none among: photo, kind" in refused(f"parquet:{tmp_path}")
    for _ in ("cold", "warm"):
        source = load_dataset(f"parquet:{tmp_path}", image_column="photo", label_column="kind")
        assert (source.classes, source.label_column) == (2, "kind")


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
        source = load_dataset(f"parquet:{tmp_path}")
        assert source.train.y.tolist() == numbers
        assert source.class_names == names


def as_pandas_writes(values: list[Any], kind: str) -> Any:
    import pyarrow as pa

    if kind == "categories":
        return pa.array(values).dictionary_encode()
    return pa.array(values, type=pa.decimal128(5, 0) if kind == "decimals" else pa.float64())


def test_labels_as_pandas_writes_them(tmp_path: Path) -> None:
    for place, values, kind in (("a", ["b", "a", "b"], "categories"), ("b", [1.0, 0.0, 1.0], "floats")):
        labels = {"label": as_pandas_writes(values, kind)}
        write_parquet(tmp_path / place / "train.parquet", some_images(3), labels, features=False)
        assert load_dataset(f"parquet:{place}", tmp_path).train.y.tolist() == [1, 0, 1]
    assert load_dataset("parquet:b", tmp_path).class_names == ("0", "1")


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        (["b", None, "b"], "categories", "empty one in row 1"),
        ([1.0, float("nan"), 0.0], "floats", "got nan"),
        ([datetime.date(2026, 1, 1)] * 3, "categories", "date32"),
        ([["a"], ["a", "b"], []], "lists", "an input has one label"),
    ],
)
def test_labels_of_other_kinds_are_refused_by_their_type(
    tmp_path: Path, values: list[Any], kind: str, words: str
) -> None:
    labels = values if kind == "lists" else as_pandas_writes(values, kind)
    write_parquet(tmp_path / "a" / "train.parquet", some_images(3), {"label": labels}, features=False)
    assert words in refused("parquet:a", tmp_path)


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
    first = load_dataset(f"parquet:{folder}")
    assert len(decoded) == 13
    assert same(first, load_dataset(f"parquet:{folder}"))
    assert len(decoded) == 13


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_cache_is_rebuilt(
    folder: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    first = load_dataset(f"parquet:{folder}")
    (stored,) = private_cache.rglob("*.safetensors")
    whole = stored.read_bytes()
    flipped = whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]
    stored.write_bytes(whole[: len(whole) // 2] if harm == "cut" else flipped)
    assert same(first, load_dataset(f"parquet:{folder}"))
    decoded = count_decodes(monkeypatch)
    assert same(first, load_dataset(f"parquet:{folder}"))
    assert decoded == []


def test_a_cache_that_cannot_be_written_is_passed_over(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "file"))
    assert len(load_dataset(f"parquet:{folder}").train) == 9


def test_no_root_and_no_environment_says_what_is_needed() -> None:
    message = refused("cifar10")
    assert "cifar10/train*.parquet" in message
    assert "POLYFED_DATA" in message


def test_unknown_names_suggest_the_nearest(folder: Path) -> None:
    assert "did you mean 'cifar10'?" in refused("cifar-10")
    assert "a folder of Parquet files is 'parquet:small'" in refused("small", folder.parent)
    assert "data.dataset: expected text" in refused("", folder.parent)


def test_folders_that_are_no_data_set(tmp_path: Path) -> None:
    write_parquet(tmp_path / "tested" / "test.parquet", some_images(2), {"label": [0, 1]})
    assert "expected a training file" in refused(f"parquet:{tmp_path / 'tested'}")
    for name in ("fine", "coarse"):
        write_parquet(tmp_path / "both" / name / "train.parquet", some_images(2), {"label": [0, 1]})
    assert "several: coarse, fine" in refused(f"parquet:{tmp_path / 'both'}")
    for name in ("cifar100", "svhn"):
        assert f"{name}/train*.parquet" in refused(name, tmp_path)


def test_validation_files_are_the_test_side_only_without_test_files(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("validation", 2), ("test", 1)):
        write_parquet(tmp_path / "data" / f"{name}-0.parquet", some_images(count), {"label": list(range(count))})
        sides = [len(samples) for _, samples in load_dataset(f"parquet:{tmp_path}").splits()]
        assert sides == {"train": [3], "validation": [3, 2], "test": [3, 1]}[name]


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_truncated_files(folder: Path, part: float) -> None:
    path = folder / "test.parquet"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    message = refused(f"parquet:{folder}")
    assert "expected a whole Parquet file" in message
    assert "test.parquet" in message


def test_no_image_and_no_label_column(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / "train.parquet", None, {"label": [0, 1]})
    assert "expected one image column" in refused("parquet:a", tmp_path)
    write_parquet(tmp_path / "b" / "train.parquet", some_images(2), {})
    assert "expected one label column" in refused("parquet:b", tmp_path)
    write_parquet(tmp_path / "c" / "train.parquet", some_images(2), {"label": [0.5, 1.5]}, features=False)
    assert "got 0.5" in refused("parquet:c", tmp_path)
    assert "got type double" in refused("parquet:c", tmp_path, image_column="label", label_column="label")


@pytest.mark.parametrize(
    ("pictures", "problem"),
    [
        ([*some_images(1), *some_images(1, (6, 4, 3))], "got RGB 6x4 pixels in row 1"),
        ([*some_images(1), *some_images(1, (6, 5))], "got gray 6x5 pixels in row 1"),
        ([*some_images(1), b"no image"], "do not decode"),
        ([*some_images(1), None], "got none"),
        ([*some_images(1), *some_images(1, (6, 5, 4))], "got mode RGBA"),
    ],
)
def test_images_that_do_not_fit(tmp_path: Path, pictures: list[np.ndarray | bytes | None], problem: str) -> None:
    write_parquet(tmp_path / "train.parquet", pictures, {"label": [0, 1]})
    message = refused(f"parquet:{tmp_path}")
    assert problem in message
    assert "row 1" in message


def test_labels_that_do_not_fit(folder: Path) -> None:
    wrong = {3: "expected labels 0..2", -1: "got -1", None: "expected 'label' in every row, got an empty one in row 1"}
    for label, problem in wrong.items():
        write_parquet(folder / "test.parquet", some_images(2), {"label": [0, label]}, names=NAMES)
        assert problem in refused(f"parquet:{folder}")
    write_parquet(folder / "test.parquet", some_images(2), {"label": [0, 1]}, names={"label": ["x", "y", "z"]})
    assert "other names or classes" in refused(f"parquet:{folder}")


def test_from_tensors_takes_arrays_and_tensors() -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4), dtype=np.uint8)
    source = from_tensors((x, np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)), (torch.tensor(x[:2]), [3, 0]))
    assert source.classes == 4
    assert source.train.y.dtype == torch.int64
    assert source.mean == pytest.approx((x / 255).mean((0, 2, 3)))
    own = from_tensors(LabeledSamples(torch.rand(4, 7), torch.tensor([0, 1, 0, 1])), classes=5, name="mine")
    assert (own.classes, own.mean, own.test, own.name) == (5, (), None, "mine")
    assert from_tensors((np.full((2, 1, 3, 3), 7, np.uint8), [0, 1])).std == (1.0,)  # by which one can divide
    wide = from_tensors((np.ones((2, 1, 3, 3)), torch.tensor([0, 1], dtype=torch.int32)))
    assert wide.train.x.dtype == torch.float32
    assert (wide.mean, wide.std) == ((0.0,), (1.0,))
    assert from_tensors((x[::-1], np.arange(6)[::-1])).train.y.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("train", "classes", "problem"),
    [
        ((np.array([[0.0, np.nan]]), [0]), None, "NaN"),
        ((np.zeros((2, 3)), [0, 5]), 3, "got 5"),
        ((np.zeros((2, 3)), [0.0, float("inf")]), None, "finite numbers to predict"),
        ((np.zeros((2, 8, 8, 3), dtype=np.uint8), [0, 1]), None, "(N, channels, height, width)"),
        ((np.zeros((2, 3), dtype=np.int64), [0, 1]), None, "uint8 or float"),
        ((np.array([["a"], ["b"]]), [0, 1]), None, "array of numbers"),
        (7, None, "expected (x, y)"),
    ],
)
def test_from_tensors_refuses(train: object, classes: int | None, problem: str) -> None:
    assert problem in refusal(lambda: from_tensors(train, classes=classes))  # type: ignore[arg-type]


def test_what_is_declared_of_a_source_stands_in_place_of_its_own() -> None:
    """Rows keep their classes by name, under new numbers; inputs are normalized as is problem."""
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
    rows = from_tensors((np.zeros((4, 3), dtype=np.float32), [0, 1, 0, 1]))
    table = replace(rows, feature_names=("a", "b", "c"), mean=(0.0,) * 3, std=(1.0,) * 3)
    with pytest.raises(ConfigError, match=r"data.mean: expected 3 numbers .* got 1; one for each feature"):
        with_declared(table, None, [0.5], [1.0])


FINE, COARSE = [f"fine {c}" for c in range(100)], [f"coarse {c}" for c in range(20)]


def test_cifar100_is_fine_unless_it_is_asked_coarse(tmp_path: Path) -> None:
    labels = {"fine_label": FINE, "coarse_label": COARSE}
    pictures = some_images(6, (32, 32, 3))
    for side, count in (("train", 6), ("test", 3)):
        columns = {name: [7 * row % len(classes) for row in range(count)] for name, classes in labels.items()}
        place = tmp_path / "cifar100" / f"{side}-00000-of-00001.parquet"
        write_parquet(place, pictures[:count], columns, names=labels)
    fine = load_dataset("cifar100", tmp_path)
    assert (fine.name, fine.classes, fine.class_names[99]) == ("cifar100", 100, "fine 99")
    assert fine.train.y.tolist() == [0, 7, 14, 21, 28, 35]
    assert np.array_equal(fine.train.x.permute(0, 2, 3, 1), np.stack(pictures))
    assert (fine.mean[0], fine.std[2]) == (0.5071, 0.2762)
    coarse = load_dataset("cifar100", tmp_path, label_column="coarse_label")
    assert coarse.classes == 20
    assert coarse.train.y.tolist() == [0, 7, 14, 1, 8, 15]
    assert (coarse.mean, coarse.std) == (fine.mean, fine.std)


def test_columns_of_own_tensors_and_own_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(options: object) -> DatasetSource:
        return from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": np.array([5, 6], dtype=np.uint8)})

    monkeypatch.setitem(DATASETS.entries, "mine", mine)
    assert load_dataset("mine", columns=["user"]).train_columns["user"].dtype == np.int64
    listed = from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": [*np.array([5, 6], dtype=np.uint8)]})
    assert listed.train_columns["user"].tolist() == [5, 6]
    assert "did you mean 'user'" in refused("mine", columns=["usr"])
    assert "no further columns" in refused("digits", columns=["user"])
    with pytest.raises(ConfigError, match="expected 2 training values in column 'user'"):
        from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": [1]})
    with pytest.raises(ConfigError, match="expected 0 test values"):
        from_tensors((np.zeros((2, 3)), [0, 1]), test_columns={"user": [1]})


X, Y = torch.rand(40, 5), torch.arange(40) % 4


def failing() -> Any:
    raise ValueError("first line\nsecond line")


OWN: dict[str, Any] = {  # of a module of one's own
    "pair": lambda: (X, Y),
    "source": lambda: from_tensors((X, Y), name="mine", train_columns={"user": np.arange(40) % 5}),
    "nothing": lambda: None,
    "splits": lambda: {"training": (X, Y)},
    "failing": failing,
    "ragged": lambda: (X, Y[:3]),
    "number": 7,
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_data", SimpleNamespace(**OWN))


@pytest.mark.parametrize("name", ["pair", "source"])
def test_every_training_side_is_the_same(name: str) -> None:
    found = load_dataset(f"own_data:{name}")
    assert torch.equal(found.train.x, X)
    assert torch.equal(found.train.y, Y)
    assert found.test is None
    assert found.name == ("mine" if name == "source" else f"own_data:{name}")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_data:pairs", "cannot import data set 'own_data:pairs': AttributeError"),
        ("imags:photos", "'images:PATH' (a folder per class)"),
        ("own_data:number", "should be a function without arguments, got a int"),
        ("own_data:failing", "data set 'own_data:failing' failed: ValueError: first line"),
        ("own_data:nothing", "got None"),
        ("own_data:splits", "expected a dictionary of 'train' and 'test' from 'own_data:splits', got ['training']"),
        ("own_data:ragged", "training side of 'own_data:ragged': expected as many labels as inputs"),
    ],
)
def test_refusals(name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in refusal(lambda: load_dataset(name))


GRAY = np.arange(36, dtype=np.uint8).reshape(6, 6)
read, refusal_images = reading("images")


def put(place: Path, *pixels: np.ndarray, form: str = "PNG") -> None:
    """Images 0.png, 1.png, ... in a folder."""
    place.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(pixels):
        (place / f"{number}.{'png' if form == 'PNG' else 'jpg'}").write_bytes(encode(image, form))


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Training: two bees (values from 0 and 2), one ape (1); test: one of each (3, 4); all gray, 6 x 6."""
    put(tmp_path / "train" / "bee", GRAY, GRAY + 2)
    put(tmp_path / "train" / "ape", GRAY + 1)
    put(tmp_path / "test" / "ape", GRAY + 3)
    put(tmp_path / "test" / "bee", GRAY + 4)
    return tmp_path


def test_sides_classes_and_order(animals: Path) -> None:
    (animals / "train" / "bee" / "notes.txt").write_text("no image")
    source = read(animals)
    assert source.class_names == ("ape", "bee")
    assert source.train.y.tolist() == [0, 1, 1]  # the classes in turn
    assert torch.equal(source.train.x[:, 0], torch.from_numpy(np.stack([GRAY + 1, GRAY, GRAY + 2])))
    assert source.test is not None
    assert source.test.y.tolist() == [0, 1]
    assert source.test.x[:, 0, 0, 0].tolist() == [3, 4]
    assert source.mean == pytest.approx([np.mean([GRAY + 1, GRAY, GRAY + 2]) / 255])


def test_several_sizes_need_image_size(tmp_path: Path) -> None:
    put(tmp_path / "a", GRAY)
    put(tmp_path / "b", np.tile(GRAY, (2, 2)))
    assert "6x6 pixels as the first, got 12x12" in refusal_images(tmp_path)
    assert "set data.image_size" in refusal_images(tmp_path)
    source = read(tmp_path, image_size=4)
    assert source.train.x.shape == (2, 1, 4, 4)
    large = LabeledSamples(torch.from_numpy(np.tile(GRAY, (2, 2)))[None, None], torch.tensor([0]))
    assert torch.equal(source.train.x[1:], resize(large, 4).x)


def test_gray_among_rgb_becomes_rgb_and_jpeg_is_read(tmp_path: Path) -> None:
    put(tmp_path / "a", GRAY)
    put(tmp_path / "b", np.full((6, 6, 3), (250, 10, 10), dtype=np.uint8), form="JPEG")
    x = read(tmp_path).train.x
    assert torch.equal(x[0], torch.from_numpy(GRAY).expand(3, 6, 6))
    assert x[1, 0].float().mean() > 200 > 50 > x[1, 1].float().mean()


def test_refusals_images(animals: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert "got no such folder" in refusal_images(empty / "none")
    assert "one folder of images per class" in refusal_images(empty)
    put(empty / "a", GRAY)
    assert "two or more classes" in refusal_images(empty)
    (empty / "b").mkdir()
    assert "images (.png, .jpg) of class 'b'" in refusal_images(empty)
    (empty / "b" / "1.png").write_bytes(b"no image")
    assert f"in {empty / 'b' / '1.png'}" in refusal_images(empty)
    put(animals / "test" / "cat", GRAY)
    assert "got 'cat'" in refusal_images(animals)
    assert "no use for label_column, got 'kind'" in refusal_images(animals, label_column="kind")
    with pytest.raises(ConfigError, match="got none"):
        load_dataset("images:")
