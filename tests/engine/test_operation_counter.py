"""Operations and memory of a client's work: by hand, and against what training really does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from polyfed.core.client import Client
from polyfed.core.method import Context, Method, Phase, TrainingResult
from polyfed.core.settings import Training
from polyfed.engine.executors import client_work
from polyfed.engine.local_training import train
from polyfed.engine.operation_counter import (
    AllocationTracker,
    OperationCounter,
    flops,
    training_memory,
    training_operations,
)
from polyfed.methods import FedHeNN, ScaleFL
from polyfed.testing import ConformanceKit


def counted(work: Callable[[], Tensor]) -> tuple[int, int]:
    """Of the way forward, and of the way back."""
    with OperationCounter() as forward:
        made = work()
    with OperationCounter() as back:
        made.sum().backward()
    return forward.count, back.count


def test_forward_and_back_by_hand() -> None:
    layer, x = nn.Linear(30, 20), torch.randn(7, 30)
    assert counted(lambda: layer(x)) == (2 * 7 * 30 * 20, 2 * 7 * 30 * 20), "inputs need no gradient"
    two = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert counted(lambda: two(torch.randn(6, 4))) == (6 * 2 * (20 + 15), 6 * 2 * (20 + 2 * 15))
    recurrent, cells = nn.LSTM(5, 7, batch_first=True), 2 * 3 * 4 * 7 * (5 + 7)
    assert counted(lambda: recurrent(torch.randn(1, 3, 5))[0]) == (cells, 2 * cells)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)  # two heads: Q K^T and A V
    assert counted(lambda: scaled_dot_product_attention(q, q, q))[0] == 2 * (2 * 4 * 8 * 4 + 2 * 4 * 4 * 8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_counting_changes_nothing(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)), torch.randn(5, 3, 8, 8)
    with mode():
        plain = net(x)
        with OperationCounter() as done:
            same = net(x)
    assert torch.equal(plain, same)
    assert done.count == 5 * 2 * (27 * 8 * 36 + 8 * 36 * 4)


def exactly(method: Method, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(told beforehand, really done) for every job of a run that trains."""
    found: list[tuple[int, int]] = []

    def watched(
        client: Client,
        method: Method,
        context: Context,
        most: int | None = None,
        phases: Sequence[Phase] | None = None,
    ) -> TrainingResult:
        before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        own = method.phases(client.training) if phases is None else phases
        told = training_operations(client, method, context, own)
        assert all(torch.equal(tensor, before[name]) for name, tensor in client.model.state_dict().items())
        with OperationCounter() as done:
            trained = train(client, method, context, most, phases)
        found.append((told, done.count))
        return trained

    monkeypatch.setattr(client_work, "train", watched)
    ConformanceKit(method=method).run(method, Training(rounds=2, batch_size=8))
    return found


@pytest.mark.parametrize("method", [FedHeNN(alignment_data={"size": 8, "every": 3}), ScaleFL()], ids=lambda m: m.name)
def test_what_is_told_beforehand_is_what_training_does(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    found = exactly(method, monkeypatch)
    assert len(found) == 12
    assert all(told == done > 0 for told, done in found)


def test_memory_of_a_step_by_hand() -> None:
    """B rows of D floats, C scores: network, inputs, labels, scores, gradients and, of Adam, two numbers each."""
    rows, width, classes = 64, 50, 4
    client = Client(nn.Linear(width, classes), (torch.randn(10, width), torch.arange(10) % classes))
    numbers = width * classes + classes
    needs: dict[str, int] = {}
    assert client.given is not None
    for optimizer in ("sgd", "adam"):
        client.training = Training(batch_size=rows, optimizer=optimizer)
        needs[optimizer] = training_memory(client, client.given)
        least = 4 * numbers + 4 * rows * width + 8 * rows + 4 * rows * classes + 4 * numbers
        assert least <= needs[optimizer] <= least + 8 * 4 * rows * classes + 16 * 4 * numbers
    assert needs["adam"] >= needs["sgd"] + 2 * 4 * numbers
    client.training = Training(batch_size=4 * rows)
    assert training_memory(client, client.given) > needs["sgd"] + 3 * 4 * rows * width


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


LAYERS = {
    "encoder": (lambda: nn.TransformerEncoderLayer(D, HEADS, F, batch_first=True), LAYER),
    "attention": (Attention, ATTENTION),
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


@pytest.mark.parametrize(
    ("module", "shape", "count"),
    [
        (nn.Linear(30, 20), (1, 30), 2 * 30 * 20),
        (nn.Conv2d(3, 8, 3), (1, 3, 10, 10), 2 * 27 * 8 * 64),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()), (1, 4, 5, 5), 2 * 9 * 4 * 9),
        (nn.LSTM(5, 7, 2, batch_first=True), (1, 6, 5), 6 * 2 * 4 * 7 * ((5 + 7) + (7 + 7))),
        (nn.GRU(5, 7, batch_first=True), (1, 6, 5), 6 * 2 * 3 * 7 * (5 + 7)),
    ],
)
def test_operations_of_a_pass(module: nn.Module, shape: tuple[int, ...], count: int) -> None:
    assert flops(module, torch.zeros(shape)) == count
    assert flops(module, torch.zeros(3, *shape[1:])) == 3 * count


def test_what_was_there_before_does_not_count_and_what_is_gone_is_given_back() -> None:
    weight = torch.zeros(100)
    with AllocationTracker() as made:
        half = weight.view(10, 10)[:5]  # a view
        one = torch.zeros(1000)
        assert made.held == 4000
        one.add_(1)  # in place
        other = one[10:] * 2
        assert (made.held, made.peak) == (4000 + 3960, 4000 + 3960)
        del one, other
        assert made.held == 0
        two = torch.ones(10)
    assert (made.held, made.peak) == (40, 7960)
    assert len(half) + len(two) == 15
