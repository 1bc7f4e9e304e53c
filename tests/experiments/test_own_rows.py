"""Models of scikit-learn on clients' own rows: as scikit-learn gives them by hand, and runs like any other."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, RidgeClassifier

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.experiments.controls import own
from polyfed.experiments.data_cache import DataCache
from polyfed.functional.feature_maps.feature_map import draw_map
from polyfed.report.benchmark_page import picks
from tests.helpers.benchmark_figures import row, setting
from tests.helpers.interrupt import Interrupt
from tests.helpers.small_recipe import SMALL

pytestmark = pytest.mark.usefixtures("unrendered")

DIGITS = {"dataset": "digits", "num_clients": 3, "split": "6:2:2", "max_test_per_client": 100}


def recipe(control: str, data: Mapping[str, Any] = DIGITS, network: str = "digits-cnn1", **sections: Any) -> Recipe:
    settings = {**SMALL, "data": data, "models": {"architectures": [network]}, **sections}
    return Recipe.from_dict(settings).choose("local").with_run(control=control, label=control)


def accuracies(asked: Recipe, **how: Any) -> tuple[list[float], Federation]:
    federation = build_federation(asked, **how)
    federation.run()
    return federation.history[-1]["accuracy_per_client"], federation


def standardized(train: Any, *others: Any) -> list[Any]:
    """By the mean and deviation of the first."""
    mean, std = train.mean(axis=0), train.std(axis=0)
    return [(rows - mean) / np.where(std, std, 1) for rows in (train, *others)]


def best(models: list[Any], train: Any, validation: Any, test: Any) -> float:
    """The test accuracy of the first model that is best on validation rows."""
    fitted = [model.fit(*train) for model in models]
    merits = [(model.predict(validation[0]) == validation[1]).mean() for model in fitted]
    return float((fitted[merits.index(max(merits))].predict(test[0]) == test[1]).mean())


def test_ridge_on_a_map_of_images_by_hand() -> None:
    asked = recipe("own-linear")
    found, federation = accuracies(asked)
    example = federation.clients[0].prepare(federation.clients[0].data.train.x[:1])
    phi = draw_map(example, 576, torch.Generator(), photographs=True)
    for client in federation.clients:
        parts = [client.data.train, client.data.validation, client.data.test]
        inputs = standardized(*(phi(client.prepare(part.x)).double().numpy() for part in parts))
        rows = list(zip(inputs, [part.y.numpy() for part in parts], strict=True))
        models = [RidgeClassifier(alpha) for alpha in (100, 1000, 10, 10000, 1)]
        assert found[client.id] == pytest.approx(best(models, *rows))
    assert min(found) > 0.8
    assert federation.history[-1]["bytes_up"] == 0


def table(folder: Path, regression: bool = False) -> dict[str, Any]:
    """A file with a number, a category that matters, and a label."""
    draws = np.random.default_rng(0)
    with (folder / "table.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["amount", "color", "label"])
        for color, amount in zip(draws.choice(["red", "green", "blue"], 240), draws.normal(size=240), strict=True):
            value = amount + 2 * (color == "green") + draws.normal() / 2
            writer.writerow([f"{amount:.4f}", color, f"{value:.4f}" if regression else "yes" if value > 0.5 else "no"])
    how = {"task": "regression"} if regression else {}
    return {
        "dataset": f"csv:{folder / 'table.csv'}",
        "category_columns": ["color"],
        "num_clients": 2,
        "split": "6:2:2",
        **how,
    }


def test_logistic_regression_on_a_table_by_hand(tmp_path: Path) -> None:
    found, federation = accuracies(recipe("own-linear", table(tmp_path), "mlp-16-32"))
    for client in federation.clients:
        parts = [client.data.train, client.data.validation, client.data.test]
        amounts = standardized(*(part.x[:, :1].double().numpy() for part in parts))
        colors = [np.eye(4)[part.x[:, 1].long()] for part in parts]
        rows = [(np.hstack(two), part.y.numpy()) for *two, part in zip(amounts, colors, parts, strict=True)]
        models = [LogisticRegression(C=strength, max_iter=1000) for strength in (1, 0.1, 10, 0.01, 100)]
        assert found[client.id] == pytest.approx(best(models, *rows))
        assert found[client.id] > 0.75


@pytest.mark.parametrize("regression", [False, True])
def test_a_table_has_trees_too_and_their_scores_are_a_function_of_the_seed(tmp_path: Path, regression: bool) -> None:
    data = table(tmp_path, regression)
    base = Recipe.from_dict({**SMALL, "data": data, "models": {"architectures": ["mlp-16-32"]}})
    asked = own(base, DataCache().source(base))
    assert [one.name for one in asked] == ["own-linear", "own-boosting", "own-forest"]
    for one in asked:
        runs = [build_federation(one) for _ in range(2)]
        results = [run.run().result for run in runs]
        value, again = (result["rmse" if regression else "accuracy"] for result in results)
        assert value == again
        assert value < 1 if regression else value > 0.75


def test_texts_are_as_tf_idf_by_hand(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    words = {"good": ["fine", "great", "sunny"], "bad": ["poor", "awful", "rain"]}
    lines = []
    for label in draws.choice(["good", "bad"], 200):
        mine = [*draws.choice(words[label], 2), *draws.choice([*words["good"], *words["bad"], "day", "it"], 4)]
        lines.append((" ".join(draws.permutation(mine)), label))
    with (tmp_path / "texts.csv").open("w") as file:
        csv.writer(file).writerows([("text", "label"), *lines])
    data = {"dataset": f"csv:{tmp_path / 'texts.csv'}", "text_column": "text", "num_clients": 2, "split": "6:2:2"}
    found, federation = accuracies(recipe("own-linear", data, "text-linear"))
    for client in federation.clients:
        parts = [client.data.train, client.data.validation, client.data.test]
        documents = [[" ".join(f"w{i}" for i in ids if i) for ids in part.x.tolist()] for part in parts]
        tf_idf = TfidfVectorizer(binary=True).fit(documents[0])
        rows = [(tf_idf.transform(some), part.y.numpy()) for some, part in zip(documents, parts, strict=True)]
        models = [LogisticRegression(C=strength, max_iter=1000) for strength in (1, 0.1, 10, 0.01, 100)]
        assert found[client.id] == pytest.approx(best(models, *rows))
        assert found[client.id] > 0.6


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_goes_on_and_gives_the_same(tmp_path: Path, executor: str) -> None:
    asked = recipe("own-linear", training={"rounds": 3, "batch_size": 10})
    whole, done = accuracies(asked)
    parts = asked.with_run(executor=executor, workers=2 if executor == "processes" else 1)
    with pytest.raises(RunInterrupted):
        build_federation(parts, out=tmp_path, loggers=[Interrupt(after=1)]).run()
    resumed = build_federation(parts, out=tmp_path)
    resumed.run(resume=True)
    assert resumed.history[-1]["accuracy_per_client"] == whole
    assert len(resumed.history) == len(done.history) == 3


def test_clients_of_few_classes_or_without_validation_rows_are_fitted() -> None:
    few = {**DIGITS, "split": "7:0:3", "partition": "by_class", "classes_per_client": 1, "num_clients": 10}
    assert set(accuracies(recipe("own-linear", few))[0]) == {1.0}
    found, _ = accuracies(recipe("own-linear", {**few, "classes_per_client": 2, "label_space": "own"}))
    assert min(found) > 0.9


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.control 'own-forest': expected rows of a table, got 'digits'"):
        build_federation(recipe("own-forest"))
    asked = Recipe.from_dict(SMALL).with_run(control="own-linear")
    with pytest.raises(ConfigError, match=r"run\.control 'own-linear': expected the method 'local', got 'fedgh'"):
        build_federation(asked)


def test_the_best_row_that_needs_nobody_may_be_one_of_them() -> None:
    rows = [row("local", [0.5], validation=0.5, sent=0), row("own-linear", [0.7], "own-linear", "local", 0.6, sent=0)]
    assert picks(setting(rows))["without"] == ("own-linear", 2)


def test_a_benchmark_has_them_and_a_second_start_runs_nothing(tmp_path: Path, capsys: Any) -> None:
    Path(tmp_path / "small.toml").write_text(recipe("own-linear").with_run(control=None, label=None).dumps())
    suite = 'title = "Small"\nmethods = ["fedgh"]\nseeds = [0]\ncontrols = ["own"]\n'
    (tmp_path / "protocol.toml").write_text(
        f'{suite}primary = [["fedgh", "own-linear"]]\n[settings.one]\nrecipe = "small.toml"\n'
    )
    words = ["benchmark", str(tmp_path), "--out", str(tmp_path / "runs")]
    assert cli.status(words) == 0
    assert "own-linear" in capsys.readouterr().out
    before = (tmp_path / "runs/one/own-linear/seed-0/result.json").stat().st_mtime_ns
    assert cli.status(words) == 0
    assert (tmp_path / "runs/one/own-linear/seed-0/result.json").stat().st_mtime_ns == before
