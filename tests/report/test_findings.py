"""Gains over Local taken apart, by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import to_csv, to_markdown, to_text
from polyfed.report.figures import draw
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import load_runs

# gains over Local taken apart ----------------------------------------------------------------------------------------

# seeds 0, 1, 2                     gains over Local           together - alone
LOCAL = (0.50, 0.52, 0.54)
TOGETHER = (0.60, 0.64, 0.68)  #    0.10, 0.12, 0.14           0.06, 0.06, 0.06
ALONE = (0.54, 0.58, 0.62)  #       0.04, 0.06, 0.08
POOLED = (0.90, 0.92, 0.94)  #      0.40, 0.40, 0.40


@pytest.fixture
def made(make: Any) -> Any:
    """The section of Local, FedGH together and alone, and the controls; so many seeds."""

    def of(
        seeds: int = 3,
        pooled: tuple[float, ...] = POOLED,
        together: tuple[float, ...] = TOGETHER,
        alone: tuple[float, ...] = ALONE,
    ) -> Any:
        for seed in range(seeds):
            make(f"local-{seed}", "local", seed, (LOCAL[seed],))
            make(f"together-{seed}", "fedgh", seed, (together[seed],), {"header_lr": 0.1})
            options = {"header_lr": 0.1, "alone": True}
            folder = make(f"alone-{seed}", "fedgh", seed, (alone[seed],), options, label="fedgh-alone")
            stored = json.loads((folder / "result.json").read_text()) | {"hyperparameters": {"header_lr": 0.1}}
            (folder / "result.json").write_text(json.dumps(stored))
            make(
                f"pooled-{seed}", "local", seed, (pooled[seed],), run={"control": "pooled-tuned"}, label="pooled-tuned"
            )
        return compare_runs(load_runs(make.root))

    return of


def gains(table: Any) -> dict[str, Any]:
    rows = table.sections[0].rows.set_index("name")
    found: dict[str, Any] = rows[rows["gain"].notna()].filter(like="gain").to_dict("index")
    return found


def test_gains_by_hand(made: Any, make: Any) -> None:
    one = gains(made())["fedgh"]
    keys = ("gain", "gain_alone", "federated_gain")
    assert [one[key] for key in keys] == pytest.approx([0.12, 0.06, 0.06])
    assert [one[f"{key}_std"] for key in keys] == pytest.approx([0.02, 0.02, 0.0], abs=1e-12)
    assert one["gain_margin"] == pytest.approx(0.049683, abs=1e-6)  # t(0.975, 2) * 0.02 / sqrt(3)
    make("together-3", "fedgh", 3, (0.99,), {"header_lr": 0.1})
    for seed in range(3):
        make(f"other-{seed}", "fedgh", seed, (0.7,), {"header_lr": 0.9}, label="fedgh-fast")
    again = gains(compare_runs(load_runs(make.root)))
    assert again == {"fedgh": one}, "on the seeds that all have; other hyperparameters are another method"


def test_one_seed_claims_nothing(made: Any) -> None:
    table = made(1)
    assert gains(table)["fedgh"]["federated_gain"] == pytest.approx(0.06)
    assert "federated gains: nothing can be claimed of them below three seeds" in table.sections[0].notes
    assert "interval of gain" not in to_markdown(table)


def test_what_tables_show(made: Any) -> None:
    table = made()
    section = table.sections[0]
    assert "What federation is worth: gain over Local = gain alone + federated gain" in to_text(table, width=400)
    cells = "| fedgh | +12.00 | [+7.03, +16.97] | +6.00 | [+1.03, +10.97] | +6.00 | [+6.00, +6.00] |"
    assert cells in to_markdown(table)
    line = {row["name"]: row for row in csv.DictReader(io.StringIO(to_csv(table)))}["fedgh"]
    found = [float(line[name]) for name in ("gain", "gain_alone", "federated_gain")]
    assert found == pytest.approx([0.12, 0.06, 0.06])
    assert "federated gains whose 95 % interval leaves out zero: fedgh (above zero)" in section.notes


@pytest.mark.parametrize(
    ("alone", "bold"),
    [
        ((0.54, 0.57, 0.60), "fedgh"),  # 0.06, 0.07, 0.08 behind; pooled data, far ahead, do not compete
        ((0.58, 0.60, 0.62), None),  # 0.02, 0.04, 0.06 behind: the interval holds zero
        ((0.70, 0.74, 0.78), None),  # 0.10 ahead, and marked itself no more
    ],
)
def test_nothing_is_bold_that_is_level_with_a_control(alone: tuple[float, ...], bold: str | None, made: Any) -> None:
    section = made(alone=alone).sections[0]
    assert section.leader == bold
    notes = [note.partition(",")[0] for note in section.notes if note.startswith("bold")]
    assert notes == ["bold: the highest accuracy (pooled data aside)"] * bool(bold)


def test_without_controls_nothing_is_said_of_them(two_by_two: Path) -> None:
    table = compare_runs(load_runs(two_by_two))
    assert not {"control", "gain"} & set(to_csv(table).splitlines()[0].split(","))
    assert not draw(group_runs(load_runs(two_by_two))[0], ["gains"])


def test_the_figure(made: Any, make: Any) -> None:
    made(together=(0.50, 0.54, 0.58))  # 0.04 less than alone, which is 0.06 above Local
    figure = draw(group_runs(load_runs(make.root))[0], ["gains"])["decomposition"]
    (axes,) = figure.axes
    alone, federated = axes.patches
    assert (alone.get_x(), alone.get_width()) == pytest.approx((52.0, 6.0))
    assert (federated.get_x(), federated.get_width()) == pytest.approx((58.0, -4.0))
    assert (alone.get_facecolor() == (1, 1, 1, 1), federated.get_facecolor() == (1, 1, 1, 1)) == (False, True)
    assert figure.texts[0].get_text().endswith("White: a loss.")
    lines = {line.get_gid(): line.get_xdata()[0] for line in axes.lines if line.get_gid()}
    assert lines == pytest.approx({"Local": 52.0, "pooled-tuned": 92.0})
