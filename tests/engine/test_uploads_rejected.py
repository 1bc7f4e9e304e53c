"""A run in which every upload was refused: its result says so and what to try; no other is taken for such a run."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.core.message import Message
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.run import summarize_run
from polyfed.errors import RunError
from polyfed.methods import FedAvg, Local
from polyfed.testing.fixtures import TIMES
from tests.helpers.small_recipe import small_recipe

NAN = "the training loss is nan"
FACTS = {"rounds": 2, "evaluation": {"stage": "personal"}}


def record(number: int, refused: dict[int, str], samples: int = 0, loss: float | None = None) -> dict[str, Any]:
    """What a round of four clients leaves, as far as it matters here."""
    counts = dict.fromkeys(("bytes_up", "bytes_down", "bytes_up_paper", "bytes_down_paper", *TIMES), 0)
    return {
        **counts,
        "round": number,
        "final_round": False,
        "evaluated": False,
        "clients": [0, 1, 2, 3],
        "refused": [{"client": client, "reason": reason} for client, reason in refused.items()],
        "samples": samples,
        "train_loss": loss,
        "lr": 0.5,
        "accuracy": {},
        "accuracy_per_client": [],
        "validation": None,
        "bytes_by_client": {},
    }


def said(*records: dict[str, Any]) -> str | None:
    return summarize_run(records, FACTS, (), torch.device("cpu"))["nothing_learnt"]


EVERY = dict.fromkeys(range(4), NAN)
MOST = dict.fromkeys(range(3), NAN)


def clients() -> list[pf.Client]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    data = [(torch.rand(12, 1, 4, 4), torch.arange(12) % 3) for _ in range(2)]
    return [pf.Client(copy.deepcopy(network), pair, test=pair) for pair in data]


@pytest.mark.parametrize(("lr", "learns"), [(0.1, True), (1e38, False)])
@pytest.mark.parametrize("method", [Local, FedAvg])
def test_a_federation(method: type, lr: float, learns: bool) -> None:
    run = pf.Federation(clients(), method(), pf.Training(rounds=2, lr=lr, local_epochs=3, batch_size=4)).run()
    assert (run.result["nothing_learnt"] is None) is learns
    assert ("nothing was learnt" in repr(run)) is not learns


class Fragile(pf.Plugin):
    """Cannot decode the uploads of client 1."""

    name = "fragile"

    def decode(self, upload: Message, job: TrainJob, method: Any) -> Message:
        return upload if job.client.id == 0 else {"n": upload["unknown"]}


def test_a_fault_of_a_plugin_that_decodes_ends_the_run() -> None:
    with pytest.raises(RunError, match="server, round 1, reading uploads: KeyError: 'unknown'"):
        pf.Federation(clients(), FedAvg(), pf.Training(rounds=1), plugins=[Fragile()]).run()


def from_afar(run: Callable[[Sequence[TrainJob], Any], list[JobResult]]) -> Any:
    return lambda jobs, done: [dataclasses.replace(result, is_remote=True) for result in run(jobs, done)]


def test_an_upload_from_another_machine_that_cannot_be_decoded_is_its_clients_alone() -> None:
    executor = pf.Execution(executor="serial", wrap=from_afar)
    run = pf.Federation(clients(), FedAvg(), pf.Training(rounds=1), plugins=[Fragile()], executor=executor).run()
    assert run.history[0]["refused"] == [{"client": 1, "reason": "the upload cannot be read: 'unknown'"}]
    assert run.history[0]["samples"] == 12


@pytest.mark.parametrize(("lost", "rounds", "learns"), [(3, 5, False), (2, 4, True), (1, 3, True)])
def test_uploads_refused_in_most_rounds(lost: int, rounds: int, learns: bool) -> None:
    records = [record(n, EVERY) if n <= lost else record(n, {}, samples=10, loss=1.0) for n in range(1, rounds + 1)]
    line = said(*records)
    assert (line is None) is learns
    assert line is None or f"in {lost} of {rounds} rounds no client's work counted" in line


def test_all_dropped_out() -> None:
    away = pf.Availability(dropout_rate=1)
    run = pf.Federation(clients(), FedAvg(), pf.Training(rounds=2), plugins=[away]).run()
    line = "nothing was learnt: in each of 2 rounds all clients dropped out; see availability.dropout_rate"
    assert run.result["nothing_learnt"] == line


# the command line -----------------------------------------------------------------------------------------------------

RECIPE = small_recipe(
    data={"num_clients": 3, "split": "6:2:2"},
    models={"architectures": ["digits-cnn1"]},
    method={"name": "fedavg"},
    training={"lr": 1e18},
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wild.toml").write_text(RECIPE)
    return tmp_path


LINE = "nothing was learnt: in the only round no client's work counted (3 refused: "


def test_a_run_and_reading_it_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.status(["run", "wild.toml", "--out", "a"]) == 3
    shown = capsys.readouterr()
    assert "Accuracy: stage received" in shown.out
    assert "fedavg: nothing was learnt  accuracy" in shown.err
    assert shown.err.splitlines()[-1].startswith(f"polyfed: {LINE}")
    assert json.loads((place / "a" / "result.json").read_text())["nothing_learnt"].startswith(LINE)
    assert cli.status(["run", "wild.toml", "--out", "a", "--resume", "--quiet"]) == 3
    assert cli.status(["run", "wild.toml", "--out", "a", "--resume", "--set", "training.rounds=2", "--quiet"]) == 3
    assert "in each of 2 rounds no client's work counted (6 refused" in capsys.readouterr().err
    assert cli.status(["run", "wild.toml", "--out", "a", "--overwrite", "--set", "training.lr=0.05", "--quiet"]) == 0
