"""What a recipe without hyperparameters does: which model is scored, and that no default switches a method off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.core.settings import Stage
from polyfed.methods import (
    MOON,
    SCAFFOLD,
    FedAvg,
    FedDPA,
    FedFomo,
    FedGen,
    FedNova,
    FedProx,
    FedRep,
    FedSelect,
    FjORD,
    InclusiveFL,
    InCoAvg,
    Local,
)
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import SHORT, difference, effect, received
from tests.helpers.quick import others_slow

# FedRep's is the newest extractor, under the client's own head.
RECEIVED = [FedAvg, FedProx, SCAFFOLD, FedNova, MOON, FedGen, InclusiveFL, InCoAvg, FedRep]
PERSONAL = [Local, FedFomo, FedDPA, FedSelect]


@pytest.mark.parametrize(
    ("kind", "stage"),
    others_slow(
        [*((kind, "received") for kind in RECEIVED), *((kind, "personal") for kind in PERSONAL)],
        quick=[(FedAvg, "received"), (FedRep, "received"), (Local, "personal"), (FedDPA, "personal")],
    ),
)
def test_the_papers_model_is_scored(kind: type[Any], stage: Stage) -> None:
    """It makes tens of points: the model that comes, or the client's own."""
    federation = ConformanceKit(method=kind()).run()
    right = []
    for client in federation.clients:
        assert client.weights is not None
        weights = received(federation, client.id) if stage == "received" else client.weights
        model = federation.model_factory.load(client.architecture, "", weights)
        with torch.no_grad():
            right.append(float((model(client.data.test.x).argmax(1) == client.data.test.y).float().mean()))
    scored = federation.history[-1]["accuracy"]
    assert list(scored) == [stage]
    assert scored[stage]["mean"] == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize(
    ("kind", "off"),
    others_slow(
        OFF := [
            (FedProx, {"mu": 0}),
            (MOON, {"mu": 0}),
            (FedRep, {"head_epochs": 0}),
            (FedGen, {"alpha": 0, "beta": 0}),
            (FedDPA, {"threshold": 1, "lambda1": 0, "lambda2": 0}),
            (FedSelect, {"personal_rate": 0, "max_personal_fraction": 0}),
            (InclusiveFL, {"beta": 0}),
            (FjORD, {"num_widths": 1, "distill": False}),
        ],
        quick=OFF[:1],
    ),
)
def test_no_default_switches_a_method_off(kind: type[Any], off: dict[str, object]) -> None:
    kit = ConformanceKit(method=kind())
    longer = SHORT.model_copy(update={"rounds": 5})
    assert difference(effect(kit.run(training=longer)), effect(kit.run(kind(**off), longer))) is not None
