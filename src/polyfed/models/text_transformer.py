"""A small transformer for texts: word vectors and positions of width 64, two blocks with 4 heads, the words' mean.

Inputs are (N, L) int64 ids with padding 0 behind the words (`polyfed.data.text`). No word attends to padding, and the
mean is over words, so that padding changes nothing. Cuts: extractor = everything up to the mean (s_in: 64),
intermediate = LayerNorm, head = Linear 64-C; D = 64. `text-transformer` has 101 826 parameters besides word vectors
for 25 words and 2 classes; these are learned (V x 64 more), or given and fixed, and then mapped to 64 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import ConfigError
from polyfed.models.lstm import IDS, PADDING
from polyfed.models.split import SequentialSplit, SplitModel
from polyfed.models.vit import Block

_WIDTH = 64
_HEADS = 4
_DEPTH = 2


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
            self.map = nn.Linear(words.shape[1], _WIDTH)
        else:
            self.embedding = nn.Embedding(words, _WIDTH, padding_idx=PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, _WIDTH))
        self.blocks = nn.ModuleList(Block(_WIDTH, _HEADS) for _ in range(_DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""
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
    if len(in_shape) != 1 or in_shape[0] < 1:
        raise ConfigError(f"text-transformer needs texts (length,), got the shape {tuple(in_shape)}")
    encoder = TextEncoder(words, in_shape[0])
    return SequentialSplit(encoder, nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, classes), "text-transformer")
