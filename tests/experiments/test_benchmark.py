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
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments import benchmark as module
from polyfed.experiments.benchmark import Benchmark, benchmark
from polyfed.experiments.sweep import Sweep
from polyfed.report.benchmark_results import RowResult, SettingResult, Tuning
from tests.helpers.benchmark_figures import without_times
from tests.helpers.refusals import refusal
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe(
    data={"limit_train": 300, "max_train_per_client": 30, "max_test_per_client": 20, "split": "6:2:2"},
    models={"architectures": ["digits-cnn1"]},
    training={"lr": 0.1},
    presets={"longer": {"training": {"rounds": 2}}},
)
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
    """Figures are not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.experiments.compare.write_report", lambda *_: [])
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


def figures(folder: Path) -> dict[str, Any]:
    """What is stored of all settings, without the times, which equal runs do not share."""
    return {path.name: without_times(json.loads(path.read_text())) for path in folder.glob("*.json")}


def row_of(setting: SettingResult, name: str) -> RowResult:
    return setting.rows[setting.names.index(name)]


def tuning_of(setting: SettingResult) -> dict[str, Tuning]:
    return {row.name: row.tuning for row in setting.rows if row.tuning}


def test_each_method_is_tuned_by_validation_with_as_many_trials(done: Benchmark) -> None:
    for setting in done.settings:
        for method, tuned in tuning_of(setting).items():
            chosen = tuned.chosen
            trials = results_of(done.folder / "tuning" / setting.setting / method)
            own = [one for one in trials.values() if one["method"] == method]
            assert len(own) == 2
            assert {one["seed"] for one in own} == set(tuned.seeds) == {7}
            assert [[one["hyperparameters"][name] for one in own] for name in tuned.tried] == [*tuned.tried.values()]
            best = max(own, key=lambda one: one["validation"])
            for name, value in chosen.items():
                assert value == best["hyperparameters"][name]


def test_what_was_chosen_is_scored_on_other_seeds(done: Benchmark) -> None:
    assert [one.setting for one in done.settings] == ["short", "long"]
    for setting, seeds in zip(done.settings, ({"0"}, {"0", "1"}), strict=True):
        assert {row.name for row in setting.rows} == {"local", "fedgh", "fedproto"}
        assert all(set(row.figures["accuracy"]) == seeds for row in setting.rows)
        for method, tuned in tuning_of(setting).items():
            for run in results_of(done.folder / setting.setting / method).values():
                clients = run["clients_table"]
                counted = [sum(one[f"{part}samples"] for one in clients) for part in ("", "validation_", "test_")]
                assert list(setting.client_rows[str(run["seed"])].values()) == counted
                assert tuned.chosen.items() <= run["hyperparameters"].items()
                row = row_of(setting, method)
                for metric, by_seed in row.figures.items():
                    assert by_seed[str(run["seed"])] == run[metric]


FAIR = """
title = "Every row tuned for itself"
methods = ["fedgh", "fd"]
seeds = [0]
tuning_seeds = [7]
controls = ["alone", "pooled"]
primary = [["fedgh", "local"], ["fedgh", "fedgh-alone"]]
alone_of = ["fedgh"]
tune_alone = ["fedgh"]

[tuning.local]
"training.weight_decay" = [0.001, 0.01]

[tuning.pooled]
"training.weight_decay" = [0.02, 0.002]

[tuning.fedgh]
header_lr = [0.01, 1.0]

