"""Wrong input: exit status 2, one line on standard error, no traceback, nothing written."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from polyfed.cli import app as cli
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe(data={"num_clients": 3, "max_test_per_client": 20}, method={"name": "local"})


class Said(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    error: str


class Place:
    """A folder with a recipe in it, in which commands are given."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.recipe, self.out = folder, folder / "tiny.toml", folder / "runs"
        self.recipe.write_text(RECIPE)
        self._capsys = capsys

    def say(self, *words: str) -> Said:
        """Give a command in this process."""
        self._capsys.readouterr()
        status = cli.status(words)
        return Said(status, *self._capsys.readouterr())

    def refused(self, *words: str) -> str:
        """Give a command that must be refused; its one line."""
        before = sorted(self.folder.rglob("*"))
        said = self.say(*words)
        assert said.status == 2, said
        assert said.out == ""
        lines = [line for line in said.error.splitlines() if not line.startswith("imports ")]  # code of one's own
        assert len(lines) == 1
        assert lines[0].startswith("polyfed: ")
        assert "Traceback" not in said.error
        assert sorted(self.folder.rglob("*")) == before
        return lines[0]

    def run_refused(self, *words: str) -> str:
        """`polyfed run` of the recipe with these words must be refused."""
        return self.refused("run", str(self.recipe), "--out", str(self.out), *words)


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path.parent / "cache"))
    return Place(tmp_path, capsys)


SETTINGS = [  # one of each kind; each error is tested where it is raised
    (["method.name=fedg"], "unknown method 'fedg'; did you mean 'fedgh'?"),
    (["trainig.lr=3"], "unknown key 'trainig'; did you mean 'training'?"),
    (["run.executor=proces"], "unknown executor 'proces'; did you mean 'processes'?"),
    (["training=3"], "expected --set SECTION.KEY=VALUE"),
    (["training.lr=nan"], "training.lr: expected a finite number, got nan"),
    (["data.num_clients=2000"], "expected at most as many clients as rows (1797), got 2000"),
    (["data.dataset=cifar10"], "'cifar10/train*.parquet'"),
]


@pytest.mark.parametrize(("settings", "line"), SETTINGS)
def test_settings_that_cannot_be(place: Place, settings: list[str], line: str) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    assert line in place.run_refused(*words)


FIT = [
    (["run.device=abacus"], "expected a device that is here ('cpu'), got 'abacus'"),
    (["method.name=fedhenn"], "fedhenn needs 5000 public rows, got 0; set data.holdout"),
    (["method.name=fedgh", "models.architectures=['digits-cnn1', 'mine:wide']"], "fedgh needs one feature width"),
    (["models.architectures=['mine:broken']"], "building 'mine:broken' for 1 x 8 x 8 inputs"),
    (["models.architectures=['mine:few']"], "expected scores for 10 classes per sample from client 0 ('mine:few')"),
]
MODELS = """
    from torch import nn
    from polyfed.models.split import SequentialSplit

    def wide(in_shape, classes):
        return SequentialSplit(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, classes))

    def few(in_shape, classes):
        return SequentialSplit(nn.Flatten(), nn.Identity(), nn.Linear(64, 3))

    def broken(in_shape, classes):
        raise ValueError("first line\\nsecond line")
"""


@pytest.mark.parametrize(("settings", "line"), FIT)
def test_what_does_not_fit(place: Place, settings: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "mine.py").write_text(textwrap.dedent(MODELS))
    monkeypatch.syspath_prepend(str(place.folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    words = [word for setting in settings for word in ("--set", setting)]
    assert line in place.run_refused(*words)


WORDS = [
    (["rn"], "no such command 'rn'. Did you mean 'run'? See 'polyfed --help'"),
    (["run", "--sed", "3"], "no such option '--sed'. (Did you mean one of: '--preset', '--seed'"),
    (["run"], "missing argument 'RECIPE.toml'; see 'polyfed run --help'"),
    (["run", "tiny.toml", "--seed", "one"], "invalid value for '--seed': 'one' is not a valid integer"),
    (["run", "tiny.tom"], "got 'tiny.tom', which is not there; did you mean 'tiny.toml'?"),
    (["run", "tiny.toml", "--resume", "--overwrite"], "expected one of --resume and --overwrite, got both"),
    (["run", "tiny.toml", "--preset", "a", "--preset", "b"], "expected --preset once, got it 2 times"),
    (["compare", "tiny.toml", "--methods", "local,,fedgh"], "expected --methods as names"),
    (["compare", "tiny.toml", "--methods", "local", "--seeds", "0,a"], "expected --seeds as whole numbers"),
    (
        ["compare", "tiny.toml", "--methods", "fedgh", "--set", "method.header_lr=1"],
        "expected --set methods.NAME.KEY=VALUE",
    ),
]


@pytest.mark.parametrize(("words", "line"), WORDS, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_words_that_cannot_be(place: Place, words: list[str], line: str) -> None:
    assert line in place.refused(*words)


@pytest.mark.parametrize("text", ["[data", "data = ", "[data]\nname = 'digits'\n[data]\n", "\udcff"])
def test_a_recipe_that_is_not_toml(place: Place, text: str) -> None:
    place.recipe.write_bytes(text.encode(errors="surrogateescape"))
    assert "tiny.toml" in place.refused("run", "tiny.toml")


def test_a_place_where_nothing_can_be_written(place: Place) -> None:
    (place.folder / "file").write_text("here")
    (place.folder / "full").mkdir()
    (place.folder / "full" / "letter").write_text("dear")
    for command in ("run", "compare"):
        assert "file" in place.refused(command, "tiny.toml", "--out", "file")
        assert "got " in place.refused(command, "tiny.toml", "--out", "file/below")
    assert "with other files in it" in place.refused("run", "tiny.toml", "--out", "full")
