"""Runs side by side, whose clients train as one, come to where each comes alone."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Exchange, Method
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.executors import stacked_clients
from polyfed.engine.executors.lockstep import Answer, present_turn, take_turns
from polyfed.engine.executors.shared_stacks import SharedStacks, run_together
from polyfed.engine.federation import Federation
from polyfed.engine.method_wrappers import alone, step_of
from polyfed.errors import PolyfedError, RunError, RunInterrupted
from polyfed.methods import MOON, FedAvg, FedGH, FedHeNN, FedProto, FedProx, Local
from polyfed.methods.fedhenn import AlignmentData, HomogeneousFedHeNN
from polyfed.registry import METHODS
from polyfed.signals import raise_on_termination
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, tiny_model, world
from tests.engine.executors.test_agreement import CLOSE, near
from tests.helpers.gentle import gentle
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow
from tests.helpers.told import Told

TRAINING = Training(rounds=3, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01)
EACH_ROUND = Evaluation(every_n_rounds=1)
CPU = torch.device("cpu")
NETWORK = functools.partial(tiny_model, 1, 4, 6)
Asked = Mapping[str, Any]  # of a federation: method, training, seed ...


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each step had."""
    sizes: list[int] = []
    plain = stacked_clients.StackedClients.gradients

    def counted(self: Any, part: Any, step: Any, *rest: Any) -> Any:
        if step.number is not None:  # no trial's
            sizes.append(len(step.rows))
        return plain(self, part, step, *rest)

    monkeypatch.setattr(stacked_clients.StackedClients, "gradients", counted)
    return sizes


def make(
    method: Method, training: Training = TRAINING, build: Callable[[], nn.Module] = NETWORK, **options: Any
) -> Federation:
    """Six clients of one network, with 8 to 24 samples."""
    among = world([build], public=24, sizes=[24, 16, 8, 24, 16, 8], labels=[(0, 1, 2)] * 6)
    given = {"executor": "vectorized", "evaluation": EACH_ROUND, **options}
    return among.federation(method, training, **given)


def side_by_side(federations: Sequence[Federation], size: int = 64, **run: Any) -> list[PolyfedError | None]:
    """Run them; how each failed."""
    errors: list[PolyfedError | None] = [None] * len(federations)

    def one(place: int) -> None:
        try:
            federations[place].run(**run)
        except RunInterrupted:
            raise
        except PolyfedError as error:
            errors[place] = error

    run_together([lambda place=place: one(place) for place in range(len(federations))], size, CPU)  # type: ignore[misc]
    return errors


def run_each(federations: Sequence[Federation]) -> None:
    """One after the other."""
    for federation in federations:
        federation.run()


def agree(expected: Sequence[Federation], found: Sequence[Federation]) -> None:
    """States and records are the same, up to rounding."""
    for one, other in zip(expected, found, strict=True):
        assert difference(all_state(one), all_state(other), CLOSE) is None
        assert near(one.history, other.history)


def check(asked: Sequence[Asked], stacks: list[int]) -> tuple[int, int]:
    """Runs side by side are those one after the other; how many steps were taken alone and together."""
    expected = [make(**one) for one in asked]
    run_each(expected)
    before = len(stacks)
    found = [make(**one) for one in asked]
    assert side_by_side(found) == [None] * len(asked)
    agree(expected, found)
    return before, len(stacks) - before


