"""ProtoNorm: prototypes pushed apart on the sphere, against a loop over pairs, and sent at one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.methods import ProtoNorm
from polyfed.methods.protonorm import spread
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, rounds


def by_hand(rows: Any, steps: int) -> Any:
    p = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    v, lr = np.zeros_like(p), 0.1
    for step in range(steps):
        gaps = p[:, None] - p[None]
        squares = (gaps**2).sum(2) + np.eye(len(p))
        v = 0.9 * v + lr * (gaps / squares[..., None]).sum(1)
        p = p + v
        p = p / np.linalg.norm(p, axis=1, keepdims=True)
        lr *= 0.95 if step % 10 == 0 else 1
    return p


@pytest.mark.parametrize("steps", [0, 1, 2, 25])
def test_directions_against_a_loop_over_pairs(steps: int) -> None:
    rows = torch.randn((5, 4), generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(spread(rows, steps).numpy(), by_hand(rows.double().numpy(), steps), atol=1e-6)


def test_one_row_equal_rows_and_rows_of_zeros() -> None:
    one = torch.tensor([[3.0, -4.0]])
    torch.testing.assert_close(spread(one, 50), one / 5)
    for rows in (torch.ones(3, 4), torch.cat([torch.zeros(1, 4), torch.eye(4)[:2]])):
        assert spread(rows, 50).isfinite().all()


def test_the_means_are_averaged_spread_and_lengthened() -> None:
    first, second = rounds(ProtoNorm(spread_steps=20, scale=3.0), members())
    rows, labels = (torch.cat([m[name] for m in first.up.values()]) for name in ("prototypes", "labels"))
    averaged = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
    torch.testing.assert_close(first.after["prototypes"], averaged, atol=1e-6, rtol=0)
    expected = 3 * by_hand(averaged.double().numpy(), 20)
    for message in second.down.values():
        parts = [message, *([message["others"]] if "others" in message else [])]
        sent = {int(c): row for part in parts for c, row in zip(part["labels"], part["prototypes"], strict=True)}
        np.testing.assert_allclose(torch.stack([sent[c] for c in range(CLASSES)]).numpy(), expected, atol=1e-5)


test_conformance = testing.conformance(
    methods.ProtoNorm(prototype_weight=0.7, spread_steps=50, scale=1.0),
    reference_loss=oracles.drawn_to,
    expected_bytes=oracles.of_classes(84, 4 * (6 + 1)),
    reductions=[
        Reduction({"prototype_weight": 0.0, "predictor": "head"}, methods.Local()),
        Reduction({"spread_steps": 0}, methods.FedProto(prototype_weight=0.7, weighting="uniform")),
    ],
)
