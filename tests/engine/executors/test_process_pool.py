"""Workers give the result of `serial`, whatever happens to them, and none outlives its run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, Exchange, Method, TrainingResult
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.executors import executor as executor_module
from polyfed.engine.executors import process_pool, worker_pool
from polyfed.engine.executors.jobs import TrainJob
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, PolyfedError, RunError
from polyfed.methods import FedAvg, FedDF, FedET, FedHeNN, Local
from polyfed.methods.building_blocks.alignment_data import AlignmentData
from polyfed.methods.building_blocks.mean_kernel import MeanKernel
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records
from tests.helpers.quick import others_slow
from tests.helpers.told import Told

if sys.platform != "linux":
    pytest.skip("worker processes need Linux", allow_module_level=True)

TRAINING = Training(rounds=3, batch_size=8, lr=0.1, client_fraction=0.7)
ALL_STAGES = Evaluation(extra_stages=["received", "after_training", "personal"], metrics=["f1", "auc", "confusion"])
HERE = os.getpid()


def said(told: Told) -> list[str]:
    """The messages but for what is averaged with whom."""
    return [text for text in told.messages if not text.startswith("averaged: ")]


def run(method: Method, training: Training = TRAINING, **options: Any) -> Federation:
    """A run of the conformance kit's six clients."""
    return ConformanceKit(method=method).usual.run(method, training, **{"evaluation": ALL_STAGES, **options})


def same(a: Federation, b: Federation) -> None:
    assert difference(all_state(a), all_state(b)) is None
    assert records(a) == records(b)


class Odd(PolyfedError):
    """An error of one's own."""


def failing(where: str, error: Exception, numbers: Sequence[int] = (1, 4)) -> Method:
    """Fails for these clients, the first of them late."""

    class Fails(FedAvg):
        def _fail(self, client: Client, at: str) -> None:
            if at == where and client.id in numbers:
                time.sleep(0.2 if client.id == numbers[0] else 0)
                raise error

        def receive(self, client: Client, message: Message) -> Context:
            self._fail(client, "receiving")
            return {**super().receive(client, message), "client": client}

        def gradients(self, model: Any, batch: Batch, context: Context) -> Any:
            self._fail(context["client"], "training")
            return super().gradients(model, batch, context)

        def upload(self, client: Client, trained: TrainingResult) -> Message:
            self._fail(client, "uploading")
            return super().upload(client, trained)

        def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
            if where == "scoring":
                raise error
            return super().predict(model, x, context)

    return Fails()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        pytest.param("receiving", KeyError("w"), marks=pytest.mark.slow),
        ("training", ValueError("five\nlines")),
        pytest.param("uploading", ConfigError("no"), marks=pytest.mark.slow),
        ("scoring", Odd("odd")),
    ],
)
def test_an_error_is_the_serial_one(where: str, error: Exception) -> None:
    said = []
    for executor in ("serial", "processes"):
        with pytest.raises(PolyfedError) as caught:
            run(failing(where, error), executor=executor, workers=None if executor == "serial" else 3)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]
    assert where in said[0][1]
    if where != "scoring":
        assert "client 1" in said[0][1]  # though client 4's came first
        assert "Traceback" in caught.value.__notes__[0]


def test_after_an_error_the_round_is_undone_and_the_workers_are_gone() -> None:
    method = failing("training", ValueError("x"))
    fed = ConformanceKit(method=method).usual.federation(method, TRAINING, executor="processes", workers=2)
    with pytest.raises(RunError):
        fed.run()
    assert fed.executor.running == []  # type: ignore[attr-defined]
    assert all(client.weights is None for client in fed.clients)


def deadly(dies: Callable[[Client], bool], scoring: bool = False) -> Method:
    """Kills the worker that it is in, never this process."""

    class Dies(FedAvg):
        def receive(self, client: Client, message: Message) -> Context:
            if os.getpid() != HERE and not scoring and dies(client):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().receive(client, message)

        def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
            if os.getpid() != HERE and scoring and len(x) >= 12 and dies(model):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().predict(model, x, context)

    return Dies()


QUIET = Evaluation(every_n_rounds=100)  # scored after the last round only


def test_a_worker_that_dies_is_replaced_and_its_job_done_again(tmp_path: Path) -> None:
    def once(client: Client) -> bool:
        mark = tmp_path / f"{client.round}-{client.id}"
        if client.id not in (0, 3) or client.round != 2 or mark.exists():
            return False
        mark.touch()
        return True

    told, training = Told(), TRAINING.model_copy(update={"client_fraction": 1.0})
    serial = run(FedAvg(), training, evaluation=QUIET)
    found = run(deadly(once), training, evaluation=QUIET, executor="processes", workers=2, loggers=[told])
    same(serial, found)
    how = "was killed by SIGKILL, as when memory runs out"
    assert sorted(said(told)) == [
        f"round 2: the worker of client {i} died ({how}); its work is done again" for i in (0, 3)
    ]


