"""All figures of real runs, through the command: files, numbers, room for every word, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyfed.analysis import plot
from polyfed.cli import app as cli
from polyfed.errors import ConfigError
from polyfed.report.plot_style import FigureWithData
from tests.helpers.readable import unreadable

RECORDS = ["curves", "clients"]
STEMS = [
    "accuracy-by-round", "accuracy-by-bytes", "accuracy-by-seconds", "accuracy-per-client", "labels", "cka", "tsne",
]  # fmt: skip


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
    assert cli.status(["plot", str(compared), "--out", str(out), "--inputs", "20"]) == 0
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
    cka = json.loads((out / "cka.json").read_text())
    of_fedmrl = {row["layer"] for row in cka["rows"] if row["name"] == "fedmrl"}
    assert of_fedmrl == {"representation", "logits"}, "FedMRL's personal network has no extractor"
    assert {(row["name"], row["seed"]) for row in cka["rows"]} == {(n, s) for n in ("local", "fedmrl") for s in (0, 1)}
    assert not (compared / "local" / "seed-0" / "analysis").exists(), "only below --out"


@pytest.mark.usefixtures("unsaved")
def test_without_a_place_figures_lie_with_the_runs_and_a_notebook_shows_them(compared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "local"
    shutil.copytree(compared / "local", copy)
    alone = plot(copy / "seed-0", ["labels"])
    assert {file.parent for file in alone.files} == {copy / "seed-0" / "analysis"}
    assert alone._repr_html_() == '<img alt="labels" src="data:image/png;base64," style="max-width:100%">'


def test_a_run_without_models_has_the_other_figures(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(compared / "local" / "seed-0", copy)
    shutil.rmtree(copy / "models")
    monkeypatch.setattr(FigureWithData, "write", lambda self, folder: [Path(self.stem)])
    done = plot(copy)
    assert [file.name for file in done.files] == STEMS[:-2]
    assert [note.partition(": ")[2].partition(":")[0] for note in done.notes] == ["cka", "tsne"]
    assert done.notes[0].endswith("holds no clients' models (models/index.json), which this figure is made of")
    with pytest.raises(ConfigError, match="holds no clients' models"):
        plot(copy, ["cka"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--figures", "curve"], "unknown figure 'curve'; did you mean 'curves'?"),
        (["--figures", "curves,"], "expected --figures as names with commas between (curves,cka), got 'curves,'"),
        (["--figures", "curves", "--inputs", "9"], "inputs: expected a figure that uses it (cka or tsne), got curves"),
        (["--figures", "cka", "--inputs", "1"], "inputs: expected at least 2, got 1"),
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
