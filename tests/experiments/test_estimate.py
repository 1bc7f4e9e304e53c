"""The page of `polyfed check`: what it costs, what does not fit, for machines too."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.cli.app import status
from polyfed.core.message import Message
from polyfed.core.server import Server
from polyfed.experiments.estimate import CostEstimate, check, estimate_costs
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.local import Local
from tests.helpers.checked_recipe import CHECKED
from tests.helpers.hospitals import hospitals

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(CHECKED, encoding="utf-8")
    return path


class Counting(FedAvg):
    """Notes whom the server told and heard."""

    def start_round(self, server: Server, selected: Any) -> None:
        NOTED.append(("plan", len(selected)))
        super().start_round(server, selected)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        NOTED.append(("aggregate", len(uploads)))
        super().aggregate(server, uploads)


NOTED: list[tuple[str, int]] = []


def federation(method: Any, clients: int = 6, rows: int = 12, **training: Any) -> pf.Federation:
    """Two networks in turn; nine training rows and three test rows for each client, or so."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3)) for width in (40, 80)]
    models = [pf.split(nets[k % 2], head="2", extractor=None) for k in range(clients)]
    x, y = torch.randn(rows, 10), torch.arange(rows) % 3
    return pf.Federation(
        [pf.Client(model, train=(x, y), test=(x[:6], y[:6]), validation=(x[:2], y[:2])) for model in models],
        method,
        pf.Training(**{"rounds": 4, "batch_size": 4, **training}),
        executor="serial",
    )


def test_networks_that_change_from_round_to_round(recipe: Path) -> None:
    """HeteroFL's clients draw a width in every round: who is measured in round 2 had another in round 1."""
    found = check(recipe, method="heterofl", overrides=["models.architectures=['digits-cnn2']", "data.num_clients=8"])
    assert len(found.architectures) > 1
    assert any(kind.up[0] != kind.up[1] for kind in found.architectures)


def test_nobody_is_missing_in_a_check() -> None:
    """One client of each network takes part in both rounds, whoever drops out or is late in a run."""
    del NOTED[:]
    made = federation(Counting(aggregation="same-shape"))
    absent = pf.Availability(dropout_rate=0.9)
    estimate_costs(pf.Federation(made.clients, made.method, made.training, plugins=[absent], executor="serial"))
    assert NOTED == [("plan", 2), ("aggregate", 2)] * 2


def test_no_worker_process_is_left(recipe: Path) -> None:
    """FedHeNN's server has workers compute passes over public rows in a run."""
    check(recipe, method="fedhenn", overrides=["method.alignment_data.size=20"], executor="processes", workers=2)
    assert multiprocessing.active_children() == []


def test_check_lists_it(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--set", "models.architectures=['digits-cnn1', 'fedhenn-lstm1', 'fedhenn-lstm2']", "--method", "fedhenn"]
    assert status(["check", str(recipe), *bad]) == 2
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [next(w for w in line.split() if "lstm" in w or w == "5000") for line in lines] == [
        "fedhenn-lstm1",
        "fedhenn-lstm2",
        "5000",
    ]
    assert "needs 5000 public rows" in lines[2]
    assert said.err == "polyfed: 3 things do not fit, as listed\n"
    assert status(["check", str(recipe), "--method", "fedhenn"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("polyfed: fedhenn needs 5000 public rows")


def test_the_page_and_its_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["check", str(recipe)]) == 0
    page = capsys.readouterr().out
    for words in (
        "FLOPs",
        "52,480",
        "memory at work",
        "(scoring ",
        " of weights and states, ",
        "a client has: training rows",
    ):
        assert words in page


PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
COMMANDS = re.search(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)[1].splitlines()  # type: ignore[index]
SMALL = ["--set", "data.limit_train=500", "--set", "data.min_samples=5"]


def test_the_table_stays_readable_with_many_clients_and_classes(recipe: Path) -> None:
    clients = tuple(
        {
            "id": number,
            "architecture": "net",
            "train": 300 + number,
            "validation": 0,
            "test": 0 if number == 7 else 20,
            "labels": {3: 300} if number == 5 else {label: 1 + label for label in range(99)},
        }
        for number in range(120)
    )
    facts = {
        "method": "local",
        "label": None,
        "dataset": "many",
        "clients": 120,
        "rounds": 2,
        "seed": 0,
        "classes": 100,
        "class_names": [str(label) for label in range(99)] + ["owl"],
        "feature_names": [f"x{place}" for place in range(50)],
    }
    cheap = estimate_costs(federation(Local()))
    odd = ("classes with test rows that nobody trains on (1): 99 (owl)",)
    lines = str(
        CostEstimate(facts, cheap.architectures, clients, cheap.seconds, 0, 0, cheap.memory, remarks=odd)
    ).splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.endswith("99 classes") for line in lines)
    assert any(line.endswith("x38, x39, ... and 10 more") for line in lines)
    for line in (
        "... and 100 more",
        "a client has: training rows 300 to 419, median 359; test rows 0 to 20, median 20; classes 1 to 99, median 99",
        "classes with test rows that nobody trains on (1): 99 (owl)",
        "clients with one class only (1): 5",
        "clients without test rows, which are not scored (1): 7",
    ):
        assert line in lines


def test_a_check_names_clients_without_test_rows_and_those_left_out(tmp_path: Path) -> None:
    settings = hospitals(tmp_path)
    table = tmp_path / "table.csv"
    table.write_text(table.read_text() + "1,1,a,tiny\n2,2,b,tiny\n3,2,b,tiny\n4,1,a,tiny\n5,1,a,tiny\n6,1,a,one\n")
    told = " ".join(str(check(pf.Recipe.from_dict(settings))).split())
    assert "clients without test rows, which are not scored (1): 1 ('one')" in told
    settings["data"]["min_samples"] = 5
    fewer = check(pf.Recipe.from_dict({**settings, "evaluation": {"weighting": "samples"}}))
    assert "left out, as they have fewer than data.min_samples rows: one" in str(fewer)
