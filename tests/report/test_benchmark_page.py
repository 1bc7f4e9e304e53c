"""The page of a benchmark, of figures made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.report.benchmark_page import ranking, to_markdown, write_page
from polyfed.report.benchmark_results import (
    ProcessorTime,
    SettingResult,
    read_processor_time,
    read_results,
    write_result,
)
from polyfed.results.fields import validated

LOCAL = (0.50, 0.52, 0.54)
ABOVE = (0.60, 0.64, 0.68)  # gains 0.10, 0.12, 0.14: 0.12 +- 4.3027 * 0.02 / sqrt(3)
BELOW = (0.40, 0.42, 0.44)
SPENT = ProcessorTime(tuning={"above": 90.0}, runs={"above": {"0": 60.0, "1": 120.0, "2": 180.0}})


def row(name: str, values: tuple[float, ...], control: str = "") -> dict[str, Any]:
    accuracy = {str(seed): value for seed, value in enumerate(values)}
    return {
        "name": name,
        "method": name,
        "control": control,
        "stage": "personal",
        "accuracy": accuracy,
        "bytes_up": 512,
        "bytes_down": 512,
    }


def setting(name: str, score: str) -> SettingResult:
    gain = {"mean": 0.12, "margin": 0.05}
    return validated(
        SettingResult,
        {
            "setting": name,
            "score": score,
            "caption": "By hand.",
            "rounds": 2,
            "clients": 3,
            "tuned": {"above": {"rate": 0.1}},
            "versions": {},
            "rows": [row("local", LOCAL), row("above", ABOVE), row("below", BELOW), row("pooled", ABOVE, "pooled")],
            "gains": [
                {"name": "above", "gain": gain, "alone": gain, "federated": {"mean": 0.0, "margin": 0.1}, "way": 0.5},
                {"name": "below", "gain": gain, "alone": gain, "federated": gain, "way": None},
            ],
        },
    )


def lines(page: str, begin: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| {begin} |")]


def test_a_table_by_hand() -> None:
    page = to_markdown("Two", [setting("one", "accuracy")], {"one": SPENT})
    assert lines(page, "above")[-1] == (
        "| above | 64.00 ± 4.00 | [54.06, 73.94] | +12.00 [+7.03, +16.97] | +12.00 | +0.00 | 50 % | 1.0 KiB | "
        "2 min 00 s | +12288.00 | +6.00 |"
    )
    assert lines(page, "below")[-1].endswith(" | - | - |"), "a loss has no price"
    assert "| below | **+12.00 [+7.00, +17.00]** |" in page, "an interval that leaves out zero is bold"
    assert "| above | +0.00 [-10.00, +10.00] |" in page
    assert "Chosen by validation: above: rate = 0.1." in page
    assert "Processor time: 6 min 00 s of all scored runs, 1 min 30 s of all trials." in page


def test_the_lowest_error_is_the_best() -> None:
    assert list(ranking([setting("one", "accuracy")]).ranks) == ["above", "local", "below"]
    ranked = ranking([setting("one", "rmse")])
    assert ranked.ranks == {"below": (1.0,), "local": (2.0,), "above": (3.0,)}
    page = to_markdown("Errors", [setting("one", "rmse")], {})
    assert "| method | RMSE |" in page
    assert lines(page, "below")[-1].startswith("| below | 0.4200 ± 0.02000 |")
    assert "+0.1000" in lines(page, "below")[-1], "0.1 less than Local is a gain"


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    spent = {
        "one": ProcessorTime(tuning={"above": 2.0, "below": 0.5}, runs={"above": {"0": 1.0}}),
        "two": ProcessorTime(tuning={}, runs={"above": {"0": None}}),
    }
    for name, one in spent.items():
        write_result(setting(name, "accuracy"), one, tmp_path)
    assert read_results(tmp_path, ["one", "two", "three"]) == [setting("one", "accuracy"), setting("two", "accuracy")]
    assert read_processor_time(tmp_path) == spent
    times = (tmp_path / "processor-seconds.json").read_bytes()
    for name in ("two", "one"):
        reordered = ProcessorTime(tuning=dict(reversed(spent[name].tuning.items())), runs=spent[name].runs)
        write_result(setting(name, "accuracy"), reordered, tmp_path)
    assert (tmp_path / "processor-seconds.json").read_bytes() == times, "another order, the same file"
    found, (page, *drawn) = write_page(tmp_path, "A & B", ["one", "two", "three"])
    assert len(found) == 2
    assert "Not finished: three." in page.read_text()
    assert "](gains.png)" in page.read_text()
    assert sorted(path.name for path in drawn) == ["gains.csv", "gains.json", "gains.png", "gains.svg"]


@pytest.mark.parametrize("score", ["accuracy", "rmse"])
def test_controls_have_no_rank(score: str) -> None:
    assert "pooled" not in ranking([setting("one", score)]).ranks


def test_the_figure_is_of_accuracies(tmp_path: Path) -> None:
    for name, score in (("one", "rmse"), ("two", "accuracy")):
        write_result(setting(name, score), ProcessorTime(tuning={}, runs={}), tmp_path)
    write_page(tmp_path, "Both", ["one", "two"])
    drawn = json.loads((tmp_path / "gains.json").read_text(encoding="utf-8"))["gains"]
    assert {row["setting"] for row in drawn} == {"two"}, "an RMSE has another unit"
    (tmp_path / "two.json").unlink()
    _, files = write_page(tmp_path, "Errors", ["one"])
    assert [path.name for path in files] == ["benchmark.md"]


def test_a_method_that_a_setting_lacks_has_no_rank_and_is_drawn(tmp_path: Path) -> None:
    whole = setting("one", "accuracy")
    rows, gains = [[one for one in part if one.name != "above"] for part in (whole.rows, whole.gains)]
    fewer = whole.model_copy(update={"setting": "two", "rows": rows, "gains": gains})
    for one in (whole, fewer):
        write_result(one, ProcessorTime(tuning={}, runs={}), tmp_path)
    _, (page, *_) = write_page(tmp_path, "Both", ["one", "two"])
    assert "Without a rank, as a setting lacks them: above (two)." in page.read_text(encoding="utf-8")
    drawn = json.loads((tmp_path / "gains.json").read_text(encoding="utf-8"))["gains"]
    assert [(row["setting"], row["method"]) for row in drawn if row["part"] == "gain"] == [
        ("one", "below"),
        ("one", "above"),
        ("two", "below"),
    ]
