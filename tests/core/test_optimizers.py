"""Optimizers that go on from round to round, learning rates against closed forms, and stopping early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, Phase, StepResult
from polyfed.core.optimizers import Optimizer
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.run import early_stop_round
from polyfed.methods import Local
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import draw, plain_model

ROOT = Path(__file__).resolve().parents[2]


def test_a_parameter_of_another_shape_begins_anew() -> None:
    """Of a sub-model of another width nothing is remembered."""
    optimizer = Optimizer([torch.zeros(2, 3), torch.zeros(7)], Training(momentum=0.9), 0.1)
    optimizer.remember(["wide", "head.bias"], {"momentum wide": torch.ones(2, 3), "momentum head.bias": torch.ones(5)})
    assert list(optimizer.memory(["wide", "head.bias"])) == ["momentum wide"]


ALL_KINDS = """
import sys
from polyfed.methods import FedDF, FedGen
from polyfed import Federation, Task, Training
from tests.helpers.toys import NETS, clients, public
task = Task(public=public(20))
for method in (FedGen(), FedDF(server_batch=20, server_steps=1)):
    for how in ("serial", "vectorized"):
        Federation(clients(["deep"] * 2), method, Training(rounds=2), task=task, executor=how, builders=NETS).run()
print(*{"sympy", "torch._dynamo"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_no_training_of_clients_or_servers_loads_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_KINDS], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.strip() == "", done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_first_rows_go_on_in_the_same_memory_however_it_lies(optimizer: str) -> None:
    """PyTorch's fused steps would mix the entries up where parameters lay by columns."""
    training = Training(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    draws = torch.Generator().manual_seed(0)
    start, first, second = (torch.randn(3, 4, 5, generator=draws) for _ in range(3))

    def moved(parameter: Tensor) -> Tensor:
        """Two steps, the second of two rows."""
        whole = Optimizer([parameter], training, 0.1)
        whole.begin()
        whole.step([first])
        whole.first(2).step([second[:2]])
        return parameter

    plain = moved(start.clone())
    assert torch.equal(plain, moved(start.mT.contiguous().mT))
    once = Optimizer([alone := start[2:].clone()], training, 0.1)
    once.step([first[2:]])
    assert torch.equal(plain[2:], alone)


# closed forms -------------------------------------------------------------------------------------------------------


def rates(rounds: int = 10, **settings: Any) -> np.ndarray:
    training = Training(rounds=rounds, lr=0.8, **settings)
    return np.array([training.lr_at(t) for t in range(1, rounds + 1)])


def falling(rounds: int) -> np.ndarray:
    """Factors of the learning rate in each round, from 1 down."""
    return 0.5 * (1 + np.cos(np.pi * np.arange(rounds) / rounds))


def test_rates_by_round() -> None:
    np.testing.assert_allclose(rates(lr_schedule="cosine"), 0.8 * falling(10), rtol=1e-12)
    assert (rates() == 0.8).all()


def test_a_phase_of_its_own_rate_and_what_comes_after_the_last_round() -> None:
    training = Training(rounds=4, lr=0.8, lr_schedule="cosine")
    assert [training.lr_at(t, 0.2) for t in range(1, 5)] == pytest.approx([*0.2 * falling(4)])
    assert [training.lr_at(t, 0.0) for t in range(1, 6)] == [0.0] * 5
    assert training.lr_at(5) == training.lr_at(4)


class Downhill(Local):
    """The gradient of every weight is 1, so that a step of SGD takes the learning rate off every weight."""

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        grads: dict[str, Tensor | None] = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        return StepResult(grads, torch.zeros(()), {})


class TwoRates(Downhill):
    """First the bias with a rate of its own, then all; keeps the rate that the client sees."""

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(1, trains=lambda name: name.endswith("bias"), lr=0.5), Phase(1))

    def receive(self, client: Client, message: Message) -> Context:
        client.state = {"seen": torch.cat([client.state.get("seen", torch.empty(0)), torch.tensor([client.lr])])}  # type: ignore
        return {}


def one_client(method: Method, training: Training) -> tuple[dict[str, Tensor], Federation]:
    network = plain_model()
    made = Federation([Client(network, draw(16, (0, 1, 2), 0), draw(6, (0, 1, 2), 1))], method, training)
    made.run()
    start, end = network.state_dict(), made.clients[0].weights
    assert end is not None
    return {name: start[name].double() - end[name].double() for name in start}, made


def test_weights_move_by_the_sum_of_the_rates() -> None:
    training = Training(rounds=5, batch_size=8, lr=0.25, lr_schedule="cosine")
    by_hand = [*0.25 * falling(5)]
    moved, made = one_client(Downhill(), training)
    for change in moved.values():
        assert torch.allclose(change, torch.tensor(2 * sum(by_hand), dtype=torch.float64), atol=1e-5)  # 2 batches
    assert [record["lr"] for record in made.history] == pytest.approx(by_hand)
    moved, made = one_client(TwoRates(), training)
    own, both = 2 * 2 * sum(by_hand), 2 * sum(by_hand)  # the rate of 0.5 is twice that of 0.25, round by round
    assert torch.allclose(moved["1.bias"], torch.tensor(own + both, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(moved["1.weight"], torch.tensor(both, dtype=torch.float64), atol=1e-5)
    assert made.clients[0].state["seen"].tolist() == pytest.approx(by_hand)  # type: ignore[union-attr]


def test_adaptive_optimizers_follow_it_too() -> None:
    """Adam's first step is its learning rate, whatever the gradient."""
    training = Training(rounds=3, batch_size=16, optimizer="adam", lr=0.1, lr_schedule="cosine")
    moved, _ = one_client(Downhill(), training)
    assert torch.allclose(moved["1.weight"], torch.tensor(0.2, dtype=torch.float64), atol=1e-5)


# stopping early -----------------------------------------------------------------------------------------------------


def curve(*values: float | None) -> list[dict[str, Any]]:
    return [{"round": t, "validation": value, "final_round": False} for t, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "patience", "delta", "stop"),
    [
        ((0.1, 0.2, 0.3, 0.4), 1, 0.0, None),
        ((0.1, 0.2, 0.2, 0.4), 1, 0.0, 3),  # as good is not better
        ((0.1, 0.2, 0.2, 0.4), 2, 0.0, None),
        ((0.5, 0.4, 0.3, 0.6, 0.5, 0.4, 0.3), 3, 0.0, 7),  # a better one starts the count again
        ((0.5, 0.52, 0.54, 0.56), 3, 0.05, None),  # together they are better by 0.06 than the last that counted
        ((0.5, 0.52, 0.54, 0.56), 2, 0.1, 3),
        ((0.5, None, None, 0.4, None, 0.3), 2, 0.0, 6),  # only evaluations count
        ((None, None, None), 1, 0.0, None),
        ((0.5, 0.4, 0.3, 0.2), 0, 0.0, None),
    ],
)
def test_when_a_curve_stops(values: Sequence[float | None], patience: int, delta: float, stop: int | None) -> None:
    assert early_stop_round(curve(*values), patience, delta) == stop


def test_the_final_round_is_no_evaluation_of_it() -> None:
    final = {"round": 3, "validation": 0.1, "final_round": True}
    assert early_stop_round([*curve(0.5, 0.4), final], 2, 0.0) is None


class Scripted(Local):
    """Classifies by script: in round t a model is right on so many of its validation samples."""

    script: Sequence[int] = (1, 2, 3, 3, 2, 1, 4, 4, 4)

    def receive(self, client: Client, message: Message) -> Context:
        client.state = {"round": torch.tensor(client.round), "y": client.data.validation.y}
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        scores = torch.nn.functional.one_hot(context["y"], 3).float()
        if len(x) != len(scores):
            return torch.zeros(len(x), 3)
        scores[self.script[int(context["round"]) - 1] :] *= -1
        return scores


SCRIPT = Training(rounds=9, batch_size=32, lr=0.01)


def scripted(**evaluation: Any) -> Federation:
    return ConformanceKit(method=Local()).usual.federation(Scripted(), SCRIPT, evaluation=Evaluation(**evaluation))


def test_a_run_stops_by_its_validation_curve() -> None:
    whole = scripted()
    whole.run()
    assert [record["validation"] for record in whole.history] == [v / 4 for v in Scripted.script]
    for patience, every, stop in ((1, 1, 4), (2, 1, 5), (3, 1, 6), (4, 1, None), (1, 2, 6)):
        made = scripted(patience=patience, every_n_rounds=every)
        result = made.run().result
        assert len(made.history) == (stop or 9), (patience, every)
        assert result["stopped_after"] == stop
        assert result["rounds"] == 9
        assert made.history[-1]["evaluated"]
    assert scripted(patience=1, min_delta=0.3).run().result["stopped_after"] == 2
