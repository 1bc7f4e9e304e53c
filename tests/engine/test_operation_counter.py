"""Operations and memory of a client's work: by hand, and against what training really does."""

from __future__ import annotations

import contextlib
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
from polyfed.engine.executors import base
from polyfed.engine.local_training import train
from polyfed.engine.operation_counter import OperationCounter, training_memory, training_operations
from polyfed.methods import FedHeNN, FjORD
from polyfed.plugins.settings import Devices
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TIMES
from tests.helpers.quick import others_slow


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
        step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> TrainingResult:
        before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        own = method.phases(client.training) if phases is None else phases
        told = training_operations(client, method, context, own, step)
        assert all(torch.equal(tensor, before[name]) for name, tensor in client.model.state_dict().items())
        with OperationCounter() as done:
            trained = train(client, method, context, most, phases, step)
        found.append((told, done.count))
        return trained

    monkeypatch.setattr(base, "train", watched)
    ConformanceKit(method=method).run(method, Training(rounds=2, batch_size=8))
    return found


@pytest.mark.parametrize("method", [FedHeNN(alignment_data={"size": 8, "every": 3}), FjORD()], ids=lambda m: m.name)
def test_what_is_told_beforehand_is_what_training_does(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    found = exactly(method, monkeypatch)
    assert len(found) == 12
    assert all(told == done > 0 for told, done in found)


@pytest.mark.parametrize("name", others_slow(list(METHODS), quick=["fedgh"]))
def test_simulating_changes_no_method_and_every_executor_tells_the_same(name: str) -> None:
    kit, devices = (
        ConformanceKit(method=METHODS[name]()),
        Devices(profiles=["phone-low", "laptop"], time_jitter=0.1),
    )
    training = Training(rounds=2, batch_size=8)
    runs = [
        kit.usual.federation(kit.method, training, devices=own, executor=executor, workers=workers).run().history
        for own, executor, workers in ((None, "serial", None), (devices, "serial", None), (devices, "processes", 2))
    ]
    for off, serial, pool in zip(*runs, strict=True):
        assert all(serial[key] == off[key] for key in off if key not in TIMES)
        assert all(pool[key] == serial[key] for key in serial if key not in TIMES)


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
