"""Work under way: as tensors and back, and later."""

from __future__ import annotations

import pytest
import torch

from polyfed.core.message import Message, State, flatten, from_bytes, to_bytes
from polyfed.core.method import TrainingResult
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.work_in_flight import WorkInFlight, pack, unpack
from polyfed.errors import RunError
from polyfed.methods import FedAvg
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import difference


def test_work_is_the_same_after_a_checkpoint() -> None:
    made = ConformanceKit(method=FedAvg()).usual.federation(FedAvg())
    made.run()
    row = made.clients[1].weights
    assert row is not None
    upload: Message = {"model": {"a.b": torch.ones(2)}, "n": torch.tensor(7)}
    state: State = {"c": torch.arange(3)}
    work = [
        WorkInFlight(4, 0.1 + 0.2, JobResult(1, upload, row, state, TrainingResult())),
        WorkInFlight(5, 1e-9, JobResult(0, {}, None, {}, TrainingResult(), refused="not finite")),
    ]
    first, second = unpack(from_bytes(to_bytes(pack(work))), made.store)
    assert (first.client_id, first.round, first.seconds) == (1, 4, 0.1 + 0.2)
    assert first.result.counts
    assert difference(flatten(first.result.message), flatten(upload)) is None
    assert difference(flatten(first.result.state), flatten(state)) is None
    assert first.result.weights is not None
    assert difference(dict(first.result.weights), dict(row)) is None
    assert (second.client_id, second.round, second.seconds, second.result.refused) == (0, 5, 1e-9, "not finite")
    assert not second.result.counts
    assert second.result.weights is None


def test_weights_outside_the_store_are_refused() -> None:
    work = WorkInFlight(1, 2.0, JobResult(3, {}, {"w": torch.ones(1)}, {}, TrainingResult()))
    with pytest.raises(RunError, match="expected a row of the store as client 3's weights, got dict"):
        pack([work])