@pytest.mark.parametrize("scoring", [False, True])
def test_a_run_whose_worker_dies_twice_of_a_job_ends(scoring: bool) -> None:
    method = deadly(lambda of: scoring or of.id == 2, scoring)
    with pytest.raises(RunError, match=r"round 1: the worker of client .* died twice \(.*SIGKILL.*fewer workers"):
        run(method, Training(rounds=1, batch_size=8), executor="processes", workers=2)


@pytest.mark.parametrize("what", others_slow(["fork", "gradient"], quick=["gradient"]))
def test_where_no_worker_can_be_had_serial_does_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    serial = run(FedAvg())
    monkeypatch.setattr(os, "fork", no_fork) if what == "fork" else None
    monkeypatch.setattr(process_pool, "find_trouble", lambda: "no gradients") if what == "gradient" else None
    told = Told()
    found = run(FedAvg(), executor="processes", workers=2, loggers=[told])
    reason = {"fork": "no process can be started: Resource temporarily unavailable", "gradient": "no gradients"}[what]
    assert said(told) == [f"there can be no worker processes ({reason}); all is done by this one"]
    same(serial, found)


def test_a_worker_computes_with_one_thread_whatever_is_set(capfd: pytest.CaptureFixture[str]) -> None:
    class Tells(Local):
        def upload(self, client: Client, trained: TrainingResult) -> Message:
            print("from a worker")
            return {"threads": torch.tensor(torch.get_num_threads()), "process": torch.tensor(os.getpid())}

    fed = ConformanceKit(method=Tells()).usual.federation(Tells(), executor="processes", workers=2)
    jobs = [TrainJob(client, {}, "", Exchange(), 1) for client in fed.clients]
    torch.set_num_threads(2)
    try:
        outcomes = fed.executor.run(jobs, lambda _: None)
    finally:
        torch.set_num_threads(1)
        fed.executor.close()
    assert {int(get_tensor(o.message, "threads")) for o in outcomes} == {1}
    assert HERE not in {int(get_tensor(o.message, "process")) for o in outcomes}
    assert [o.client_id for o in outcomes] == list(range(6))
    assert capfd.readouterr().out.count("from a worker") == 6


RAD = AlignmentData(size=20, batch=10)
FIXED = FedHeNN(alignment_data=AlignmentData(size=20, batch=10, fixed=True), kernel=MeanKernel(pool="seen"))
METHODS = {
    "fedhenn": FedHeNN(alignment_data=RAD),
    "fixed": FIXED,
    "rbf": FedHeNN(alignment_data=RAD, kernel=MeanKernel(similarity="rbf", norm="fro")),
    "feddf": FedDF(server_steps=2, server_batch=8),
    "fedet": FedET(server_steps=2, server_batch=8),
}


def ran(method: Method, executor: str = "processes", training: Training = TRAINING, **options: Any) -> Federation:
    usual = ConformanceKit(method=method).usual
    workers = 2 if executor == "processes" else None
    return usual.run(method, TRAINING, executor=executor, workers=workers, evaluation=QUIET, **options)


def fail(*_: Any) -> Tensor:
    raise ValueError("no pass")


@pytest.mark.parametrize("name", others_slow(METHODS, quick=["feddf", "rbf"]))
def test_workers_make_the_passes_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serial = ran(METHODS[name], "serial")
    assert serial.server.run_passes is None
    monkeypatch.setattr(worker_pool, "run_public_pass", fail)  # with which the run's own process would make them
    monkeypatch.setattr(inference, "run_pass", fail)
    same(serial, ran(METHODS[name]))


def test_a_pass_that_a_worker_dies_of_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, mark = inference.run_pass, tmp_path / "died"

    def deadly(asked: Any, *rest: Any) -> Tensor:
        if os.getpid() != HERE and asked.client_id == 2 and asked.round == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(asked, *rest)

    serial = ran(METHODS["fedhenn"], "serial")
    monkeypatch.setattr(executor_module, "run_pass", deadly)
    told = Told()
    same(serial, ran(METHODS["fedhenn"], loggers=[told]))
    who = "round 2: the worker of client 2 died"
    assert [text.partition(" (")[0] for text in told.messages if "worker" in text] == [who]
