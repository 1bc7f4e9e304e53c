"""Clients trained as one come to where they come alone; what cannot be stacked is done alone, and is said."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, StepResult
from polyfed.core.settings import Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.stacked_training import StackedPhase
from polyfed.engine.executors.vectorized import VectorizedExecutor
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunError
from polyfed.functional.losses import cross_entropy
from polyfed.methods import MOON, FedAvg, FedSelect, Local
from polyfed.models.split import SequentialSplit
from polyfed.plugins.settings import Availability
from polyfed.testing.fixtures import all_state, difference, grouped
from tests.engine.executors.test_agreement import CLOSE, near
from tests.helpers import toys
from tests.helpers.quick import others_slow
from tests.helpers.told import Told

TWO_ROUNDS = Training(rounds=2, batch_size=8, lr=0.1)
HARD = Training(rounds=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01)
SIZES = [12, 7, 1, 30, 17]


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each step of several clients had, trials apart."""
    sizes: list[int] = []
    plain = StackedPhase._gradients

    def counted(self: Any, going: int, rows: slice | Tensor, *rest: Any) -> Any:
        sizes.append(rows.stop if isinstance(rows, slice) else len(rows))
        return plain(self, going, rows, *rest)

    monkeypatch.setattr(StackedPhase, "_gradients", counted)
    return sizes


def same(run: Callable[..., Federation], lines: Sequence[str] = ()) -> Federation:
    """`run(executor=, loggers=)` gives the same by either executor; the lines that only one says match these."""
    told_serial, told = Told(), Told()
    serial = run(executor="serial", loggers=[told_serial])
    found = run(executor="vectorized", loggers=[told])
    assert isinstance(found.executor, VectorizedExecutor)
    assert difference(all_state(serial), all_state(found), CLOSE) is None
    assert near(serial.history, found.history)
    own = [said for said in told.messages if said not in told_serial.messages]
    assert len(own) == len(lines), own
    assert all(re.search(line, said) for line, said in zip(lines, own, strict=True)), own
    return found


def of_toys(
    method: Method,
    net: Callable[[], nn.Module] = toys.NETS["shallow"],
    sizes: Sequence[int] = SIZES,
    training: Training = HARD,
    **options: Any,
) -> Callable[..., Federation]:
    """Runs of clients of one network with so many samples."""

    def run(**more: Any) -> Federation:
        members = toys.clients(["net"] * len(sizes), sizes, test=5)
        given = {"builders": {"net": net}, "classes": toys.CLASSES, **options, **more}
        federation = Federation(members, method, training, **grouped(**given))
        federation.run()
        return federation

    return run


