"""What the others' data are worth: picks by validation, primary comparisons; figures made by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from polyfed.report.benchmark_page import picks, to_markdown, worth_of
from polyfed.report.statistics import Estimate, holm
from tests.helpers.benchmark_figures import row, setting

LOCAL = (0.50, 0.54, 0.52)


def rows(score: str = "accuracy") -> list[dict[str, Any]]:
    make = functools.partial(row, score=score)
    return [
        make("local", LOCAL, validation=0.5, sent=0),
        make("lucky", (0.90, 0.92, 0.94), validation=0.6),  # the best by test
        make("sure", (0.60, 0.66, 0.63), validation=0.7),  # the best by validation
        make("smooth", (0.55, 0.57, 0.59), "targets", validation=0.6, control="uniform"),  # sends what nobody needs
        make("flat", (0.80, 0.80, 0.80), "targets", validation=0.9, control="flat"),  # a control that needs the others
        make("sure-alone", (0.70, 0.71, 0.72), "alone", validation=0.55, sent=0),
        make("pooled", (0.80, 0.80, 0.80), "pooled", validation=0.4, sent=0),
        make("pooled-tuned", (0.65, 0.69, 0.67), "pooled-tuned", validation=0.8, sent=0),
        make("closed-form", (0.60, 0.62, 0.61), validation=0.95),
        make("closed-form-alone", (0.50, 0.52, 0.51), "alone", validation=0.95, sent=0),
    ]


def test_rows_are_picked_by_validation_never_by_test() -> None:
    one = setting(rows())
    assert {kind: pick for kind, pick in picks(one).items() if kind} == {
        "federated": ("sure", 2),
        "without": ("smooth", 3),
        "pooled": ("pooled-tuned", 2),
    }
    page = to_markdown("Worth", [one])
    assert page.split("\n\n")[1] == "## What the others' data are worth", "the first section"
    assert (
        "| one | sure 63.00 (of 2) | smooth 57.00 (of 3) | +6.00 [-0.57, +12.57] | pooled-tuned 67.00 (of 2) | "
        "+10.00 [+5.03, +14.97] | 61.00 | 51.00 |"
    ) in page, "margins: 4.3027 / sqrt(3) times 2.646 and 2"
    assert "sure 63.00" in worth_of([one]).to_text()


def test_of_errors_the_lowest_is_picked() -> None:
    found = picks(setting(rows("rmse"), "rmse"))
    assert [found[kind].row for kind in ("federated", "without")] == ["lucky", "local"]


def test_where_a_row_lacks_a_seeds_validation_score_nothing_is_picked() -> None:
    partly = rows()
    partly[1]["figures"]["validation"] = {"0": 0.99}
    found = setting(partly)
    assert picks(found)["federated"].row == "", "the row that lacks it could be the best"
    assert picks(found)["without"].row == "smooth"
    page = to_markdown("Part", [found])
    assert "| setting | best without the others | best pooled |" in page
    assert "Where rows have no validation scores, none of their kind is picked." in page


# primary comparisons --------------------------------------------------------------------------------------------------


def test_holm_as_r_adjusts() -> None:
    assert holm([0.02, 0.05, 0.03, 0.01, 0.04]) == pytest.approx([0.08, 0.09, 0.09, 0.05, 0.09])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.5, None, 0.4]) == [0.8, None, 0.8], "what is not tested is not counted"


def test_p_values_are_those_of_scipy() -> None:
    from scipy.stats import ttest_rel

    one = setting(rows())
    for upper, lower in (("sure", "local"), ("local", "lucky")):
        expected = ttest_rel(list(one.scores[upper].values()), list(one.scores[lower].values())).pvalue
        assert one.gain(upper, lower).p_value == pytest.approx(float(expected))
    assert Estimate.of({0: 0.1, 1: 0.1, 2: 0.1}).p_value == 0.0
    assert Estimate.of({0: 0.0, 1: 0.0, 2: 0.0}).p_value == 1.0
    assert Estimate.of({0: 0.1, 1: 0.2}).p_value is None, "too few seeds to say"


def test_primary_comparisons_are_those_of_all_settings_that_have_both_rows() -> None:
    one, two = setting(rows()), setting(rows()[:2], name="two")
    page = to_markdown("Primary", [one, two], primary=[["sure", "local"], ["lucky", "local"]])
    (_, section) = page.split("## Primary comparisons")
    table = section.split("\n\n")[1].splitlines()[2:]
    assert [line.split(" | ")[:2] for line in table] == [
        ["| sure - local", "one"],
        ["| lucky - local", "one"],
        ["| lucky - local", "two"],
    ]
    assert "all 3 tests of this table" in section
    assert all("**" in line for line in table)
    assert "Primary" not in to_markdown("None", [one])
