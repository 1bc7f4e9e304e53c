"""Texts as numbered words, padded to one length; labels and vectors: `polyfed.data.labeled_texts`.

What has ids ("words" below) is, by the rule that ``data.tokens`` names,

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

import numpy as np
import torch
from torch import Tensor

PADDING = 0
UNKNOWN = 1
FIRST_WORD = 2

WORDS_FILE = "words.txt"  # beside a run's models: the words that have ids, in their order, one a line

OF_PAPER = "fedrep"  # the rule of FedRep's Sentiment140
_OF_PAPER = re.compile(r"[\w']+|[.,!?;]")


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
    def network_ids(self) -> int | None:
        """How many ids networks take that learn vectors, the same whatever the texts are; None: they get vectors."""
        return None if self.most is None else FIRST_WORD + self.most

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
