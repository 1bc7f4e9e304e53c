"""Labeled texts as numbered words, padded to one length; where they are read from: `polyfed.data.text_files`.

What has ids ("words" below) is, by the rule that `TextConfig.tokens` names,

    words       in lower case, a run of letters, digits, combining marks and apostrophes; every other sign by itself, an
                emoji with what changes its look. Nothing but blanks is lost, in any script.
    characters  every character as it is; blanks in a row are one.
    fedrep      in lower case, a run of letters, digits and apostrophes, and the marks . , ! ? ; one by one; all else is
                lost, as in FedRep's and FedHeNN's Sentiment140. Runs of earlier versions read texts so.

All but the last put texts into Unicode's normal form C first. These are regular expressions that learn nothing, so a
package of tokenisers has nothing to add. Id 0 is padding and 1 any word without an id of its own; the vocabulary's
words follow from 2 on, the most frequent first. It is made of the training side alone.

Shapes: N texts, L ids per text, V ids, E numbers per word vector.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data import bounds
from polyfed.data.column_schema import Columns
from polyfed.data.label_encoding import Files, encode_labels
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError, first_line, suggest

PADDING = 0
UNKNOWN = 1
FIRST_WORD = 2

WORDS_FILE = "words.txt"  # of a run's models: the words that have ids, in their order, one a line

OF_PAPER = "fedrep"  # the rule of FedRep's Sentiment140
_ON = {"train": "on the training side", "test": "on the test side"}
_LENGTHS = {"characters": 100}  # ids per text by default; of the other rules 25, FedHeNN's
_OF_PAPER = re.compile(r"[\w']+|[.,!?;]")


@dataclass(frozen=True)
class TextConfig:
    """How texts become ids; None stands for the default.

    Args:
        column: the column with texts; None to find it.
        vocabulary: at most so many words have ids of their own; default 5000.
        length: L, ids per text: the first words, padded; default 25, FedHeNN's, or 100 characters.
        vectors: a text file with a word and its numbers on each line, as GloVe's are; then only its words are in the
            vocabulary, and networks take their vectors as they are. Default: networks learn vectors.
        tokens: the rule by which a text is cut into what has ids, see above; default "words".

    Raises:
        ConfigError: a vocabulary or a length below 1, an unknown rule.
    """

    column: str | None = None
    vocabulary: int | None = None
    length: int | None = None
    vectors: str | Path | None = None
    tokens: str | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens not in _RULES:
            raise ConfigError(f"unknown tokens '{self.tokens}'{suggest(self.tokens, _RULES)}")
        for name, value in (("vocabulary", self.vocabulary), ("length", self.length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"expected {name} to be a whole number >= 1, got {value!r}")

    @property
    def vocab_size(self) -> int:
        """The vocabulary's size at most."""
        return 5000 if self.vocabulary is None else self.vocabulary

    @property
    def rule(self) -> str:
        """By which a text is cut."""
        return self.tokens or "words"

    @property
    def max_length(self) -> int:
        """L."""
        return _LENGTHS.get(self.rule, 25) if self.length is None else self.length

    @property
    def ids(self) -> int:
        """V of networks that learn vectors: the same whatever the texts are."""
        return FIRST_WORD + self.vocab_size

    def given_vocabulary(self) -> str | None:
        """The first setting that is not left at its default."""
        values = {"text_column": self.column, "vocab_size": self.vocabulary, "max_length": self.length}
        more = {"word_vectors": self.vectors, "tokens": self.tokens}
        return next((name for name, value in {**values, **more}.items() if value is not None), None)


@dataclass(frozen=True)
class Vocabulary:
    """How texts became ids, so that new ones can be read likewise.

    Args:
        words: words[i] has id i + 2.
        length: L, ids per text.
        column: where the texts stood in their files; None: in none.
        most: so many words could have ids, which says how large networks are; None: these take given vectors.
        tokens: the rule by which texts were cut.
    """

    words: tuple[str, ...]
    length: int
    column: str | None = None
    most: int | None = None
    tokens: str = "words"

    def ids(self, texts: Iterable[str]) -> Tensor:
        """(N, L) int64.

        >>> Vocabulary(("good", "so"), 3).ids(["So GOOD!", ""])
        tensor([[3, 2, 1],
                [0, 0, 0]])
        """
        return encode_tokens([tokenize(text, self.tokens) for text in texts], self.words, self.length)


