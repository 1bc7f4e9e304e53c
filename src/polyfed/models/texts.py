"""Networks for texts: FedHeNN's two LSTMs (Makhija et al., ICML 2022), and a small transformer.

Inputs are (N, L) int64 ids with padding 0 behind the words (`polyfed.data.text`), which changes nothing. Word vectors
are learned; given ones stay as they are, are no parameters, and are neither sent nor stored.

LSTMs: word vectors of 300 numbers, one layer (`fedhenn-lstm1`) or two of 128, FC 10, head. The output at the last word
is taken. The authors' code scans 300 steps of 25 numbers, and carries the state from batch to batch; here a text is 25
steps of 300 numbers, from zero. Cuts: extractor = word vectors and LSTM (s_in: 128), intermediate = Linear 128-10,
ReLU, dropout 0.5, head = Linear 10-C; D = 10. In eval mode, in which FedHeNN compares representations, dropout is off.

`text-transformer`: word vectors and positions of width 64 (given vectors are mapped to 64 numbers), two blocks with 4
heads, the words' mean; no word attends to padding. Cuts: extractor = everything up to the mean (s_in: 64), intermediate
= LayerNorm, head = Linear 64-C; D = 64.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import ConfigError
from polyfed.models.split import SequentialSplit, SplitModel
from polyfed.models.vit import Block

PADDING = 0
IDS = 5002  # padding, unknown and 5000 words

_WIDTH = 300
_STATE = 128
_HIDDEN = 10
_DROPOUT = 0.5
_TEXT_WIDTH = 64  # of the transformer
_HEADS = 4
_DEPTH = 2


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


def fedhenn_lstm1(in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS) -> SplitModel:
    """FedHeNN's network for Sentiment140: one LSTM layer. `words`: see `LSTMLastState`."""
    return _lstm("fedhenn-lstm1", in_shape, classes, words, layers=1)


def fedhenn_lstm2(in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS) -> SplitModel:
    """The same with two LSTM layers, for heterogeneous clients."""
    return _lstm("fedhenn-lstm2", in_shape, classes, words, layers=2)


def _lstm(name: str, in_shape: tuple[int, ...], classes: int, words: int | Tensor, layers: int) -> SplitModel:
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


def text_transformer(in_shape: tuple[int, ...], classes: int, words: int | Tensor = IDS) -> SplitModel:
    """Two blocks of width 64. `words`: see `TextEncoder`."""
    _check_texts("text-transformer", in_shape)
    encoder = TextEncoder(words, in_shape[0])
    return SequentialSplit(encoder, nn.LayerNorm(_TEXT_WIDTH), nn.Linear(_TEXT_WIDTH, classes), "text-transformer")


def _check_texts(name: str, in_shape: tuple[int, ...]) -> None:
    if len(in_shape) != 1 or in_shape[0] < 1:
        raise ConfigError(f"{name} needs texts (length,), got the shape {tuple(in_shape)}")
