"""What every figure has in common, by measure: shades, looks, room for every word, the files."""

import csv
import itertools
import json
from pathlib import Path

import pytest

from polyfed.report.plot_style import (
    FigureWithData,
    bar_style,
    canvas,
    empty_figure,
    inches,
    legend,
    legends,
    line_style,
    save,
    shortened,
)
from tests.helpers.quick import others_slow
from tests.helpers.readable import unreadable


def test_neighbors_differ_without_color() -> None:
    lines = [(style["marker"], str(style["linestyle"])) for style in map(line_style, range(45))]
    assert len(set(lines)) == 45
    hatches = [bar["hatch"] for bar in map(bar_style, range(9))]
    assert len(set(hatches)) == 9


@pytest.mark.parametrize("shift", others_slow(range(4), quick=[0]))  # where lines break differs
def test_a_caption_is_no_wider_than_the_figure_as_it_is_saved(shift: int) -> None:
    words = "each method's own stage (personal or received), on each client's own test data, plain mean over clients "
    figure, _ = empty_figure("Title", f"{'i' * shift} {words * 5}{'path/' * 40}")
    assert unreadable(figure) == []


def test_shortened_names_still_differ() -> None:
    assert shortened(["a long name of the first", "short"], 11) == ["a lon…first", "short"]
    alike = ["the same start, one, the same end", "the same start, two, the same end"]
    assert shortened(alike, 20) == alike
    assert shortened(["twice the same long name"] * 2, 9) == ["twic…name"] * 2
    assert inches(["", " "], 8) == 0
    assert 0.9 < inches(["i", "a name of 20 letters"], 8) < 1.3


def test_legends_stand_side_by_side() -> None:
    figure, axes = empty_figure("Title", "About.")
    (line,) = axes.plot([0, 1])
    legends(
        figure, [([line] * 3, ["one", "two", "three"]), ([line] * 9, [f"a long name, number {n}" for n in range(9)])]
    )
    assert unreadable(figure) == []
    left, right = (one.get_window_extent(figure.canvas.get_renderer()) for one in figure.legends)
    assert left.x1 <= right.x0
    assert left.y1 == right.y1, "both begin below the axes"


def test_long_words_are_wrapped_and_the_sheet_grows() -> None:
    about = "words that say at length what was measured and where " * 8
    figure, axes = empty_figure(
        "A title that is too long for a single line of a figure as wide as a column of text", about
    )
    handles = [axes.plot([0, 1], [0, n], label=f"{n}")[0] for n in range(20)]
    before = figure.get_figheight()
    legend(
        axes, handles, [f"method {n} with its many settings, $a_b$ among them, told at great length" for n in range(20)]
    )
    figure.draw_without_rendering()
    renderer, canvas_box = figure.canvas.get_renderer(), figure.bbox
    title, caption = (text.get_window_extent(renderer) for text in figure.texts)
    below, grid = figure.legends[0].get_window_extent(renderer), axes.get_tightbbox(renderer)
    stacked = [title, caption, grid, below]
    assert figure.get_figheight() > before + 2
    assert grid.height > 2.4 * figure.dpi
    for box in stacked:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= canvas_box.x1 + 1
        assert box.y1 <= canvas_box.y1
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in itertools.pairwise(stacked))
    assert "$a_b$" in figure.legends[0].get_texts()[0].get_text(), "no formula"


def test_a_drawing_leaves_its_numbers_beside_it(tmp_path: Path) -> None:
    figure, _ = canvas("Title", "About.", 1.0)
    rows = [{"name": "ä", "value": 0.1}, {"name": "b", "value": None}]
    files = FigureWithData("it", figure, {"rows": rows}, rows).write(tmp_path / "new")
    assert [file.name for file in files] == ["it.png", "it.svg", "it.json", "it.csv"]
    assert json.loads(files[2].read_text(encoding="utf-8")) == {"rows": rows}
    with files[3].open(encoding="utf-8", newline="") as stream:
        assert list(csv.DictReader(stream)) == [{"name": "ä", "value": "0.1"}, {"name": "b", "value": ""}]


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        figure, ((axes,),) = canvas("Title", "About.", 1.0)
        axes.plot([0, 1], [1, 0], marker="o", clip_on=True)
        save(figure, tmp_path / name, "it")
    for form in ("png", "svg"):
        assert (tmp_path / f"one/it.{form}").read_bytes() == (tmp_path / f"two/it.{form}").read_bytes()
