"""Runs are never gone on from, or put beside each other, over data that have changed under the same name."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.core.server import Server
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.sweep import sweep
from polyfed.methods import FedAvg

pytestmark = pytest.mark.usefixtures("unrendered")

RECIPE = """
[data]
dataset = "csv:rows.csv"
num_clients = 2
split = "6:1:3"
[models]
architectures = ["mlp-16-32"]
[method]
name = "fedavg"
[training]
rounds = 1
[run]
checkpoint_every = 1
executor = "serial"
"""
OTHER = "holds a run of other data under this name"
OWN = """
import helping
from polyfed.methods import FedAvg


class Mine(FedAvg):
    pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its table, which is the present one."""
    rows = [f"{number * 37 % 41 / 10},{number / 8},{'yes' if number % 2 else 'no'}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "\n".join(rows) + "\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(old: str, new: str) -> None:
    """Put one text in the place of another in the table."""
    path = Path("rows.csv")
    changed = re.sub(old, new, path.read_text(), count=0 if old == "yes" else 1)
    assert changed != path.read_text()
    path.write_text(changed)


def files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


class Stop:
    """Interrupts after the first round."""

    def round(self, record: object, remaining_seconds: float) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"(?<=\n)[-\d.]+", "9.25"),  # one number
        (r"\n([^\n]*)yes", r"\n\1no"),  # one label
        ("yes", "aye"),  # the name of a class
        (r"\Z", "1,2,yes\n"),  # one row more
    ],
)
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_run_does_not_go_on_over_other_data(place: Path, state: str, old: str, new: str) -> None:
    rounds = ["training.rounds=2"]
    if state == "interrupted":
        with pytest.raises(RunInterrupted):
            pf.run("recipe.toml", out="run", overrides=rounds, loggers=[Stop()])
    else:
        pf.run("recipe.toml", out="run")
    before = files("run")
    change(old, new)
    with pytest.raises(ConfigError, match=OTHER):
        pf.run("recipe.toml", out="run", resume=True, overrides=[] if state == "finished" else rounds)
    assert files("run") == before


# several runs -------------------------------------------------------------------------------------------------------


def test_a_comparison_and_a_sweep_refuse_what_was_run_on_other_data(place: Path) -> None:
    starts: list[Callable[..., object]] = [
        lambda methods: pf.compare("recipe.toml", methods, out="compare"),
        lambda values: sweep("recipe.toml", {"training.lr": values}, out="sweep"),
    ]
    first: list[list[object]] = [["fedavg"], [0.1, 0.2]]
    more: list[list[object]] = [["fedavg", "fedprox"], [0.1, 0.2, 0.3]]
    for start, asked in zip(starts, first, strict=True):
        start(asked)
        start(asked)
    before = files("compare") | files("sweep")
    change("yes", "aye")
    for start, *asked in zip(starts, first, more, strict=True):
        for each in asked:
            with pytest.raises(ConfigError, match=OTHER):
                start(each)
    assert files("compare") | files("sweep") == before


# one's own code -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own(place: Path) -> Iterator[None]:
    """A method of one's own, and a module that it uses, beside the recipe."""
    (place / "mymethod.py").write_text(OWN)
    (place / "helping.py").write_text("SHARE = 1\n")
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("mymethod", "helping"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own")
def test_other_code_is_told_and_goes_on(place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = pf.run("recipe.toml", method="mymethod:Mine", out="run")
        assert set(first.result["made_of"]["code"]) == {"mymethod", "helping"}
        pf.run("recipe.toml", method="mymethod:Mine", out="run", resume=True)
    (place / "helping.py").write_text("SHARE = 2\n")
    with pytest.warns(UserWarning, match="run holds a run that began with other code in helping$"):
        pf.run("recipe.toml", method="mymethod:Mine", out="run", resume=True)
    with pytest.warns(UserWarning, match="other code in helping$"):
        done = pf.run("recipe.toml", method="mymethod:Mine", out="run", resume=True, overrides=["training.rounds=2"])
    assert done.result["made_of"]["code"] != first.result["made_of"]["code"]


# what fails, what is interrupted --------------------------------------------------------------------------------


def test_a_run_that_fails_leaves_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FedAvg.aggregate

    def aggregate(self: FedAvg, server: Server, uploads: Any) -> None:
        if vars(server)["_seed"] == 1:
            raise ValueError("wrong")
        plain(self, server, uploads)

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    found = pf.compare("recipe.toml", ["fedavg"], (0, 1, 2), out="compare")
    assert found.failures == {"fedavg, seed 1": "server, round 1, aggregation: ValueError: wrong"}
    assert found.table is not None
    shown = found._repr_html_()
    assert '<img alt="accuracy by round"' in shown, "a notebook shows the curves"
    assert "fedavg, seed 1 failed: server, round 1" in shown
