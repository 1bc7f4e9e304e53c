"""Which model each method is scored by, and that a recipe without hyperparameters does what the method is for."""

from __future__ import annotations

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

RECEIVED = [FedAvg, FedProx, SCAFFOLD, FedNova, MOON, FedGen, InclusiveFL, InCoAvg, FjORD]
PERSONAL = [Local, FedFomo, FedDPA, FedSelect]


def test_the_papers_model_is_scored() -> None:
    """It makes tens of points: the model that comes, or the client's own."""
    assert {method().evaluation_stage for method in RECEIVED} == {"received"}
    assert {method().evaluation_stage for method in PERSONAL} == {"personal"}
    assert FedRep().evaluation_stage == "received"  # the newest extractor, under the client's own head


@pytest.mark.parametrize(
    ("method", "off"),
    [
        (FedProx, {"mu": 0}),
        (MOON, {"mu": 0}),
        (FedRep, {"head_epochs": 0}),
        (FedGen, {"alpha": 0, "beta": 0, "diversity_weight": 0}),
        (FedDPA, {"threshold": 1, "lambda1": 0, "lambda2": 0}),
        (FedSelect, {"personal_rate": 0, "max_personal_fraction": 0}),
        (InclusiveFL, {"beta": 0}),
        (InCoAvg, {"theta_rule": "none"}),
        (FjORD, {"num_widths": 1, "distill": False}),
    ],
)
def test_no_default_switches_a_method_off(method: type, off: dict[str, object]) -> None:
    assert all(getattr(method(), hyperparameter) != value for hyperparameter, value in off.items())
