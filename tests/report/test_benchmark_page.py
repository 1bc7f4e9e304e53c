"""The page of a benchmark and its stored figures, made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.report.benchmark_figures import gains_figure
from polyfed.report.benchmark_page import Wanted, to_markdown, write_page
from polyfed.report.benchmark_results import (
    ProcessorTime,
    RowResult,
    SettingResult,
    join_processor_time,
    join_results,
    mean_curve,
    read_processor_time,
    read_results,
    write_result,
)
from polyfed.report.benchmark_worth import gains_of
from polyfed.results.fields import validated
from tests.helpers.refusals import refusal

LOCAL = (0.50, 0.52, 0.54)
ALONE = (0.52, 0.55, 0.58)  # gains 0.02, 0.03, 0.04, so that together adds 0.08, 0.09, 0.10
ABOVE = (0.60, 0.64, 0.68)  # gains 0.10, 0.12, 0.14: 0.12 +- 4.3027 * 0.02 / sqrt(3)
NOTHING = Wanted([], [])
BELOW = (0.40, 0.42, 0.44)
SPENT = ProcessorTime(tuning={"above": 90.0}, runs={"above": {"0": 60.0, "1": 120.0, "2": 180.0}})


def row(name: str, values: tuple[float, ...], control: str = "", method: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "method": method or name,
        "control": control,
        "hyperparameters": {},
        "stage": "personal",
        "accuracy": {str(seed): value for seed, value in enumerate(values)},
        "bytes_up": 512 * len(values),
        "bytes_down": 512 * len(values),
    }


def setting(name: str, score: str) -> SettingResult:
    rows = [row("local", LOCAL), row("above", ABOVE), row("below", BELOW)]
    rows += [row("above-alone", ALONE, "alone", "above"), row("below-alone", BELOW, "alone", "below")]
    rows.append(row("pooled-tuned", ABOVE, "pooled-tuned", "local"))
    told = {"setting": name, "score": score, "about": "By hand", "changes": "Preset small."}
    told["scored_on"] = "on one global test set, plain mean over clients"
    tuning = {"above": {"tried": {"rate": [0.1, 1.0]}, "seeds": [7], "chosen": {"rate": 0.1}}}
    made = {"rounds": 2, "clients": 3, "recipe": {"training": {"rounds": 2}}, "versions": [{"polyfed": "0"}]}
    return validated(SettingResult, {**told, **made, "tuning": tuning, "rows": rows})


def lines(page: str, begin: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| {begin} |")]


def test_a_table_by_hand() -> None:
    page = to_markdown("Two", [setting("one", "accuracy")], {"one": SPENT})
    assert lines(page, "above")[-2] == (
        "| above | 64.00 ± 4.00 | +12.00 [+7.03, +16.97] | 6.19 | +3.00 | +9.00 | 1.0 KiB | 2 min 00 s |"
    ), "smallest shown: (4.3027 + 1.0607) * 2 / sqrt(3)"
    assert "| above | +9.00 [+6.52, +11.48] |" in page
    assert "| below | +0.00 [+0.00, +0.00] |" in page
    assert "Processor time: 6 min 00 s of all scored runs, 1 min 30 s of all trials." in page
    assert (
        "By hand, seeds 0, 1, 2. Accuracy: stage personal, on one global test set, plain mean over clients. "
        "Preset small."
    ) in page


def test_the_lowest_error_is_the_best() -> None:
    page = to_markdown("Errors", [setting("one", "rmse")], {})
    assert "| method | RMSE |" in page
    assert lines(page, "below")[-1].startswith("| below | 0.4200 ± 0.02000 |")
    assert "+0.1000" in lines(page, "below")[-1], "0.1 less than Local is a gain"


def test_what_was_tried_is_told_and_what_lies_at_an_end() -> None:
    """After widening, 1 is in the middle; words have no ends."""
    grid = {"tried": {"rate": [0.1, 1.0], "how": ["a", "b"], "steps": [1, 2]}, "seeds": [7], "widened": {"rate": 10.0}}
    tuning = {"above": grid | {"chosen": {"rate": 1.0, "how": "a", "steps": 1}}}
    found = validated(SettingResult, setting("one", "accuracy").model_dump() | {"tuning": tuning})
    page = to_markdown("Tuned", [found], {})
    assert "| above | rate 0.1, 1, 10; how a, b; steps 1, 2 | rate 1; how a; steps 1 | steps |" in page
    assert "may lie beyond; 1 of 2." in page


def test_rounds_that_were_run_and_curves_are_shown(tmp_path: Path) -> None:
    known = setting("one", "accuracy")
    curved = row("above", ABOVE) | {"rounds": {"0": 10, "1": 20, "2": 15}, "curve": {"5": 0.5, "20": 0.64}}
    for one in (join_results(known, part(curved), []), known.model_copy(update={"setting": "two"})):
        write_result(one, SPENT, tmp_path)
    _, files = write_page(tmp_path, "Curves", {"one": NOTHING, "two": NOTHING})
    page = (tmp_path / "benchmark.md").read_text(encoding="utf-8")
    first, second = page.split("## one")[1].split("## two")
    assert " | +9.00 | 15 | 1.0 KiB | " in lines(first, "above")[0]
    assert "| rounds |" not in second
    assert [path.name for path in files if path.stem.startswith("curves")] == ["curves-one.png", "curves-one.svg"]
    assert page.count("](curves-one.png)") == 1
    assert "curves-two" not in page


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
    whole = Wanted(["local", "above"], [0, 1])
    found, (page, *drawn) = write_page(tmp_path, "A & B", {"one": whole, "two": whole, "three": whole})
    assert len(found) == 2
    assert "Not finished: three." in page.read_text()
    assert "](gains.png)" in page.read_text()
    assert sorted(path.name for path in drawn) == ["gains.csv", "gains.json", "gains.png", "gains.svg"]


def test_a_method_stands_beside_its_variants_with_other_targets() -> None:
    """0.12 above Local with what the others know, 0.03 with something else in its place."""
    plain = setting("one", "accuracy")
    own = validated(RowResult, row("above-own", ALONE, "targets", "above"))
    found = plain.model_copy(update={"rows": [*plain.rows, own]})
    page = to_markdown("Two", [found, setting("two", "accuracy")], {})
    assert "## Gains over other targets" in page
    assert "| above - above-own | +9.00 [+6.52, +11.48] | - |" in page
    assert "other targets" not in to_markdown("None", [plain], {})


def test_a_control_stands_beside_the_variant_that_differs_in_its_targets_alone() -> None:
    """Not beside the method itself, which has the labels of public rows."""
    plain = setting("one", "accuracy")
    settings = {"above": (1, "none", 1), "unlabeled": (0, "none", 2), "pseudo": (0, "labels", 5)}
    rows = [
        row(name, ABOVE if name == "above" else ALONE, "targets" if name == "pseudo" else "", "above")
        | {"hyperparameters": {"public": {"epochs": epochs}, "control": control, "digest": tuned}}
        for name, (epochs, control, tuned) in settings.items()
    ]
    tuning = {"pseudo": {"tried": {"digest": [1, 5]}, "seeds": [7], "chosen": {"digest": 5}}}
    found = validated(SettingResult, plain.model_dump() | {"rows": [row("local", LOCAL), *rows], "tuning": tuning})
    page = to_markdown("One", [found], {})
    assert "| unlabeled - pseudo | +0.00 [+0.00, +0.00] |" in page
    assert "above - pseudo" not in page


def test_the_figure_is_of_accuracies(tmp_path: Path) -> None:
    for name, score in (("one", "rmse"), ("two", "accuracy")):
        write_result(setting(name, score), ProcessorTime(tuning={}, runs={}), tmp_path)
    write_page(tmp_path, "Both", {"one": NOTHING, "two": NOTHING})
    drawn = json.loads((tmp_path / "gains.json").read_text(encoding="utf-8"))["gains"]
    assert {row["setting"] for row in drawn} == {"two"}, "an RMSE has another unit"
    (tmp_path / "two.json").unlink()
    _, files = write_page(tmp_path, "Errors", {"one": NOTHING})
    assert [path.name for path in files] == ["benchmark.md"]


def test_what_is_lacking_is_told() -> None:
    wanted = {
        "one": Wanted(["local", "above", "fd"], [0, 1, 2, 3]),
        "two": Wanted(["local"], [0]),
    }
    page = to_markdown("Two", [setting("one", "accuracy")], {}, wanted)
    assert "Not finished: one (seed 3 of local, seed 3 of above, fd); two." in page
    page = to_markdown("Two", [setting("one", "accuracy")], {}, {"one": Wanted(["above"], [0], readings=["above"])})
    assert "Not finished" not in page
    assert "Readings of papers whose formulas, or code, were not at hand: above." in page


def test_an_overview_counts_who_gains_and_by_whom() -> None:
    stored = setting("one", "accuracy")
    errors = setting("two", "rmse")
    page = to_markdown("Both", [stored, errors], {}, {"one": NOTHING, "two": NOTHING})
    (_, part_) = page.split("## Overview")
    part_ = part_.split("## Federated gains")[0]
    assert "| one | 2 | 1 | 1 | 0 | 1 of 1 |" in part_
    assert "| two | 2 | 1 | 0 | 1 | 1 of 1 |" in part_, "of errors, less is better"


def test_what_lies_below_local_has_gained_nothing() -> None:
    """Together 10 points above alone, and 10 below Local."""
    stored = setting("one", "accuracy")
    alone = part(row("below-alone", (0.30, 0.32, 0.34), "alone", "below"))
    found = join_results(stored, alone, [])
    page = to_markdown("Below", [found], {})
    (_, counted) = page.split("## Overview")
    assert "| one | 2 | 1 | 1 | 0 |" in counted, "above alone gains by the others"
    assert "| below | *+10.00 [+10.00, +10.00]* |" in page
    assert "| -20.00 | *+10.00* |" in lines(page, "below")[-1]
    figure = gains_figure({"one": gains_of(found)}, ["above", "below"])
    assert figure is not None
    opacity = [image.get_alpha().ravel().tolist() for axes in figure.figure.axes for image in axes.images]
    assert opacity == [[1, 1], [1, 0.25]]


def test_gains_over_a_tuned_local() -> None:
    stored = setting("one", "accuracy")
    tuned = part(row("local-tuned", (0.55, 0.57, 0.59), method="local"))
    page = to_markdown("Tuned", [join_results(stored, tuned, [])], {})
    (_, part_) = page.split("## Gains over local-tuned")
    assert "| above | +7.00 [+2.03, +11.97] |" in part_, "0.07 +- 4.3027 * 0.02 / sqrt(3)"
    assert "| local" not in part_.split("As far as")[0]


# rows from several places -------------------------------------------------------------------------------------------


def part(*rows: dict[str, Any]) -> SettingResult:
    return validated(SettingResult, setting("one", "accuracy").model_dump() | {"rows": list(rows)})


def test_further_seeds_join_a_row_and_others_stay() -> None:
    more = row("above", (0.1,))
    more["accuracy"] = {"4": 0.1}
    joined = join_results(setting("one", "accuracy"), part(more, row("fd", LOCAL)), ["fd"])
    assert [one.name for one in joined.methods] == ["local", "fd", "above", "below"]
    above = joined.row("above")
    assert above is not None
    assert above.by_seed == {0: 0.60, 1: 0.64, 2: 0.68, 4: 0.1}
    assert above.bytes_of_run == 1024
    assert "Fewer seeds: local 0, 1, 2; fd 0, 1, 2;" in to_markdown("Joined", [joined], {})
    spent = ProcessorTime(tuning={"fd": 1.0}, runs={"above": {"4": 5.0}})
    found = join_processor_time(SPENT, spent, joined.rows)
    assert found.runs["above"] == {"0": 60.0, "1": 120.0, "2": 180.0, "4": 5.0}
    assert found.tuning == {"above": 90.0, "fd": 1.0}


def test_a_curve_goes_on_with_the_last_accuracy_of_a_seed_that_has_stopped() -> None:
    first, second = {"5": 0.2, "10": 0.4}, {"5": 0.4, "10": 0.6, "13": 0.7}
    both = {"5": 0.3, "10": 0.5, "13": 0.55}
    assert mean_curve([(first, 1), (second, 1)]) == both
    stored = row("above", (0.4,)) | {"validation": {"0": 0.3}, "best": {"0": 0.4}, "rounds": {"0": 10}, "curve": first}
    found = row("above", (0.0,)) | {"accuracy": {"1": 0.6, "2": 0.8}, "validation": {"1": 0.5, "2": None}}
    found |= {"best": {"1": 0.7}}
    joined = join_results(part(stored), part(found | {"rounds": {"1": 12, "2": 13}, "curve": second}), []).rows[0]
    assert joined.validation == {"0": 0.3, "1": 0.5, "2": None}
    assert joined.best == {"0": 0.4, "1": 0.7}
    assert joined.rounds == {"0": 10, "1": 12, "2": 13}
    assert joined.curve == {"5": 0.333333, "10": 0.533333, "13": 0.6}, "two of three seeds are in the second"
    assert join_results(part(stored), part(found), []).rows[0].curve == {}, "not known of all seeds"


@pytest.mark.parametrize("change", [{"hyperparameters": {"rate": 2.0}}, {"accuracy": {"2": 0.1}}])
def test_a_row_of_other_hyperparameters_or_run_again_replaces(change: dict[str, Any]) -> None:
    anew = row("above", (0.3,)) | change
    joined = join_results(setting("one", "accuracy"), part(anew), [])
    above = joined.row("above")
    assert above is not None
    assert above.model_dump() == {"validation": {}, "best": {}, "rounds": {}, "curve": {}} | anew
    assert (
        join_processor_time(SPENT, ProcessorTime(tuning={}, runs={}), [above]).runs["above"].keys()
        == above.accuracy.keys()
    )


# the figure -----------------------------------------------------------------------------------------------------------


def test_cells_are_the_settings_gains() -> None:
    gains = gains_of(setting("one", "accuracy"))
    figure = gains_figure({"one": gains, "two": gains}, ["below", "above", "local"])
    assert figure is not None
    parts = {(row["setting"], row["method"], row["part"]): round(row["mean"], 9) for row in figure.rows}
    assert len(parts) == 8
    assert [parts["one", name, part] for name in ("below", "above") for part in ("gain", "federated")] == [
        -0.1, 0.0, 0.12, 0.09,
    ]  # fmt: skip
    over_local, federated = figure.figure.axes[:2]
    assert [label.get_text() for label in over_local.get_yticklabels()] == ["below", "above"]
    assert [label.get_text() for label in federated.get_xticklabels()] == ["one", "two"]
    texts = {(text.get_position(), text.get_text(), text.get_fontweight()) for text in federated.texts}
    assert ((0, 0), "+0.0", "normal") in texts, "its interval includes zero"
    assert ((0, 1), "+9.0", "bold") in texts


# stored figures that are none are refused, with the file and what is wrong --------------------------------------------


def with_score(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["rows"][1]["accuracy"].update({"2": value})


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
    write_result(setting("one", score), ProcessorTime(tuning={}, runs={}), tmp_path)
    path = tmp_path / "one.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    said = refusal(lambda: read_results(tmp_path, ["one"]))
    assert str(path) in said
    assert told in said


def test_figures_of_other_data_are_not_joined() -> None:
    stored, found = (
        setting("one", "accuracy").model_copy(update={"data": data}) for data in ({"0": "a", "1": "b"}, {"1": "b"})
    )
    joined = join_results(stored, found, [])
    assert joined.data == {"0": "a", "1": "b"}
    other = found.model_copy(update={"data": {"1": "c", "2": "d"}, "rows": found.rows[:1]})
    assert join_results(stored, other, []) == other
    unknown = stored.model_copy(update={"data": {}})
    assert join_results(unknown, other, []).data == {"1": "c", "2": "d"}
