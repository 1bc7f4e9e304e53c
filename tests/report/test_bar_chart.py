"""Bars of methods and variants: the numbers by hand, and that these are what is drawn."""

from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.bar_chart import build_bars, variants
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import load_runs
from tests.helpers.readable import unreadable


def test_bars_by_hand(two_by_two: Path) -> None:
    (group,), _ = group_runs(load_runs(two_by_two))
    local, fedgh = build_bars(group)
    assert (local.method, local.accuracy, local.each) == ("local", pytest.approx(0.52), (0.5, 0.54))
    assert (fedgh.accuracy, fedgh.std, fedgh.seeds) == (pytest.approx(0.65), pytest.approx(0.005**0.5), (0, 1))
    assert build_bars(group, "received")[1].accuracy == pytest.approx(0.45)


def test_local_is_a_line_and_the_others_bars(two_by_two: Path) -> None:
    (drawing,) = variants(load_runs(two_by_two))
    axes = drawing.figure.axes[0]
    (bar,) = axes.patches
    assert bar.get_width() == pytest.approx(65)
    (line,) = (line for line in axes.lines if line.get_gid() == "local")
    assert line.get_xdata()[0] == pytest.approx(52)
    assert sorted(axes.collections[0].get_offsets()[:, 0]) == pytest.approx([60, 70])
    assert "65.00 ± 7.07" in [text.get_text() for text in axes.texts]
    assert drawing.rows[1]["each"] == "0.6 0.7"


def test_local_alone_is_a_bar(make: Any) -> None:
    make("a", "local")
    (drawing,) = variants(load_runs(make.root))
    assert drawing.figure.axes[0].patches[0].get_width() == pytest.approx(60)
    assert not drawing.figure.legends


def test_nothing_recorded(make: Any) -> None:
    make("a", "local", accuracy=None)
    with pytest.raises(ConfigError, match="no accuracy"):
        variants(load_runs(make.root))
    with pytest.raises(ConfigError, match="not scored in stage"):
        variants(load_runs(make.root), "after_training")


def test_names_of_several_lines_and_numbers_on_lines_can_be_read(make: Any) -> None:
    make("local", "local", 0, (0.5, 0.6))
    for number in range(12):
        label = f"fedgh-with-a-header-trained-for-a-hundred-epochs-and-{number}-more-words"
        make(str(number), "fedgh", 0, (0.5, 0.55 + 0.01 * number), label=label)
    (drawing,) = variants(load_runs(make.root))
    assert unreadable(drawing.figure) == []
    numbers = drawing.figure.axes[0].texts
    assert all(text.get_path_effects() for text in numbers), "a white rim where Local's line passes"
