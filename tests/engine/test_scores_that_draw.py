"""A network that draws while it is scored: equal weights have equal scores, whoever scores them, how often and when."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.engine.task import Execution
from polyfed.experiments.build import build_federation
from polyfed.experiments.prediction import predict

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


class Drawing(nn.Module):
    """Dropout that stays on; or a shift that Python's generator draws."""

    def __init__(self, outputs: int, pythons: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.pythons = nn.Linear(8, 16), nn.Linear(16, outputs), pythons

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x).relu()
        scores: Tensor = self.head(z - 2 * random.random() if self.pythons else F.dropout(z, training=True))
        return scores


def build(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Drawing(classes))


def scores(
    method: pf.Method,
    every: int = 1,
    rounds: int = 3,
    pythons: bool = False,
    shared: bool = False,
    resume: bool = False,
    **options: Any,
) -> list[float]:
    clients = []
    for k in range(3):
        torch.manual_seed(k)
        rows = X[k::3], Y[k::3]
        own = {} if shared else {"test": (X[k::2], Y[k::2]), "validation": (X[::4], Y[::4])}
        clients.append(pf.Client(Drawing(3, pythons), rows, **own))
    task = pf.Task(test=(X, Y)) if shared else pf.Task()
    training = pf.Training(rounds=rounds, batch_size=8, lr=0.1, client_fraction=0.67)  # not all change in each round
    evaluation = pf.Evaluation(every_n_rounds=every)
    federation = pf.Federation(clients, method, training, evaluation, task=task, **options)
    found: list[float] = federation.run(resume=resume).result["accuracy_per_client"]
    return found


@pytest.mark.parametrize("pythons", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", [pf.methods.Local(), pf.methods.FedAvg()], ids=lambda method: method.name)
def test_scores_are_the_same_whoever_takes_them_and_how_often(method: pf.Method, shared: bool, pythons: bool) -> None:
    expected = scores(method, pythons=pythons, shared=shared)
    random.seed(1)
    torch.manual_seed(1)
    assert scores(method, every=3, pythons=pythons, shared=shared) == expected
    two = Execution(executor="processes", workers=2)
    assert scores(method, pythons=pythons, shared=shared, executor=two) == expected
    if not pythons:  # which no clients can draw as one
        assert scores(method, pythons=pythons, shared=shared, executor="vectorized") == expected


def test_scores_are_the_same_after_a_resume(tmp_path: Path) -> None:
    method = pf.methods.FedAvg()
    scores(method, rounds=2, out=tmp_path / "run")
    assert scores(method, out=tmp_path / "run", resume=True) == scores(method)


@pytest.mark.parametrize("pythons", [False, True])
def test_global_generators_stay_where_they_are(pythons: bool) -> None:
    before = torch.get_rng_state(), random.getstate()
    client = pf.Client(Drawing(3, pythons), (X, Y), (X, Y))
    federation = pf.Federation([client], pf.methods.Local(), pf.Training(rounds=1), executor="serial")
    torch.set_rng_state(before[0])
    federation.run()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_run_folder_predicts_with_the_reported_accuracy(tmp_path: Path) -> None:
    recipe = pf.Recipe.from_dict(
        {
            "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 60, "max_test_per_client": 40},
            "models": {"architectures": [f"{__name__}:build"]},
            "method": {"name": "local"},
            "training": {"rounds": 1, "lr": 0.05},
        }
    )
    run = pf.run(recipe, out=tmp_path / "run")
    for client in build_federation(recipe).clients:
        found = predict(tmp_path / "run", client.id, client.data.test.x, trust=True)
        reported = run.result["accuracy_per_client"][client.id]
        assert float((found.classes == client.data.test.y).double().mean()) == pytest.approx(reported)
        assert torch.equal(found.scores, predict(tmp_path / "run", client.id, client.data.test.x, trust=True).scores)
