"""Suites: equal trials, the choice by validation, scored seeds with what was chosen, going on, the page."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.errors import ConfigError
from polyfed.experiments.benchmark import Benchmark, benchmark

RECIPE = """
[data]
dataset = "digits"
num_clients = 2
limit_train = 300
max_train_per_client = 30
max_test_per_client = 20
split = "6:2:2"

[models]
architectures = ["digits-cnn1"]

[method]
name = "fedgh"

[training]
rounds = 1
batch_size = 10
lr = 0.1

[presets.longer.training]
rounds = 2
"""
PROTOCOL = """
title = "A very small suite"
methods = ["fedgh", "fedproto"]
seeds = [0, 1]
tuning_seeds = [7]

[tuning.fedgh]
header_lr = [0.0, 1.0]

[tuning.fedproto]
prototype_weight = [0.0, 100.0]

[settings.short]
recipe = "plain.toml"
seeds = [0]

[settings.long]
recipe = "plain.toml"
preset = "longer"
overrides = ["training.lr=0.2"]
"""


@pytest.fixture(scope="module", autouse=True)
def no_figures() -> Iterator[None]:
    """Curves and figures of sweeps and comparisons are not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("compare.curves", "compare.write_decompositions", "sweep.draw"):
            patch.setattr(f"polyfed.experiments.{place}", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites") / "tiny"
    folder.mkdir()
    (folder / "plain.toml").write_text(RECIPE)
    (folder / "protocol.toml").write_text(PROTOCOL)
    return folder


@pytest.fixture(scope="module")
def done(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    return benchmark(suite, tmp_path_factory.mktemp("runs") / "tiny")


def results_of(folder: Path) -> dict[Path, dict[str, Any]]:
    return {path.parent: json.loads(path.read_text()) for path in sorted(folder.rglob("result.json"))}


def figures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json") if path.name != "processor-seconds.json"}


def test_each_method_is_tuned_by_validation_with_as_many_trials(done: Benchmark) -> None:
    for setting in done.settings:
        for method, chosen in setting.tuned.items():
            trials = results_of(done.folder / "tuning" / setting.setting / method)
            own = [one for one in trials.values() if one["method"] == method]
            assert len(own) == 2
            assert {one["seed"] for one in own} == {7}
            best = max(own, key=lambda one: one["validation"])
            for name, value in chosen.items():
                assert value == best["hyperparameters"][name]


def test_what_was_chosen_is_scored_on_other_seeds(done: Benchmark) -> None:
    assert [one.setting for one in done.settings] == ["short", "long"]
    for setting, seeds in zip(done.settings, ({"0"}, {"0", "1"}), strict=True):
        assert {row.name for row in setting.rows} == {"local", "fedgh", "fedproto"}
        assert all(set(row.accuracy) == seeds for row in setting.rows)
        for method, chosen in setting.tuned.items():
            for run in results_of(done.folder / setting.setting / method).values():
                assert chosen.items() <= run["hyperparameters"].items()
                row = setting.row(method)
                assert row is not None
                assert row.accuracy[str(run["seed"])] == run["accuracy"]


def test_finished_runs_keep_their_records_only(done: Benchmark) -> None:
    kept = {path.name for run in results_of(done.folder) for path in run.iterdir()}
    assert kept == {"recipe.toml", "result.json", "rounds.jsonl"}
    assert not [one.caption for one in done.settings if "run.keep" in one.caption]


def test_a_suite_may_keep_weights(suite: Path, tmp_path: Path) -> None:
    keeping = tmp_path / "keeping"
    shutil.copytree(suite, keeping)
    text = PROTOCOL.replace('overrides = ["training.lr=0.2"]', 'overrides = ["training.lr=0.2", "run.keep=last"]')
    (keeping / "protocol.toml").write_text(text)
    done = benchmark(keeping, tmp_path / "runs", settings=["long"])
    assert all((run / "models").is_dir() for run in results_of(done.folder))


def test_presets_and_changes_hold_in_tuning_and_scoring(done: Benchmark) -> None:
    for place in ("long", "tuning/long"):
        for run in results_of(done.folder / place):
            training = tomllib.loads((run / "recipe.toml").read_text())["training"]
            assert (training["rounds"], training["lr"]) == (2, 0.2)


def test_a_second_start_runs_nothing_and_changes_nothing(done: Benchmark, suite: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.folder.rglob("result.json")}
    written = figures(done.folder / "results")
    page = (done.folder / "results" / "benchmark.md").read_bytes()
    again = benchmark(suite, done.folder)
    assert {path: path.stat().st_mtime_ns for path in done.folder.rglob("result.json")} == before
    assert figures(done.folder / "results") == written
    assert (done.folder / "results" / "benchmark.md").read_bytes() == page
    assert again.table == done.table


def test_what_is_missing_is_run_again_with_equal_figures(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    shutil.copytree(done.folder, out)
    shutil.rmtree(out / "results")
    shutil.rmtree(out / "long" / "fedgh" / "seed-1")
    shutil.rmtree(out / "tuning" / "short" / "fedproto")
    benchmark(suite, out)
    assert figures(out / "results") == figures(done.folder / "results")


def test_settings_one_after_the_other(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    shutil.copytree(done.folder, out)
    shutil.rmtree(out / "results")
    first = benchmark(suite, out, settings=["long"])
    assert [one.setting for one in first.settings] == ["long"]
    assert "Not finished: short." in (out / "results" / "benchmark.md").read_text()
    benchmark(suite, out, settings=["short"])
    assert figures(out / "results") == figures(done.folder / "results")


def test_the_page_has_ranks_and_a_table_per_setting(done: Benchmark) -> None:
    page = (done.folder / "results" / "benchmark.md").read_text()
    for heading in ("# A very small suite", "## Mean ranks", "## short", "## long"):
        assert f"{heading}\n" in page
    assert "Chosen by validation: fedgh: header\\_lr = " in page or "Chosen by validation: fedgh: header_lr = " in page
    assert done.table is not None
    assert set(done.table.ranks) == {"local", "fedgh", "fedproto"}


def test_the_command_tells_what_is_left(done: Benchmark, suite: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "tiny"
    shutil.copytree(done.folder, out)
    shutil.rmtree(out / "long" / "fedgh" / "seed-1")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["benchmark", str(suite), "--out", str(out)])
    told = capsys.readouterr()
    assert "setting short (1 of 2): all runs are done" in told.err
    assert "setting long (2 of 2): 1 run left, about " in told.err
    assert "mean rank" in told.out


def test_a_method_of_ones_own_is_counted_and_not_run_again(suite: Path, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "suite"
    shutil.copytree(suite, own)
    (own / "of_mine.py").write_text(
        "from polyfed.core.method import Method, hyperparameters\n\n\n"
        "@hyperparameters\nclass Mine(Method):\n    name = 'of-mine'\n"
    )
    protocol = "title = 'Mine'\nmethods = ['of_mine:Mine']\nseeds = [0]\n[settings.short]\nrecipe = 'plain.toml'\n"
    (own / "protocol.toml").write_text(protocol)
    for left in ("2 runs left", "all runs are done"):
        done = benchmark(own, tmp_path / "out", progress=True)
        assert f"setting short (1 of 1): {left}" in capsys.readouterr().err
    assert done.table is not None
    assert len(done.table.ranks) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("settings", ["shrot"]), "expected a setting of the suite, got 'shrot'; did you mean 'short'?"),
        (("methods", 'methods = ["fedgh", "fedporto"]'), "fedporto"),
    ],
)
def test_wrong_requests_write_nothing(change: tuple[str, Any], said: str, suite: Path, tmp_path: Path) -> None:
    what, value = change
    own = tmp_path / "suite"
    shutil.copytree(suite, own)
    if what == "methods":
        text = PROTOCOL.split("[tuning.fedgh]")[0].replace("tuning_seeds = [7]", "")
        text += "[settings.short]\nrecipe = 'plain.toml'\n"
        (own / "protocol.toml").write_text(text.replace('methods = ["fedgh", "fedproto"]', value))
    with pytest.raises(ConfigError) as caught:
        benchmark(own, tmp_path / "out", settings=value if what == "settings" else None)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_figures_that_are_none_are_refused(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    shutil.copytree(done.folder, out)
    (out / "results" / "short.json").write_text('{"setting": 3}')
    with pytest.raises(ConfigError, match=r"expected figures of a benchmark in .*short\.json, got something else"):
        benchmark(suite, out, settings=["long"])


# some methods only --------------------------------------------------------------------------------------------------


def test_methods_one_after_the_other_come_to_the_same(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    """Each in a run folder of its own, as on two machines."""
    for name in ("fedproto", "fedgh"):
        benchmark(suite, tmp_path / name, methods=[name], results=tmp_path / "results")
        assert {path.name for path in (tmp_path / name / "tuning/long").iterdir()} == {name}
    assert figures(tmp_path / "results") == figures(done.folder / "results")
    spent = {
        place: json.loads((place / "processor-seconds.json").read_text())
        for place in (tmp_path / "results", done.folder / "results")
    }
    (pieces, whole) = spent.values()
    assert {s: {k: set(v) for k, v in one.items()} for s, one in pieces.items()} == {
        s: {k: set(v) for k, v in one.items()} for s, one in whole.items()
    }


def test_controls_of_some_methods_join_those_that_are_there(suite: Path, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "suite"
    shutil.copytree(suite, own)
    text = PROTOCOL.replace('"fedproto"]', '"fedproto", "local-mutual"]')  # the last sends nothing: it is never alone
    (own / "protocol.toml").write_text(text.replace("tuning_seeds", "controls = true\ntuning_seeds"))
    benchmark(own, tmp_path / "whole", settings=["short"])
    benchmark(own, tmp_path / "whole", settings=["short"], progress=True)
    assert "setting short (1 of 1): all runs are done" in capsys.readouterr().err
    for name in ("local-mutual", "fedproto", "fedgh"):
        benchmark(own, tmp_path / name, settings=["short"], methods=[name], results=tmp_path / "results")
    assert figures(tmp_path / "results") == figures(tmp_path / "whole/results")


def test_a_further_method_gets_a_row_and_the_others_stay(
    done: Benchmark, suite: Path, tmp_path: Path, capsys: Any
) -> None:
    """What is stored of the others is neither run nor changed."""
    results = tmp_path / "results"
    shutil.copytree(done.folder / "results", results)
    stored = json.loads((results / "short.json").read_text())
    for row in stored["rows"]:
        row["accuracy"] = dict.fromkeys(row["accuracy"], 0.125)
    (results / "short.json").write_text(json.dumps(stored))
    words = ["--settings", "short", "--methods", "fd", "--out", str(tmp_path / "out"), "--results", str(results)]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["benchmark", str(suite), *words])
    told = capsys.readouterr().err
    assert "setting short (1 of 1): 2 runs left" in told, "local and fd"
    assert "short, seed 0: local has 0." in told
    assert "in the stored figures 0.125, as on another machine or version" in told
    found = json.loads((results / "short.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["local", "fedgh", "fedproto", "fd"]
    assert found["rows"][:3] == stored["rows"]
    assert found["tuned"] == stored["tuned"]
    assert not (tmp_path / "out/tuning").exists()
    assert "| fd |" in (results / "benchmark.md").read_text()


def test_a_method_of_the_suite_runs_where_the_suite_has_it(suite: Path, tmp_path: Path) -> None:
    own = tmp_path / "suite"
    shutil.copytree(suite, own)
    text = PROTOCOL.replace("seeds = [0]\n", 'seeds = [0]\nmethods = ["fedgh"]\n')
    (own / "protocol.toml").write_text(text)
    done = benchmark(own, tmp_path / "out", methods=["fedproto"])
    assert [one.setting for one in done.settings] == ["long"]
    with pytest.raises(ConfigError, match="methods: expected some that short has in this suite, got 'fedproto'"):
        benchmark(own, tmp_path / "none", settings=["short"], methods=["fedgh", "fedproto"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["fedporto"], "unknown method 'fedporto'; did you mean 'fedproto'?"),
        ("fedproto", "methods: expected a list"),
        ([], "methods: expected at least one, got none"),
    ],
)
def test_methods_that_cannot_be_write_nothing(asked: Any, said: str, suite: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        benchmark(suite, tmp_path / "out", methods=asked)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_figures_of_other_rounds_take_no_rows(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(done.folder / "results", results)
    stored = json.loads((results / "long.json").read_text())
    (results / "long.json").write_text(json.dumps(stored | {"rounds": 3}))
    with pytest.raises(ConfigError, match=r"long: expected stored figures of 2 rounds, got those of 3; choose another"):
        benchmark(suite, tmp_path / "out", methods=["fedgh"], results=results)
    assert not (tmp_path / "out").exists()