[settings.short]
recipe = "plain.toml"
lr = [0.05, 0.2]
"""


@pytest.fixture(scope="module")
def fair(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    folder = tmp_path_factory.mktemp("suites") / "fair"
    shutil.copytree(suite, folder)
    (folder / "protocol.toml").write_text(FAIR)
    return benchmark(folder, tmp_path_factory.mktemp("runs") / "fair")


def test_controls_and_methods_alone_are_tuned_each_for_itself_over_learning_rates_too(fair: Benchmark) -> None:
    (setting,) = fair.settings
    pooled = ["pooled", "pooled-shares", "pooled-tuned"]
    assert list(tuning_of(setting)) == ["local", "fedgh", "fedgh-alone", *pooled]
    assert [row.name for row in setting.rows] == ["local", "fedgh", "fd", "fedgh-alone", *pooled]
    assert len({str(row_of(setting, name).tuning) for name in pooled}) == 1
    for name, tuned in tuning_of(setting).items():
        trials = results_of(fair.folder / "tuning" / "short" / ("pooled" if name in pooled else name))
        recipes = {folder: tomllib.loads((folder / "recipe.toml").read_text()) for folder in trials}
        assert all(recipe["method"].get("alone", False) == (name == "fedgh-alone") for recipe in recipes.values())
        assert all((recipe["run"].get("control") == "pooled") == (name in pooled) for recipe in recipes.values())
        assert tuned.tried["training.lr"] == [0.05, 0.2]
        common = {"training.lr": 0.1, "training.weight_decay": 0.0}  # as in the recipe
        assert tuned.chosen.items() <= (common | row_of(setting, name).hyperparameters).items()


def test_a_second_start_runs_nothing_and_changes_nothing(done: Benchmark, suite: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.folder.rglob("result.json")}
    written = {path: path.read_bytes() for path in (done.folder / "results").iterdir()}
    again = benchmark(suite, done.folder)
    assert {path: path.stat().st_mtime_ns for path in done.folder.rglob("result.json")} == before
    assert {path: path.read_bytes() for path in (done.folder / "results").iterdir()} == written
    assert again.table == done.table


NOBODY = """
title = "Nobody"
methods = ["fedgh", "fedporto"]
seeds = [0]

