"""The page of a benchmark and its stored figures, made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.report.benchmark_page import to_markdown, write_page
from polyfed.report.benchmark_results import SettingResult, read_results, write_result
from tests.helpers.benchmark_figures import row
from tests.helpers.benchmark_figures import setting as made
from tests.helpers.refusals import refusal

LOCAL = (0.50, 0.52, 0.54)
ALONE = (0.52, 0.55, 0.58)  # gains 0.02, 0.03, 0.04, so that together adds 0.08, 0.09, 0.10
ABOVE = (0.60, 0.64, 0.68)  # gains 0.10, 0.12, 0.14: 0.12 +- 4.3027 * 0.02 / sqrt(3)
BELOW = (0.40, 0.42, 0.44)
TUNING = {"tried": {"rate": [0.1, 1.0]}, "seeds": [7], "chosen": {"rate": 0.1}, "processor_seconds": 90.0}


def setting(name: str, score: str) -> SettingResult:
    spent = {"processor_seconds": {"0": 60.0, "1": 120.0, "2": 180.0}}
    above = row("above", ABOVE, score=score) | {"tuning": TUNING}
    above["figures"] |= spent
    rows = [row("local", LOCAL, score=score), above, row("below", BELOW, score=score)]
    rows += [row("above-alone", ALONE, "alone", score=score), row("below-alone", BELOW, "alone", score=score)]
    rows.append(row("pooled-tuned", ABOVE, "pooled-tuned", "local", score=score))
    told = {"scored_on": "on one global test set, plain mean over clients", "changes": "Preset small."}
    return made(rows, score, name, **told)


def lines(page: str, begin: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| {begin} |")]


def test_a_table_by_hand() -> None:
    page = to_markdown("Two", [setting("one", "accuracy")])
    assert lines(page, "above")[-2] == (
        "| above | 64.00 ± 4.00 | +12.00 [+7.03, +16.97] | +3.00 [+0.52, +5.48] | +9.00 [+6.52, +11.48] | "
        "1.0 KiB | 2 min 00 s |"
    )
    assert "| +0.00 [+0.00, +0.00] |" in lines(page, "below")[-1]
    assert "Processor time: 6 min 00 s of all scored runs, 1 min 30 s of all trials." in page
    assert (
        "By hand, seeds 0, 1, 2. Accuracy: stage personal, on one global test set, plain mean over clients. "
        "Preset small."
    ) in page


def test_what_rows_are_counted_and_which_runs_the_limit_has_ended() -> None:
    local, above = row("local", LOCAL), row("above", ABOVE)
    local["figures"]["rounds"] = {"0": 2, "1": 1, "2": 2}
    above["figures"]["rounds"] = {"0": 1, "1": 1, "2": 1}
    counts = {"training": 240, "validation": 60, "test": 90}
    further = {"rounds": 2, "client_rows": {"0": counts, "1": counts | {"validation": 66, "test": 96}}}
    patient = made([local, above], recipe={"evaluation": {"patience": 5}}, **further)
    page = to_markdown("Limit", [patient])
    assert (
        "Rows per client, on average: 101 labeled, of them 80 for training and 21 for validation; 31 for tests." in page
    )
    assert ["2 of 3" in line for name in ("local", "above") for line in lines(page, name)[-1:]] == [True, False]
    assert "At the limit: how many runs 2 rounds have ended before validation did." in page
    endless = to_markdown("All", [made([local, above], recipe={})])
    assert "at the limit" not in endless
    assert "Validation ends no run: all have all rounds." in endless
    assert "Rows per client" not in endless, "not recorded"


def test_what_had_been_seen_before_stands_at_the_top() -> None:
    page = to_markdown("Two", [setting("one", "accuracy")], seen_before="seeds 0 to 2")
    assert page.startswith("# Two\n\nSeen before the runs: seeds 0 to 2\n\n")


def test_intervals_and_p_values_of_rows_that_are_split_anew_are_wider() -> None:
    """By hand: gains of 10, 12 and 14 points have a deviation of 2."""
    rows = [row("local", (0.50, 0.50, 0.50)), row("above", (0.60, 0.62, 0.64))]
    one = made(rows, recipe={"data": {"split": "6:2:4"}})
    assert one.gain("above").margin == pytest.approx(4.3027 * 0.02 * (1 / 3 + 1 / 2) ** 0.5, rel=1e-4)
    assert "is taken as s^2 (1/n + 0.50)" in to_markdown("Anew", [one])
    assert "(1/n" not in to_markdown("Given", [made(rows, recipe={"data": {"split": "official:8:2"}})])


def test_the_lowest_error_is_the_best() -> None:
    page = to_markdown("Errors", [setting("one", "rmse")])
    assert "| method | RMSE |" in page
    assert lines(page, "below")[-1].startswith("| below | 0.4200 ± 0.02000 |")
    assert "+0.1000" in lines(page, "below")[-1], "0.1 less than Local is a gain"


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_result(setting(name, "accuracy"), tmp_path)
    assert read_results(tmp_path, ["one", "two", "three"]) == [setting("one", "accuracy"), setting("two", "accuracy")]
    found, (page,) = write_page(tmp_path, "A & B", ["one", "two", "three"])
    assert len(found) == 2
    assert "Not begun: three." in page.read_text()
    assert "| above | rate 0.1, 1 | rate 0.1 |" in page.read_text()


def test_a_mean_is_of_all_seeds_or_not_known() -> None:
    stored = setting("one", "accuracy")
    assert max(filter(None, stored.scores["above"].values())) == 0.68
    assert stored.means("processor_seconds") == [None, 120.0, None, None, None, None]


# stored figures that are none are refused, with the file and what is wrong --------------------------------------------


def with_score(value: object) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        (scores,) = [found["rows"][1]["figures"][score] for score in ("accuracy", "rmse") if score in str(found)]
        scores["2"] = value

    return change


@pytest.mark.parametrize(
    ("score", "change", "told"),
    [
        ("accuracy", lambda found: found.update(setting="two"), "expected the setting one, got two"),
        ("accuracy", lambda found: found["rows"].append(row("above", (0.1,))), "expected each row once, got above"),
        ("accuracy", with_score(1.01), "above, seed 2: expected from 0 to 1, got 1.01"),
        ("accuracy", with_score(float("nan")), "above, seed 2: expected from 0 to 1, got nan"),
        ("accuracy", with_score("0.5"), "expected a number, got '0.5'"),
        ("rmse", with_score(-0.1), "above, seed 2: expected from 0 to inf, got -0.1"),
        ("accuracy", lambda found: found.pop("recipe"), "expected the key 'recipe', got none"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    score: str, change: Callable[[dict[str, Any]], None], told: str, tmp_path: Path
) -> None:
    write_result(setting("one", score), tmp_path)
    path = tmp_path / "one.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    said = refusal(lambda: read_results(tmp_path, ["one"]))
    assert str(path) in said
    assert told in said