def hiding() -> nn.Module:
    """A network that draws masks."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3))


def rate(lr: float, **more: Any) -> Training:
    return TRAINING.model_copy(update={"lr": lr, **more})


@pytest.mark.parametrize(
    "asked",
    [
        [{"method": FedAvg(), "seed": seed} for seed in range(3)],
        [{"method": method} for method in (Local(), FedAvg(), alone(FedAvg()), FedGH(header_lr=0.1), FedGH())],
        [{"method": FedAvg(), "training": rate(lr)} for lr in (0.1, 0.01, 0.3)],
        [{"method": FedProto(), "seed": seed} for seed in range(2)] + [{"method": alone(FedProto())}],
        [{"method": HomogeneousFedHeNN(alignment_data=AlignmentData(size=24)), "seed": seed} for seed in range(2)],
        [{"method": FedAvg(), "training": rate(lr, lr_schedule="cosine")} for lr in (0.1, 0.2)],
    ],
    ids=["seeds", "methods", "rates", "own loss", "own gradients", "schedule"],
)
def test_runs_side_by_side_are_those_alone_in_the_steps_of_one(asked: Sequence[Asked], stacks: list[int]) -> None:
    before, together = check(asked, stacks)
    assert together * len(asked) == before
    assert stacks[-1] == len(asked) * 2  # who has three batches


@pytest.mark.parametrize("name", others_slow(METHODS, quick=["fedrolex", "fedrep"]))
def test_every_method(name: str) -> None:
    """With another seed, and another half of the server, beside it.

    FedMD's clients alone learn towards their own scores: the sign of what is nothing but rounding.
    """
    third = gentle(name) if name == "fedmd" else alone(gentle(name))

    def runs() -> list[Federation]:
        among = ConformanceKit(method=gentle(name))
        asked = [(gentle(name), 0), (gentle(name), 1), (third, 2)]
        given: dict[str, Any] = {"executor": "vectorized", "evaluation": EACH_ROUND}
        return [among.world(one=True).federation(method, TRAINING, seed=seed, **given) for method, seed in asked]

    expected, found = runs(), runs()
    run_each(expected)
    assert side_by_side(found) == [None] * 3
    agree(expected, found)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_rates_that_differ_move_an_optimizers_rows_as_far_as_their_own(optimizer: str, stacks: list[int]) -> None:
    lines = [rate(lr, optimizer=optimizer, momentum=0.0, weight_decay=0.1) for lr in (0.03, 0.01, 0.0)]
    check([{"method": FedAvg(), "training": line} for line in lines], stacks)


def test_runs_with_fewer_rounds_end_earlier(stacks: list[int]) -> None:
    asked = [{"method": FedAvg(), "training": rate(0.1, rounds=rounds)} for rounds in (1, 3, 2)]
    before, together = check(asked, stacks)
    assert before == (1 + 3 + 2) * 3
    assert together == 3 * 3
    assert stacks[-3:] == [6, 4, 2]  # the longest is alone at the end


class Counts(Local):
    """Local training, after an exchange of its own."""

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange("count", trains=False), Exchange())


def test_a_run_with_more_exchanges_does_not_fall_behind(stacks: list[int]) -> None:
    before, together = check([{"method": Counts()}, {"method": Local()}], stacks)
    assert together * 2 == before


@pytest.mark.parametrize(
    "asked",
    [
        [{"method": FedProx(mu=0.1)}, {"method": FedProx(mu=1.0)}],
        [{"method": MOON()}, {"method": FedAvg()}],
        [{"method": FedAvg()}, {"method": FedAvg(), "training": rate(0.1, batch_size=4)}],
        [{"method": FedAvg()}, {"method": FedAvg(), "training": rate(0.1, local_epochs=2)}],
        [{"method": FedAvg()}, {"method": FedAvg(), "precision": "bf16"}],
        [{"method": Local()}, {"method": Local(), "build": lambda: tiny_model(1, 5, 7)}],
        [{"method": Local(), "seed": s, "build": hiding} for s in range(2)],
    ],
    ids=["hyperparameters", "losses", "batches", "epochs", "precision", "networks", "dropout"],
)
def test_what_differs_in_a_step_has_stacks_of_its_own(asked: Sequence[Asked], stacks: list[int]) -> None:
    before, together = check(asked, stacks)
    assert before == together


class Scaled(nn.Module):
    """A network with a number, or numbers that are no weights, in its layers."""

    def __init__(self, number: float, by: float) -> None:
        super().__init__()
        self.number = number
        self.layer = nn.Linear(36, 3)
        self.register_buffer("by", torch.tensor(by), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1)) * self.number * self.by
        return out


@pytest.mark.parametrize(("other", "is_one"), [((1.0, 2.0), True), ((2.0, 2.0), False), ((1.0, 1.0), False)])
def test_networks_of_one_name_that_compute_something_else_are_told_apart(
    other: tuple[float, float], is_one: bool, stacks: list[int]
) -> None:
    builds = [lambda: Scaled(1.0, 2.0), lambda: Scaled(*other)]
    before, together = check([{"method": Local(), "build": build} for build in builds], stacks)
    assert (together * 2 == before) is is_one


def test_a_step_takes_of_a_method_what_its_functions_may_read() -> None:
    assert step_of(FedGH(header_lr=0.5)) == step_of(alone(FedAvg())) == step_of(Local()) == ()
    assert step_of(alone(FedProto())) == step_of(FedProto()) != step_of(FedProto(prototype_weight=0.5))
    assert step_of(FedHeNN()) != step_of(HomogeneousFedHeNN())


class Peeks(FedAvg):
    """FedAvg whose loss looks at a number."""

    def loss(self, model: Any, batch: Batch, context: Context) -> torch.Tensor:
        loss = super().loss(model, batch, context)
        assert isinstance(loss, torch.Tensor)
        return loss * (1.0 if float(loss.detach()) > 0 else 2.0)


def test_what_cannot_be_stacked_trains_run_by_run(stacks: list[int]) -> None:
    told = [Told(), Told()]
    runs = [make(Peeks(), seed=seed, loggers=[told[seed]]) for seed in range(2)]
    assert side_by_side(runs) == [None, None]
    assert not stacks
    why = "fedavg: clients train one after the other; net0: its loss cannot be vectorized"
    assert [[line.startswith(why) for line in one.messages].count(True) for one in told] == [1, 1]
    expected = make(FedAvg(), seed=1)
    expected.run()
    assert difference(all_state(expected), all_state(runs[1]), CLOSE) is None


def test_where_memory_runs_out_runs_have_stacks_of_their_own(
    monkeypatch: pytest.MonkeyPatch, stacks: list[int]
) -> None:
    plain = stacked_clients.StackedClients.train

    def small(self: Any, phases: Any) -> Any:
        if len(self._walks) > 6:
            raise torch.OutOfMemoryError
        return plain(self, phases)

    monkeypatch.setattr(stacked_clients.StackedClients, "train", small)
    told = Told()
    runs = [make(FedAvg(), loggers=[told]), make(FedAvg(), seed=1)]
    assert side_by_side(runs) == [None, None]
    assert max(stacks) == 6
    assert [m for m in told.messages if "with 12 clients of several runs as one" in m and "below 12" in m]


class Fails(FedAvg):
    """FedAvg that fails somewhere in round 2."""

    where = ""

    def receive(self, client: Any, message: Message) -> Context:
        if (client.round, client.id, self.where) == (2, 3, "client"):
            raise ValueError("wrong")
        return super().receive(client, message)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if (server.round, self.where) == (2, "server"):
            raise ValueError("wrong")
        super().aggregate(server, uploads)


@pytest.mark.parametrize(("where", "what"), [("client", "client 3 .*round 2"), ("server", "server, round 2")])
def test_a_run_that_fails_leaves_the_others(where: str, what: str, stacks: list[int]) -> None:
    expected = make(FedAvg(), seed=1)
    expected.run()
    failing = Fails()
    vars(failing)["where"] = where
    runs = [make(failing), make(FedAvg(), seed=1)]
    failed, fine = side_by_side(runs)
    assert fine is None
    with pytest.raises(RunError, match=what):
        raise failed or AssertionError
    assert len(runs[0].history) == 1
    assert difference(all_state(expected), all_state(runs[1]), CLOSE) is None


def test_an_error_that_nobody_expected_ends_all() -> None:
    def wrong(record: object) -> None:
        raise LookupError("a logger's own")

    runs = [make(FedAvg()), make(FedAvg(), seed=1, loggers=[Told(wrong)])]
    with pytest.raises(LookupError, match="a logger's own"):
        side_by_side(runs)
    assert len(runs[0].history) < 3


@pytest.mark.parametrize("place", ["round", "within", "stack", "signal"])
def test_runs_that_are_interrupted_go_on(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [make(FedAvg(), seed=seed) for seed in range(2)]
    run_each(expected)

    def runs(*loggers: object) -> list[Federation]:
        watch: list[Sequence[object]] = [(), loggers]
        return [make(FedAvg(), seed=s, loggers=watch[s], out=tmp_path / str(s), checkpoint_every=1) for s in range(2)]

    pressed: dict[str, list[object]] = {
        "round": [Interrupt(after=2)],
        "within": [Interrupt(within=2)],
        "stack": [],
        "signal": [Told(lambda record: os.kill(os.getpid(), signal.SIGINT) if record["round"] == 2 else None)],
    }
    if place == "stack":
        _press_in_stack(monkeypatch, after=2)
    with raise_on_termination(), pytest.raises((KeyboardInterrupt, RunInterrupted)):
        side_by_side(runs(*pressed[place]))
    assert not any((tmp_path / name / "result.json").exists() for name in "01")
    monkeypatch.undo()
    resumed = runs()
    assert side_by_side(resumed, resume=True) == [None, None]
    agree(expected, resumed)


def _press_in_stack(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C in the main thread, while clients of all runs train, after so many stacks."""
    plain = stacked_clients.StackedClients.train
    trained = []

    def train(self: Any, phases: Any) -> Any:
        trained.append(len(self._walks))
        if len(trained) > after:
            raise KeyboardInterrupt
        return plain(self, phases)

    monkeypatch.setattr(stacked_clients.StackedClients, "train", train)


