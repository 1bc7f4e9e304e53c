"""What objects look like in a notebook and when they are printed: short texts, HTML without foreign markup."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.client import PublicData
from polyfed.core.randomness import numpy_generator
from polyfed.data.datasets import from_tensors
from polyfed.data.federated_dataset import build_federated_dataset
from polyfed.data.options import PartitionOptions
from polyfed.experiments.compare import compare
from polyfed.experiments.predictions import Predictions
from polyfed.experiments.sweep import sweep
from tests.helpers.flat_options import grouped

EVIL = "<script>alert(1)</script>"
SETTINGS: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 300, "holdout": 20, "split": "6:1:3"},
    "models": {"architectures": ["digits-cnn1", "digits-cnn3"]},
    "method": {"name": "fedgh", "header_epochs": 2},
    "training": {"rounds": 2, "lr": 0.1},
    "run": {"executor": "serial"},
}


class Words(HTMLParser):
    """The texts of a piece of markup, in order, and its tags."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def clients() -> list[pf.Client]:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    return [pf.Client(torch.nn.Linear(4, 3), (x[:20], y[:20]), (x[20 + k :], y[20 + k :])) for k in range(3)]


def federation(rounds: int = 3, **options: Any) -> pf.Federation:
    return pf.Federation(clients(), pf.methods.FedAvg(), pf.Training(rounds=rounds, lr=0.1), **grouped(**options))


# a federation and its run -------------------------------------------------------------------------------------------


def test_a_run_shows_its_scores_its_curves_and_its_clients() -> None:
    run = federation(dataset=EVIL, label=EVIL).run()
    words = Words(run._repr_html_())
    assert {"table", "svg", "polyline", "details"} <= set(words.tags)
    assert "script" not in words.tags
    assert f"{EVIL} on {EVIL}: 3 clients, 3 rounds, seed 0" in words.texts
    assert f"{100 * run.result['accuracy']:.2f}" in words.texts
    assert words.tags.count("tr") == 2 + 4 + 4, "the stage, three rounds and three clients, each with headings"


def test_a_history_is_a_short_text_and_a_table() -> None:
    history = federation(30).run().history
    first, last = (history[at]["accuracy"]["received"]["mean"] for at in (0, -1))
    assert repr(history) == str(history) == f"History(30 rounds: accuracy {first:.4f} to {last:.4f} (received))"
    assert isinstance(history, list)
    assert list(history) == history
    words = Words(history._repr_html_())
    assert words.tags.count("tr") == 1 + 5 + 1 + 15, "the first five, a gap, the last fifteen"
    assert words.tags.count("polyline") == 1
    assert repr(type(history)()) == "History(0 rounds)"
    assert type(history)()._repr_html_()


def test_without_test_data_nothing_is_drawn() -> None:
    alone = pf.Client(torch.nn.Linear(4, 3), (torch.randn(9, 4), torch.arange(9) % 3))
    run = pf.Federation([alone], pf.methods.Local(), pf.Training(rounds=1)).run()
    words = Words(run._repr_html_())
    assert "svg" not in words.tags
    assert "No client was scored: none has test samples." in words.texts
    assert repr(run.history) == "History(1 round)"


def test_a_federation_shows_who_takes_part() -> None:
    made = federation()
    assert repr(made) == "Federation(fedavg, 3 clients with 1 architecture, own data, 3 rounds, seed 0)"
    words = Words(made._repr_html_())
    assert words.tags.count("tr") == 4
    at = words.texts.index("Linear")
    assert words.texts[at : at + 5] == ["Linear", "15", "20", "0", "40"]  # 4 x 3 weights and 3 biases
    assert repr(made.clients[2]) == "Client(2, Linear, 20 training, 38 test samples)"


# comparisons ----------------------------------------------------------------------------------------------------------


def test_a_comparison_shows_result_table_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.experiments.compare.curves", lambda *_, **__: [])  # drawn where they are tested
    recipe = Recipe.from_dict(SETTINGS)
    done = compare(recipe, ["fedgh", "fedproto"], (0,), tmp_path / "runs")
    assert done.table is not None
    finding = done.table.sections[0].finding
    assert repr(done.table) == f"Table(3 methods: {finding})"
    assert repr(done) == f"Comparison({done.table!r}, in {tmp_path / 'runs'})"
    words = Words(done._repr_html_())
    assert words.texts[0] == finding
    assert words.tags.count("polyline") == 3
    assert words.texts.count("fedgh") >= 3
    headings = words.texts[2 : words.texts.index("local")]
    assert headings[:4] == ["method", "stage", "accuracy", "vs Local"]
    assert Words(done.table._repr_html_()).tags.count("polyline") == 0


def test_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        '[data]\ndataset = "digits"\nnum_clients = 3\nlimit_train = 200\nsplit = "6:1:3"\n'
        '[models]\narchitectures = ["digits-cnn1"]\n[method]\nname = "local"\n'
        '[training]\nrounds = 1\n[run]\nexecutor = "serial"\n'
    )
    done = sweep(path, {"training.lr": [0.01, 0.1]}, out=tmp_path / "runs")
    assert repr(done).startswith("Sweep(SweepTable(training.lr: ")
    words = Words(done._repr_html_())
    assert words.texts[0].startswith("Chosen by validation: --set training.lr=")
    assert "yes" in words.texts


def test_a_check() -> None:
    found = pf.check(Recipe.from_dict(SETTINGS))
    assert repr(found).startswith("Check(fedgh on digits, 3 clients: models and data fit; about ")
    assert "\n" not in repr(found)
    assert Words(found._repr_html_()).tags == ["pre"]


# settings, methods and data -----------------------------------------------------------------------------------------


def test_hyperparameters_that_were_set_are_told() -> None:
    assert repr(pf.methods.FedGH(header_epochs=100)) == "FedGH(header_epochs=100)"
    assert repr(pf.methods.FedIN(aggregation="same-shape")) == "FedIN(aggregation='same-shape')"

    class Mine(pf.Method):
        pass

    assert repr(Mine()) == "Mine()"


def test_data_are_told_by_their_size() -> None:
    x, y = torch.zeros(30, 1, 8, 8, dtype=torch.uint8), torch.arange(30) % 3
    source = from_tensors((x, y), name="mine")
    assert repr(source) == "Source(mine, 3 classes, training Samples(30 of 1 x 8 x 8, uint8))"
    options = PartitionOptions(
        num_clients=2, partition=lambda y, k, rng: np.split(rng.permutation(30), [12]), split="1:0:1"
    )
    dealt = build_federated_dataset(source, options, lambda purpose: numpy_generator(0, purpose))
    assert repr(dealt) == "FederatedDataset(mine, 2 clients with 6 to 9 training samples, 3 classes)"
    assert repr(PublicData(source.train)) == "PublicData(Samples(30 of 1 x 8 x 8, uint8), holdout)"
    assert repr(pf.Client("cnn", (x, y))) == "Client(cnn, 30 training samples)"
    told = Predictions(("a", "b"), torch.eye(2), torch.tensor([0, 0]), ("x", "y"))
    assert repr(told) == "Predictions(2 inputs, 2 classes, accuracy 0.5000)"
