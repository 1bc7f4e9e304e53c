"""Weights and uploads that stay where the networks compute, as on a GPU that has the room; here in main memory, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Method, TrainingResult, follows_device
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import RunError
from polyfed.methods import FedAvg, FedGH
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, state

TRAINING = Training(rounds=3, local_epochs=1, batch_size=8, lr=0.1, momentum=0.5)
executors = pytest.mark.parametrize("executor", ["serial", "vectorized"])


class Faulty(FedAvg):
    """In round 2 something is wrong with client 1's upload, or with what the server does."""

    fault: ClassVar[str] = ""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = super().upload(client, trained)
        spoilt = {"nan": math.nan, "large": 1e30}.get(self.fault, 1.0)
        if (client.id, client.round) != (1, 2):
            return message
        return {**message, "model": {name: t * spoilt for name, t in get_group(message, "model").items()}}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        if server.round == 2 and self.fault == "raises":
            raise ValueError("on purpose")
        if server.round == 2 and self.fault == "writes":
            next(iter(get_group(uploads[1], "model").values())).add_(1)


def federation(method: Method, executor: str, training: Training = TRAINING, **options: object) -> Federation:
    return ConformanceKit(method=method).world(one=True).federation(method, training, executor=executor, **options)


@pytest.fixture
def follows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have weights stay; the type of each server's device, which the stand-in calls "gpu"."""
    monkeypatch.setattr(WeightStore, "on_device", True)
    found: list[str] = []

    def with_number(device: torch.device) -> torch.device:
        found.append("gpu")
        return device

    monkeypatch.setattr("polyfed.engine.federation.with_number", with_number)
    return found


@executors
@pytest.mark.parametrize("fault", ["", "nan", "large"])
def test_the_result_is_that_of_main_memory(
    fault: str, executor: str, monkeypatch: pytest.MonkeyPatch, follows: list[str]
) -> None:
    method = type("Mine", (Faulty,), {"fault": fault})()
    found = federation(method, executor)
    found.run()
    assert follows == ["gpu"]
    assert [each["client"] for each in found.history[1]["refused"]] == ([1] if fault else [])
    monkeypatch.undo()
    expected = federation(method, executor)
    expected.run()
    assert difference(all_state(expected), all_state(found)) is None


@executors
@pytest.mark.usefixtures("follows")
@pytest.mark.parametrize(("fault", "message"), [("raises", "on purpose"), ("writes", "client 1's upload was written")])
def test_a_round_that_fails_changes_nothing(fault: str, message: str, executor: str) -> None:
    expected = federation(FedAvg(), executor, TRAINING.model_copy(update={"rounds": 1}))
    expected.run()
    found = federation(type("Mine", (Faulty,), {"fault": fault})(), executor)
    with pytest.raises(RunError, match=message):
        found.run()
    assert difference(state(expected), state(found)) is None


@pytest.mark.parametrize(
    ("method", "options"),
    [(FedAvg(), {"availability": pf.Availability(dropout_rate=0.1)}), (FedGH(), {})],
    ids=["a plugin", "a method that works in main memory"],
)
def test_uploads_go_to_main_memory_for(method: Method, options: dict[str, object], follows: list[str]) -> None:
    federation(method, "serial", **options)
    assert follows == []
