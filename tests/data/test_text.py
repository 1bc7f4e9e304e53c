"""Texts: words, vocabulary, ids, files of word vectors, users federated in groups, and what is refused."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from polyfed.data.datasets import load_dataset
from polyfed.data.labeled_texts import load_word_vectors
from polyfed.data.partition import hash_groups
from polyfed.data.text import tokenize, vocabulary
from tests.helpers.refusals import refusal
from tests.helpers.small_data import put, reading

TRAIN = ["Good, good day", "bad day!", "so good", ""]
TEST = ["good zebra", "awful day"]


def write(folder: Path, side: str, texts: list[str | None], labels: list[int], **more: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string()), "sentiment": labels, **more})
    pq.write_table(table, folder / f"{side}.parquet")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "sentiment140"
    write(place, "train", TRAIN, [4, 0, 4, 0], user=["a", "b", "a", "c"])
    write(place, "test", TEST, [4, 0], user=["b", "z"])
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World", ["hello", ",", "world"]),
        ("it's 2 late?!;.", ["it's", "2", "late", "?", "!", ";", "."]),
        ("@ann C++ C# 5€", ["@", "ann", "c", "+", "+", "c", "#", "5", "€"]),
        ("Été 日本", ["été", "日本"]),
        ("E\u0301te\u0301", ["été"]),  # as \u00e9
        ("का की, हिन्दी।", ["का", "की", ",", "हिन्दी", "।"]),
        ("می\u200cخواهم سَلام", ["می\u200cخواهم", "سَلام"]),
        ("😀👍🏽 ❤\ufe0f❤ 👩\u200d👧 🇩🇪🇫🇷", ["😀", "👍🏽", "❤", "❤", "👩\u200d👧", "🇩🇪", "🇫🇷"]),
        ("𑀓\U00011038𑀓", ["𑀓\U00011038𑀓"]),  # a mark beyond the first plane
        (" \t\n", []),
    ],
)
def test_words_of_any_script_keep_their_marks_and_no_sign_is_lost(text: str, words: list[str]) -> None:
    assert tokenize(text) == words


def test_the_rule_of_fedrep_and_characters() -> None:
    assert tokenize("@ann http://a.b #x -- (no)?", "fedrep") == ["ann", "http", "a", ".", "b", "x", "no", "?"]
    assert tokenize(" Ab\r\n e\u0301 好", "characters") == ["A", "b", " ", "é", " ", "好"]


def test_the_vocabulary_is_the_most_frequent_words_and_ties_are_alphabetical() -> None:
    texts = [["b", "a", "c"], ["c", "d"], ["c", "d"]]
    assert vocabulary(texts, 9) == ("c", "d", "a", "b")
    assert vocabulary(texts, 3) == ("c", "d", "a")
    assert vocabulary(texts, 9, known={"a", "d", "x"}) == ("d", "a")


def test_sentiment140_is_ids_and_no_word_of_the_test_side_has_one(root: Path) -> None:
    source = load_dataset("sentiment140", root, columns=("user",))
    assert (source.train.x.shape, source.train.x.dtype) == ((4, 25), torch.int64)
    assert (source.class_names, source.train.y.tolist(), source.words) == (("0", "4"), [1, 0, 1, 0], 5002)
    # good 3, day 2, and ! , bad so once: ids 2, 3, 4, 5, 6, 7
    assert source.train.x[:, :5].tolist() == [[2, 5, 2, 3, 0], [6, 3, 4, 0, 0], [7, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert source.test is not None
    assert source.test.x[:, :3].tolist() == [[2, 1, 0], [1, 3, 0]]
    assert source.train_columns["user"].tolist() == ["a", "b", "a", "c"]
    assert source.vocabulary is not None
    assert source.vocabulary.tokens == "fedrep"


REVIEWS = """stars;review;shop
bad;"Broken; and it was
late!";2
good;So good,1
good;Good day,1
""".replace(",1", ";1")
read, refused = reading("csv")


def test_a_csv_file_is_read_as_parquet_is(tmp_path: Path) -> None:
    source = read(put(tmp_path / "a.csv", REVIEWS), text_column="review", label_column="stars", columns=("shop",))
    assert (source.train.y.tolist(), source.class_names, source.words) == ([0, 1, 1], ("bad", "good"), 5002)
    assert source.train_columns["shop"].tolist() == [2, 1, 1]
    write(tmp_path / "same", "train", ["Broken; and it was\nlate!", "So good", "Good day"], [0, 1, 1])
    same = load_dataset(f"parquet:{tmp_path / 'same'}", text_column="text", label_column="sentiment")
    assert torch.equal(source.train.x, same.train.x)
    assert source.vocabulary is not None
    assert source.vocabulary.words[:2] == ("good", "!")
    assert source.vocabulary.column == "review"


def test_how_much_of_the_texts_is_not_read_is_reported(tmp_path: Path) -> None:
    put(tmp_path / "train.csv", "text,label\n今天 天气 很 好,1\n今天,0\n")
    put(tmp_path / "test.csv", "text,label\n今天天气很差,1\n好,0\n今天 好,0\n")
    report = read(tmp_path, text_column="text", max_length=3).remarks
    assert [line.partition(";")[0] for line in report] == [
        "texts without a known word (data.tokens = 'words'): 1 of 3 on the test side",
        "texts longer than data.max_length, 3, and cut: 1 of 2 on the training side",
    ]
    source = read(tmp_path, text_column="text", max_length=6, tokens="characters")
    assert source.vocabulary is not None
    assert source.vocabulary.words == tuple(" 天今好很气")
    assert source.test is not None
    assert source.test.x.tolist()[0] == [4, 3, 3, 7, 6, 1]
    assert source.remarks == ("texts longer than data.max_length, 6, and cut: 1 of 2 on the training side",)
    assert read(tmp_path, text_column="text", tokens="characters").remarks == ()


def test_what_a_csv_file_of_texts_must_have(tmp_path: Path) -> None:
    place, words = tmp_path / "a.csv", {"text_column": "text"}
    assert "text column 'txt'" in refused(put(place, "text,label\na,1\nb,0\n"), text_column="txt")
    assert "did you mean 'text'" in refused(place, text_column="txt")
    assert "got 'text' for both" in refused(place, **words, label_column="text")
    assert "text_column names a column of texts" in refused(place)
    assert "a text in line 3 of column 'text' of" in refused(put(place, "text,label\na,1\n ,0\n"), **words)
    assert "a label in line 2 of column 'label'" in refused(put(place, "text,label\na,\n"), **words)
    assert "two or more classes, got '1' alone" in refused(put(place, "text,label\na,1\nb,1\n"), **words)
    assert "expected classes, whole numbers or words" in refused(put(place, "text,label\na,.5\nb,1\n"), **words)


def test_vectors_are_those_of_the_file_and_only_its_words_are_known(root: Path) -> None:
    file = root / "glove.txt"
    file.write_text("day 1 2\nzebra 9 9\n. . 5 5\ngood -1.5 1e-1\nother 0 0\n", encoding="utf-8")
    source = load_dataset("sentiment140", root, word_vectors=str(file))
    assert isinstance(source.words, torch.Tensor)
    torch.testing.assert_close(source.words, torch.tensor([[0, 0], [0, 0], [-1.5, 0.1], [1, 2]]))
    assert source.train.x[0, :4].tolist() == [2, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"day 1 2\ngood 1\n", "expected a word and 2 numbers on every line of .*, as on the first, got 1 in line 2"),
        (b"day 1 2\ngood 1 nan\n", "expected finite numbers in line 2 of .*, got '1 nan'"),
        (b"day 1 1e39\n", "expected finite numbers in line 1 of .*, got '1 1e39'"),
        (b"day 1 2\n\xff\xfe 1 2\n", "expected UTF-8 in data.word_vectors"),
        (b"zebra 1 2\n", "expected words of the training texts in data.word_vectors .*, got none of them"),
        (b"day\n", "expected a word and its numbers on every line"),
    ],
)
def test_wrong_vectors_are_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "vectors.txt"
    file.write_bytes(content)
    assert re.search(message, refusal(lambda: load_word_vectors(file, {"day", "good"})))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda r: load_dataset("sentiment140", r, text_column="txt"), "did you mean 'text'"),
        (lambda r: load_dataset("sentiment140", r, text_column="sentiment"), "expected texts"),
        (lambda r: load_dataset("hub:a/b", max_length=9), "'hub:a/b' has no use for max_length"),
    ],
)
def test_wrong_requests_are_one_clear_line(root: Path, ask: Callable[[Path], object], message: str) -> None:
    assert re.search(message, refusal(lambda: ask(root)))


def test_groups_are_of_the_values_alone() -> None:
    assert hash_groups(["ann", "bob", "ann"], 7).tolist() == [zlib.crc32(n) % 7 for n in (b"ann", b"bob", b"ann")]
    assert hash_groups(np.array([5]), 7).tolist() == [zlib.crc32(b"5") % 7]
