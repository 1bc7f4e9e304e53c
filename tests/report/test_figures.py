"""Figures of runs: the numbers by hand, and that these are what is drawn; what every figure has in common."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.figures import clients, curves, draw, plot
from polyfed.report.frames import client_frame, curve_frame, ranked
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import canvas, empty_figure, legend, line_style, save
from polyfed.report.run_records import load_runs
from tests.helpers.readable import unreadable


def groups_in(folder: Path) -> list[Group]:
    groups, _ = group_runs(load_runs(folder))
    return groups


def group_of(folder: Path) -> Group:
    (group,) = groups_in(folder)
    return group


def caption_of(figure: Any) -> str:
    return " ".join(figure.texts[0].get_text().split())


# curves ---------------------------------------------------------------------------------------------------------------


def points_of(group: Group, name: str) -> dict[str, list[Any]]:
    frame = curve_frame(group)
    found: dict[str, list[Any]] = frame[frame["name"] == name].to_dict("list")
    return found


def test_points_by_hand(two_by_two: Path) -> None:
    group = group_of(two_by_two)
    fedgh = points_of(group, "fedgh")
    assert fedgh["count"] == [2, 2, 2]
    assert [fedgh[axis] for axis in ("round", "bytes")] == [[1, 2, 3], [3072, 6144, 9216]]
    assert fedgh["mean"] == pytest.approx([0.4, 0.5, 0.65])
    assert (fedgh["low"], fedgh["high"]) == ([0.3, 0.4, 0.6], [0.5, 0.6, 0.7])


def test_rounds_that_were_not_evaluated_still_cost_and_a_final_one_counts(make: Any) -> None:
    folder = make("a")
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    final = records[1] | {"round": 3, "final_round": True, "accuracy": {"personal": {"mean": 0.9}}}
    records[0]["accuracy"] = {}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (*records, final)))
    line = points_of(group_of(folder), "local")
    assert (line["round"], line["bytes"], line["mean"]) == ([2, 3], [6144, 9216], [0.6, 0.9])


def test_a_method_that_sends_nothing_is_a_level(two_by_two: Path) -> None:
    for seed in (0, 1):
        path = two_by_two / f"local-{seed}" / "rounds.jsonl"
        path.write_text(re.sub(r'"bytes_(up|down)": \d+', r'"bytes_\1": 0', path.read_text()))
    axes = draw(groups_in(two_by_two), ["curves"])["accuracy-by-bytes"].axes[0]
    level, curve = axes.lines
    assert list(level.get_xdata()) == [0, 9]  # KiB, as far as the other line goes
    assert list(level.get_ydata()) == pytest.approx([52, 52])
    assert list(curve.get_ydata()) == pytest.approx([40, 50, 65])
    assert len(axes.collections) == 2  # a band for each: two seeds
    assert "sends nothing" in axes.figure.legends[0].get_texts()[0].get_text().replace("\n", " ")


def test_a_method_keeps_its_color_in_all_figures_of_a_folder(make: Any) -> None:
    make("a", "local")
    make("b", "fedavg")
    make("c", "fedgh", clients_table=[{"id": 0, "architecture": "x", "samples": 5, "accuracy": 0.5}])
    figures = draw(groups_in(make.root), ["curves", "clients"])
    drawn = [line for figure in figures.values() for line in figure.axes[0].lines]
    style = line_style(1)  # of fedavg, fedgh
    of_fedgh = [line for line in drawn if line.get_marker() == style["marker"]]
    assert len(of_fedgh) == 3
    assert {line.get_color() for line in of_fedgh} == {style["color"]}
    assert len({line.get_color() for line in drawn}) == 3, "black is Local's"


@pytest.mark.parametrize(("methods", "bands"), [(6, 6), (7, 0)])
def test_more_than_six_lines_have_no_bands(methods: int, bands: int, make: Any) -> None:
    for name in [f"m{number}" for number in range(methods)]:
        for seed in (0, 1):
            make(f"{name}-{seed}", "fedgh", seed, label=name)
    group = group_of(make.root)
    for figure in (curves(group), clients(group)):
        assert figure is not None
        assert len(figure.axes[0].collections) == bands
        assert ("band" in caption_of(figure)) is bool(bands)


def test_bytes_far_apart_are_on_a_logarithmic_axis(two_by_two: Path) -> None:
    def scale(x: str) -> str:
        figure = curves(group_of(two_by_two), x)
        assert figure is not None
        return str(figure.axes[0].get_xscale())

    assert scale("bytes") == "linear"
    for seed in (0, 1):
        path = two_by_two / f"local-{seed}" / "rounds.jsonl"
        path.write_text(path.read_text().replace('"bytes_up": 1024', '"bytes_up": 1024000'))
    assert (scale("bytes"), scale("round")) == ("log", "linear")


def test_requests_that_cannot_be_met(two_by_two: Path, make: Any) -> None:
    folder = make("empty", accuracy=None)
    (folder / "rounds.jsonl").write_text("")
    with pytest.raises(ConfigError, match="expected runs of which curves can be drawn, got others"):
        plot(folder, ["curves"])
    with pytest.raises(ConfigError, match=r"unknown figure 'curve'; did you mean 'curves'\?"):
        plot(two_by_two, ["curve"])


def test_figures_lie_with_the_runs_and_a_notebook_shows_them(two_by_two: Path, monkeypatch: Any) -> None:
    drawn = {}

    def named(figure: Any, folder: Path, stem: str) -> list[Path]:  # a picture takes a quarter of a second to save
        drawn[stem] = figure
        folder.mkdir(exist_ok=True)
        (folder / f"{stem}.png").touch()
        return [folder / f"{stem}.png", folder / f"{stem}.svg"]

    monkeypatch.setattr("polyfed.report.figures.save", named)
    done = plot(two_by_two)
    assert [*drawn] == ["accuracy-by-round", "accuracy-by-bytes", "accuracy-per-client"], "no method ran alone"
    assert {file.parent for file in done.files} == {two_by_two / "analysis"}
    assert done._repr_html_().count("<img") == 3
    for figure in drawn.values():
        assert unreadable(figure) == []
        assert "digits" in caption_of(figure)


# clients --------------------------------------------------------------------------------------------------------------


def table(
    *accuracies: float | None, names: Sequence[str] = "aabb", samples: tuple[int, ...] = (10, 20, 30, 400)
) -> list[Any]:
    return [
        {"id": n, "architecture": name, "samples": size, "accuracy": accuracy}
        for n, (accuracy, name, size) in enumerate(zip(accuracies, names, samples, strict=True))
    ]


@pytest.fixture
def runs(make: Any) -> Any:
    make("local-0", "local", 0, clients_table=table(0.5, 0.1, 0.4, 0.2))
    make("fedgh-0", "fedgh", 0, clients_table=table(0.4, 0.3, 0.2, 0.1))
    make("fedgh-1", "fedgh", 1, clients_table=table(0.5, 0.8, None, 0.6))
    return load_runs(make.root)


def test_clients_by_hand(runs: Any) -> None:
    (group,), _ = group_runs(runs)
    scores = client_frame(group)
    assert len(scores) == 11
    assert list(scores.iloc[0][["name", "seed", "client", "samples"]]) == ["local", 0, 0, 10]
    ranks = ranked(scores)
    assert ranks[ranks["name"] == "local"][["rank", "mean", "low"]].to_numpy().tolist() == [
        [1, 0.1, 0.1], [2, 0.2, 0.2], [3, 0.4, 0.4], [4, 0.5, 0.5],
    ]  # fmt: skip
    fedgh = ranks[ranks["name"] == "fedgh"]
    assert list(fedgh["mean"]) == pytest.approx([0.3, 0.4, 0.55]), "as many ranks as both seeds have"
    assert fedgh[["low", "high", "count"]].to_numpy().tolist() == [[0.1, 0.5, 2], [0.2, 0.6, 2], [0.3, 0.8, 2]]


def test_clients_are_drawn_as_found(runs: Any) -> None:
    (group,), _ = group_runs(runs)
    figure = draw([group], ["clients"])["accuracy-per-client"]
    axes = figure.axes[0]
    local, fedgh = axes.lines
    assert list(local.get_ydata()) == pytest.approx([10, 20, 40, 50])
    assert list(fedgh.get_ydata()) == pytest.approx([30, 40, 55])
    assert all(float(tick).is_integer() for tick in axes.get_xticks()), "ranks are whole numbers"
    assert "seeds 0, 1" in caption_of(figure)


# what every figure has in common --------------------------------------------------------------------------------------


def test_neighbors_differ_without_color() -> None:
    lines = [(style["marker"], str(style["linestyle"])) for style in map(line_style, range(45))]
    assert len(set(lines)) == 45


def test_long_words_are_wrapped_and_nothing_stands_on_another() -> None:
    about = "words that say at length what was measured and where " * 8
    title = "A title that is too long for a single line of a figure as wide as a column of text"
    figure, axes = empty_figure(title, about)
    handles = [axes.plot([0, 1], [0, n], label=f"{n}")[0] for n in range(20)]
    names = [f"method {n} with its many settings, $a_b$ among them, named at great length" for n in range(20)]
    legend(axes, handles, names)
    assert unreadable(figure) == []
    renderer = figure.canvas.get_renderer()
    caption, title_box = (text.get_window_extent(renderer) for text in figure.texts)
    below, grid = figure.legends[0].get_window_extent(renderer), axes.get_tightbbox(renderer)
    stacked = [title_box, caption, grid, below]
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in itertools.pairwise(stacked))
    assert "$a_b$" in figure.legends[0].get_texts()[0].get_text(), "no formula"


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        figure, ((axes,),) = canvas("Title", "About.", 1.0)
        axes.plot([0, 1], [1, 0], marker="o", clip_on=True)
        save(figure, tmp_path / name, "it")
    for form in ("png", "svg"):
        assert (tmp_path / f"one/it.{form}").read_bytes() == (tmp_path / f"two/it.{form}").read_bytes()
