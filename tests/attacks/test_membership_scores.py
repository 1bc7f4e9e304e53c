"""Guesses from losses, and how good a guess is, against numbers worked out by hand or by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.attacks.inference import auc, loss_scores, tpr_at_fpr


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_losses_are_those_of_the_softmax() -> None:
    logits, y = draws(0, 6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(axis=1, keepdims=True)
    own = p[np.arange(6), y.numpy()]
    assert loss_scores(logits, y).tolist() == pytest.approx(np.log(own).tolist())


def test_auc_and_its_interval_are_those_of_all_pairs() -> None:
    scores, member = draws(6, 40).round(decimals=1), draws(7, 40) > 0
    scores[member] += 0.5
    mine, others = scores[member].numpy(), scores[~member].numpy()
    wins = (mine[:, None] > others[None]) + 0.5 * (mine[:, None] == others[None])
    error = math.sqrt(wins.mean(axis=1).var(ddof=1) / len(mine) + wins.mean(axis=0).var(ddof=1) / len(others))
    found = auc(scores, member)
    assert found.value == pytest.approx(wins.mean())
    assert found.high - found.value == pytest.approx(min(1.96 * error, 1 - wins.mean()), rel=1e-3)
    assert auc(-scores, member).value == pytest.approx(1 - wins.mean()), "the other sign"


def test_rates_agree_with_counting() -> None:
    scores, member = draws(8, 300).round(decimals=1), torch.arange(300) < 120
    scores[:120] += 0.7
    for fpr in (0.01, 0.1):
        called = [scores > threshold for threshold in scores.unique().tolist()]
        reached = max(float((c & member).sum()) / 120 for c in called if float((c & ~member).sum()) / 180 <= fpr)
        found = tpr_at_fpr(scores, member, fpr)
        assert found is not None
        assert found.value == pytest.approx(reached)
        for end in (found.low, found.high):  # the roots of Wilson's equation
            assert abs(reached - end) == pytest.approx(1.95996 * math.sqrt(end * (1 - end) / 120), abs=1e-5)
    assert tpr_at_fpr(scores, member, 0.001) is None, "180 rows do not tell 0.1 %"


@pytest.mark.parametrize("member", [[True, True], [False, False]])
def test_one_kind_of_rows_alone_is_refused(member: list[bool]) -> None:
    with pytest.raises(ValueError, match="expected members and others"):
        auc(torch.zeros(2), torch.tensor(member))


@pytest.mark.parametrize("member", [[True, False, False], [False, True, True]])
def test_a_single_row_on_a_side_has_the_widest_interval(member: list[bool]) -> None:
    found = auc(torch.tensor([1.0, 0.0, 2.0]), torch.tensor(member))
    assert found == (0.5, 0.0, 1.0)
    all_told_apart = auc(torch.tensor([3.0, 0.0, 2.0]), torch.tensor([True, False, False]))
    assert all_told_apart == (1.0, 0.5, 1.0)
