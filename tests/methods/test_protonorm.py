"""ProtoNorm: prototypes pushed apart on the sphere and sent at one length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.methods import ProtoNorm
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, rounds

NORMED = ProtoNorm(spread_steps=20, scale=3.0)


def by_hand(rows: np.ndarray, steps: int, scale: float) -> np.ndarray:
    """Pair by pair: momentum 0.9, steps of 0.1 that shrink by 0.95 after the first of every ten."""
    p = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    v, lr = np.zeros_like(p), 0.1
    for step in range(steps):
        gaps = p[:, None] - p[None]
        squared = (gaps**2).sum(2) + np.eye(len(p))
        v = 0.9 * v + lr * (gaps / squared[..., None]).sum(1)
        p = (p + v) / np.linalg.norm(p + v, axis=1, keepdims=True)
        lr *= 0.95 if step % 10 == 0 else 1
    found: np.ndarray = scale * p
    return found


def sent_down(round_down: dict[str, torch.Tensor]) -> dict[int, np.ndarray]:
    """All prototypes of a message by class."""
    parts = [round_down, *([round_down["others"]] if "others" in round_down else [])]
    return {int(c): row for m in parts for c, row in zip(m["labels"], m["prototypes"].double().numpy(), strict=True)}


def test_the_means_are_averaged_spread_and_lengthened() -> None:
    first, second = rounds(NORMED, members())
    means = {
        c: np.mean(
            [
                m["prototypes"][m["labels"].tolist().index(c)].double().numpy()
                for m in first.up.values()
                if c in m["labels"]
            ],
            axis=0,
        )
        for c in range(CLASSES)
    }
    averaged = np.stack([means[c] for c in range(CLASSES)])
    np.testing.assert_allclose(first.after["prototypes"].numpy(), averaged, atol=1e-6)
    expected = by_hand(averaged, 20, 3.0)
    for i in range(4):
        down = sent_down(second.down[i])
        np.testing.assert_allclose(np.stack([down[c] for c in range(CLASSES)]), expected, atol=1e-5)
    assert np.linalg.norm(expected, axis=1) == pytest.approx(3.0)


def test_a_class_that_nobody_sends_keeps_its_mean_and_is_spread_with_the_others() -> None:
    first, second = rounds(NORMED, members(), lose=lambda round, i: round == 2 and i in (0, 2))
    assert torch.equal(first.after["prototypes"][0], second.after["prototypes"][0])
    rows = second.after["prototypes"].double().numpy()
    np.testing.assert_allclose(second.after["spread"].numpy(), by_hand(rows, 20, 3.0), atol=1e-5)
    assert not torch.equal(first.after["spread"][0], second.after["spread"][0])