[settings.short]
recipe = "plain.toml"
"""


@pytest.mark.parametrize(
    ("protocol", "asked", "said"),
    [
        (PROTOCOL, {"settings": ["shrot"]}, "expected a setting of the suite, got 'shrot'; did you mean 'short'?"),
        (PROTOCOL, {"methods": "fedproto"}, "methods: expected a list"),
        (PROTOCOL, {"methods": []}, "methods: expected at least one, got none"),
        (NOBODY, {}, "fedporto"),
        (
            FAIR.replace('"fedgh-alone"]]', '"fd-alone"]]'),
            {},
            "primary: expected two rows that one setting has, got fedgh and fd-alone",
        ),
        (
            FAIR.replace('"fd"]', '"fd", "smooth"]').replace('alone_of = ["fedgh"]', 'alone_of = ["fedgh", "smooth"]')
            + '[variants.smooth]\nname = "fd"\ncontrol = "uniform"\n',
            {},
            "alone_of: expected methods that send something and are no controls, got smooth",
        ),
        (PROTOCOL.replace("header_lr", "header_rate"), {}, "unknown key 'methods.fedgh.header_rate'"),
    ],
)
def test_wrong_requests_write_nothing(
    protocol: str, asked: dict[str, Any], said: str, suite: Path, tmp_path: Path
) -> None:
    own = tmp_path / "suite"
    shutil.copytree(suite, own)
    (own / "protocol.toml").write_text(protocol)
    assert said in refusal(lambda: benchmark(own, tmp_path / "out", **asked))
    assert not (tmp_path / "out").exists()


# some methods only --------------------------------------------------------------------------------------------------


def test_methods_one_after_the_other_come_to_the_same(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    """Each in a run folder of its own, as on two machines."""
    for name in ("fedproto", "fedgh"):
        benchmark(suite, tmp_path / name, methods=[name], results=tmp_path / "results")
        assert {path.name for path in (tmp_path / name / "tuning/long").iterdir()} == {name}
    assert figures(tmp_path / "results") == figures(done.folder / "results")


def test_a_further_method_gets_a_row_and_the_others_stay(
    done: Benchmark, suite: Path, tmp_path: Path, capsys: Any
) -> None:
    """What is stored of the others is neither run nor changed; Local runs beside it."""
    results = tmp_path / "results"
    shutil.copytree(done.folder / "results", results)
    stored = json.loads((results / "short.json").read_text())
    for row in stored["rows"]:
        row["figures"]["accuracy"] = dict.fromkeys(row["figures"]["accuracy"], 0.125)
    data = stored.pop("data")  # as in those of older versions, of which it is not known
    del stored["recipe"]["training"]["momentum"]  # a key that has come since counts as its default
    (results / "short.json").write_text(json.dumps(stored))
    words = ["--settings", "short", "--methods", "fd", "--out", str(tmp_path / "out"), "--results", str(results)]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["benchmark", str(suite), *words])
    told = capsys.readouterr()
    assert "setting short, fd" in told.err
    assert "best without the others" in told.out
    found = json.loads((results / "short.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["local", "fedgh", "fedproto", "fd"]
    assert found["rows"][1:3] == stored["rows"][1:3]
    assert found["data"] == data
    assert {path.name for path in (tmp_path / "out/short").iterdir()} == {"local", "fd"}
    assert "| fd |" in (results / "benchmark.md").read_text()


def test_figures_of_other_data_are_not_gone_on_from(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(done.folder / "results", results)
    stored = json.loads((results / "short.json").read_text())
    assert set(stored["data"]) == {"0"}
    stored["data"]["0"] = "0" * 64
    (results / "short.json").write_text(json.dumps(stored))
    before = figures(results)
    with pytest.raises(ConfigError, match="short: expected stored figures of the data that there are now"):
        benchmark(suite, tmp_path / "out", settings=["short"], methods=["fd"], results=results)
    assert figures(results) == before


# refused, interrupted, failed -----------------------------------------------------------------------------------------


def test_figures_of_another_recipe_are_refused(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    results = tmp_path / "figures"
    shutil.copytree(done.folder / "results", results)
    stored = json.loads((results / "long.json").read_text())
    stored["recipe"]["training"]["rounds"] = 3
    (results / "long.json").write_text(json.dumps(stored))
    said = r"long: expected stored figures with training\.rounds = 2, as in the recipe, got those with 3"
    with pytest.raises(ConfigError, match=said):
        benchmark(suite, tmp_path / "out", results=results)
    assert not (tmp_path / "out").exists()


def test_overwrite_runs_again_what_is_done_and_comes_to_the_same(done: Benchmark, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    shutil.copytree(done.folder, out)
    before = {path.relative_to(out): path.stat().st_mtime_ns for path in out.rglob("result.json")}
    benchmark(suite, out, settings=["short"], methods=["fedgh"], overwrite=True)
    again = {place for place, at in before.items() if (out / place).stat().st_mtime_ns != at}
    assert {"/".join(place.parts[:-2]) for place in again} == {
        "short/local", "short/fedgh", "tuning/short/fedgh/header_lr=0", "tuning/short/fedgh/header_lr=1",
    }  # fmt: skip
    assert figures(out / "results") == figures(done.folder / "results")


def test_figures_are_written_after_every_method(
    done: Benchmark, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption in the second method leaves the first one's row, and the end is the same."""
    real = module.run_planned

    def interrupted(members: Any, *further: Any) -> Any:
        if any(member.name == "fedproto" for member in members):
            raise RunInterrupted("stopped")
        return real(members, *further)

    monkeypatch.setattr(module, "run_planned", interrupted)
    with pytest.raises(RunInterrupted):
        benchmark(suite, tmp_path / "out", settings=["short"])
    stored = json.loads((tmp_path / "out/results/short.json").read_text())
    assert [row["name"] for row in stored["rows"]] == ["local", "fedgh"]
    monkeypatch.undo()
    benchmark(suite, tmp_path / "out", settings=["short"])
    assert figures(tmp_path / "out/results")["short.json"] == figures(done.folder / "results")["short.json"]


def test_a_method_whose_trials_fail_does_not_keep_the_others_from_running(
    done: Benchmark, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.sweep

    def failing(*given: Any, **further: Any) -> Any:
        if further["method"] == "fedgh":
            return Sweep(tmp_path, None, failures={"header_lr=0, seed 7": "no"})
        return real(*given, **further)

    monkeypatch.setattr(module, "sweep", failing)
    found = benchmark(suite, tmp_path / "out", settings=["short"])
    assert found.failures == {"short, tuning: header_lr=0, seed 7": "no"}
    assert [row.name for row in found.settings[0].rows] == ["local", "fedproto"]
    assert "Not begun: long." in (tmp_path / "out/results/benchmark.md").read_text()
