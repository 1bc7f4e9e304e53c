"""Intervals, paired differences and what a target took, against numbers worked out apart."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed.report.frames import round_frame
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import load_runs
from polyfed.report.statistics import Estimate, leader, resplit_ratio, to_target, total


@pytest.mark.parametrize("values", [[0.5, 0.7, 0.5], [0.1, 0.2, 0.15, 0.3, 0.22]])
def test_the_interval_is_scipys(values: list[float]) -> None:
    import scipy.stats

    n, mean = len(values), sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    low, high = scipy.stats.t.interval(0.95, n - 1, mean, std / math.sqrt(n))
    margin = Estimate.of(dict(enumerate(values))).margin
    assert margin is not None
    assert (mean - margin, mean + margin) == pytest.approx((low, high))


def test_fewer_than_three_values_or_an_unknown_one_have_no_interval() -> None:
    for values in ([0.5], [0.5, 0.7], [], [0.5, 0.6, None]):
        assert Estimate.of(dict(enumerate(values))).margin is None
    assert Estimate.of(dict.fromkeys(range(3), 0.5)).margin == 0.0


@pytest.mark.parametrize("sign", [1, -1])
def test_differences_are_paired_and_have_a_sign(sign: int) -> None:
    import scipy.stats

    mine, other = {0: 0.60, 1: 0.70, 2: 0.65, 9: 0.1}, {2: 0.60, 1: 0.54, 0: 0.50, 8: 0.9}
    found = Estimate.difference(mine, other) if sign == 1 else Estimate.difference(other, mine)
    assert set(found.seeds) == {0, 1, 2}
    assert found.mean == pytest.approx(sign * (0.10 + 0.16 + 0.05) / 3)
    test = scipy.stats.ttest_rel([0.60, 0.70, 0.65], [0.50, 0.54, 0.60]).confidence_interval(0.95)
    assert found.mean is not None
    assert found.margin is not None
    low, high = (test.low, test.high) if sign == 1 else (-test.high, -test.low)
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx((low, high))
    nothing = Estimate.difference({0: 0.5}, {1: 0.6})
    assert (nothing.seeds, nothing.mean) == ((), None)


@pytest.mark.parametrize(
    ("mean", "margin", "is_distinguishable"),
    [(-0.2, 0.1, True), (0.1, 0.2, False), (0.1, 0.1, False), (0.2, None, None), (None, None, None)],
)
def test_what_is_distinguishable(mean: float | None, margin: float | None, is_distinguishable: bool | None) -> None:
    assert Estimate(mean, 0.1, margin).is_distinguishable is is_distinguishable


# rows that seeds split anew -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "ratio"),
    [
        ({"split": "6:1:3"}, 3 / 7),
        ({"split": "50:16:34"}, 34 / 66),
        ({"split": "9:1:0", "test": "global"}, 0.0),
        ({"split": "official:8:2"}, 0.0),
        ({"split": "official"}, 0.0),
        ({}, 0.0),
    ],
)
def test_only_rows_that_are_split_by_their_seeds_have_a_ratio(data: dict[str, str], ratio: float) -> None:
    assert resplit_ratio(data) == pytest.approx(ratio)


def test_shared_rows_widen_the_interval_as_nadeau_and_bengio_have_it() -> None:
    """Equation by equation: a loop over squares, Student's quantile, and the p-value of the same error."""
    import scipy.stats

    values, ratio = [0.02, 0.05, 0.01, 0.04, 0.03], 3 / 7
    mean = sum(values) / 5
    squares = 0.0
    for value in values:
        squares += (value - mean) ** 2
    error = math.sqrt((1 / 5 + ratio) * squares / 4)
    found = Estimate.of(by_seed(*values), ratio)
    assert found.margin == pytest.approx(float(scipy.stats.t.ppf(0.975, 4)) * error)
    assert found.p_value == pytest.approx(2 * float(scipy.stats.t.sf(mean / error, 4)))
    assert (found.is_distinguishable, Estimate.of(by_seed(*values)).is_distinguishable) == (False, True)


def test_the_wider_interval_covers_what_the_plain_one_misses() -> None:
    """Two models that are equally good, scored on seven splits of 200 rows: the plain interval is often wrong."""
    draws = np.random.default_rng(0)
    missed = {0.0: 0, 3 / 7: 0}
    for _ in range(200):
        rows = draws.standard_normal(200)  # by how much one model is better than the other on each row
        scores = {seed: float(draws.permutation(rows)[:60].mean()) for seed in range(7)}
        for ratio in missed:
            missed[ratio] += bool(Estimate.of(scores, ratio).is_distinguishable)
    assert missed[0.0] > 40, "more than a fifth, where 5 % were promised"
    assert missed[3 / 7] <= 16, "8 %, of 5 % and what chance adds"


