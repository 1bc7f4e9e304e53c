"""The command line end to end, on a few handwritten digits."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import polyfed
from polyfed.cli import app as cli
from polyfed.testing.fixtures import TIMES
from tests.helpers.processes import forked
from tests.helpers.quick import others_slow
from tests.helpers.small_recipe import small_recipe

pytestmark = pytest.mark.usefixtures("unrendered")

PATIENCE = 600  # seconds for a process on a busy machine; it is never waited for so long otherwise
RECIPE = small_recipe(
    data={"num_clients": 3, "holdout": 30, "max_train_per_client": 40, "max_test_per_client": 20},
    training={"rounds": 2},
    evaluation={"extra_stages": ["personal", "received"]},
    methods={
        "fedavg": {"aggregation": "same-shape"},
        "fedgh-random-header": {"name": "fedgh", "header_lr": 0.0},
    },
    presets={"short": {"note": "one round", "training": {"rounds": 1}}},
)


class Said(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    error: str


class Terminal:
    """Gives commands in this process, in a folder with a recipe."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        (folder / "tiny.toml").write_text(RECIPE)
        self._capsys = capsys

    def __call__(self, *words: str, status: int = 0) -> Said:
        self._capsys.readouterr()
        code = cli.status(words)
        said = Said(code, *self._capsys.readouterr())
        assert said.status == status, said
        assert "Traceback" not in said.error
        return said


