"""What every figure has in common, by measure: shades, looks, room for every word, the files."""

import csv
import itertools
import json
from pathlib import Path

from polyfed.report.style import LOCAL_STYLE, SHADES, Drawing, blank, canvas, fills, legend, looks, save, styles


def test_shades_darken_steadily_in_grey() -> None:
    from matplotlib import colormaps

    shades = [colormaps[SHADES](step / 50) for step in range(51)]
    grey = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue, _ in shades]
    assert all(later < earlier for earlier, later in itertools.pairwise(grey))
    assert grey[0] - grey[-1] > 0.7


def test_neighbours_differ_without_colour() -> None:
    lines = [(style["marker"], str(style["linestyle"])) for style in itertools.islice(styles(), 45)]
    assert len(set(lines)) == 45
    hatches = [fill["hatch"] for fill in itertools.islice(fills(), 9)]
    assert len(set(hatches)) == 9


def test_long_words_are_wrapped_and_the_sheet_grows() -> None:
    about = "words that say at length what was measured and where " * 8
    figure, axes = blank("A title that is too long for a single line of a figure as wide as a column of text", about)
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
    files = Drawing("it", figure, {"rows": rows}, rows).write(tmp_path / "new")
    assert [file.name for file in files] == ["it.png", "it.svg", "it.json", "it.csv"]
    assert json.loads(files[2].read_text(encoding="utf-8")) == {"rows": rows}
    with files[3].open(encoding="utf-8", newline="") as stream:
        assert list(csv.DictReader(stream)) == [{"name": "ä", "value": "0.1"}, {"name": "b", "value": ""}]
    first = files[1].read_bytes()
    assert save(figure, tmp_path, "again")[1].read_bytes()[:40] == first[:40]


def test_local_has_a_look_of_its_own_and_its_variants_have_others() -> None:
    methods = ["local", "fedgh", "local", "fedin"]
    found = [style["marker"] for style in looks(methods, styles(), LOCAL_STYLE)]
    assert found == ["x", "o", "s", "^"]
