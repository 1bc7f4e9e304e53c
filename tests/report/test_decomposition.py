"""Gains over Local taken apart, held against numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.comparison import compare_runs, to_csv, to_json, to_latex, to_markdown, to_text
from polyfed.report.decomposition_figure import decompositions
from polyfed.report.run_records import load_runs

# seeds 0, 1, 2                     gains over Local           together - alone
LOCAL = (0.50, 0.52, 0.54)
TOGETHER = (0.60, 0.64, 0.68)  #    0.10, 0.12, 0.14           0.06, 0.06, 0.06
ALONE = (0.54, 0.58, 0.62)  #       0.04, 0.06, 0.08
POOLED = (0.90, 0.92, 0.94)  #      0.40, 0.40, 0.40
LONGER = (0.58, 0.60, 0.62)  #      together minus it: 0.02, 0.04, 0.06


@pytest.fixture
def made(make: Any) -> Any:
    """Local, FedGH together and alone, and the ceiling; so many seeds."""

    def of(
        seeds: int = 3,
        pooled: tuple[float, ...] = POOLED,
        longer: tuple[float, ...] = LONGER,
        together: tuple[float, ...] = TOGETHER,
    ) -> Any:
        for seed in range(seeds):
            make(f"local-{seed}", "local", seed, (LOCAL[seed],))
            make(f"together-{seed}", "fedgh", seed, (together[seed],), {"header_lr": 0.1})
            alone = {"header_lr": 0.1, "alone": True}
            hyperparameters = {"header_lr": 0.1}
            folder = make(f"alone-{seed}", "fedgh", seed, (ALONE[seed],), alone, label="fedgh-alone")
            stored = json.loads((folder / "result.json").read_text()) | {"hyperparameters": hyperparameters}
            (folder / "result.json").write_text(json.dumps(stored))
            make(f"pooled-{seed}", "local", seed, (pooled[seed],), run={"control": "pooled"}, label="pooled")
            control = {"control": "longer", "control_of": ["fedgh"]}
            make(f"longer-{seed}", "local", seed, (longer[seed],), run=control, label="local-longer-4")
        return compare_runs(load_runs(make.root))

    return of


def test_by_hand(made: Any) -> None:
    (one,) = made().sections[0].decompositions
    assert (one.name, one.alone_name) == ("fedgh", "fedgh-alone")
    assert one.local == pytest.approx(0.52)
    assert one.gain.mean == pytest.approx(0.12)
    assert one.alone.mean == pytest.approx(0.06)
    assert one.federated.mean == pytest.approx(0.06)
    assert (one.gain.std, one.alone.std) == pytest.approx((0.02, 0.02))
    assert one.federated.std == pytest.approx(0.0, abs=1e-12)
    # Student's t(0.975, 2) = 4.3027: 4.3027 * 0.02 / sqrt(3)
    assert one.gain.margin == pytest.approx(0.049683, abs=1e-6)
    assert one.longer.mean == pytest.approx(0.04)
    assert one.pooled == pytest.approx(0.92)
    assert one.way == pytest.approx(0.12 / 0.40)


def test_the_sum_is_exact_on_the_seeds_that_all_have(made: Any, make: Any) -> None:
    table = made()
    make("together-3", "fedgh", 3, (0.99,), {"header_lr": 0.1})
    (one,) = compare_runs(load_runs(make.root)).sections[0].decompositions
    assert one.gain.seeds == one.alone.seeds == one.federated.seeds == (0, 1, 2)
    assert one.gain.mean == pytest.approx(one.alone.mean + one.federated.mean)
    assert one == table.sections[0].decompositions[0]


@pytest.mark.parametrize("pooled", [(0.52, 0.51, 0.56), (0.40, 0.42, 0.44)])
def test_there_is_no_way_to_what_may_be_no_better(pooled: tuple[float, ...], made: Any) -> None:
    (one,) = made(pooled=pooled).sections[0].decompositions
    assert one.pooled == pytest.approx(sum(pooled) / 3)
    assert one.way is None


def test_one_seed_claims_nothing(made: Any) -> None:
    table = made(1)
    (one,) = table.sections[0].decompositions
    assert one.federated.mean == pytest.approx(0.06)
    assert one.federated.margin is None
    assert "federated gains: nothing can be claimed of them below three seeds" in table.sections[0].notes
    assert table.sections[0].leaders == {}
    assert "interval" not in to_text(table, width=400).partition("What federation")[2].partition("accuracy in %")[0]


def test_what_tables_show(made: Any) -> None:
    table = made()
    text = to_text(table, width=400)
    assert "What federation is worth: gain over Local = gain alone + federated gain" in text
    cells = "| fedgh | +12.00 | [+7.03, +16.97] | +6.00 | [+1.03, +10.97] | +6.00 | [+6.00, +6.00] | +4.00 | 30 % |"
    assert cells in to_markdown(table)
    assert "federated gain" in to_latex(table)
    line = {row["name"]: row for row in csv.DictReader(io.StringIO(to_csv(table)))}["fedgh"]
    found = {name: float(line[name]) for name in ("gain", "gain_alone", "federated_gain", "way_to_pooled")}
    assert found == pytest.approx({"gain": 0.12, "gain_alone": 0.06, "federated_gain": 0.06, "way_to_pooled": 0.3})
    assert line["gain_seeds"] == "0 1 2"
    assert "federated gains whose 95 % interval leaves out zero: fedgh (above zero)" in table.sections[0].notes


def test_a_control_is_nobodys_rival(made: Any) -> None:
    section = made().sections[0]
    assert [row.name for row in section.rows][:2] == ["local", "fedgh"]
    assert section.finding.startswith("fedgh leads with 64.00 %, 12.00 points above Local (52.00 %)")
    assert {row.rival for row in section.rows} == {""}
    assert all(row.difference is not None for row in section.rows if row.name != "local")


@pytest.mark.parametrize(
    ("longer", "bold"),
    [
        ((0.54, 0.57, 0.60), ["fedgh"]),  # 0.06, 0.07, 0.08 behind; pooled data, far ahead, do not compete
        (LONGER, []),  # 0.02, 0.04, 0.06 behind: the interval holds zero
        ((0.70, 0.74, 0.78), []),  # 0.10 ahead, and marked itself no more
    ],
)
def test_nothing_is_bold_that_a_control_cannot_be_told_from(
    longer: tuple[float, ...], bold: list[str], made: Any
) -> None:
    table = made(longer=longer)
    section = table.sections[0]
    assert section.leaders == {column: name for name in bold for column in ("accuracy", "personal", "received")}
    assert to_markdown(table).count("**64.00 ±") == len(bold)
    told = [note.partition(",")[0] for note in section.notes if note.startswith("bold")]
    assert told == ["bold: the highest of its column (pooled data aside)" for _ in bold]


def test_other_hyperparameters_are_another_method(made: Any, make: Any) -> None:
    made()
    for seed in range(3):
        make(f"other-{seed}", "fedgh", seed, (0.7,), {"header_lr": 0.9}, label="fedgh-fast")
    names = [one.name for one in compare_runs(load_runs(make.root)).sections[0].decompositions]
    assert names == ["fedgh"]


def test_without_controls_nothing_is_said_of_them(two_by_two: Any) -> None:
    table = compare_runs(load_runs(two_by_two))
    assert table.sections[0].decompositions == ()
    assert "control" not in to_csv(table).splitlines()[0]
    told = json.loads(to_json(table))["tables"][0]
    assert "decompositions" not in told
    assert "control" not in told["rows"][0]
    with pytest.raises(ConfigError, match="no method of these runs ran alone"):
        decompositions(load_runs(two_by_two))


def test_the_figure(made: Any, make: Any) -> None:
    made()
    (drawing,) = decompositions(load_runs(make.root))
    assert drawing.stem == "decomposition"
    (row,) = drawing.rows
    assert row["federated"] == pytest.approx(0.06)
    (axes,) = drawing.figure.axes
    alone, federated = (patch for patch in axes.patches)
    assert (alone.get_x(), alone.get_width()) == pytest.approx((52.0, 6.0))
    assert (federated.get_x(), federated.get_width()) == pytest.approx((58.0, 6.0))
    lines = {line.get_gid(): line.get_xdata()[0] for line in axes.lines if line.get_gid()}
    assert lines == pytest.approx({"Local": 52.0, "pooled": 92.0})
    assert "White" not in drawing.data["about"]


@pytest.mark.parametrize("together", [(0.99, 0.60, 0.99), (0.01, 0.40, 0.01)])
def test_the_figure_shows_no_accuracy_outside_of_0_to_100(together: tuple[float, ...], made: Any, make: Any) -> None:
    made(together=together)
    (drawing,) = decompositions(load_runs(make.root))
    (axes,) = drawing.figure.axes
    low, high = axes.get_xlim()
    assert 0 <= low < high <= 100
    ends = [point for line in axes.lines if line.get_gid() is None for point in line.get_xdata()]
    assert min(ends) < 0 or max(ends) > 100, "the interval goes on, and is cut by the frame"


def test_a_loss_is_white(made: Any, make: Any) -> None:
    made(together=(0.50, 0.54, 0.58))  # 0.04 less than alone, which is 0.06 above Local
    (drawing,) = decompositions(load_runs(make.root))
    alone, federated = drawing.figure.axes[0].patches
    assert (federated.get_x(), federated.get_width()) == pytest.approx((58.0, -4.0))
    assert (alone.get_facecolor() == (1, 1, 1, 1), federated.get_facecolor() == (1, 1, 1, 1)) == (False, True)
    assert drawing.data["about"].endswith("White: a loss.")
