"""OwnPlusCommon: a network trained alone, a common model beside it, and how much each of both counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import polyfed as pf
from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.message import nbytes
from polyfed.engine.run import Run
from polyfed.functional.closed_forms import fit_temperature
from polyfed.methods import ClosedForm, Local, OwnPlusCommon
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import CLASSES, federation, rounds, same, samples

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
    for i in range(4):
        assert same(mine[-1].weights[i], local[-1].weights[i])
        assert same(mine[0].up[i]["sums"], closed[0].up[i]["sums"])
        assert [nbytes(round.up[i]) for round in mine[1:]] == [8, 8]
    assert same(mine[-1].after["solution"], closed[-1].after["solution"])


@pytest.mark.parametrize(("weight", "other"), [(0.0, Local()), (1.0, CLOSED)], ids=["own", "common"])
def test_at_either_end_it_predicts_as_the_simpler_method(weight: float, other: pf.Method) -> None:
    assert run(replace(SMALL, weight=weight)).result["accuracy"] == run(other).result["accuracy"]


@pytest.mark.parametrize("validation", [0, 30])
def test_in_between_it_adds_calibrated_log_probabilities(validation: int) -> None:
    fed, _ = federation(SMALL, members(validation))
    done = fed.run()
    for number, client in enumerate(fed.clients):
        x, rows = client.data.test.x, client.data.validation
        network = done.models[number].network
        own_temperature = 0.5
        with torch.no_grad():
            logits = network(x).double()
            if validation:
                alike = torch.ones(CLASSES)
                own_temperature = fit_temperature(network(rows.x).double(), rows.y, alike, alike)
        own = F.log_softmax(own_temperature * logits, dim=1)
        common = CLOSED.predict(None, x, client.state)
        found = SMALL.predict(network, x, client.state)
        torch.testing.assert_close(found, 0.2 * own + 0.8 * common, rtol=1e-9, atol=1e-9)
        plain = replace(SMALL, temperature=1.0).predict(network, x, client.state)
        sure = replace(CLOSED, temperature=1.0).predict(None, x, client.state)
        torch.testing.assert_close(plain, 0.2 * F.log_softmax(logits, dim=1) + 0.8 * sure, rtol=1e-9, atol=1e-9)


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
