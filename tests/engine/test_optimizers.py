"""Optimizers that go on from round to round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.core.method import Method
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.engine.optimizers import Optimizer
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FedAvg, FedLoRA, FedNova, FedRep, FedRolex, Local
from tests.helpers.interrupt import Interrupt
from tests.helpers.toys import NETS, Two, clients, federation, rounds, same, two_gradient, two_parameter_clients

KEPT: dict[str, Any] = {"rounds": 3, "batch_size": 5, "lr": 0.05, "momentum": 0.9, "keep_optimizer_state": True}


def test_momentum_goes_on_by_hand() -> None:
    members = two_parameter_clients()
    history = rounds(Local(), members, {"two": Two}, classes=2, **{**KEPT, "batch_size": 8, "lr": 0.5})
    for i, client in enumerate(members):
        w, velocity = np.array([0.3, -0.2]), np.zeros(2)
        for round in history:
            velocity = 0.9 * velocity + two_gradient(w, client.data.train)
            w = w - 0.5 * velocity
            np.testing.assert_allclose(round.trained[i]["w"].numpy(), w, atol=1e-6)


def test_adam_goes_on_by_hand() -> None:
    (client, *_) = members = two_parameter_clients(1)
    settings = {**KEPT, "momentum": 0.0, "optimizer": "adam", "batch_size": 8}
    w, m, v = np.array([0.3, -0.2]), np.zeros(2), np.zeros(2)
    for t, round in enumerate(rounds(Local(), members, {"two": Two}, classes=2, **settings), 1):
        g = two_gradient(w, client.data.train)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(round.trained[0]["w"].numpy(), w, atol=1e-6)


def trained(method: Method, executor: str, kind: str = "bn", **settings: Any) -> Federation:
    members = clients([kind] * 3, [13, 8, 11])
    fed = Federation(members, method, Training(**{**KEPT, **settings}), executor=executor, builders=NETS)
    fed.run()
    return fed


@pytest.mark.parametrize("method", [FedAvg(), FedRep(head_epochs=1)])
def test_executors_agree_bit_for_bit(method: Method) -> None:
    """Phases have optimizers of their own; where clients would be stacked, they train one by one."""
    serial, stacked, pooled = (trained(method, executor) for executor in ("serial", "vectorized", "processes"))
    for alone, together, apart in zip(serial.clients, stacked.clients, pooled.clients, strict=True):
        assert alone.weights is not None
        assert together.weights is not None
        assert apart.weights is not None
        assert same(alone.weights, together.weights)
        assert same(alone.weights, apart.weights)
    fresh = trained(method, "serial", keep_optimizer_state=False)
    assert not same(serial.clients[0].weights or {}, fresh.clients[0].weights or {})
    assert not any(name.startswith("optimizer") for name in fresh.clients[0].state)


def test_resumed_rounds_are_those_of_one_run(tmp_path: Path) -> None:
    def made(out: Path) -> Federation:
        return federation(FedAvg(), clients(["deep"] * 2), out=out, **KEPT)[0]

    whole = made(tmp_path / "whole")
    whole.run()
    parted = made(tmp_path / "parted")
    parted.loggers.append(Interrupt(2))
    with pytest.raises(RunInterrupted):
        parted.run()
    again = made(tmp_path / "parted")
    again.run(resume=True)
    assert all(same(whole.server.state[name], again.server.state[name]) for name in whole.server.state)


def test_a_parameter_of_another_shape_begins_anew() -> None:
    """Of a sub-model of another width nothing is remembered."""
    optimizer = Optimizer([torch.zeros(2, 3), torch.zeros(7)], Training(momentum=0.9), 0.1)
    optimizer.remember(["wide", "head.bias"], {"momentum wide": torch.ones(2, 3), "momentum head.bias": torch.ones(5)})
    assert list(optimizer.memory(["wide", "head.bias"])) == ["momentum wide"]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedNova(), "counts the steps"),
        (FedRolex(), "other channels in every round"),
        (FedLoRA(), "'stack' has clients train other adapters"),
    ],
)
def test_methods_whose_optimizers_must_begin_anew_say_so(method: Method, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        federation(method, clients(["deep"] * 2), **KEPT)[0].run()


def test_where_nothing_is_remembered_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match="keep_optimizer_state = true does nothing beside momentum = 0"):
        Training(keep_optimizer_state=True)
    assert "keep_optimizer_state" not in Training(momentum=0.5).effective()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_is_kept_of_some_rows_lies_as_their_parameters(optimizer: str) -> None:
    """Also where the others' parameters lay row by row; PyTorch's fused steps would mix the entries up."""
    training = Training(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    draws = torch.Generator().manual_seed(0)
    start, first, second = (torch.randn(3, 4, 5, generator=draws) for _ in range(3))
    rows = torch.tensor([0, 2])

    def moved(before: Tensor, after: Tensor) -> Tensor:
        """Two steps, the second of two rows."""
        whole = Optimizer([before], training, 0.1)
        whole.step([first])
        after.copy_(before[rows])
        part = Optimizer([after], training, 0.1)
        part.copy_state_from(whole, rows)
        part.step([second[rows]])
        return after

    plain = moved(start.clone(), torch.empty(2, 4, 5))
    by_columns = moved(start.clone(), torch.empty(2, 5, 4).mT)
    assert torch.equal(plain, by_columns)
