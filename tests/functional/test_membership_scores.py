"""Ratios to shadow models, and how good a guess is, against numbers worked out by hand or by brute force."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional.membership_scores import (
    auc,
    likelihood_ratio,
    logit_of_true_class,
    loss_scores,
    roc,
    tpr_at_fpr,
    wilson_interval,
)


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_log_odds_and_loss_are_those_of_the_softmax() -> None:
    logits, y = draws(0, 6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(axis=1, keepdims=True)
    own = p[np.arange(6), y.numpy()]
    assert logit_of_true_class(logits, y).tolist() == pytest.approx(np.log(own / (1 - own)).tolist())
    assert loss_scores(logits, y).tolist() == pytest.approx(np.log(own).tolist())
    sure = torch.tensor([[100.0, 0.0], [-100.0, 0.0]])  # p comes out as 1 and 0
    assert logit_of_true_class(sure, torch.tensor([0, 0])).tolist() == [100, -100]


def test_the_online_ratio_is_that_of_two_gaussians_fitted_by_hand() -> None:
    shadows = torch.tensor([[1.0, 9.0], [3.0, 8.0], [0.0, 4.0], [-2.0, 2.0]])
    inside = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    target = torch.tensor([2.5, 2.0])
    spread_in, spread_out = math.sqrt((2 + 2) / 2), math.sqrt((2 + 0.5) / 2)  # of both rows: the mean variance
    row = [
        (NormalDist(2, spread_in), NormalDist(-1, spread_out)),
        (NormalDist(3, spread_in), NormalDist(8.5, spread_out)),
    ]
    expected = [math.log(a.pdf(t) / b.pdf(t)) for (a, b), t in zip(row, target.tolist(), strict=True)]
    assert likelihood_ratio(target, shadows, inside).tolist() == pytest.approx(expected)
    assert expected[0] > 0
    assert expected[1] > 0
    low = likelihood_ratio(torch.tensor([-1.0, 9.0]), shadows, inside)
    assert bool((low < 0).all()), "both signs"


@pytest.mark.parametrize("count", [64, 63])
def test_with_many_shadow_models_each_row_has_its_own_spread(count: int) -> None:
    scale = torch.tensor([0.1, 10.0], dtype=torch.float64)
    within, without = (draws(2, count, 2) + 1) * scale, draws(3, count, 2) * scale
    inside = (torch.arange(2 * count) < count).unsqueeze(1).expand(-1, 2)
    sides = []
    for shadows in (within, without):
        own = shadows.std(dim=0) if count == 64 else shadows.var(dim=0).mean().sqrt().expand(2)
        sides.append([NormalDist(*pair) for pair in zip(shadows.mean(dim=0).tolist(), own.tolist(), strict=True)])
    expected = [math.log(a.pdf(1.0) / b.pdf(1.0)) for a, b in zip(*sides, strict=True)]
    found = likelihood_ratio(torch.ones(2), torch.cat([within, without]), inside)
    assert found.tolist() == pytest.approx(expected)


def test_shadow_models_that_do_not_suffice_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two shadow models"):
        likelihood_ratio(torch.zeros(3), torch.zeros(2, 3), torch.tensor([[True], [False]]).expand(2, 3))


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


def test_roc_and_rates_agree_with_counting() -> None:
    scores, member = draws(8, 300).round(decimals=1), torch.arange(300) < 120
    scores[:120] += 0.7
    alarms, hits = roc(scores, member)
    for threshold in scores.unique().tolist():
        called = scores >= threshold
        point = (float((called & ~member).sum()) / 180, float((called & member).sum()) / 120)
        assert (
            min(abs(a - point[0]) + abs(h - point[1]) for a, h in zip(alarms.tolist(), hits.tolist(), strict=True))
            < 1e-9
        )
    for fpr in (0.01, 0.1):
        reached = max(h for a, h in zip(alarms.tolist(), hits.tolist(), strict=True) if a <= fpr + 1e-9)
        found = tpr_at_fpr(scores, member, fpr)
        assert found is not None
        assert found.value == pytest.approx(reached)
        assert found.low <= found.value <= found.high
    assert tpr_at_fpr(scores, member, 0.001) is None, "180 rows do not tell 0.1 %"


def test_wilson_is_the_root_of_its_equation() -> None:
    for count, total in ((0, 10), (3, 10), (10, 10)):
        found = wilson_interval(count, total)
        assert found.value == count / total
        for end in {found.low, found.high} - {0.0, 1.0}:
            assert abs(count / total - end) == pytest.approx(1.95996 * math.sqrt(end * (1 - end) / total), abs=1e-5)


@pytest.mark.parametrize("member", [[True, True], [False, False]])
def test_one_kind_of_rows_alone_is_refused(member: list[bool]) -> None:
    for score in (auc, roc):
        with pytest.raises(ValueError, match="expected members and others"):
            score(torch.zeros(2), torch.tensor(member))  # type: ignore[operator]


@pytest.mark.parametrize("member", [[True, False, False], [False, True, True]])
def test_a_single_row_on_a_side_has_the_widest_interval(member: list[bool]) -> None:
    found = auc(torch.tensor([1.0, 0.0, 2.0]), torch.tensor(member))
    assert found == (0.5, 0.0, 1.0)
    all_told_apart = auc(torch.tensor([3.0, 0.0, 2.0]), torch.tensor([True, False, False]))
    assert all_told_apart == (1.0, 0.5, 1.0)
