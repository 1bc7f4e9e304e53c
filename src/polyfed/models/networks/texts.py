"""Networks for texts: FedHeNN's two LSTMs (Makhija et al., ICML 2022), a small transformer, and HtFLlib's networks.

Inputs are (N, L) int64 ids with padding 0 behind the words (`polyfed.data.text`), which changes nothing. Word vectors
are learned; given ones stay as they are, are no parameters, and are neither sent nor stored.

LSTMs: word vectors of 300 numbers, one layer (`fedhenn-lstm1`) or two of 128, FC 10, head. The output at the last word
is taken. The authors' code scans 300 steps of 25 numbers, and carries the state from batch to batch; here a text is 25
steps of 300 numbers, from zero. Cuts: extractor = word vectors and LSTM (s_in: 128), intermediate = Linear 128-10,
ReLU, dropout 0.5, head = Linear 10-C; D = 10. In eval mode, in which FedHeNN compares representations, dropout is off.

`text-transformer`: word vectors and positions of width 64 (given vectors are mapped to 64 numbers), two blocks with 4
heads, the words' mean; no word attends to padding. Cuts: extractor = everything up to the mean (s_in: 64), intermediate
= LayerNorm, head = Linear 64-C; D = 64.

HtFLlib's (Zhang et al., KDD 2025, arXiv 2506.03954) learn vectors of 512 numbers; D = 512. The extractor is all that
reads words, `fasttext` and `text-bilstm` have a Linear layer behind it, the others nothing.

    fasttext, text-linear     the words' mean
    text-lstm                 the last state of two layers with dropout 0.2, its ReLU, and dropout
    text-bilstm               one layer in both directions, 1024 numbers

Deviations from HtFLlib, where padding changes what comes out: means are over words, not over padding; the LSTM's state
is that of the last word, not of the last column; the bidirectional one begins at the last word. HtFLlib's networks
return log-probabilities, whose cross-entropy is that of the logits.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from polyfed.errors import ConfigError
from polyfed.models.networks import Home, register
from polyfed.models.networks.vit import Block
from polyfed.models.split import SequentialSplit, SplitModel

PADDING = 0
IDS = 5002  # padding, unknown and 5000 words

_WIDTH = 300
_STATE = 128
_HIDDEN = 10
_DROPOUT = 0.5
_TEXT_WIDTH = 64  # the transformer's
_HEADS = 4
_DEPTH = 2
_WIDE = 512  # HtFLlib's networks'
_LIGHT_DROPOUT = 0.2


class LSTMLastState(nn.Module):
    """Ids (N, L) to the LSTM's output at the last id that is no padding (N, 128); at the first where all are.

    Args:
        words: V, the number of ids, whose vectors are learned; or (V, E) float32 vectors, which stay as they are.
        layers: of the LSTM.
    """

    vectors: Tensor

    def __init__(self, words: int | Tensor, layers: int) -> None:
        super().__init__()
        if isinstance(words, Tensor):
            self.embedding = None
            self.register_buffer("vectors", words.clone(), persistent=False)
        else:
            self.embedding = nn.Embedding(words, _WIDTH, padding_idx=PADDING)
        width = words.shape[1] if isinstance(words, Tensor) else _WIDTH
        self.lstm = nn.LSTM(width, _STATE, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x_NLE = functional.embedding(x, self.vectors) if self.embedding is None else self.embedding(x)
        out_NLH, _ = self.lstm(x_NLE)
        place_L = torch.arange(x.shape[1], device=x.device)
        last_N = ((x != PADDING) * place_L).amax(dim=1)
        last: Tensor = out_NLH.gather(1, last_N[:, None, None].expand(-1, 1, out_NLH.shape[2])).squeeze(1)
        return last


def _lstm(name: str, in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS, layers: int = 1) -> SplitModel:
    """words: see `LSTMLastState`."""
    _check_texts(name, in_shape)
    intermediate = nn.Sequential(
        OrderedDict(fc1=nn.Linear(_STATE, _HIDDEN), relu1=nn.ReLU(), dropout=nn.Dropout(_DROPOUT))
    )
    return SequentialSplit(LSTMLastState(words, layers), intermediate, nn.Linear(_HIDDEN, classes), name)


class TextEncoder(nn.Module):
    """Ids (N, L) to the mean over words of the last block's output (N, 64); zeros for texts without words.

    Args:
        words: V, the number of ids, whose vectors are learned; or (V, E) float32 vectors, which stay as they are.
        length: L, at most.
    """

    vectors: Tensor

    def __init__(self, words: int | Tensor, length: int) -> None:
        super().__init__()
        self.embedding: nn.Module | None = None
        if isinstance(words, Tensor):
            self.register_buffer("vectors", words.clone(), persistent=False)
            self.map = nn.Linear(words.shape[1], _TEXT_WIDTH)
        else:
            self.embedding = nn.Embedding(words, _TEXT_WIDTH, padding_idx=PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, _TEXT_WIDTH))
        self.blocks = nn.ModuleList(Block(_TEXT_WIDTH, _HEADS) for _ in range(_DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        words_NLW = self.map(functional.embedding(ids, self.vectors)) if self.embedding is None else self.embedding(ids)
        tokens = words_NLW + self.positions[:, : ids.shape[1]]
        there = ids != PADDING
        for block in self.blocks:
            tokens = block(tokens, there)
        counted = there[:, :, None].to(tokens.dtype)
        mean: Tensor = (tokens * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        return mean


def _small_transformer(name: str, in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS) -> SplitModel:
    """words: see `TextEncoder`."""
    _check_texts(name, in_shape)
    encoder = TextEncoder(words, in_shape[0])
    return SequentialSplit(encoder, nn.LayerNorm(_TEXT_WIDTH), nn.Linear(_TEXT_WIDTH, classes), name)


class WordMean(nn.Module):
    """Ids (N, L) to the mean of their learned vectors (N, 512), padding left out; zeros for texts without words."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, _WIDE, padding_idx=PADDING)

    def forward(self, ids: Tensor) -> Tensor:
        counted = (ids != PADDING).sum(dim=1, keepdim=True)
        mean: Tensor = self.embedding(ids).sum(dim=1) / counted.clamp(min=1)
        return mean


