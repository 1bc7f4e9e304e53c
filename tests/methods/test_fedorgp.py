"""The conformance kit."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyfed import methods, testing
from polyfed.testing import ChangedValue, Reduction
from tests.helpers import oracles


def turned_to(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 (1 - cos(z, P[y])) in float64, a mean over all rows of the batch."""
    z, p = (t.detach().double().numpy() for t in (model.represent(batch.x), context["prototypes"]))
    known, y = context["known"].numpy(), batch.y.numpy()
    rows = [(row, p[c]) for row, c in zip(z, y, strict=True) if known[c]]
    cosines = [(a @ b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-8) for a, b in rows]
    return oracles.cross_entropy(model, batch, context) + 0.7 * float(sum(1 - one for one in cosines)) / len(y)


test_conformance = testing.conformance(
    methods.FedORGP(prototype_weight=0.7, gamma=0.5, server_epochs=10, server_lr=0.1),
    reference_loss=turned_to,
    expected_bytes=oracles.CLASS_ROWS,
    skip=oracles.TRAINED_AT_THE_SERVER,
    changed_values={"candidates": ChangedValue("own", {"predictor": "prototype"})},
    reductions=[Reduction({"prototype_weight": 0.0}, methods.Local())],
)
