"""OwnPlusCommon: a network trained alone, a common model beside it, and how much each of both counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyfed as pf
from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.message import clone, nbytes
from polyfed.engine.run import Run
from polyfed.methods import ClosedForm, Local, OwnPlusCommon
from polyfed.methods.own_plus_common import _best_weight
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import CLASSES, federation, rounds, same, samples, worker

SMALL = OwnPlusCommon(features=20, shrinkage=0.3)
CLOSED = ClosedForm(features=20, shrinkage=0.3)
OWNED = ((0, 1), (1, 2), (0, 1, 2), (0,))
MIXED = ["bn", "broad", "wide", "shallow"]


def members(validation: int = 0) -> list[Client]:
    held = [samples(validation, 70 + i) if validation else None for i in range(4)]
    return [Client(MIXED[i], samples(9 + i, i, own), samples(30, 50 + i), held[i]) for i, own in enumerate(OWNED)]


def run(method: pf.Method, clients: Sequence[Client] | None = None, **more: Any) -> Run:
    fed, _ = federation(method, members() if clients is None else clients, **more)
    return fed.run()


def test_networks_are_those_of_local_and_sums_those_of_the_closed_form() -> None:
    mine, local, closed = (rounds(method, members()) for method in (SMALL, Local(), CLOSED))
    assert len(mine) == 3  # the last only hands out the solution
    for i in range(4):
        assert same(mine[-1].weights[i], local[-1].weights[i])
        assert same(mine[0].up[i]["sums"], closed[0].up[i]["sums"])
        assert [nbytes(round.up[i]) for round in mine[1:]] == [8, 8]
    assert same(mine[-1].after["solution"], closed[-1].after["solution"])


@pytest.mark.parametrize(("weight", "other"), [(0.0, Local()), (1.0, CLOSED)], ids=["own", "common"])
def test_at_either_end_it_predicts_as_the_simpler_method(weight: float, other: pf.Method) -> None:
    assert run(replace(SMALL, weight=weight)).result["accuracy"] == run(other).result["accuracy"]


def test_in_between_it_adds_log_probabilities() -> None:
    fed, _ = federation(SMALL, members())
    done = fed.run()
    for number, client in enumerate(fed.clients):
        x = client.data.test.x
        network = done.models[number].network
        with torch.no_grad():
            own = F.log_softmax(network(x).double(), dim=1)
        common = CLOSED.predict(None, x, client.state)
        found = SMALL.predict(network, x, client.state)
        torch.testing.assert_close(found, 0.2 * own + 0.8 * common, rtol=1e-9, atol=1e-9)


def scores_of(predicted: Tensor, sure: float) -> Tensor:
    return F.log_softmax(sure * F.one_hot(predicted, CLASSES).double(), dim=1)


def test_validation_rows_choose_the_network_only_where_it_is_surely_better() -> None:
    y = torch.arange(40) % CLASSES
    right, wrong = scores_of(y, 3.0), scores_of((y + 1) % CLASSES, 3.0)
    assert _best_weight(right, right, y) == 0.8
    assert _best_weight(right, wrong, y) == 0.0
    assert _best_weight(wrong, right, y) == 0.8  # which has it right, too
    assert _best_weight(9 * wrong, right, y) == 1.0


def test_one_row_is_not_more_than_one_standard_error_and_two_of_many_are() -> None:
    for rows in range(2, 40):
        y = torch.arange(rows) % CLASSES
        for missed in (1, 2):
            common = scores_of(torch.where(torch.arange(rows) < missed, (y + 1) % CLASSES, y), 3.0)
            found = _best_weight(scores_of(y, 3.0), common, y)
            assert (found < 0.8) == (missed > 1)


def test_the_weight_is_that_of_the_network_and_the_common_model_at_the_end() -> None:
    method = replace(SMALL, control="permuted")
    fed, _ = federation(method, members(validation=30), rounds=3)
    done = fed.run()
    for number, client in enumerate(fed.clients):
        again = worker(fed, number)
        again.model.load_state_dict(done.models[number].network.state_dict())
        again.state.pop("weight")
        method._choose_weight(again)
        assert torch.equal(client.state["weight"], again.state["weight"])
    assert min(float(client.state["weight"]) for client in fed.clients) < 0.8


def test_classes_that_nobody_has_sent_rows_of_are_judged_by_the_network() -> None:
    fed, _ = federation(SMALL, members())
    done = fed.run()
    client = fed.clients[2]  # has rows of all classes
    others = clone(client.state)
    others["solution"]["shares"][1] = 0  # type: ignore[index]
    x, network = client.data.test.x, done.models[2].network
    with torch.no_grad():
        own = F.log_softmax(network(x).double(), dim=1)
    torch.testing.assert_close(SMALL.predict(network, x, others)[:, 1], own[:, 1], rtol=1e-6, atol=1e-6)


test_conformance = testing.conformance(
    methods.OwnPlusCommon(features=12),
    reference_loss=oracles.cross_entropy,
    expected_bytes=lambda server, client_id: (1, 8),  # in the last round both know what the other has
    counted="statistics",
    changed_values={"map": "random"},
    no_effect={"keep_sums": "only the server keeps more", "views": "nothing is augmented here"},
    skip={
        "missing_upload_is_not_zero": oracles.FEWER_VARY,
        "nan_is_rejected": "its last exchange trains nobody, and there what is not finite counts as zeros",
    },
    reductions=[Reduction({"weight": 0.0}, methods.Local())],
)