@pytest.mark.parametrize("optimizer", ["sgd", "adam", pytest.param("adamw", marks=pytest.mark.slow)])
def test_ragged_sizes_and_every_optimizer(optimizer: str, stacks: list[int]) -> None:
    settings = {"momentum": 0.9 if optimizer == "sgd" else 0.0, "weight_decay": 0.1, "lr": 0.01}
    same(of_toys(Local(), training=Training(rounds=2, local_epochs=2, batch_size=8, optimizer=optimizer, **settings)))
    steps = [-(-size // 8) * 2 for size in SIZES]
    assert stacks == [sum(count > step for count in steps) for step in range(max(steps))] * 2  # who is through leaves


def test_batchnorm_is_given_no_filled_batches(stacks: list[int]) -> None:
    found = same(of_toys(FedAvg(), toys.NETS["bn"], sizes=[16, 12, 1, 30, 28]))
    assert [[one["client"] for one in record["refused"]] for record in found.history] == [[2]] * 3  # a single row
    assert stacks[:3] == [4, 3, 1]  # full batches; then 4 of 12 apart from the others' 8


def test_small_stacks_are_of_clients_of_like_size(stacks: list[int]) -> None:
    run = of_toys(Local(), sizes=[30, 7, 30, 7, 7], training=TWO_ROUNDS)
    told = Told()
    a, b = run(executor="serial"), run(executor="vectorized", workers=2, loggers=[told])
    assert difference(all_state(a), all_state(b), CLOSE) is None
    assert stacks == [2] * 4 + [2] + [2] * 4 + [2]  # 30 and 30 in four steps; 7 and 7 in one; the last 7 alone
    assert told.messages == []


def test_who_is_refused_drops_out_or_fails_does_as_alone() -> None:
    def run(**more: Any) -> Federation:
        members = toys.clients(["linear"] * 4, 12, test=5)
        huge = LabeledSamples(torch.full((9, toys.INPUTS), 3e38), torch.zeros(9, dtype=torch.int64))
        members[2] = Client("linear", huge, toys.samples(5, 1))
        nets = {"linear": lambda: nn.Sequential(nn.Linear(toys.INPUTS, toys.CLASSES))}
        unreliable = Availability(dropout_rate=0.3, dropout_stage="after")
        given = {"builders": nets, "classes": toys.CLASSES, "availability": unreliable, **more}
        federation = Federation(members, FedAvg(), HARD, **grouped(**given))
        federation.run()
        return federation

    found = same(run)
    assert all(one["client"] == 2 for record in found.history for one in record["refused"])
    assert any(record["refused"] for record in found.history)

    class Fails(Local):
        def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
            raise ValueError("no")

    with pytest.raises(RunError, match=r"client 0 \(net\), round 1, training: ValueError: no"):
        of_toys(Fails())(executor="vectorized")


class TwoHeads(nn.Module):
    """A head that not everybody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(toys.INPUTS, 6), nn.Linear(6, toys.CLASSES)
        self.other = nn.Linear(6, toys.CLASSES)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        z = torch.tanh(self.body(x))
        return self.head(z) + (self.other(z) if other else 0)


class Sometimes(Local):
    """The other head learns in every second step."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"other": step % 2 == 0}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x, context["other"]), batch.y, batch.w)


class SomeOfThem(Sometimes):
    """It learns at one client."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"other": client.id == 1}


@pytest.mark.parametrize("optimizer", others_slow(["sgd", "adam"], quick=["adam"]))
def test_a_parameter_without_gradient_stays(optimizer: str, stacks: list[int]) -> None:
    training = Training(rounds=2, local_epochs=2, batch_size=8, optimizer=optimizer, weight_decay=0.1)
    same(of_toys(Sometimes(), TwoHeads, training=training))
    assert max(stacks) == 5


class Widths(Local):
    """Each client's batch is scaled by a number that it draws from three, which is no tensor."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"scale": 1 + int(torch.randint(3, (), generator=generator))}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x * context["scale"]), batch.y, batch.w)


def test_clients_who_draw_the_same_are_taken_together(stacks: list[int]) -> None:
    same(of_toys(Widths()))
    assert len(set(stacks)) > 1


class Apart(Local):
    """A context with more entries at some clients."""

    def receive(self, client: Client, message: Message) -> Context:
        return {"target": torch.ones(2 if client.id % 2 else 1)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["target"].sum()


def test_clients_of_other_contexts_are_apart(stacks: list[int]) -> None:
    same(of_toys(Apart()))
    assert stacks[0] == 3  # clients 0, 2, 4; then 1 and 3
    same(of_toys(Apart(), sizes=SIZES[:3]), ["clients whose contexts differ in more than values of tensors train one"])


class Unweighted(Local):
    """A loss that does not weigh its rows."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)


class UnweightedLater(Unweighted):
    """It does not weigh them from the second step on."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"later": True} if step else {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return super().loss(model, batch, context) if context else cross_entropy(model(batch.x), batch.y, batch.w)


@pytest.mark.parametrize("method", [Unweighted(), UnweightedLater()], ids=lambda method: type(method).__name__)
def test_a_loss_that_does_not_weigh_rows_is_given_no_filled_batches(method: Method, stacks: list[int]) -> None:
    same(of_toys(method, sizes=[16, 12, 12, 30]))
    assert stacks[:3] == [4, 2, 2]  # full batches; then 8 of 30 and of 16, and 4 of 12 twice


@pytest.mark.parametrize(("sizes", "batch_size"), [([7, 8, 9], 3), ([1, 14, 11], 8), ([2, 1, 1], 2)], ids=str)
def test_a_single_row_does_not_pass_for_a_loss_that_weighs_rows(sizes: list[int], batch_size: int) -> None:
    training = Training(rounds=1, local_epochs=3, batch_size=batch_size, lr=0.5)
    same(of_toys(Unweighted(), sizes=sizes, training=training))
    same(of_toys(Local(), sizes=sizes, training=training))


@pytest.mark.parametrize("client_fraction", [1.0, 0.6])
@pytest.mark.parametrize("aggregation", others_slow(["layer-wise", "same-shape"], quick=["same-shape"]))
def test_masks_that_grow_apart_are_stacked(aggregation: Any, client_fraction: float, stacks: list[int]) -> None:
    """With a share of the clients, some have masks while others have none yet."""
    training = Training(rounds=5, batch_size=8, lr=0.1, client_fraction=client_fraction)
    found = same(of_toys(FedSelect(grow_interval=1, aggregation=aggregation), training=training))
    assert any("mask" in client.state for client in found.clients)
    assert max(stacks) > 1


class Asks(Local):
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        loss = cross_entropy(model(batch.x), batch.y, batch.w)
        return loss if loss.item() > 0 else 2 * loss


class LooksAtWeights(Local):
    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"pull": next(client.model.parameters()).detach().sum()}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * (1 + 0.1 * torch.tanh(context["pull"]))


class Remembers(Local):
    """A loss that depends on how often it was asked."""

    asked: ClassVar[list[int]] = []

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        self.asked.append(1)
        return cross_entropy(model(batch.x), batch.y, batch.w) * len(self.asked)


class SecondGradient(Local):
    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        found = super().gradients(model, batch, context)
        return found._replace(grads={n: g + 0 * next(model.parameters()).sum() for n, g in found.grads.items()})


class Foreign(Local):
    """An object of each client's own in the context."""

    def receive(self, client: Client, message: Message) -> Context:
        return {"scale": SimpleNamespace(by=1.0 + client.id)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["scale"].by


class Masked(nn.Module):
    """Drops entries without a layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toys.INPUTS, toys.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


class Skips(nn.Module):
    """Scales what its layer gives by what Python's and NumPy's global generators draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toys.INPUTS, toys.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores * (random.random() + np.random.random()) if self.training else scores


class RunningMean(nn.Module):
    """Keeps a mean of its inputs in a buffer, which it writes into or assigns anew, for scoring alone."""

    def __init__(self, assigned: bool = True) -> None:
        super().__init__()
        self.linear, self.assigned = nn.Linear(toys.INPUTS, toys.CLASSES), assigned
        self.register_buffer("mean", torch.zeros(toys.INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.linear(x - self.mean)
        mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.assigned:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        return self.linear(x)


@pytest.mark.parametrize(
    ("method", "net", "reason"),
    [
        (Asks(), "shallow", r"its training cannot be vectorized \(RuntimeError: vmap: .*item"),
        (LooksAtWeights(), "shallow", "meta tensor"),
        (SomeOfThem(), TwoHeads, "a gradient in the steps of some clients only"),
        (SecondGradient(), "shallow", r"its `gradients` wants more of the network \('parameters'\)"),
        (Foreign(), "shallow", "contexts differ"),
        (FedAvg(), RunningMean, "the steps of two clients as one are not those of one after the other"),
        (Local(), Masked, "called random"),
        (FedAvg(), Skips, "its network draws from Python's or NumPy's generator"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__ if isinstance(value, Method) else "")[:20],
)
def test_what_cannot_be_stacked_trains_alone_and_is_said(method: Method, net: Any, reason: str) -> None:
    build = toys.NETS[net] if isinstance(net, str) else net
    run = of_toys(method, build, sizes=[9, 5, 12], training=TWO_ROUNDS)
    told = Told()
    serial, found = run(executor="serial"), run(executor="vectorized", loggers=[told])
    assert difference(all_state(serial), all_state(found)) is None  # bit for bit
    (line,) = told.messages
    assert re.match(r"\w+: clients .*train one after the other", line)
    assert re.search(reason, line)


def test_buffers_that_forward_writes_into(stacks: list[int]) -> None:
    same(of_toys(FedAvg(), lambda: RunningMean(assigned=False), sizes=[9, 5, 12]))
    assert max(stacks) > 1, "and rows of weight 0, which would count in the mean, fill up no batch"


class Twice(SequentialSplit):
    """A layer used twice under two names, and a weight that another layer has, too."""

    def __init__(self) -> None:
        square, other = nn.Linear(6, 6), nn.Linear(6, 6)
        other.weight = square.weight
        norm = nn.BatchNorm1d(6)
        body = nn.Sequential(square, norm, nn.Tanh(), square, norm, nn.Tanh(), other)
        super().__init__(nn.Linear(toys.INPUTS, 6), body, nn.Linear(6, toys.CLASSES), architecture="net")


@pytest.mark.parametrize("method", [FedAvg(), MOON()], ids=lambda method: method.name)
def test_tensors_of_several_names(method: Method, stacks: list[int]) -> None:
    found = same(of_toys(method, Twice, sizes=[9, 5, 12]))
    assert max(stacks) > 1
    body = found.export(0).get_submodule("intermediate")
    assert torch.equal(body[0].weight, body[6].weight)
    sent = sum(t.numel() * t.element_size() for t in Twice().parameters()) + 2 * 6 * 4  # and the statistics
    assert found.history[0]["bytes_up"] == 3 * (sent + 8), "each tensor travels once"


def test_dropout_has_a_mask_for_every_client_the_same_when_run_again(stacks: list[int]) -> None:
    def run(rate: float, **more: Any) -> Federation:
        x = torch.linspace(-1, 1, toys.INPUTS).expand(8, -1)  # one row, so that batches are alike in any order
        alike = LabeledSamples(x.clone(), torch.zeros(8, dtype=torch.int64))
        members = [Client("net", alike, toys.samples(5, 1)) for _ in range(3)]
        nets = {"net": lambda: toys.net(dropout=rate)}
        given = {"builders": nets, "classes": toys.CLASSES, "executor": "vectorized", **more}
        federation = Federation(members, FedAvg(), Training(rounds=2, batch_size=4, lr=0.1), **grouped(**given))
        federation.run()
        return federation

    def weights(federation: Federation) -> list[Tensor]:
        return [torch.cat([t.flatten() for t in (client.weights or {}).values()]) for client in federation.clients]

    told = Told()
    dropping = weights(run(0.4, loggers=[told]))
    assert stacks == [3] * 4
    assert told.messages[1:] == [
        "fedavg: net: dropout draws other masks for clients trained as one than for each alone"
    ]
    assert not torch.allclose(dropping[0], dropping[1])
    assert not torch.allclose(dropping[0], dropping[2])
    assert all(map(torch.equal, dropping, weights(run(0.4))))
    assert not torch.allclose(dropping[0], weights(run(0.4, seed=1))[0])
    assert not torch.allclose(dropping[0], weights(run(0.4, executor="serial"))[0])
    plain = weights(run(0.0))
    assert torch.equal(plain[0], plain[1])


def test_a_loss_that_is_no_function_is_found_out() -> None:
    told = Told()
    of_toys(Remembers(), training=TWO_ROUNDS)(executor="vectorized", loggers=[told])
    assert re.search("not those of one after the other", told.messages[0])


def test_a_cohort_resumes_as_a_cohort_of_the_same_size(tmp_path: Path) -> None:
    def begun(out: Path, **options: Any) -> Federation:
        members = toys.clients(["net"] * 3, [12, 7, 20], test=5)
        nets = {"net": toys.NETS["bn"]}
        training = Training(rounds=4, batch_size=8, lr=0.1)
        return Federation(members, FedAvg(), training, builders=nets, **grouped(out=out, checkpoint_every=1, **options))

    def stop(record: Mapping[str, Any]) -> None:
        if record["round"] == 2:
            raise RuntimeError("stopped")

    whole = begun(tmp_path / "whole", executor="vectorized")
    whole.run()
    (tmp_path / "half").mkdir()
    halved = begun(tmp_path / "half", executor="vectorized", loggers=[Told(stop)])
    with pytest.raises(RuntimeError, match="stopped"):
        halved.run()
    for other in ({}, {"executor": "serial"}, {"executor": "vectorized", "workers": 2}):
        with pytest.raises(ConfigError, match=r"another recipe's run: clients trained in stacks of 32, now "):
            begun(tmp_path / "half", **other).run(resume=True)
    again = begun(tmp_path / "half", executor="vectorized")
    again.run(resume=True)
    assert difference(all_state(whole), all_state(again)) is None
    begun(tmp_path / "serial", executor="serial").run()
    with pytest.raises(ConfigError, match=r"clients trained one by one, now in stacks of 32 \(run.executor\)"):
        begun(tmp_path / "serial", executor="vectorized").run(resume=True)