class LastWordState(nn.Module):
    """Ids (N, L) to what an LSTM gives for the last id that is no padding (N, 512), or twice as wide.

    Args:
        words: V. layers: how many, with dropout 0.2 between them.
        both_ways: read from both ends.
    """

    def __init__(self, words: int, layers: int, both_ways: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, _WIDE, padding_idx=PADDING)
        between = _LIGHT_DROPOUT if layers > 1 else 0.0
        self.recurrent = nn.LSTM(_WIDE, _WIDE, layers, batch_first=True, dropout=between, bidirectional=both_ways)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != PADDING).sum(dim=1).clamp(min=1)
        packed = pack_padded_sequence(self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        last: Tensor = states[torch.arange(len(ids), device=ids.device), lengths - 1]
        return last


def _mean_of_words(
    name: str, in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS, linear: bool = False
) -> SplitModel:
    """linear: whether a Linear layer without activation stands before the head."""
    reads = WordMean(_learned(name, in_shape, words))
    behind: dict[str, nn.Module] = {"fc": nn.Linear(_WIDE, _WIDE)} if linear else {}
    return _wide(name, classes, reads, **behind)


def _recurrent(name: str, in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS) -> SplitModel:
    ids = _learned(name, in_shape, words)
    if name == "text-bilstm":
        states = LastWordState(ids, layers=1, both_ways=True)
        return _wide(name, classes, states, fc=nn.Linear(2 * _WIDE, _WIDE))
    states = LastWordState(ids, layers=2)
    return _wide(name, classes, states, relu=nn.ReLU(), dropout=nn.Dropout(_LIGHT_DROPOUT))


def _wide(name: str, classes: int, reads: nn.Module, **behind: nn.Module) -> SequentialSplit:
    return SequentialSplit(reads, nn.Sequential(OrderedDict(behind)), nn.Linear(_WIDE, classes), name)


def _learned(name: str, in_shape: tuple[int, ...], words: int | Tensor) -> int:
    _check_texts(name, in_shape)
    if isinstance(words, Tensor):
        raise ConfigError(f"{name} learns its words' vectors, got given ones; leave out data.word_vectors")
    return words


def _check_texts(name: str, in_shape: tuple[int, ...]) -> None:
    if len(in_shape) != 1 or in_shape[0] < 1:
        raise ConfigError(f"{name} needs texts (length,), got the shape {tuple(in_shape)}")


_TWEETS = Home((25,), 2, "FedHeNN, Makhija et al., ICML 2022")
_NEWS = Home((200,), 4, "HtFLlib, Zhang et al., KDD 2025, arXiv 2506.03954")

register("fedhenn-lstm1", _lstm, _TWEETS, "FedHeNN's network for Sentiment140: one LSTM layer.", layers=1)
register("fedhenn-lstm2", _lstm, _TWEETS, "The same with two LSTM layers, for heterogeneous clients.", layers=2)
register(
    "text-transformer",
    _small_transformer,
    replace(_TWEETS, paper=f"polyfed; width {_TEXT_WIDTH}, {_HEADS} heads"),
    f"Two blocks of width {_TEXT_WIDTH}.",
)
register(
    "fasttext",
    _mean_of_words,
    _NEWS,
    "HtFLlib's fastText: the words' mean, a Linear layer without activation, the head.",
    linear=True,
)
register("text-linear", _mean_of_words, _NEWS, "HtFLlib's logistic regression: the words' mean, the head.")
register("text-lstm", _recurrent, _NEWS, "HtFLlib's LSTM of two layers.")
_about = "HtFLlib's bidirectional LSTM of one layer, behind it a Linear layer without activation."
register("text-bilstm", _recurrent, _NEWS, _about)
