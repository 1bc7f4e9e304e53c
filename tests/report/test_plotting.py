"""All figures of real runs, through the command: files, numbers, room for every word, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.experiments.compare import compare
from polyfed.report.plot_style import FigureWithData
from polyfed.report.plotting import plot
from tests.helpers.readable import unreadable

RECORDS = ["curves", "clients"]
STEMS = [
    "accuracy-by-round", "accuracy-by-bytes", "accuracy-by-seconds", "accuracy-per-client",
]  # fmt: skip

SETTINGS = {
    "data": {"dataset": "digits", "num_clients": 4, "limit_train": 400, "max_train_per_client": 20, "split": "6:1:3"},
    "models": {"architectures": ["digits-cnn1", "digits-cnn3"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 1, "lr": 0.1},
    "run": {"executor": "serial"},
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small comparison: two architectures, two methods, two seeds, one round."""
    folder = tmp_path_factory.mktemp("plots") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.experiments.compare.write_report", lambda *_, **__: [])  # tested elsewhere
        assert not compare(Recipe.from_dict(SETTINGS), ["fedgh"], (0, 1), folder).failures
    return folder


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are named, not saved: a quarter of a second each, and tests/report/test_plot_style.py saves one."""

    def named(figure: Any, folder: Path, stem: str) -> list[Path]:
        return [folder / f"{stem}.{form}" for form in ("png", "svg") if not (folder / f"{stem}.{form}").touch()]

    monkeypatch.setattr("polyfed.report.plot_style.save", named)


@pytest.mark.slow
@pytest.mark.usefixtures("unsaved")
def test_everything_that_two_methods_allow(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[FigureWithData] = []
    plain = FigureWithData.write

    def watched(self: FigureWithData, folder: Path) -> list[Path]:
        drawn.append(self)
        return plain(self, folder)

    monkeypatch.setattr(FigureWithData, "write", watched)
    out = tmp_path / "figures"
    assert cli.status(["plot", str(compared), "--out", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == sorted(
        f"{stem}.{form}" for stem in STEMS for form in ("png", "svg", "json", "csv")
    )
    said = capsys.readouterr().out
    assert [drawing.stem for drawing in drawn] == STEMS
    for drawing in drawn:
        assert unreadable(drawing.figure) == []
        png, text = out / f"{drawing.stem}.png", json.loads((out / f"{drawing.stem}.json").read_text())
        assert f"wrote {png}" in said
        assert "digits" in text["about"]
        assert "seed" in text["about"]
        assert len((out / f"{drawing.stem}.csv").read_text().splitlines()) == len(drawing.rows) + 1
    assert not (compared / "local" / "seed-0" / "analysis").exists(), "only below --out"


@pytest.mark.usefixtures("unsaved")
def test_without_a_place_figures_lie_with_the_runs_and_a_notebook_shows_them(compared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "local"
    shutil.copytree(compared / "local", copy)
    alone = plot(copy / "seed-0", ["clients"])
    assert {file.parent for file in alone.files} == {copy / "seed-0" / "analysis"}
    assert alone._repr_html_() == '<img alt="accuracy per client" src="data:image/png;base64," style="max-width:100%">'


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--figures", "curve"], "unknown figure 'curve'; did you mean 'curves'?"),
        (["--figures", "curves,"], "expected --figures as names with commas between (curves,clients), got 'curves,'"),
        (
            ["--figures", "clients", "--stage", "received"],
            "stage: expected a figure that uses it (curves or gains)",
        ),
    ],
)
def test_what_is_refused_in_one_line(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert cli.status(["plot", str(compared / "local"), "--out", str(tmp_path / "new"), *words]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "new").exists()