@pytest.fixture
def polyfed_(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.chdir(tmp_path)
    return Terminal(tmp_path, capsys)


def rounds(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, without what differs between equal runs."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in (*TIMES, "seal")} for line in lines]


def models(folder: Path) -> dict[str, bytes]:
    """The weights that a run exported."""
    return {path.name: path.read_bytes() for path in sorted((folder / "models").iterdir())}


def test_run_shows_what_came_out_and_where_it_is(polyfed_: Terminal) -> None:
    said = polyfed_("run", "tiny.toml", "--seed", "3")
    folder = Path("runs/tiny-fedgh-seed3")
    for words in ("Accuracy: stage personal", " received ", " KiB ", f"run folder {folder}"):
        assert words in said.out
    assert "fedgh: done" in said.error
    result = json.loads((folder / "result.json").read_text())
    assert f" {100 * result['accuracy']:.2f} " in said.out
    assert (result["method"], result["dataset"], result["clients"], result["seed"]) == ("fedgh", "digits", 3, 3)
    stored = tomllib.loads((folder / "recipe.toml").read_text())
    assert stored["method"]["header_epochs"] == 1
    assert len(rounds(folder)) == 2
    assert len(list((folder / "models").glob("personal-*.safetensors"))) == 3
    assert "3 clients, 1 rounds, seed 0" in polyfed_("check", "tiny.toml", "--preset", "short").out


def test_a_run_is_not_run_twice_unless_forced(polyfed_: Terminal) -> None:
    first = polyfed_("run", "tiny.toml", "--out", "mine", "--quiet")
    assert first.error == ""
    before = (Path("mine/result.json").read_bytes(), rounds(Path("mine")), models(Path("mine")))
    assert "already holds a run" in polyfed_("run", "tiny.toml", "--out", "mine", status=2).error
    again = polyfed_("run", "tiny.toml", "--out", "mine", "--resume", "-q")
    assert again.out == first.out
    assert Path("mine/result.json").read_bytes() == before[0]
    polyfed_("run", "tiny.toml", "--out", "mine", "--overwrite", "-q")
    assert (rounds(Path("mine")), models(Path("mine"))) == before[1:]
    polyfed_("run", "tiny.toml", "--out", "mine", "--overwrite", "-q", "--set", "training.lr=0.1")
    assert rounds(Path("mine")) != before[1]


def test_compare_runs_all_adds_local_and_skips_what_is_done(polyfed_: Terminal) -> None:
    words = ["compare", "tiny.toml", "--methods", "fedavg,fedgh,fedgh-random-header", "--seeds", "0,1", "--out", "all"]
    first = polyfed_(*words)
    names = ["local", "fedavg", "fedgh", "fedgh-random-header"]
    folders = [Path("all") / name / f"seed-{seed}" for name in names for seed in (0, 1)]
    assert all((folder / "result.json").exists() for folder in folders)
    for name in names:
        assert f"\n{name}" in first.out
    assert {path.name for path in Path("all").iterdir() if path.is_file()} == {
        "comparison.md", "comparison.csv", "comparison-clients.csv",
        "command.txt", "report.html",
        *(f"{stem}{end}" for stem in ("accuracy-by-round", "accuracy-by-bytes", "accuracy-per-client")
          for end in (".png", ".svg")),
    }  # fmt: skip
    assert Path("all/command.txt").read_text() == f"{shlex.join(['polyfed', *words])}\n"
    rows = list(csv.DictReader(Path("all/comparison.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == names
    assert {row["seeds"] for row in rows} == {"0 1"}
    times = [(folder / "result.json").stat().st_mtime_ns for folder in folders]
    second = polyfed_(*words)
    assert second.error.count("already done") == 8
    assert second.out == first.out
    assert [(folder / "result.json").stat().st_mtime_ns for folder in folders] == times
    polyfed_("compare", "tiny.toml", "--methods", "fedavg", "--seeds", "0", "--out", "all", "--overwrite", "-q")
    assert (folders[0] / "result.json").stat().st_mtime_ns > times[0]
    assert (folders[1] / "result.json").stat().st_mtime_ns == times[1]


@pytest.mark.parametrize(
    "method", others_slow(["local", "fedavg", "fedgh", "fedhenn", "fedin"], quick=["fedgh", "fedhenn"])
)
def test_what_check_says_of_bytes_is_what_a_run_sends(polyfed_: Terminal, method: str) -> None:
    hyperparameters = {"fedhenn": ["alignment_data.size=20"], "fedin": ["aggregation=same-shape"]}.get(method, [])
    settings = [f"methods.{method}.{key}" for key in hyperparameters]
    settings += ["data.num_clients=2"]  # one client of each architecture: the estimate is then exact
    checked = polyfed.check("tiny.toml", method=method, overrides=settings)
    run = polyfed.run("tiny.toml", method=method, overrides=settings, out="run")
    assert (checked.bytes_up, checked.bytes_down) == (run.result["bytes_up"], run.result["bytes_down"])
    assert checked.facts["method"] == method
    assert [client["train"] for client in checked.clients] == [40, 40]


def test_report_makes_the_table_again_from_folders(polyfed_: Terminal) -> None:
    compared = polyfed_("compare", "tiny.toml", "--methods", "fedgh", "--out", "all", "-q")
    table = compared.out.partition("wrote ")[0]
    said = polyfed_("report", "all", "--out", "elsewhere")
    assert said.out.startswith(table)
    assert {"comparison.md", "accuracy-by-bytes.png", "accuracy-by-bytes.svg", "report.html"} <= {
        path.name for path in Path("elsewhere").iterdir()
    }
    assert "To reach an accuracy of 1.00 %" in polyfed_("report", "all", "--target", "0.01").out


# In a process of its own


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command; Ctrl-C reaches it and nobody else."""
    command = [sys.executable, "-m", "polyfed", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


CTRL_C = """
import os
import signal
from pathlib import Path

import polyfed


class CtrlC(polyfed.Plugin):
    name = "ctrl-c"

    def select(self, round):
        if round.number == 4 and not Path("pressed").exists():
            Path("pressed").touch()
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_writes_a_checkpoint_and_resume_gives_the_undisturbed_run(polyfed_: Terminal) -> None:
    folder = polyfed_.folder
    (folder / "pressing.py").write_text(CTRL_C)
    (folder / "tiny.toml").write_text(f'{RECIPE}\n[[plugins]]\nname = "pressing:CtrlC"\n')
    many = ["run", "tiny.toml", "--set", "training.rounds=6", "--set", "run.checkpoint_every=1000"]
    ended = forked([*many, "--out", "stopped"], folder)
    assert ended.status == 130, ended
    assert "Traceback" not in ended.stderr
    assert "interrupted; " in ended.stderr.splitlines()[-1]
    assert ended.stderr.endswith(f"; go on with: polyfed {' '.join(many)} --out stopped --resume\n")
    assert not (folder / "stopped" / "result.json").exists()
    assert len(rounds(folder / "stopped")) == 3, "round 4 is not over"
    for more in (["--out", "stopped", "--resume", "-q"], ["--out", "undisturbed", "-q"]):
        assert forked([*many, *more], folder).status == 0
    assert rounds(folder / "stopped") == rounds(folder / "undisturbed")
    assert models(folder / "stopped") == models(folder / "undisturbed")


@pytest.mark.parametrize("words", others_slow([["--help"], ["methods", "fedgh"]], quick=[["--help"]]))
def test_a_reader_that_has_gone_is_no_failure(words: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, *words)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(timeout=PATIENCE)