@dataclass(frozen=True)
class RawTexts:
    """One side as it is stored: N texts, (N,) labels, int64 or strings, and further columns, (N,) values by name.

    files: what they were read from, and how many rows of each.
    """

    texts: Sequence[str]
    labels: NDArray[Any]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    files: Files = ()

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class LabeledTexts:
    """What was read: x is (N, L) int64; vectors is (V, E) float32, zeros for ids 0 and 1.

    remarks: how much of the texts is not read, for people.
    """

    train: LabeledSamples
    test: LabeledSamples | None
    class_names: tuple[str, ...]
    vocabulary: Vocabulary
    vectors: Tensor | None
    train_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    test_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    label_column: str | None = None
    remarks: tuple[str, ...] = ()


def tokenize(text: str, rule: str = "words") -> list[str]:
    """A text's words in order, by one of the rules above.

    >>> tokenize("I can't, @Ann!"), tokenize("I can't, @Ann!", "fedrep"), tokenize("@Ann", "characters")
    (['i', "can't", ',', '@', 'ann', '!'], ['i', "can't", ',', 'ann', '!'], ['@', 'A', 'n', 'n'])
    """
    return _RULES[rule](text)


def _words(text: str) -> list[str]:
    shown = unicodedata.normalize("NFC", text.lower()).replace("\ufe0f", "")  # which asks for a colored sign
    return _word_pattern().findall(shown)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    """A word of any script, or a sign. Marks, which `re` has no name for, are gathered once."""
    marks = {code for code in range(0x20000) if unicodedata.category(chr(code))[0] == "M"}
    ends = zip(sorted(marks - {code + 1 for code in marks}), sorted(marks - {code - 1 for code in marks}), strict=True)
    ranges = "".join(f"{chr(first)}-{chr(last)}" for first, last in ends)  # faster than one by one
    joined = "\u200c\u200d" + ranges  # with what joins letters, or emoji, and what parts them
    skin = "\U0001f3fb-\U0001f3ff"
    flag = "[\U0001f1e6-\U0001f1ff]{2}"
    return re.compile(rf"[\w'{joined}]+|{flag}|[^\s\w](?:[{joined}{skin}]|(?<=\u200d)[^\s\w])*")


def _characters(text: str) -> list[str]:
    return list(unicodedata.normalize("NFC", " ".join(text.split())))


_RULES: dict[str, Callable[[str], list[str]]] = {
    "words": _words,
    "characters": _characters,
    OF_PAPER: lambda text: _OF_PAPER.findall(text.lower()),
}


def vocabulary(texts: Iterable[Sequence[str]], most: int, known: Collection[str] | None = None) -> tuple[str, ...]:
    """The most frequent words, equally frequent ones in alphabetical order.

    Args:
        texts: the words of each text.
        most: how many at most.
        known: only these; None for any.
    """
    counts = Counter(word for text in texts for word in text)
    found = [word for word in counts if known is None or word in known]
    return tuple(sorted(found, key=lambda word: (-counts[word], word))[:most])


