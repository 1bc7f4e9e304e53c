"""The numbers behind the curves by hand; the files by their series."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.errors import ConfigError
from polyfed.report.bar_chart import variants
from polyfed.report.clients import clients, sizes
from polyfed.report.figures import curve_drawings, curves, draw_series, series
from polyfed.report.grouping import group_runs
from polyfed.report.plot_style import bar_style, line_style
from polyfed.report.run_records import load_runs
from tests.helpers.quick import others_slow


def _lines_in(svg: Path) -> int:
    return len(re.findall(r'id="series-\d+"', svg.read_text()))


def test_series_by_hand(two_by_two: Path) -> None:
    (group,), _ = group_runs(load_runs(two_by_two))
    local, fedgh = series(group)
    assert (local.name, fedgh.name, fedgh.seeds) == ("local", "fedgh", 2)
    assert fedgh.x == (1, 2, 3)
    assert fedgh.mean == pytest.approx((0.4, 0.5, 0.65))
    assert fedgh.low == (0.3, 0.4, 0.6)
    assert fedgh.high == (0.5, 0.6, 0.7)
    assert series(group, "bytes")[1].x == (3072, 6144, 9216)
    assert series(group, "seconds")[1].x == (1.5, 3.0, 4.5)
    assert series(group, stage="received")[1].mean == pytest.approx((0.2, 0.3, 0.45))


def test_rounds_that_were_not_evaluated_still_cost(make: Any) -> None:
    folder = make("a")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    lines[0] = re.sub(r'"accuracy": \{.*\}\}', '"accuracy": {}', lines[0])
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    (group,), _ = group_runs(load_runs(folder))
    (line,) = series(group, "bytes")
    assert line.x == (6144,)


@pytest.mark.parametrize("x", others_slow(["round", "bytes", "seconds"], quick=["bytes"]))
def test_files(two_by_two: Path, tmp_path: Path, x: str) -> None:
    png, svg = curves(load_runs(two_by_two), tmp_path / "figures", x=x)
    assert (png.name, svg.name) == (f"accuracy-by-{x}.png", f"accuracy-by-{x}.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000
    assert _lines_in(svg) == 2
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [png.name, svg.name]


def test_a_method_that_sends_nothing_is_a_level(two_by_two: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        path = two_by_two / f"local-{seed}" / "rounds.jsonl"
        path.write_text(re.sub(r'"bytes_(up|down)": \d+', r'"bytes_\1": 0', path.read_text()))
    (group,), _ = group_runs(load_runs(two_by_two))
    lines = series(group, "bytes")
    axes = draw_series(group, lines, "bytes", None).axes[0]
    level, curve = axes.lines
    assert list(level.get_xdata()) == [0, 9]  # KiB, as far as the other line goes
    assert list(level.get_ydata()) == pytest.approx([52, 52])
    assert list(curve.get_ydata()) == pytest.approx([40, 50, 65])
    assert len(axes.collections) == 2  # a band for each: two seeds
    assert "sends nothing" in axes.figure.legends[0].get_texts()[0].get_text().replace("\n", " ")


def test_a_method_keeps_its_color_in_all_figures_of_a_folder(make: Any) -> None:
    """FedGH's: beside FedAvg, without it in another experiment, as line, bar and mark, whoever is not finished."""
    make("a", "local")
    make("b", "fedavg")
    make("c", "fedgh", clients_table=[{"id": 0, "architecture": "x", "samples": 5, "accuracy": 0.5}])
    make("d", "local", data={"dataset": "cifar10"})
    make("e", "fedgh", data={"dataset": "cifar10"})
    make("f", "fd", finished=False)
    runs = load_runs(make.root)
    (marks,) = sizes(runs)
    drawn = [line for one in (*curve_drawings(runs), *clients(runs)) for line in one.figure.axes[0].lines]
    style = line_style(2)  # of fd, fedavg, fedgh
    of_fedgh = [line for line in drawn if line.get_marker() == style["marker"]]
    assert len(of_fedgh) == 4
    assert {line.get_color() for line in (*of_fedgh, marks.figure.axes[0].lines[0])} == {style["color"]}
    assert len({line.get_color() for line in drawn}) == 3, "black is Local's"
    bars = [patch for one in variants(runs) for patch in one.figure.axes[0].patches]
    faces = [bar.get_facecolor()[:3] for bar in bars if bar.get_gid() == "bar fedgh"]
    assert faces == [pytest.approx(bar_style(2)["facecolor"])] * 2


@pytest.mark.parametrize(("methods", "bands"), [(6, 6), (7, 0)])
def test_more_than_six_lines_have_no_bands(methods: int, bands: int, make: Any) -> None:
    for name in [f"m{number}" for number in range(methods)]:
        for seed in (0, 1):
            make(f"{name}-{seed}", "fedgh", seed, label=name)
    for (drawing,) in (curve_drawings(load_runs(make.root)), clients(load_runs(make.root))):
        assert len(drawing.figure.axes[0].collections) == bands
        assert ("band" in drawing.data["about"]) is bool(bands)
        assert drawing.rows[0]["low"] is not None


