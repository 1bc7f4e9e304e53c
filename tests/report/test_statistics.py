"""Intervals, paired differences and what a target took, against numbers worked out apart."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from polyfed.errors import ConfigError
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.report.statistics import (
    Target,
    ci_half_width,
    first_reach,
    leader,
    paired_difference,
    paper_bytes,
    to_target,
)
from polyfed.results.schema import RoundRecord


@pytest.mark.parametrize("values", [[0.5, 0.7, 0.5], [0.61, 0.6, 0.64], [0.1, 0.2, 0.15, 0.3, 0.22]])
def test_the_interval_is_scipys(values: list[float]) -> None:
    n, mean = len(values), sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    low, high = scipy.stats.t.interval(0.95, n - 1, mean, std / math.sqrt(n))
    margin = ci_half_width(values)
    assert margin is not None
    assert (mean - margin, mean + margin) == pytest.approx((low, high))


def test_the_interval_of_three_by_the_printed_table() -> None:
    assert ci_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)  # t(0.975, 2) = 4.303, s = 1


def test_fewer_than_three_values_or_an_unknown_one_have_no_interval() -> None:
    assert ci_half_width([0.5]) is None
    assert ci_half_width([0.5, 0.7]) is None
    assert ci_half_width([]) is None
    assert ci_half_width([0.5, 0.6, None]) is None
    assert ci_half_width([0.5, 0.5, 0.5]) == 0.0


@pytest.mark.parametrize("sign", [1, -1])
def test_differences_are_paired_and_have_a_sign(sign: int) -> None:
    mine, other = {0: 0.60, 1: 0.70, 2: 0.65, 9: 0.1}, {2: 0.60, 1: 0.54, 0: 0.50, 8: 0.9}
    found = paired_difference(mine, other) if sign == 1 else paired_difference(other, mine)
    assert set(found.seeds) == {0, 1, 2}
    each = [sign * 0.10, sign * 0.16, sign * 0.05]
    assert found.mean == pytest.approx(sum(each) / 3)
    test = scipy.stats.ttest_rel([0.60, 0.70, 0.65], [0.50, 0.54, 0.60]).confidence_interval(0.95)
    assert found.mean is not None
    assert found.margin is not None
    low, high = (test.low, test.high) if sign == 1 else (-test.high, -test.low)
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx((low, high))
    unpaired = scipy.stats.ttest_ind([0.60, 0.70, 0.65], [0.50, 0.54, 0.60]).confidence_interval(0.95)
    assert unpaired.high - unpaired.low != pytest.approx(2 * found.margin)


def by_seed(*values: float | None) -> dict[int, float | None]:
    return dict(enumerate(values))


def leads(**scores: dict[int, float | None]) -> str | None:
    return leader(scores, scores)


def test_a_row_leads_where_its_difference_to_every_other_is_more_than_chance() -> None:
    low, high = by_seed(0.5, 0.6, 0.7), by_seed(0.55, 0.66, 0.76)  # differences 0.05, 0.06, 0.06, whatever the seed
    wild = by_seed(0.1, 0.7, 0.8)  # 0.45, -0.04, -0.04 below: a lower mean than the next, and the interval holds zero
    assert leads(low=low, high=high) == "high"
    assert leads(low=low, high=high, lowest=by_seed(0.1, 0.1, 0.1)) == "high"
    assert leads(low=low, close=by_seed(0.6, 0.6, 0.7)) is None  # 0.1, 0, 0: margin 0.14
    assert leads(low=low, high=high, near=by_seed(0.60, 0.60, 0.76)) is None
    assert leads(low=low, high=high, wild=wild) is None
    assert leads(low=low, high=high, few=by_seed(0.1, 0.2)) is None
    assert leads(low=low, high=high, unknown=by_seed(0.9, 0.9, None)) == "high"  # the table shows no mean of it
    assert leads(low=low, same=dict(low)) is None
    assert leads(low=by_seed(0.5, 0.6), high=by_seed(0.55, 0.66)) is None  # two seeds
    assert leads(low=low, unknown=by_seed(0.9, 0.9, None)) is None  # nobody to compare with
    assert leads(low=low, elsewhere={7: 0.9, 8: 0.9, 9: 0.9}) is None  # no seed in common
    assert leads(low=low, more={**high, 3: 0.0, 4: 0.0}) is None  # ahead on shared seeds, not in the mean that is shown
    assert leads() is None


def test_who_may_not_lead_stands_in_the_way() -> None:
    rows = {"low": by_seed(0.5, 0.6, 0.7), "control": by_seed(0.56, 0.65, 0.77), "high": by_seed(0.55, 0.66, 0.76)}
    assert leader(rows, ["low", "high"]) is None  # level with the control
    assert leader({**rows, "control": by_seed(0.4, 0.5, 0.6)}, ["low", "high"]) == "high"
    assert leader({**rows, "control": by_seed(0.9, 0.9, 0.9)}, ["low", "high"]) is None
    errors = {"low": by_seed(0.5, 0.6, 0.7), "high": by_seed(0.55, 0.66, 0.76)}
    assert leader(errors, errors, lower_is_better=True) == "low"
    assert leader(errors, ["high"], lower_is_better=True) is None


def test_no_shared_seed_and_one_shared_seed() -> None:
    nothing = paired_difference({0: 0.5}, {1: 0.6})
    assert (nothing.seeds, nothing.mean, nothing.std, nothing.margin) == ((), None, None, None)
    one = paired_difference({0: 0.5, 1: 0.7}, {1: 0.6})
    assert (one.seeds, one.std, one.margin) == ((1,), None, None)
    assert one.mean == pytest.approx(0.1)


# targets --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "share", "of"),
    [
        (0.6, 0.6, ""),
        ("0.6", 0.6, ""),
        ("60 %", 0.6, ""),
        (" 90% of Local ", 0.9, "local"),
        ("90 % of best", 0.9, "best"),
    ],
)
def test_targets_as_one_writes_them(text: str | float, share: float, of: str) -> None:
    assert (Target.parse(text).share, Target.parse(text).of) == (pytest.approx(share), of)


@pytest.mark.parametrize("text", ["", "high", "0", "1.2", "-0.5", "101 %", "90 % of fedgh", "nan", "0.6 0.7"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^target: expected an accuracy such as 0\.6 or '60 %'"):
        Target.parse(text)


def test_a_number_that_was_meant_in_per_cent() -> None:
    with pytest.raises(ConfigError, match="got '90'; did you mean '90 %'"):
        Target.parse("90")


def test_a_share_of_another_row() -> None:
    assert Target.parse("0.6").accuracy(None, None) == 0.6
    assert Target.parse("90 % of local").accuracy(0.5, 0.8) == pytest.approx(0.45)
    assert Target.parse("90 % of best").accuracy(0.5, 0.8) == pytest.approx(0.72)
    assert Target.parse("90 % of local").accuracy(None, 0.8) is None


def one(make: Any, name: str, *accuracies: float, **more: Any) -> RunRecord:
    make(name, "fedgh", accuracies=accuracies, **more)
    (run,) = load_runs(make.root / name)
    return run


def test_the_first_round_at_the_target_counts_and_all_that_was_spent_up_to_it(make: Any) -> None:
    found = first_reach(one(make, "a", 0.3, 0.6, 0.7, 0.8), 0.6, "personal")
    assert found is not None
    assert (found.round, found.bytes_up, found.bytes_down, found.bytes) == (2, 2048, 4096, 6144)
    assert (found.seconds, found.lost) == (3.0, False)
    received = first_reach(one(make, "b", 0.3, 0.6, 0.7, 0.8), 0.6, "received")  # 0.2 lower throughout
    assert received is not None
    assert received.round == 4


def test_never_reached(make: Any) -> None:
    assert first_reach(one(make, "a", 0.3, 0.59), 0.6, "personal") is None
    assert first_reach(one(make, "b", 0.3, 0.59), 0.1, "after_training") is None  # not scored there


def test_reached_and_lost_again(make: Any) -> None:
    lost = first_reach(one(make, "a", 0.3, 0.65, 0.5, 0.55), 0.6, "personal")
    back = first_reach(one(make, "b", 0.3, 0.65, 0.5, 0.75), 0.6, "personal")
    assert lost is not None
    assert back is not None
    assert (lost.round, lost.lost, back.round, back.lost) == (2, True, 2, True)


def test_rounds_that_were_not_scored_are_spent_all_the_same(make: Any) -> None:
    run = one(make, "a", 0.7, 0.7, 0.7)
    lines = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()]
    lines[0] |= {"evaluated": False, "accuracy": {}}
    for number, line in enumerate(lines, start=1):
        line |= {"bytes_up_paper": 10 * number, "bytes_down_paper": number}
    rounds = [RoundRecord(**line) for line in lines]
    found = first_reach(RunRecord(run.path, run.result, rounds), 0.6, "personal")
    assert found is not None
    assert (found.round, found.bytes, found.bytes_paper) == (2, 6144, 33)
    assert paper_bytes(rounds, both_ways=False) == 60
    assert paper_bytes(run.rounds) == 9216  # as sent, where the paper's count was not recorded


def test_over_seeds_all_must_have_reached_it(make: Any, tmp_path: Path) -> None:
    runs = [one(make, f"s{seed}", *found, seed=seed) for seed, found in enumerate([(0.6, 0.7), (0.3, 0.6)])]
    both = to_target(runs, 0.6, "personal")
    assert (both.reached, both.runs, both.rounds, both.bytes, both.seconds) == (2, 2, 1.5, 4608, 2.25)
    assert both.rounds_std == pytest.approx(math.sqrt(0.5))
    half = to_target(runs, 0.65, "personal")
    assert (half.reached, half.rounds, half.rounds_std, half.bytes, half.seconds) == (1, None, None, None, None)
    assert half.by_seed == {0: 2, 1: None}
    assert half.lost == 0
