"""What a recipe without hyperparameters does: no default switches a method off."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.methods import (
    MOON,
    FedDPA,
    FedGen,
    FedProx,
    FedRep,
    FedSelect,
    FjORD,
    InclusiveFL,
)
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import SHORT, difference, effect
from tests.helpers.quick import others_slow


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
