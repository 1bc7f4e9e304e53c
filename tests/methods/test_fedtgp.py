"""The conformance kit."""

from __future__ import annotations

from polyfed import methods, testing
from polyfed.testing import Reduction
from tests.helpers import oracles

test_conformance = testing.conformance(
    methods.FedTGP(prototype_weight=0.7, server_epochs=10, server_lr=0.1),
    reference_loss=oracles.drawn_to,
    expected_bytes=oracles.CLASS_ROWS,
    skip=oracles.TRAINED_AT_THE_SERVER,
    changed_values={"margin": 0.01},
    reductions=[Reduction({"prototype_weight": 0.0}, methods.Local())],
)
