"""Methods that can predict in several ways: each is scored, from the same weights and state, when one has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Context, Method, MethodCard, hyperparameters
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation
from polyfed.engine.federation import Federation
from polyfed.testing.fixtures import SHORT, draw, tiny_model
from tests.helpers.flat_options import grouped

CALLS: list[str] = []


@hyperparameters
class Shifted(Method):
    """Local, which can add what the server sent last to its scores of class 2: nothing, and 100 after round 2."""

    card = MethodCard(name="shifted", paper="nobody")
    by: str = "plain"  # "least": the lowest score counts; "shifted": with what is kept

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        return {
            other: dataclasses.replace(self, by=other) for other in ("plain", "least", "shifted") if other != self.by
        }

    def init_server(self, server: Server) -> None:
        server.state["shift"] = torch.tensor([0.0])

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"shift": server.state["shift"]}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.round == 2:  # later on nothing changes
            server.state["shift"] = torch.tensor([100.0])

    def receive(self, client: Client, message: Message) -> Context:
        client.state["shift"] = get_tensor(message, "shift").clone()
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        CALLS.append(self.by)
        scores: Tensor = model(x)
        shift = torch.eye(scores.shape[1])[2] * get_tensor(context, "shift") if "shift" in context else 0.0
        return -scores if self.by == "least" else scores + shift if self.by == "shifted" else scores


def federation(method: Method, **options: Any) -> Federation:
    """Three clients, the last without test data."""
    given = {"rounds": options.pop("rounds", 2), "client_fraction": options.pop("client_fraction", 1.0)}
    builders = {"a": lambda: tiny_model(1, 4, 6), "b": lambda: tiny_model(0, 4, 6)}
    clients = [
        Client("ab"[i % 2], draw(12, (0, 1, 2), i), draw(9 + i, (0, 1, 2), 20 + i) if i < 2 else None, draw(4, (1,), 9))
        for i in range(3)
    ]
    asked = Evaluation(extra_stages=["after_training", "received"], **options.pop("evaluation", {}))
    training = SHORT.model_copy(update=given)
    return Federation(clients, method, training, asked, builders=builders, **grouped(classes=3, **options))


def means(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    found = record["accuracy_by_predictor"]
    return {stage: {name: entry["mean"] for name, entry in by.items()} for stage, by in found.items()}


def test_each_predictor_is_scored_in_every_stage_and_by_hand() -> None:
    fed = federation(Shifted())
    run = fed.run()
    for record in run.history:
        assert (
            list(record["accuracy"])
            == list(record["accuracy_by_predictor"])
            == ["personal", "after_training", "received"]
        )
        for by in record["accuracy_by_predictor"].values():
            assert list(by) == ["least", "shifted"]
            assert all(entry["n"] == 2 for entry in by.values())
    expected = []
    for number in range(2):
        test = fed.clients[number].data.test
        scores = run.models[number](test.x).detach()
        expected.append(float((scores.argmin(1) == test.y).double().mean()))
    last = means(run.history[-1])
    assert last["personal"]["least"] == pytest.approx(sum(expected) / 2)
    # what counts is what is kept, and for `received` what comes: a shift of 100 makes all samples class 2
    shares = [float((fed.clients[i].data.test.y == 2).double().mean()) for i in range(2)]
    assert last["received"]["shifted"] == pytest.approx(sum(shares) / 2)
    assert last["personal"]["shifted"] == run.history[-1]["accuracy"]["personal"]["mean"]
    assert run.result["accuracy_by_predictor"] == run.history[-1]["accuracy_by_predictor"]