def test_one_run_works_at_a_time_and_all_end() -> None:
    at_work: list[int] = []
    most: list[int] = []

    def run(number: int) -> None:
        turn = present_turn()
        assert turn is not None
        for _ in range(number):
            at_work.append(number)
            most.append(len(at_work))
            at_work.remove(number)
            assert turn.ask(number) == 10 * number

    def answers(asked: Sequence[int]) -> list[Answer]:
        assert present_turn() is None
        return [Answer(10 * number) for number in asked]

    take_turns([lambda n=n: run(n) for n in (3, 1, 2)], answers, lambda _: False)  # type: ignore[misc]
    assert max(most) == 1
    assert len(most) == 6


def test_the_seconds_of_runs_side_by_side_add_up_to_no_more_than_went_by() -> None:
    runs = [make(FedAvg(), seed=seed) for seed in range(4)]
    began = time.perf_counter()
    used = time.process_time()
    side_by_side(runs)
    for name, went_by in (("seconds", time.perf_counter() - began), ("processor_seconds", time.process_time() - used)):
        each = [record[name] for run in runs for record in run.history]
        assert 0 < sum(each) <= went_by
        assert min(each) > 0


def test_nothing_of_a_run_is_held_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    executors: list[weakref.ref[object]] = []
    plain = SharedStacks.answers

    def answers(self: Any, asked: Any) -> Any:
        if len(asked) == 1:
            gc.collect()
            held.append(sum(one() is not None for one in executors))
        return plain(self, asked)

    def run(rounds: int) -> None:
        federation = make(FedAvg(), rate(0.1, rounds=rounds))
        executors.append(weakref.ref(federation.executor))
        federation.run()

    monkeypatch.setattr(SharedStacks, "answers", answers)
    run_together([lambda: run(1), lambda: run(2)], 64, CPU)
    assert held == [1]
