"""LEAF's JSON: numbers, texts and characters by user, and files that are no such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.data.dataset import DatasetSource
from polyfed.data.datasets import load_dataset
from polyfed.data.text import TextConfig
from polyfed.errors import ConfigError


def content(rows: dict[str, tuple[list[Any], list[Any]]], **more: Any) -> dict[str, Any]:
    """A file as LEAF's scripts write it."""
    return {
        "users": list(rows),
        "num_samples": [len(y) for _, y in rows.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in rows.items()},
        **more,
    }


def put(place: Path, **files: Any) -> Path:
    """Files by side and number: train_0, test_0."""
    for name, value in files.items():
        side, _, number = name.partition("_")
        (place / side).mkdir(parents=True, exist_ok=True)
        text = value if isinstance(value, str) else json.dumps(value)
        (place / side / f"all_data_niid_0_keep_0_{side}_9_{number}.json").write_text(text)
    return place


def read(place: Path, **options: Any) -> DatasetSource:
    return load_dataset(f"leaf:{place}", columns=("user",), **options)


IMAGES = {"f0": ([[0.0, 0.5], [1.0, 0.25]], [3, 61]), "f1": ([[0.5, 0.5]], [3])}


def test_numbers_of_several_files(tmp_path: Path) -> None:
    """FEMNIST's form; a user may have rows in two files, and labels keep their names."""
    more = {"f2": ([[1.0, 1.0]], [7]), "f0": ([[0.1, 0.2]], [7])}
    put(tmp_path, train_0=content(IMAGES), train_1=content(more), test_0=content({"f1": ([[0.0, 1.0]], [61])}))
    source = read(tmp_path)
    assert source.train.x.tolist() == torch.tensor([[0, 0.5], [1, 0.25], [0.5, 0.5], [1, 1], [0.1, 0.2]]).tolist()
    assert source.class_names == ("3", "7", "61")
    assert source.train.y.tolist() == [0, 2, 0, 1, 1]
    assert source.train_columns["user"].tolist() == ["f0", "f0", "f1", "f2", "f0"]
    assert source.test is not None
    assert source.test.y.tolist() == [2]


def test_a_recipe_makes_a_client_of_every_user(tmp_path: Path) -> None:
    """As for a folder per client; users whose rows are for testing alone stay out."""
    rows = {user: ([[float(n), 1.0] for n in range(6)], [n % 2 for n in range(6)]) for user in ("a", "b", "c")}
    test = {user: ([[1.0, 1.0]], [1]) for user in ("a", "b", "c", "late")}
    put(tmp_path, train_0=content(rows, hierarchies=["x", "y", "z"]), test_0=content(test))
    recipe = pf.Recipe.from_dict(
        {
            "data": {"dataset": f"leaf:{tmp_path}", "split": "official"},
            "models": {"architectures": ["mlp-16-32"]},
            "method": {"name": "fedavg"},
            "training": {"rounds": 1},
        }
    )
    run = pf.run(recipe, out=tmp_path / "run")
    assert len(run.models) == 3


def test_texts_by_words(tmp_path: Path) -> None:
    """Sentiment140's form: the text is the last of a row's strings."""
    tweets = [["1", "Mon", "NO_QUERY", "ann", "so good !"], ["2", "Tue", "NO_QUERY", "ann", "so bad"]]
    put(tmp_path, train_0=content({"ann": (tweets, [1, 0])}))
    source = read(tmp_path, words=TextConfig(length=4))
    assert source.train.x.shape == (2, 4)
    assert source.vocabulary is not None
    assert set(source.vocabulary.words) == {"so", "good", "!", "bad"}
    assert source.train.y.tolist() == [1, 0]
    assert int(source.train.x[0, 0]) == int(source.train.x[1, 0]) == 2


def test_characters(tmp_path: Path) -> None:
    """Shakespeare's form: strings of one length, and the character that comes next."""
    put(
        tmp_path,
        train_0=content({"ROMEO": (["to b", "o be"], ["e", " "])}),
        test_0=content({"ROMEO": (["Zo b"], ["e"])}),
    )
    source = read(tmp_path)
    assert source.class_names == (" ", "e")
    assert source.words == 2 + len(set("to be"))
    ids = {character: 2 + number for number, character in enumerate(sorted(set("to be")))}
    assert source.train.x.tolist() == [[ids[c] for c in text] for text in ("to b", "o be")]
    assert source.test is not None
    assert source.test.x[0].tolist() == [1, *(ids[c] for c in "o b")]


CHARACTERS = (["to b", "o be", " be ", "be o"], ["e", " ", "o", "r"])


def test_rows_of_different_lengths_are_words_unless_tokens_say_otherwise(tmp_path: Path) -> None:
    put(tmp_path, train_0=content({"ROMEO": ([*CHARACTERS[0], "longer"], [*CHARACTERS[1], "r"])}))
    assert read(tmp_path).vocabulary is not None
    by_characters = read(tmp_path, words=TextConfig(tokens="characters")).vocabulary
    assert by_characters is not None
    assert "o" in by_characters.words


def test_names_of_images_are_no_texts(tmp_path: Path) -> None:
    put(tmp_path / "a", train_0=content({"12": (["120000.jpg", "120001.JPG", "x"], [0, 1, 1])}))
    with pytest.raises(ConfigError, match=r"got '120000.jpg', the name of an image, in "):
        read(tmp_path / "a")
    assert read(tmp_path / "a", words=TextConfig(tokens="words")).vocabulary is not None


X, Y = [[0.0, 1.0]], [1]


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ("{", "expected LEAF's JSON in"),
        ("[" * 100_000, "nested too deep"),
        ([1], "should be a valid dictionary"),
        (content({}), "with at least one sample"),
        ({"users": "ab", "num_samples": [1], "user_data": {}}, "at 'users': Input should be a valid list"),
        ({**content({"a": (X, Y)}), "users": ["a", "a"], "num_samples": [1, 1]}, "every user once"),
        ({**content({"a": (X, Y)}), "users": ["b"]}, "samples of user 'b' .* got 0 inputs"),
        ({**content({"a": (X, Y)}), "num_samples": [2]}, "expected 2 samples of user 'a' .* got 1 inputs and 1 labels"),
        (content({"a": (X, [[0, 1]])}), "at 'user_data.a.y.0.*multi-label data are not supported"),
        (content({"a": (X, [0.5])}), "at 'user_data.a.y.0"),
        (content({"a": (X * 2, [1, "b"])}), "labels of one kind"),
        (content({"a": (X, [2**70])}), "labels below"),
        (content({"a": (X, [-5])}), "from 0 on"),
        (content({"a": ([[1.0], [1.0, 2.0]], [0, 1])}), "expected inputs of numbers, all of one shape"),
        (content({"a": ([[float("nan")], [0.0]], [0, 1])}), "expected inputs of several finite numbers"),
        (content({"a": (["text", [0.0]], [0, 1])}), "expected texts as in the first row"),
    ],
)
def test_what_is_refused(tmp_path: Path, train: Any, problem: str) -> None:
    """In one line each."""
    put(tmp_path, train_0=train)
    with pytest.raises(ConfigError, match=problem) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
