"""Layers that PyTorch computes in one operation are counted as their parts: figures from their equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyfed.engine.operation_counter import OperationCounter, flops

T, D, F, HEADS = 16, 32, 64, 4  # tokens, width, inner width, heads
# queries, keys and values; scores and weighted values, (T, T) with D numbers each; what leads out of the heads
ATTENTION = 2 * T * D * 3 * D + 2 * T * T * D + 2 * T * T * D + 2 * T * D * D
LAYER = ATTENTION + 2 * T * D * F + 2 * T * F * D


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(D, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads(x, x, x, need_weights=False)[0]
        return found


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(D, F, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found


LAYERS = {
    "encoder": (lambda: nn.TransformerEncoderLayer(D, HEADS, F, batch_first=True), LAYER),
    "attention": (Attention, ATTENTION),
    "lstm": (lambda: Recurrent(nn.LSTM), 2 * T * 4 * F * (D + F)),
    "gru": (lambda: Recurrent(nn.GRU), 2 * T * 3 * F * (D + F)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_fused_pass_counts_as_its_parts(kind: str) -> None:
    make, expected = LAYERS[kind]
    layer, x = make(), torch.randn(1, T, D)
    before = torch.backends.mha.get_fastpath_enabled()
    assert flops(layer, x) == expected
    assert torch.backends.mha.get_fastpath_enabled() == before
    for training in (True, False):
        layer.train(training)
        with OperationCounter() as done, torch.no_grad():
            layer(x)
        assert done.count == expected
