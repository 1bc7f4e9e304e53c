"""Clients scored together have the scores that they have alone; who cannot be is scored alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Context, Method
from polyfed.core.settings import Training
from polyfed.data.samples import SelectedSamples
from polyfed.engine.executors import stacked_scoring
from polyfed.engine.executors.base import Serial, WorkerContext
from polyfed.engine.executors.jobs import EvalJob, Scores
from polyfed.engine.executors.stacked_scoring import can_score_together
from polyfed.engine.executors.vectorized import VectorizedExecutor
from polyfed.engine.federation import Federation
from polyfed.engine.scoring import ClientScore, evaluate_model
from polyfed.errors import RunError
from polyfed.methods import FML, FedAvg, FedGH, FedProto, Local
from tests.helpers import toys
from tests.helpers.flat_options import grouped
from tests.helpers.quick import others_slow

TESTS = (5, 1, 40, 700)  # rows of each client; more than one pass takes
PARTS = ("validation", "test")


def trained(method: Method, net: Callable[[], nn.Module]) -> tuple[Federation, WorkerContext]:
    """A federation of one network after a round, whose clients have unequal test data."""
    members = [
        Client("net", toys.samples(12, place), toys.samples(count, 10 + place), validation=toys.samples(3, 20 + place))
        for place, count in enumerate(TESTS)
    ]
    given = {"builders": {"net": net}, "classes": toys.CLASSES, "executor": "serial"}
    federation = Federation(members, method, Training(rounds=2, batch_size=4, lr=0.1), **grouped(**given))
    federation.run()
    clients = federation.clients
    context = WorkerContext(method, federation.model_factory, clients, federation.store, ("auc", "calibration_error"))
    return federation, context


def asked_of(federation: Federation, received: bool) -> list[EvalJob]:
    """Each client as it stands, or as it would receive."""
    server = federation.server
    messages = [federation.method.broadcast(server, one.id) if received else None for one in federation.clients]
    return [EvalJob(client, "", sent, 3, PARTS) for client, sent in zip(federation.clients, messages, strict=True)]


def by_executor(context: WorkerContext, asked: Sequence[EvalJob]) -> tuple[list[Scores], list[Scores]]:
    """Scored one after the other, and together."""
    serial = Serial(context.method, context.model_factory, context.store, context.from_scores)
    return serial.score(asked), VectorizedExecutor(context, 3, print).score(asked)


def check_equal(one: ClientScore, other: ClientScore) -> None:
    assert one.others.keys() == other.others.keys()
    assert all(torch.equal(one.others[name].confusion, other.others[name].confusion) for name in one.others)
    assert torch.equal(one.confusion, other.confusion)
    assert one.auc == pytest.approx(other.auc, nan_ok=True)
    assert one.calibration_error == pytest.approx(other.calibration_error, rel=1e-4)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients that were scored together with others, a time for each part of their data."""
    scored: list[int] = []
    plain = evaluate_model

    def noted(client: Client, *rest: Any, **more: Any) -> ClientScore:
        scored.append(client.id)
        return plain(client, *rest, **more)

    monkeypatch.setattr(stacked_scoring, "evaluate_model", noted)
    return scored


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("net", others_slow(["shallow", "bn", "dropout"], quick=["bn", "dropout"]))
@pytest.mark.parametrize(
    "method",
    others_slow([Local(), FedGH(), FML(), FedProto()], quick=[FedGH(), FedProto()]),
    ids=lambda method: method.name,
)
def test_scores_are_those_of_clients_alone(method: Method, net: str, received: bool, together: list[int]) -> None:
    federation, context = trained(method, toys.NETS[net])
    alone, found = by_executor(context, asked_of(federation, received))
    assert together == [0, 1, 2] * 2  # the fourth would be a stack of its own
    for one, other in zip(alone, found, strict=True):
        assert one.keys() == other.keys() == set(PARTS)
        for part in PARTS:
            check_equal(one[part], other[part])
    assert len({tuple(scores["test"].confusion.flatten().tolist()) for scores in found}) == len(TESTS)


class Branching(nn.Module):
    """Whose way depends on numbers, which no vectorized call can ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toys.INPUTS, toys.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores if float(scores.detach().sum()) > 0 else F.relu(scores)


def test_what_cannot_be_vectorized_is_scored_alone(together: list[int]) -> None:
    federation, context = trained(FedAvg(), Branching)
    alone, found = by_executor(context, asked_of(federation, received=False))
    assert not together
    for one, other in zip(alone, found, strict=True):
        check_equal(one["test"], other["test"])


def test_who_can_be_scored_together() -> None:
    federation, _ = trained(Local(), toys.NETS["shallow"])
    job = asked_of(federation, received=False)[0]
    assert can_score_together(job)
    assert not can_score_together(replace(job, shared=["test"]))  # equal networks are scored once
    job.client.missing = SelectedSamples(job.client.data.test, torch.arange(2))
    assert not can_score_together(job)


class Refuses(Local):
    """Fails where its second client receives."""

    def receive(self, client: Client, message: Message) -> Context:
        if client.id == 1 and client.round == 3:
            raise ValueError("no")
        return {}


class CannotPredict(Local):
    """Fails where its third client predicts."""

    def receive(self, client: Client, message: Message) -> Context:
        client.state["fails"] = torch.tensor(client.id == 2)
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        if bool(context["fails"]):
            raise ValueError("no")
        return super().predict(model, x, context)


def test_who_cannot_predict_is_named() -> None:
    federation, context = trained(Local(), toys.NETS["shallow"])
    asked = [replace(job, message={}) for job in asked_of(federation, received=False)]
    with pytest.raises(RunError, match=r"client 2 \(net\), round 3, scoring: ValueError: no"):
        VectorizedExecutor(replace(context, method=CannotPredict()), 4, print).score(asked)


def test_who_cannot_receive_is_named() -> None:
    federation, context = trained(Refuses(), toys.NETS["shallow"])
    asked = [replace(job, message={}) for job in asked_of(federation, received=False)]
    with pytest.raises(RunError, match=r"client 1 \(net\), round 3, scoring: ValueError: no"):
        VectorizedExecutor(context, 4, print).score(asked)
