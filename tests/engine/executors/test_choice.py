"""Which executor carries out a run: by its name, by what pays, or one's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyfed.core.settings import Training
from polyfed.engine.executors import process_pool, worker_pool
from polyfed.engine.executors.choice import make_executor
from polyfed.engine.executors.executor import Executor
from polyfed.engine.executors.serial import Serial
from polyfed.engine.executors.vectorized import VectorizedExecutor
from polyfed.engine.executors.worker_requests import RequestHandler, make_request, read_answer
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, FedGH
from polyfed.testing.fixtures import all_state, difference, grouped, records
from tests.helpers import toys

LONG = Training(rounds=10_000)


def choose(executor: Any = "auto", clients: int = 6, device: str = "cpu", **options: Any) -> Any:
    """The executor of such a federation; on another device, the one that it would have there."""
    training = options.pop("training", Training(rounds=3, batch_size=8))
    given = {"executor": executor, **options} if device == "cpu" else {"executor": "serial"}
    given = grouped(classes=toys.CLASSES, builders=toys.NETS, **given)
    found = Federation(toys.clients(["shallow"] * clients), FedAvg(), training, **given).executor
    if device == "cpu":
        return found
    there: Any = SimpleNamespace(device=torch.device(device), module=found.setup.model_factory.module)
    return make_executor(executor, replace(found.setup, model_factory=there, **options))


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")
def test_auto_takes_workers_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "available_cores", lambda: 4)
    assert isinstance(choose(), Serial)  # milliseconds
    assert choose(training=LONG).workers == 4
    assert choose(clients=3, training=LONG).workers == 3
    assert isinstance(choose(training=Training(rounds=10_000, client_fraction=0.2)), Serial)  # one client per round
    assert isinstance(choose(training=LONG, workers=1), Serial)
    assert choose(workers=2).workers == 2  # whoever asks for workers has them
    assert choose("processes").workers == 4
    assert choose("processes", workers=1).workers == 1
    monkeypatch.setattr(worker_pool, "available_cores", lambda: 1)
    assert isinstance(choose(training=LONG), Serial)


def test_auto_trains_clients_as_one_on_a_gpu() -> None:
    assert isinstance(choose(device="cuda"), VectorizedExecutor)
    assert isinstance(choose(device="cuda", workers=4), VectorizedExecutor)
    assert isinstance(choose(device="cuda", workers=1), Serial)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"executor": "serail"}, "unknown executor 'serail'; did you mean 'serial'"),
        ({"executor": "os:environ"}, "a class that extends polyfed.Executor, got"),
        ({"executor": dict}, "a class that extends polyfed.Executor, got the class dict"),
        ({"workers": 0}, "workers: expected at least 1, got 0"),
        ({"executor": "serial", "workers": 2}, "expected workers = 1, as the executor 'serial' has one, got 2"),
        ({"executor": "vectorized", "workers": 1}, "expected workers = 2 or more, .* 'vectorized' .*, got 1"),
        ({"executor": "processes", "device": "cuda"}, "expected the executor 'vectorized', .* and this one is 'cuda'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        choose(**options)


def test_without_linux_there_are_no_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(worker_pool, "available_cores", lambda: 4)
    for given in ({"executor": "processes"}, {"workers": 2}):
        with pytest.raises(ConfigError, match="'serial' with 1 worker, as worker processes need Linux"):
            choose(**given)
    assert isinstance(choose(training=LONG), Serial)


class Backwards(Executor):
    """Serial work, the last client first."""

    def run(self, jobs: Sequence[Any], done: Any) -> list[Any]:
        return Serial(self.setup).run(list(reversed(jobs)), done)[::-1]


class Threads(Executor):
    """Threads that each have a federation of their own, as docs/own-executor.md says."""

    def run(self, jobs: Sequence[Any], done: Any) -> list[Any]:
        assert self.setup.rebuild is not None
        free = SimpleQueue[RequestHandler]()
        for _ in range(2):
            free.put(RequestHandler(self.setup.rebuild().executor.setup))

        def work(request: bytes) -> bytes:
            handler = free.get()
            answer = handler.reply(request)
            free.put(handler)
            return answer

        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(work, map(make_request, jobs)))
        done(len(jobs))
        return [read_answer(job, answer) for job, answer in zip(jobs, answers, strict=True)]


def two_networks(**options: Any) -> Federation:
    members = toys.clients(["shallow", "deep", "shallow", "deep"], test=5)
    return Federation(
        members,
        FedGH(),
        Training(rounds=3, batch_size=8),
        **grouped(classes=toys.CLASSES, builders=toys.NETS, **options),
    )


def test_threads_with_a_federation_each_give_the_serial_result() -> None:
    serial, threads = two_networks(executor="serial"), two_networks(executor=Threads, rebuild=two_networks)
    serial.run()
    threads.run()
    assert difference(all_state(serial), all_state(threads)) is None
    assert records(serial) == records(threads)


def test_an_executor_of_ones_own_is_found_by_class_and_by_name() -> None:
    assert isinstance(choose(Backwards), Backwards)
    assert isinstance(choose(f"{__name__}:Backwards"), Backwards)


def test_cores_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= worker_pool.available_cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "process_cpu_count", lambda: 6, raising=False)
    for text, expected in {"max 100000\n": 6, "250000 100000\n": 3, "10000 100000\n": 1, "?": 6}.items():
        monkeypatch.setattr(worker_pool.Path, "read_text", lambda *_, text=text, **__: text)
        assert worker_pool.available_cores() == expected
