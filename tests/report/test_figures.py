"""The numbers behind the curves by hand; the files by their series."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import RequestError
from polyfed.report.figures import _draw, curves, series
from polyfed.report.folders import find_runs
from polyfed.report.grouping import group_runs


def _lines_in(svg: Path) -> int:
    return len(re.findall(r'id="series-\d+"', svg.read_text()))


def test_series_by_hand(two_by_two: Path) -> None:
    (group,), _ = group_runs(find_runs(two_by_two))
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
    (group,), _ = group_runs(find_runs(folder))
    (line,) = series(group, "bytes")
    assert line.x == (6144,)


@pytest.mark.parametrize("x", ["round", "bytes", "seconds"])
def test_files(two_by_two: Path, tmp_path: Path, x: str) -> None:
    png, svg = curves(find_runs(two_by_two), tmp_path / "figures", x=x)
    assert (png.name, svg.name) == (f"accuracy-by-{x}.png", f"accuracy-by-{x}.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000
    assert _lines_in(svg) == 2
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [png.name, svg.name]


def test_a_method_that_sends_nothing_is_a_level(two_by_two: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        path = two_by_two / f"local-{seed}" / "rounds.jsonl"
        path.write_text(re.sub(r'"bytes_(up|down)": \d+', r'"bytes_\1": 0', path.read_text()))
    (group,), _ = group_runs(find_runs(two_by_two))
    lines = series(group, "bytes")
    axes = _draw(group, lines, "bytes", None).axes[0]
    level, curve = axes.lines
    assert list(level.get_xdata()) == [0, 9]  # KiB, as far as the other line goes
    assert list(level.get_ydata()) == pytest.approx([52, 52])
    assert list(curve.get_ydata()) == pytest.approx([40, 50, 65])
    assert len(axes.collections) == 2  # a band for each: two seeds
    assert "sends nothing" in axes.get_legend().get_texts()[0].get_text().replace("\n", " ")


def test_one_figure_for_each_experiment_and_odd_names(make: Any, tmp_path: Path) -> None:
    make("a", label="_costs $5 and $6_")
    make("b", "fedgh", data={"name": "cifar10"})
    make("c", "fedgh", finished=False)
    files = curves(find_runs(make.root), tmp_path / "out")
    assert [file.name for file in files] == [f"accuracy-by-round-{n}.{form}" for n in (1, 2) for form in ("png", "svg")]
    assert [_lines_in(file) for file in files[1::2]] == [1, 1]


def test_requests_that_cannot_be_met(make: Any, tmp_path: Path) -> None:
    folder = make("a")
    with pytest.raises(RequestError, match="did you mean 'round'"):
        curves(find_runs(folder), tmp_path, x="rounds")
    (folder / "rounds.jsonl").write_text("")
    with pytest.raises(RequestError, match="nothing to draw"):
        curves(find_runs(folder), tmp_path)


def test_no_heavy_import_until_drawn_and_pyplot_never(two_by_two: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from polyfed.report import figures, folders, tables
heavy = {{"torch", "matplotlib", "rich", "numpy", "polyfed.engine"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
figures.curves(folders.find_runs({str(two_by_two)!r}), {str(tmp_path / "out")!r})
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