def test_bytes_far_apart_are_on_a_logarithmic_axis(two_by_two: Path) -> None:
    runs = load_runs(two_by_two)
    assert curve_drawings(runs, "bytes")[0].figure.axes[0].get_xscale() == "linear"
    for seed in (0, 1):
        path = two_by_two / f"local-{seed}" / "rounds.jsonl"
        path.write_text(path.read_text().replace('"bytes_up": 1024', '"bytes_up": 1024000'))
    (drawing,) = curve_drawings(load_runs(two_by_two), "bytes")
    assert drawing.figure.axes[0].get_xscale() == "log"
    assert curve_drawings(load_runs(two_by_two), "round")[0].figure.axes[0].get_xscale() == "linear"


def test_smoothed_curves_and_their_numbers_by_hand(two_by_two: Path) -> None:
    (plain,) = curve_drawings(load_runs(two_by_two))
    (smooth,) = curve_drawings(load_runs(two_by_two), smooth=2)
    means = [[row["mean"] for row in drawing.rows if row["name"] == "fedgh"] for drawing in (plain, smooth)]
    assert means == [pytest.approx([0.4, 0.5, 0.65]), pytest.approx([0.4, 0.45, 0.575])]
    assert list(smooth.figure.axes[0].lines[1].get_ydata()) == pytest.approx([40, 45, 57.5])
    assert smooth.data["lines"][1]["low"] == pytest.approx((0.3, 0.35, 0.5))
    assert "the last 2 evaluated rounds" in smooth.data["about"]
    assert "evaluated rounds" not in plain.data["about"]


def test_one_figure_for_each_experiment_and_odd_names(make: Any, tmp_path: Path) -> None:
    make("a", label="_costs $5 and $6_")
    make("b", "fedgh", data={"dataset": "cifar10"})
    make("c", "fedgh", finished=False)
    files = curves(load_runs(make.root), tmp_path / "out")
    assert [file.name for file in files] == [f"accuracy-by-round-{n}.{form}" for n in (1, 2) for form in ("png", "svg")]
    assert [_lines_in(file) for file in files[1::2]] == [1, 1]


def test_requests_that_cannot_be_met(make: Any, tmp_path: Path) -> None:
    folder = make("a")
    with pytest.raises(ConfigError, match="did you mean 'round'"):
        curves(load_runs(folder), tmp_path, x="rounds")
    (folder / "rounds.jsonl").write_text("")
    with pytest.raises(ConfigError, match="nothing to draw"):
        curves(load_runs(folder), tmp_path)


@pytest.mark.slow
def test_no_heavy_import_until_drawn_and_pyplot_never(two_by_two: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from polyfed.report import figures
from polyfed.report import run_records
from polyfed.report import comparison
from tests.helpers.quick import others_slow
heavy = {{"torch", "matplotlib", "rich", "numpy", "polyfed.engine"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
figures.curves(run_records.load_runs({str(two_by_two)!r}), {str(tmp_path / "out")!r})
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def record_figures(root: Path) -> None:
    """Every record gets a macro F1 of half its accuracy, and a lowest tenth 0.25 below."""
    for path in root.glob("*/rounds.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record["metrics"] = {s: {"f1": {"mean": a["mean"] / 2}} for s, a in record["accuracy"].items()}
            for found in record["accuracy"].values():
                found["bottom_decile"] = found["mean"] - 0.25
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_other_figures_by_hand(two_by_two: Path, tmp_path: Path) -> None:
    record_figures(two_by_two)
    (group,), _ = group_runs(load_runs(two_by_two))
    assert series(group, metric="f1")[1].mean == pytest.approx((0.2, 0.25, 0.325))
    assert series(group, metric="bottom_decile")[1].mean == pytest.approx((0.15, 0.25, 0.4))
    assert series(group, stage="received", metric="f1")[1].mean == pytest.approx((0.1, 0.15, 0.225))
    axes = draw_series(group, series(group, metric="f1"), "round", None, "f1").axes[0]
    assert axes.get_ylabel() == "test macro F1 [%]"
    assert axes.figure.texts[0].get_text() == "Macro F1 against rounds"
    png, _ = curves(load_runs(two_by_two), tmp_path / "figures", metric="f1")
    assert png.name == "f1-by-round.png"


def test_the_command_draws_and_prints_them(
    two_by_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_figures(two_by_two)
    for path in two_by_two.glob("*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"metrics": {"personal": {"f1": {"mean": 0.375}}}}))
    words = ["report", str(two_by_two), "--out", str(tmp_path / "out"), "--metric", "f1"]
    assert cli.status(words) == 0
    assert "F1" not in capsys.readouterr().out
    assert cli.status([*words, "--metrics"]) == 0
    assert ["fedgh", "37.50"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (tmp_path / "out" / "f1-by-round.svg").exists()
    assert "| 37.50 |" in (tmp_path / "out" / "comparison.md").read_text()


def test_figures_that_are_unknown_or_were_not_recorded(two_by_two: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'balanced_accuracy'"):
        curves(load_runs(two_by_two), tmp_path, metric="balanced-accuracy")
    with pytest.raises(ConfigError, match="has recorded 'auc'"):
        curves(load_runs(two_by_two), tmp_path, metric="auc")


def test_a_final_record_is_a_point_after_the_last_round(make: Any) -> None:
    folder = make("a", "fedgh")
    last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    last |= {"round": 3, "final_round": True, "accuracy": {"personal": {"mean": 0.9}}}
    with (folder / "rounds.jsonl").open("a") as stream:
        stream.write(json.dumps(last) + "\n")
    (group,), _ = group_runs(load_runs(folder))
    (line,) = series(group)
    assert (line.x, line.mean) == ((1, 2, 3), (0.5, 0.6, 0.9))
