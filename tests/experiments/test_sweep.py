"""Sweeps: the grid, the choice by validation, what is refused, going on after a stop."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.cli import app as cli
from polyfed.errors import ConfigError
from polyfed.experiments.sweep import parse, sweep
from polyfed.records.schema import RoundRecord, RunResult
from polyfed.report.run_records import RunRecord, to_frame
from polyfed.report.sweeps import SweepCell, build_table, to_csv, to_text
from tests.helpers.refusals import refusal
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe(
    data={"limit_train": 300, "max_train_per_client": 30, "max_test_per_client": 20},
    method={"header_epochs": 5},
    training={"rounds": 2, "lr": 0.1},
    methods={"fedgh-round": {"name": "fedgh", "header_batch": "round"}},
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unrendered: None) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return Path("tiny.toml")


def run_of(folder: Path | str) -> dict[str, Any]:
    """A run's last validation accuracy and its result."""
    lines = [json.loads(line) for line in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    return {"validation": lines[-1]["validation"], **json.loads((Path(folder) / "result.json").read_text())}


def made(folder: Path | str) -> list[str]:
    """The run folders."""
    return sorted(str(path.parent.relative_to(folder)) for path in Path(folder).rglob("result.json"))


# ---- what --set says ----


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("method.header_lr=0.01,0.1,1", "method.header_lr", [0.01, 0.1, 1]),
        ("method.header_batch=lar,10", "method.header_batch", ["lar", 10]),
        ("training.rounds=5", "training.rounds", [5]),
        ("method.share = true , false", "method.share", [True, False]),
        ("data.split='8:1:1',\"7:2:1\"", "data.split", ["8:1:1", "7:2:1"]),
        ("models.architectures=['a','b']", "models.architectures", [["a", "b"]]),
        ("models.architectures=['a'],['a','b,c']", "models.architectures", [["a"], ["a", "b,c"]]),
        ('data.dataset="a,b","c"', "data.dataset", ["a,b", "c"]),
        (r"data.root='a\','b'", "data.root", ["a\\", "b"]),
        ("data.dataset=o'neil,b", "data.dataset", ["o'neil", "b"]),
    ],
)
def test_commas_at_the_top_level_separate_values(text: str, key: str, values: list[Any]) -> None:
    assert parse([text]) == {key: values}


@pytest.mark.parametrize("text", ["a.b=1,,2", "a.b=,1", "a.b=1,"])
def test_nothing_between_commas_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"expected values with commas between .*, got '{text}'"):
        parse([text])