def test_who_leads_depends_on_shared_rows() -> None:
    rows = {"low": by_seed(0.5, 0.6, 0.7), "high": by_seed(0.53, 0.64, 0.75)}  # 0.03, 0.04, 0.05: margin 0.025
    assert leader(rows, rows) == "high"
    assert leader(rows, rows, resplit=3 / 7) == "high", "its margin is 0.0375"
    assert leader(rows, rows, resplit=1.0) is None


def by_seed(*values: float | None) -> dict[int, float | None]:
    return dict(enumerate(values))


def leads(**scores: dict[int, float | None]) -> str | None:
    return leader(scores, scores)


def test_a_row_leads_where_its_difference_to_every_other_is_more_than_chance() -> None:
    low, high = by_seed(0.5, 0.6, 0.7), by_seed(0.55, 0.66, 0.76)  # differences 0.05, 0.06, 0.06, whatever the seed
    wild = by_seed(0.1, 0.7, 0.8)  # 0.45, -0.04, -0.04 below: a lower mean than the next, and the interval holds zero
    assert leads(low=low, high=high) == "high"
    assert leads(low=low, close=by_seed(0.6, 0.6, 0.7)) is None  # 0.1, 0, 0: margin 0.14
    assert leads(low=low, high=high, wild=wild) is None
    assert leads(low=low, high=high, few=by_seed(0.1, 0.2)) is None
    assert leads(low=low, high=high, unknown=by_seed(0.9, 0.9, None)) == "high"  # the table shows no mean of it
    assert leads(low=by_seed(0.5, 0.6), high=by_seed(0.55, 0.66)) is None  # two seeds
    assert leads(low=low, unknown=by_seed(0.9, 0.9, None)) is None  # nobody to compare with
    assert leads(low=low, more={**high, 3: 0.0, 4: 0.0}) is None  # ahead on shared seeds, not in the mean that is shown
    assert leads() is None


def test_who_may_not_lead_stands_in_the_way() -> None:
    rows = {"low": by_seed(0.5, 0.6, 0.7), "control": by_seed(0.56, 0.65, 0.77), "high": by_seed(0.55, 0.66, 0.76)}
    assert leader(rows, ["low", "high"]) is None  # level with the control
    assert leader({**rows, "control": by_seed(0.4, 0.5, 0.6)}, ["low", "high"]) == "high"
    errors = {"low": by_seed(0.5, 0.6, 0.7), "high": by_seed(0.55, 0.66, 0.76)}
    assert leader(errors, errors, lower_is_better=True) == "low"


# targets --------------------------------------------------------------------------------------------------------------
def needed(folder: Path, accuracy: float = 0.6, stage: str = "personal") -> dict[str, list[float | None]]:
    """By the runs of a folder, which are one row; seed by seed."""
    (group,), _ = group_runs(load_runs(folder))
    found = to_target(round_frame(group, stage), group.seeds, accuracy)
    return {key: list(by_seed.values()) for key, by_seed in found.items()}


@pytest.mark.parametrize(
    ("accuracies", "stage", "round_"),
    [
        ((0.3, 0.6, 0.7, 0.8), "personal", 2),
        ((0.3, 0.6, 0.7, 0.8), "received", 4),  # 0.2 lower throughout
        ((0.3, 0.65, 0.5, 0.55), "personal", 2),
        ((0.3, 0.59), "personal", None),
        ((0.7, 0.8), "after_training", None),  # not scored there
    ],
)
def test_the_first_round_at_the_target_counts(
    make: Any, accuracies: tuple[float, ...], stage: str, round_: int | None
) -> None:
    found = needed(make("a", accuracies=accuracies), 0.6, stage)
    assert found["rounds"] == [round_]
    spent = None if round_ is None else (round_ * 3072, round_ * 1.5)
    assert (None if spent is None else (found["bytes"][0], found["seconds"][0])) == spent


def test_rounds_that_were_not_scored_are_spent_all_the_same(make: Any) -> None:
    folder = make("a", accuracies=(0.7, 0.7, 0.7))
    (group,), _ = group_runs(load_runs(folder))
    assert total(round_frame(group), "paper_up", "paper_down") == 9216  # as sent: the paper's count was not recorded
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines[0] |= {"evaluated": False, "accuracy": {}}
    for number, line in enumerate(lines, start=1):
        line |= {"bytes_up_paper": 10 * number, "bytes_down_paper": number}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = needed(folder)
    assert [found[key] for key in ("rounds", "bytes", "bytes_paper")] == [[2], [6144], [33]]


def test_a_seed_that_has_not_reached_it_is_none(make: Any) -> None:
    for seed, accuracies in enumerate([(0.6, 0.7), (0.3, 0.6)]):
        make(f"s{seed}", seed=seed, accuracies=accuracies)
    both = needed(make.root)
    assert [both[key] for key in ("rounds", "bytes", "seconds")] == [[1, 2], [3072, 6144], [1.5, 3.0]]
    half = needed(make.root, 0.65)
    assert [half[key] for key in ("rounds", "bytes", "seconds")] == [[2, None], [6144, None], [3.0, None]]
