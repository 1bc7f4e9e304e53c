"""Labeled texts as ids of words, with the vectors that these may have.

Shapes: N texts, L ids per text, V ids, E numbers per word vector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.classes import encode_labels
from polyfed.data.column_schema import Columns
from polyfed.data.dataset import DatasetSource
from polyfed.data.files import check_file
from polyfed.data.options import SourceOptions
from polyfed.data.samples import LabeledSamples
from polyfed.data.text import FIRST_WORD, Vocabulary, encode_tokens, tokenize, vocabulary
from polyfed.errors import ConfigError, first_line

_VOCABULARY = 5000  # words that have ids, unless another number is asked for
_WORDS, _CHARACTERS = 25, 100  # ids per text likewise; 25 words are FedHeNN's
_ON = {"train": "on the training side", "test": "on the test side"}


@dataclass(frozen=True)
class RawTexts:
    """One side as it is stored: N texts, (N,) labels, int64 or strings, and further columns, (N,) values by name."""

    texts: Sequence[str]
    labels: NDArray[Any]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def encode_texts(sides: Mapping[str, RawTexts], columns: Columns, options: SourceOptions) -> DatasetSource:
    """Texts and their labels as numbers; the vocabulary is made of the training side alone.

    A text without any word is a row of padding. columns: where texts and labels stood, and the classes' names, if the
    files name them.
    """
    if columns.content == columns.label:
        raise ConfigError(f"expected texts and labels in different columns, got '{columns.label}' for both")
    rule = options.tokens or "words"
    length = options.max_length or (_CHARACTERS if rule == "characters" else _WORDS)
    words_in = {side: [tokenize(text, rule) for text in raw.texts] for side, raw in sides.items()}
    raw_labels = {side: raw.labels for side, raw in sides.items()}
    labels, class_names = encode_labels(raw_labels, columns.label, columns.class_names)
    if len(class_names) < 2:
        raise ConfigError(f"expected labels of two or more classes, got '{class_names[0]}' alone")
    vectors = None
    known: dict[str, NDArray[np.float32]] | None = None
    if options.word_vectors is not None:
        known = load_word_vectors(Path(options.word_vectors), {word for text in words_in["train"] for word in text})
    most = options.vocab_size or _VOCABULARY
    words = vocabulary(words_in["train"], most, known)
    if known is not None:
        width = len(next(iter(known.values())))
        vectors = torch.from_numpy(np.stack([np.zeros(width, np.float32)] * FIRST_WORD + [known[w] for w in words]))
    made = Vocabulary(words, length, columns.content, most if vectors is None else None, rule)
    samples = {
        side: LabeledSamples(encode_tokens(words_in[side], words, made.length), torch.from_numpy(labels[side]))
        for side in sides
    }
    return DatasetSource.of(
        options.dataset,
        samples,
        class_names,
        {side: raw.columns for side, raw in sides.items()},
        words=made.network_ids if vectors is None else vectors,
        vocabulary=made,
        label_column=columns.label,
        remarks=_remarks(words_in, samples, made),
    )


def _remarks(
    words_in: Mapping[str, Sequence[Sequence[str]]], sides: Mapping[str, LabeledSamples], made: Vocabulary
) -> tuple[str, ...]:
    """How many texts of each side have no known word, and how many are cut."""
    lines = []
    unknown = {name: int((side.x < FIRST_WORD).all(dim=1).sum()) for name, side in sides.items()}
    cut = {name: sum(len(text) > made.length for text in texts) for name, texts in words_in.items()}
    many = any(10 * n > len(sides[name]) for name, n in unknown.items())
    hint = "; data.tokens = 'characters' suits scripts without blanks between words, 'words' has emoji" if many else ""
    for what, counts, more in (
        (f"without a known word (data.tokens = '{made.tokens}')", unknown, hint),
        (f"longer than data.max_length, {made.length}, and cut", cut, ""),
    ):
        parts = [f"{n} of {len(sides[name])} {_ON[name]}" for name, n in counts.items() if n]
        if parts:
            lines.append(f"texts {what}: {', '.join(parts)}{more}")
    return tuple(lines)


def load_word_vectors(path: Path, wanted: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """The vectors of some words, (E,) each, from a text file: a word and E numbers on every line, as GloVe's are.

    Lines of other words are only checked for their width, and words with blanks in them passed over.
    """
    found: dict[str, NDArray[np.float32]] = {}
    width = 0
    check_file(path)
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                word, *fields = line.rstrip("\r\n ").split(" ")
                width = width or len(fields)
                if width < 1 or len(fields) < width:
                    raise ConfigError(
                        f"expected a word and {width or 'its'} numbers on every line of {path}, as on the first, got "
                        f"{len(fields)} in line {number}"
                    )
                if len(fields) == width and word in wanted:
                    found[word] = _vector(fields, f"line {number} of {path}")
    except OSError as error:
        raise ConfigError(f"cannot read data.word_vectors '{path}': {first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"expected UTF-8 in data.word_vectors '{path}', got other bytes: {error.reason}") from error
    if not found:
        raise ConfigError(f"expected words of the training texts in data.word_vectors '{path}', got none of them")
    return found


def _vector(fields: Sequence[str], where: str) -> NDArray[np.float32]:
    with contextlib.suppress(ValueError):
        values = [float(field) for field in fields]
        if all(abs(value) < 3e38 for value in values):
            return np.array(values, dtype=np.float32)
    raise ConfigError(f"expected finite numbers in {where}, got '{' '.join(fields)[:40]}'")
