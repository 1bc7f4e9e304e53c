"""Passes over public inputs that the server asks for: by workers, with the bits of one process, whatever happens."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core import inference
from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.executors import base, process_pool
from polyfed.engine.federation import Federation
from polyfed.errors import RunError
from polyfed.methods import FedDF, FedET, FedHeNN
from polyfed.methods.fedhenn import AlignmentData, MeanKernel
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records
from tests.helpers.quick import others_slow
from tests.helpers.told import Told

if sys.platform != "linux":
    pytest.skip("worker processes need Linux", allow_module_level=True)

HERE = os.getpid()
TRAINING = Training(rounds=3, batch_size=8, lr=0.1, client_fraction=0.7)
QUIET = Evaluation(every_n_rounds=100)  # scored after the last round only
RAD = AlignmentData(size=20, batch=10)
FIXED = FedHeNN(alignment_data=AlignmentData(size=20, batch=10, refresh=0), kernel=MeanKernel(pool="seen"))
METHODS = {
    "fedhenn": FedHeNN(alignment_data=RAD),
    "fixed": FIXED,
    "rbf": FedHeNN(alignment_data=RAD, kernel=MeanKernel(similarity="rbf", norm="fro")),
    "feddf": FedDF(server_steps=2, server_batch=8),
    "fedet": FedET(server_steps=2, server_batch=8),
}


def run(method: Method, executor: str = "processes", training: Training = TRAINING, **options: Any) -> Federation:
    usual = ConformanceKit(method=method).usual
    workers = 2 if executor == "processes" else None
    return usual.run(method, training, executor=executor, workers=workers, evaluation=QUIET, **options)


def same(a: Federation, b: Federation) -> None:
    assert difference(all_state(a), all_state(b)) is None
    assert records(a) == records(b)


def fail(*_: Any) -> Tensor:
    raise ValueError("no pass")


@pytest.mark.parametrize("name", others_slow(METHODS, quick=["feddf", "rbf"]))
def test_workers_make_the_passes_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serial = run(METHODS[name], "serial")
    assert serial.server.run_passes is None
    monkeypatch.setattr(process_pool, "run_public_pass", fail)  # with which the run's own process would make them
    monkeypatch.setattr(inference, "run_pass", fail)
    found = run(METHODS[name])
    same(serial, found)


def test_an_error_is_the_serial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "run_pass", fail)
    monkeypatch.setattr(inference, "run_pass", fail)
    said = []
    for executor in ("serial", "processes"):
        with pytest.raises(RunError) as caught:
            run(METHODS["fedhenn"], executor)
        said.append(str(caught.value))
    assert said == ["server, round 2, planning: ValueError: no pass"] * 2


@pytest.mark.parametrize("times", others_slow([1, 2], quick=[2]))
def test_a_pass_that_workers_die_of_is_made_again(times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By another worker; where that dies, too, by the run's own process."""
    whole = inference.run_pass

    def deadly(asked: Any, *rest: Any) -> Tensor:
        deaths = len(list(tmp_path.iterdir()))
        if os.getpid() != HERE and asked.client_id == 2 and asked.round == 2 and deaths < times:
            (tmp_path / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(asked, *rest)

    serial = run(METHODS["fedhenn"], "serial")
    monkeypatch.setattr(base, "run_pass", deadly)
    told = Told()
    found = run(METHODS["fedhenn"], loggers=[told])
    same(serial, found)
    assert found.history[1]["dropped"] == serial.history[1]["dropped"]
    who = "round 2: the worker of client 2 died"
    again = [f"{who} again; the run's own process does its work"] * (times - 1)
    assert [text.partition(" (")[0] for text in [text for text in told.messages if "worker" in text]] == [
        who
    ] * times + again


def test_rows_are_taken_in_their_order() -> None:
    """Representations of some of the public inputs, and scores of all, are those of the client's network."""
    fed = run(METHODS["fedhenn"], "serial")
    server = fed.server
    rows = torch.tensor([7, 0, 7, 3])
    models = {i: server.client_weights(i) for i in (4, 1)}
    assert server.public is not None
    for (i, weights), z, some in zip(
        models.items(),
        inference.public_outputs(server, models, "representations", rows),
        inference.public_outputs(server, models, "scores"),
        strict=True,
    ):
        network = server.model(server.clients[i].architecture, weights)
        with torch.no_grad():
            x = server.prepare(server.public.samples.x)
            torch.testing.assert_close(z, network.represent(x)[rows])  # type: ignore[operator]
            torch.testing.assert_close(some, network(x))
