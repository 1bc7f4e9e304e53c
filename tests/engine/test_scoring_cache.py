"""Where only a head changed, a client's representations of its test data are not taken again; the scores stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.core.settings import Evaluation, Training
from polyfed.engine import scoring
from polyfed.methods import FedAvg, FedGH, LGFedAvg
from polyfed.models import build
from polyfed.testing.fixtures import TIMES
from tests.helpers.flat_options import grouped


def federation(method: object, executor: str = "serial", client_fraction: float = 0.5, **more: Any) -> pf.Federation:
    draws = torch.Generator().manual_seed(3)
    x, y = torch.randn(6, 30, 1, 8, 8, generator=draws), torch.randint(4, (6, 30), generator=draws)
    names = ("digits-cnn1", "digits-cnn3") if not isinstance(method, FedAvg) else ("digits-cnn1",)
    return pf.Federation(
        [pf.Client(names[i % len(names)], (x[i, :20], y[i, :20]), (x[i, 20:], y[i, 20:])) for i in range(6)],
        method,
        Training(rounds=3, client_fraction=client_fraction, batch_size=10, lr=0.1),
        Evaluation(extra_stages=["personal", "received"]),
        builders={name: lambda name=name: build(name, (1, 8, 8), 4) for name in names},
        **grouped(classes=4, executor=executor, workers=2 if executor == "processes" else None, **more),
    )


def passes(method: object, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[int, list[dict[str, Any]]]:
    """How many times a test set was represented, and the records."""
    count = 0
    whole = scoring.represent_samples

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return whole(*args)

    monkeypatch.setattr(scoring, "represent_samples", counted)
    done = federation(method, **more).run()
    monkeypatch.setattr(scoring, "represent_samples", whole)
    return count, [{**record, **dict.fromkeys(TIMES, 0)} for record in done.history]


def never(*args: Any) -> bool:
    return False


@pytest.mark.parametrize("method", [FedGH(), LGFedAvg()])
def test_two_stages_and_unchanged_clients_cost_one_pass(method: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All six in round 1, the three that trained in rounds 2 and 3; though the header, and so every score, changed."""
    count, records = passes(method, monkeypatch)
    assert count == 6 + 3 + 3
    monkeypatch.setattr("polyfed.engine.executors.client_work.only_head_differs", never)
    plain, same = passes(method, monkeypatch)
    assert plain > 0
    assert records == same


def test_a_body_that_was_received_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg: as received all six change in every round; none of these passes is remembered."""
    count, records = passes(FedAvg(), monkeypatch, client_fraction=1.0)
    assert count == 6 * 3  # the personal ones
    monkeypatch.setattr("polyfed.engine.executors.client_work.only_head_differs", never)
    assert passes(FedAvg(), monkeypatch, client_fraction=1.0) == (count, records)


def test_workers_remember_too() -> None:
    def records(executor: str) -> Sequence[dict[str, Any]]:
        return [{**record, **dict.fromkeys(TIMES, 0)} for record in federation(FedGH(), executor).run().history]

    assert records("processes") == records("serial")


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, records = passes(FedGH(), monkeypatch)
    monkeypatch.setattr(scoring, "REMEMBERED_BYTES", 10 * 64 * 4 + 1)  # one client's
    count, same = passes(FedGH(), monkeypatch)
    assert count > 12
    assert records == same