@pytest.mark.parametrize("text", ["header_lr=1,2", "method.header_lr", "=1,2", "a..b=1,2"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected --set SECTION\.KEY=VALUE"):
        parse([text])


# ---- the grid ----


def test_all_combinations_are_run(tiny: Path) -> None:
    settings = {"training.lr": [0.1, 0.2], "method.header_lr": [0.0, 0.5], "training.rounds": 1}
    done = sweep(tiny, settings, seeds=[1], out="grid")
    assert made("grid") == [f"lr={lr}_header_lr={header}/seed-1" for lr in (0.1, 0.2) for header in (0.5, 0)]
    assert done.table is not None
    rows = done.table.rows.to_dict("records")
    assert len(rows) == 4
    for row in rows:
        header, lr = (row[key] for key in ("method.header_lr", "training.lr"))
        folder = Path(f"grid/lr={lr}_header_lr={header:g}/seed-1")
        stored = tomllib.loads((folder / "recipe.toml").read_text())
        assert (stored["training"]["lr"], stored["training"]["rounds"]) == (lr, 1)
        assert stored["method"]["header_lr"] == header
        assert stored["method"]["header_epochs"] == 5  # the recipe's own hyperparameter
        run = run_of(folder)
        assert all(row[key] == run[key] for key in ("validation", "accuracy", "bytes_up", "bytes_down"))
    best = max(rows, key=lambda row: row["validation"])
    assert done.chosen == {key: best[key] for key in ("training.lr", "method.header_lr")}
    assert {path.name for path in done.files} == {"sweep.csv"}


# ---- the choice ----


def cell(value: Any, validation: float | None, accuracy: float, seeds: Sequence[int] = (0,)) -> SweepCell:
    """A combination with finished runs as folders would tell them."""
    runs = []
    for seed in seeds:
        found = {
            "method": "fedgh", "dataset": "digits", "clients": 2, "rounds": 2, "seed": seed, "accuracy": accuracy,
            "evaluation": {"stage": "personal", "test": "client", "weighting": "clients"}, "bytes_up": 10,
            "accuracy_best_by_validation": accuracy, "validation": validation, "seconds": 1.0,
        }  # fmt: skip
        result = RunResult(**found)
        better = RoundRecord(round=1, evaluated=True, validation=0.99)  # which is not the reported round
        runs.append(RunRecord(Path(str(value)), result, to_frame([better], result)))
    return SweepCell({"method.header_lr": value}, runs, ("--set", f"method.header_lr={value}"))


def test_chosen_is_the_best_by_validation_where_test_says_otherwise() -> None:
    table = build_table([cell(0.01, 0.60, 0.95), cell(0.1, 0.80, 0.40), cell(1.0, 0.70, 0.90)], [0])
    assert table is not None
    assert table.chosen == {"method.header_lr": 0.1}
    assert list(table.rows["chosen"]) == [False, True, False]
    assert table.chosen_options == "--set method.header_lr=0.1"
    (line,) = [line.split() for line in to_text(table).splitlines() if line.endswith(" yes")]
    assert line == ["0.1", "80.00", "40.00", "40.00", "10", "B", "1.0", "s", "yes"]
    rows = list(csv.DictReader(to_csv(table).splitlines()))
    assert [(row["method.header_lr"], row["accuracy"], row["chosen"]) for row in rows] == [
        ("0.01", "0.95", "False"), ("0.1", "0.4", "True"), ("1", "0.9", "False"),
    ]  # fmt: skip


def test_what_lacks_a_seed_or_a_validation_accuracy_is_never_chosen() -> None:
    lacking = cell(4, 0.99, 0.99)
    table = build_table(
        [cell(1, 0.4, 0.9, [0, 1]), cell(2, 0.3, 0.9, [0, 1]), cell(3, None, 0.9, [0, 1]), lacking], [0, 1]
    )
    assert table is not None
    assert table.chosen == {"method.header_lr": 1}
    assert "not to be chosen, as a seed is missing: header_lr=4" in table.section.notes
    nothing = build_table([lacking], [0, 1])
    assert nothing is not None
    assert nothing.chosen is None
    assert "chosen by validation: none" in to_text(nothing)
    assert build_table([SweepCell({"a.b": 1}, []), SweepCell({"a.b": 2}, [])], [0]) is None


# ---- refused before anything is written ----


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"method.header_lrr": [1, 2]}, {}, "unknown key 'method.header_lrr'; did you mean 'header_lr'?"),
        ({"method.header_lr": [0.1, -1]}, {}, "method.header_lr: expected at least 0, got -1"),
        ({"method.header_lr": [0.1, {1}]}, {}, "expected values that a recipe can hold, got {1}"),
        ({"method.header_lr": []}, {}, "method.header_lr: expected at least one value, got none"),
        ({"method.header_lr": 0.1}, {}, "expected several values for at least one setting"),
        ({"run.seed": [0, 1]}, {}, "run.seed: expected a setting of the experiment; for seeds give --seeds"),
        ({"run.device": ["cpu", "cuda"]}, {}, "run.device: expected one value, as [run] is no part of the exp"),
        ({"method.header_lr": [1, 1.0]}, {}, "expected values that differ, got header_lr=1 twice"),
        ({"data.dirichlet_alpha": [0.1, 0.5]}, {}, "data: dirichlet_alpha = 0.1 does nothing beside partition = 'iid'"),
        ({"data.split": ["8:1:1", "8:0:2"]}, {}, "expected validation rows (split=8:0:2, seed 0), got none"),
        ({"training.lr": [0.1, 1]}, {"seeds": []}, "expected at least one seed, got none"),
        ({"training.lr": [0.1, 1]}, {"out": "tiny.toml"}, "expected a place for the run folder tiny.toml"),
    ],
)
def test_one_clear_line_before_anything_is_written(
    tiny: Path, settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    assert words in refusal(lambda: sweep(tiny, settings, **options))
    assert [path.name for path in Path().iterdir()] == ["tiny.toml"]


# ---- going on ----


def test_what_is_done_is_skipped_and_values_can_be_added(tiny: Path) -> None:
    settings = {"method.header_lr": [0.1, 1.0], "training.rounds": 1}
    sweep(tiny, settings, out="grid")
    times = {name: (Path("grid") / name / "result.json").stat().st_mtime_ns for name in made("grid")}
    more = sweep(tiny, {**settings, "method.header_lr": [0.0, 0.1, 1.0]}, out="grid")
    assert more.table is not None
    assert list(more.table.rows["method.header_lr"]) == [0.0, 0.1, 1.0]
    assert {name: (Path("grid") / name / "result.json").stat().st_mtime_ns for name in times} == times
    sweep(tiny, settings, out="grid", overwrite=True)
    assert all((Path("grid") / name / "result.json").stat().st_mtime_ns > before for name, before in times.items())


def test_a_failure_does_not_stop_the_others(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate = polyfed.methods.FedGH.aggregate

    def fail(self: Any, *arguments: Any) -> None:
        if self.header_lr == 0.1:
            raise ArithmeticError("no more numbers")
        aggregate(self, *arguments)

    monkeypatch.setattr(polyfed.methods.FedGH, "aggregate", fail)
    done = sweep(tiny, {"method.header_lr": [0.1, 1.0]}, out="grid")
    assert list(done.failures) == ["header_lr=0.1, seed 0"]
    assert made("grid") == ["header_lr=1/seed-0"]
    assert done.chosen == {"method.header_lr": 1.0}
    assert any("header_lr=0.1, seed 0 failed" in note for note in done.table.section.notes)  # type: ignore[union-attr]
    monkeypatch.setattr(polyfed.methods.FedGH, "aggregate", aggregate)
    assert sweep(tiny, {"method.header_lr": [0.1, 1.0]}, out="grid").failures == {}


# ---- the command ----


def test_the_command(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sweep", "tiny.toml", "--set", "method.header_lr=0,1", "--set", "training.rounds=1"]
    assert cli.status([*words, "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "chosen by validation: --set method.header_lr=" in said.out
    assert "wrote runs/tiny-sweep/sweep.csv" in said.out
    assert cli.status(words) == 0
    assert capsys.readouterr().err.count("already done") == 2
    assert cli.status(["sweep", "tiny.toml"]) == 2
    assert "expected several values" in capsys.readouterr().err

    def fail(*_: Any) -> None:
        raise ArithmeticError("no more numbers")

    monkeypatch.setattr(polyfed.methods.FedGH, "aggregate", fail)
    assert cli.status([*words, "--seeds", "1", "-q"]) == 1
    assert capsys.readouterr().err.count("failed: server, round 1") == 2
