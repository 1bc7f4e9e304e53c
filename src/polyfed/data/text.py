"""Texts as numbered words, padded to one length; labels and vectors: `polyfed.data.labeled_texts`.

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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyfed.errors import ConfigError, suggest

PADDING = 0
UNKNOWN = 1
FIRST_WORD = 2

WORDS_FILE = "words.txt"  # beside a run's models: the words that have ids, in their order, one a line

OF_PAPER = "fedrep"  # the rule of FedRep's Sentiment140
_LENGTHS = {"characters": 100}  # ids per text by default; of the other rules 25, FedHeNN's
_OF_PAPER = re.compile(r"[\w']+|[.,!?;]")


@dataclass(frozen=True)
class TextConfig:
    """How texts become ids; None stands for the default.

    Args:
        column: the column with texts; None to find it.
        vocabulary: how many words have ids of their own, at most; default 5000.
        length: L, ids per text: the first words, padded; default 25, FedHeNN's, or 100 characters.
        vectors: a text file with a word and its numbers on each line, as GloVe's are; then only its words are in the
            vocabulary, and networks take their vectors as they are. Default: networks learn vectors.
        tokens: the rule by which a text is cut into what has ids, see above; default "words".
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


@dataclass(frozen=True)
class Vocabulary:
    """How texts became ids, so that new ones can be read likewise.

    Args:
        words: words[i] has id i + 2.
        length: L, ids per text.
        column: where the texts stood in their files; None: in none.
        most: how many words could have ids, by which networks are sized; None: these take given vectors.
        tokens: the rule by which texts were cut.
    """

    words: tuple[str, ...]
    length: int
    column: str | None = None
    most: int | None = None
    tokens: str = "words"

    @property
    def size(self) -> int:
        """V, how many ids there are."""
        return FIRST_WORD + len(self.words)

    def ids(self, texts: Iterable[str]) -> Tensor:
        """(N, L) int64.

        >>> Vocabulary(("good", "so"), 3).ids(["So GOOD!", ""])
        tensor([[3, 2, 1],
                [0, 0, 0]])
        """
        return encode_tokens([tokenize(text, self.tokens) for text in texts], self.words, self.length)


def tokenize(text: str, rule: str = "words") -> list[str]:
    """A text's words in order, by one of the rules above.

    >>> tokenize("I can't, @Ann!"), tokenize("I can't, @Ann!", "fedrep"), tokenize("@Ann", "characters")
    (['i', "can't", ',', '@', 'ann', '!'], ['i', "can't", ',', 'ann', '!'], ['@', 'A', 'n', 'n'])
    """
    return _RULES[rule](text)


def _words(text: str) -> list[str]:
    shown = unicodedata.normalize("NFC", text.lower()).replace("\ufe0f", "")  # the mark that asks for a colored sign
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


_RULES: dict[str, Callable[[str], list[str]]] = {
    "words": _words,
    "characters": lambda text: list(unicodedata.normalize("NFC", " ".join(text.split()))),
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
