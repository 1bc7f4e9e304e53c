"""What a recipe without hyperparameters does: which model is scored, and that no default switches a method off."""

from __future__ import annotations

from typing import Any

import pytest

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
from polyfed.testing.fixtures import SHORT, difference, effect
from tests.helpers.quick import others_slow

RECEIVED = [FedAvg, FedProx, SCAFFOLD, FedNova, MOON, FedGen, InclusiveFL, InCoAvg, FedRep]
PERSONAL = [Local, FedFomo, FedDPA, FedSelect]


def test_the_model_of_the_paper_is_scored() -> None:
    """The choice between what a client receives and what it keeps makes tens of points."""
    assert {kind().evaluation_stage for kind in RECEIVED} == {"received"}
    assert {kind().evaluation_stage for kind in PERSONAL} == {"personal"}


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