def encode_tokens(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> Tensor:
    """(N, length) int64 ids of the first words of each text, padded with 0.

    >>> encode_tokens([["so", "good", "!"], []], ["good", "so"], 4)
    tensor([[3, 2, 1, 0],
            [0, 0, 0, 0]])
    """
    id_of = {word: number for number, word in enumerate(words, FIRST_WORD)}
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in enumerate(texts):
        first = [id_of.get(word, UNKNOWN) for word in text[:length]]
        ids[row, : len(first)] = first
    return torch.from_numpy(ids)


def encode_dataset(sides: Mapping[str, RawTexts], columns: Columns, how: TextConfig) -> LabeledTexts:
    """Texts and their labels as numbers; the vocabulary is made of the training side alone.

    A text without any word is a row of padding.

    Args:
        sides: "train" and, if there is one, "test".
        columns: where texts and labels stood, and the classes' names, if the files name them.
        how: vocabulary, length and vectors.

    Raises:
        ConfigError: texts and labels in one column, labels that are all the same, a label out of range, a file of
            vectors that is wrong.
    """
    if columns.image == columns.label:
        raise ConfigError(f"expected texts and labels in different columns, got '{columns.label}' for both")
    words_in = {name: [tokenize(text, how.rule) for text in side.texts] for name, side in sides.items()}
    raw, files = ({name: getattr(side, of) for name, side in sides.items()} for of in ("labels", "files"))
    labels, class_names = encode_labels(raw, columns, files)
    if len(class_names) < 2:
        raise ConfigError(f"expected labels of two or more classes, got '{class_names[0]}' alone")
    vectors = None
    if how.vectors is None:
        words = vocabulary(words_in["train"], how.vocab_size)
    else:
        known = load_word_vectors(Path(how.vectors), {word for text in words_in["train"] for word in text})
        words = vocabulary(words_in["train"], how.vocab_size, known)
        width = len(next(iter(known.values())))
        vectors = torch.from_numpy(np.stack([np.zeros(width, np.float32)] * FIRST_WORD + [known[w] for w in words]))
    made = Vocabulary(words, how.max_length, columns.image, how.vocab_size if vectors is None else None, how.rule)
    numbers = {
        name: LabeledSamples(encode_tokens(words_in[name], words, made.length), torch.from_numpy(labels[name]))
        for name in sides
    }
    more = {name: side.columns for name, side in sides.items()}
    return LabeledTexts(
        numbers["train"],
        numbers.get("test"),
        class_names,
        made,
        vectors,
        more["train"],
        more.get("test", {}),
        columns.label,
        _remarks(words_in, numbers, made),
    )


def _remarks(
    words_in: Mapping[str, Sequence[Sequence[str]]], sides: Mapping[str, LabeledSamples], made: Vocabulary
) -> tuple[str, ...]:
    """How many texts of each side have no known word, and how many are cut."""
    lines = []
    unknown = {name: int((side.x < FIRST_WORD).all(dim=1).sum()) for name, side in sides.items()}
    cut = {name: sum(len(text) > made.length for text in texts) for name, texts in words_in.items()}
    many = any(10 * n > len(sides[name]) for name, n in unknown.items())
    emoji = "'words' has emoji, " if made.tokens == "fedrep" else ""
    hint = f"; data.tokens = {emoji}'characters' suits scripts without blanks" if many else ""
    for what, counts, more in (
        (f"without a known word (data.tokens = '{made.tokens}')", unknown, hint),
        (f"longer than data.max_length, {made.length}, and cut", cut, ""),
    ):
        said = [f"{n} of {len(sides[name])} {_ON[name]}" for name, n in counts.items() if n]
        if said:
            lines.append(f"texts {what}: {', '.join(said)}{more}")
    return tuple(lines)


# word vectors --------------------------------------------------------------------------------------------------------


def load_word_vectors(path: Path, wanted: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """The vectors of some words, (E,) each, from a text file: a word and E numbers on every line, as GloVe's are.

    Lines of other words are only checked for their width, and words with blanks in them passed over.

    Args:
        path: the file, in UTF-8.
        wanted: the words to take.

    Raises:
        ConfigError: no such file, another encoding, lines of different widths, something else than finite numbers, or
            none of the words.
    """
    found: dict[str, NDArray[np.float32]] = {}
    width = 0
    bounds.check_file(path)
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                fields = line.rstrip("\r\n ").split(" ")
                width = width or len(fields) - 1
                if width < 1 or len(fields) - 1 < width or (len(fields) - 1 > width and _number(fields[-width - 1])):
                    raise ConfigError(
                        f"expected a word and {width or 'its'} numbers on every line of {path}, as on the first, got "
                        f"{len(fields) - 1} in line {number}"
                    )
                if len(fields) - 1 == width and fields[0] in wanted:
                    found[fields[0]] = _vector(fields[1:], number, path)
    except OSError as error:
        raise ConfigError(f"cannot read data.word_vectors '{path}': {first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"expected UTF-8 in data.word_vectors '{path}', got other bytes: {error.reason}") from error
    if not found:
        raise ConfigError(f"expected words of the training texts in data.word_vectors '{path}', got none of them")
    return found


def _vector(fields: Sequence[str], line: int, path: Path) -> NDArray[np.float32]:
    values = [_number(field) for field in fields]
    wrong = next((f for f, v in zip(fields, values, strict=True) if v is None or not abs(v) < 3e38), None)
    if wrong is not None:
        raise ConfigError(f"expected finite numbers in line {line} of {path}, got '{wrong[:40]}'")
    return np.array(values, dtype=np.float32)


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
