"""Steps of stacks that are recorded and replayed, by a stand-in for CUDA graphs: the results, and what falls back.

The stand-in does the recorded operations again on changed memory: a value of Python's that a step read while it was
recorded is the old one then, and the comparison fails.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, TrainingResult
from polyfed.core.settings import Training
from polyfed.engine.executors import recorded_step, stack_parts
from polyfed.engine.federation import Federation
from polyfed.errors import RunError
from polyfed.functional.losses import cross_entropy
from polyfed.methods import FD, SCAFFOLD, FedAvg, FedDPA, FedHeNN, FedMD, FedProx, FedRep, FedSelect, FjORD, Local
from polyfed.testing.fixtures import CLASSES, all_state, difference, tiny_model, world
from tests.helpers import graphs
from tests.helpers.told import Told

CLOSE = 1e-5  # of the largest entry
NETWORK = functools.partial(tiny_model, 1, 4, 6)
THREE = [functools.partial(tiny_model, 1, width, 6) for width in (3, 4, 5)]
RAGGED = (12, 30, 7, 16, 21)
TRAINING = Training(rounds=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.use(monkeypatch)


def run(
    method: Method,
    executor: str = "vectorized",
    *,
    networks: Sequence[Callable[[], nn.Module]] = (NETWORK,),
    sizes: Sequence[int] = RAGGED,
    training: Training = TRAINING,
    **options: Any,
) -> tuple[Federation, dict[str, int]]:
    """A run, and how many graphs were captured and replayed in it."""
    before = dict(graphs.done)
    labels = (tuple(range(CLASSES)),) * len(sizes)
    found = world(networks, public=24, sizes=sizes, labels=labels).run(method, training, executor=executor, **options)
    return found, {name: count - before[name] for name, count in graphs.done.items()}


def replayed(method: Method, **options: Any) -> dict[str, int]:
    """Replays come to where the clients come alone; what was done."""
    found, done = run(method, **options)
    expected, _ = run(method, "serial", **options)
    assert difference(all_state(expected), all_state(found), CLOSE) is None
    assert graphs.current is graphs.default
    return done


# the same result ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"optimizer": "adam", "momentum": 0.0, "lr": 0.01},
        {"lr_schedule": "cosine", "rounds": 4},
        {"class_weights": "balanced"},
        {"augmentation": "crop-flip"},
    ],
    ids=str,
)
def test_ragged_sizes_and_every_way_to_move(changes: dict[str, Any]) -> None:
    assert replayed(Local(), training=TRAINING.model_copy(update=changes))["replays"] > 10


ALIGNED = FedHeNN(alignment_data={"size": 8, "batch": 4})
METHODS = [FedProx(), SCAFFOLD(), FedSelect(grow_interval=1), ALIGNED, FD(), FedDPA(), FedMD(), FedRep()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_gradients_of_its_own_masks_inputs_and_phases(method: Method) -> None:
    same_shape = {"aggregation": "same-shape"} if hasattr(method, "aggregation") else {}
    assert replayed(dataclasses.replace(method, **same_shape))["replays"] > 3


@pytest.mark.parametrize("sizes", [(16, 12, 30, 28), (20, 20, 20)], ids=str)
def test_batchnorm_has_a_graph_for_each_width_that_all_have(sizes: Sequence[int]) -> None:
    """4 rows of 20 are one; where some have 4 rows and others 8, steps are launched."""
    normed = functools.partial(tiny_model, 1, 4, 6, norm=True)
    assert replayed(FedAvg(), networks=[normed], sizes=sizes)["captures"] == 2  # or 8 rows of four clients, and of two


def test_networks_take_turns_each_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[graphs.Stream] = []
    plain = graphs.CUDAGraph.replay

    def replay(graph: graphs.CUDAGraph) -> None:
        order.append(graphs.current)
        plain(graph)

    monkeypatch.setattr(graphs.CUDAGraph, "replay", replay)
    replayed(Local(), networks=THREE, sizes=(40, 40, 16), training=TRAINING.model_copy(update={"rounds": 4}))
    last = order[-(10 + 10 + 4) :]
    one, other, third = dict.fromkeys(last)
    assert last == [one, other, third] * 4 + [one, other] * 6
    assert graphs.default not in last
    assert all(stream.idle for stream in (one, other, third)), "others wait for all that they did"


class OnlyIn(Local):
    """Fails where one client uploads, in the second round."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if client.round == 2 and client.id == 1:
            raise ValueError("no")
        return super().upload(client, trained)


def test_who_fails_beside_others_is_named() -> None:
    with pytest.raises(RunError, match=r"client 1 \(net1\), round 2, uploading: ValueError: no"):
        run(OnlyIn(), networks=THREE, sizes=(20, 12, 30))


def test_widths_that_a_client_draws_have_a_graph_each() -> None:
    assert replayed(FjORD(), sizes=(64,) * 3)["captures"] > 3


class Drawing(Local):
    """Noise for each step, and in every fourth something that the loss only asks for, and does not read."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        drawn: dict[str, Any] = {"noise": torch.randn(1, 6, 6, generator=generator), "shared": SHARED}
        return {**drawn, "loud": True} if step % 4 == 3 else drawn

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        loss = cross_entropy(model(batch.x + context["noise"] * context["shared"]), batch.y, batch.w)
        return 2.0 * loss if "loud" in context else loss


SHARED = torch.tensor(0.3)


@pytest.mark.parametrize("ahead", [2**26, 2000, 0])
def test_what_steps_draw_may_be_drawn_ahead(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all steps; with less memory, for some."""
    monkeypatch.setattr(stack_parts, "_AHEAD", ahead)
    short, long = (replayed(Drawing(), sizes=(8 * steps,) * 3) for steps in (4, 24))
    assert long["replays"] - short["replays"] == 3 * 2 * 20


# what is kept --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"lr_schedule": "cosine"}, {"client_fraction": 0.6}], ids=str)
def test_later_rounds_replay_what_the_first_ones_have_recorded(changes: dict[str, Any]) -> None:
    few, many = (
        replayed(Local(), sizes=(16,) * 5, training=TRAINING.model_copy(update={"rounds": rounds, **changes}))
        for rounds in (2, 6)
    )
    assert few["captures"] == many["captures"] == 1
    assert many["replays"] == few["replays"] + 4 * 2 * 2


def test_who_is_through_rides_along_until_half_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 1 to 8 batches: one graph for 8 to 5 of them, one for 4 and 3, one for 2, one for the last."""
    assert replayed(Local(), sizes=[8 * (1 + place) for place in range(8)])["captures"] == 4
    monkeypatch.setattr(recorded_step, "_MOST_GRAPHS", 1)
    monkeypatch.setattr(recorded_step, "_MOST_STACKS", 1)
    replayed(FedRep(aggregation="same-shape"))


class Full(Local):
    """Memory runs out once, in the third round of a stack."""

    left: ClassVar[list[int]] = []

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if client.round == 3 and self.left:
            self.left.pop()
            raise torch.OutOfMemoryError
        return {}


def test_what_is_kept_is_given_up_where_memory_runs_out() -> None:
    Full.left.append(1)
    assert replayed(Full(), sizes=(16,) * 4)["captures"] == 2
    assert not Full.left


class Varying(Local):
    """A context whose tensor is a shorter one in every round."""

    def receive(self, client: Client, message: Message) -> Context:
        return {"weights": torch.ones(7 - client.round)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["weights"].sum()


@pytest.mark.parametrize(("most", "worth", "captures", "lines"), [(48, 8, 4, 0), (2, 3, 4, 0), (2, 4, 2, 1)])
def test_contexts_of_other_shapes_have_graphs_as_long_as_these_are_worth_it(
    most: int, worth: int, captures: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contexts of each of four rounds have a graph, which is replayed three times."""
    monkeypatch.setattr(recorded_step, "_MOST_CAPTURES", most)
    monkeypatch.setattr(recorded_step, "_WORTH", worth)
    told = Told()
    training = TRAINING.model_copy(update={"rounds": 4, "lr": 0.02})
    assert replayed(Varying(), sizes=(16,) * 4, training=training, loggers=[told])["captures"] == captures
    assert len(told.messages) == lines


class Uneven(Local):
    """Three rows for a step, and two in every fourth."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"noise": torch.randn(2 if step % 4 == 3 else 3, 6, 6, generator=generator)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x + context["noise"].mean(0)), batch.y, batch.w)


def test_what_is_drawn_may_have_shapes_in_turn() -> None:
    assert replayed(Uneven(), sizes=(64,) * 4)["captures"] == 2


def test_cohorts_may_have_batches_of_widths_in_turn() -> None:
    """One graph for each of seven widths of the widest batch, and another where more samples have come together."""
    changes = {"client_fraction": 0.4, "batch_size": 16, "local_epochs": 5}
    sizes = (12, 14, 15, 5, 6, 7, 8, 9, 10, 11)
    many = TRAINING.model_copy(update={"rounds": 16, **changes})
    assert replayed(Local(), sizes=sizes, training=many)["captures"] <= 8


# what is not recorded ----------------------------------------------------------------------------------------------


class Looking(Local):
    """A loss that looks at a number of Python's, another one in every round."""

    scale: ClassVar[list[float]] = [1.0]

    def receive(self, client: Client, message: Message) -> Context:
        self.scale[0] = 1.0 + client.round
        return super().receive(client, message)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * self.scale[0]


class Given(Looking):
    """The same number in the context, as a number and as a tensor."""

    def receive(self, client: Client, message: Message) -> Context:
        return {"scale": 1.0 + client.round, "tensor": torch.tensor(1.0 + client.round)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        loss = cross_entropy(model(batch.x), batch.y, batch.w)
        return 0.5 * loss * context["scale"] + 0.5 * loss * context["tensor"]


class Counting(Local):
    """A context with a whole number, in one tensor for all clients."""

    shared: ClassVar[list[Tensor]] = [torch.tensor(place) for place in range(4)]

    def receive(self, client: Client, message: Message) -> Context:
        return {"round": self.shared[client.round]}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["round"]


def test_numbers_of_the_context_are_not_frozen_in() -> None:
    assert replayed(Given())["captures"] > 3  # for each round and number of clients
    assert replayed(Counting(), sizes=(16,) * 4)["captures"] == 1
    with pytest.raises(AssertionError):  # one beside it is found out
        replayed(Looking())


class Making(Local):
    """A loss that brings numbers to another device."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        torch.empty(CLASSES, device="meta").copy_(torch.arange(CLASSES))
        return cross_entropy(model(batch.x), batch.y, batch.w)


def stacks_held() -> int:
    """How many stacks are in memory."""
    gc.collect()
    return sum(type(each) is recorded_step.RecordedStack for each in gc.get_objects())


def test_what_a_capture_refuses_is_launched_and_said() -> None:
    """Not even tried: a capture that breaks off leaves things behind."""
    kept: list[int] = []
    told = Told(lambda record: kept.append(stacks_held()))
    found, done = run(Making(), sizes=(16,) * 4, loggers=[told])
    assert difference(all_state(run(Making(), "serial", sizes=(16,) * 4)[0]), all_state(found), CLOSE) is None
    assert done == {"captures": 0, "replays": 0}
    assert kept == [0] * 3
    (line,) = told.messages
    assert line.startswith("local: net0: steps are launched one by one, not recorded (RuntimeError: ")


def test_a_replay_that_gives_other_numbers_than_the_step_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[recorded_step.RecordedStack] = []
    begin = recorded_step.RecordedStack.begin
    replay = graphs.CUDAGraph.replay

    def watched(stack: recorded_step.RecordedStack, *given: Any) -> None:
        begin(stack, *given)
        begun.append(stack)

    def wrong(graph: graphs.CUDAGraph) -> None:
        replay(graph)
        for tensor in begun[-1].tensors.values():
            tensor.detach().mul_(0.99)

    monkeypatch.setattr(recorded_step.RecordedStack, "begin", watched)
    monkeypatch.setattr(graphs.CUDAGraph, "replay", wrong)
    told = Told()
    assert replayed(FedAvg(), sizes=(16,) * 4, loggers=[told])["replays"] == 1
    assert "gives other numbers than launched" in told.messages[0]


def test_a_trial_that_fails_leaves_no_step_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no room to compare")

    monkeypatch.setattr(recorded_step, "_is_same_step", full)
    assert replayed(FedAvg(), sizes=(16,) * 4)["replays"] == 1


def test_dropout_is_not_recorded_nor_anything_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, CLASSES))

    assert run(FedAvg(aggregation="same-shape"), networks=[dropping])[1]["captures"] == 0
    monkeypatch.setattr(recorded_step, "RECORDS", False)
    assert replayed(Local()) == {"captures": 0, "replays": 0}


# the stand-in ------------------------------------------------------------------------------------------------------


def captured(step: Callable[[], object]) -> graphs.CUDAGraph:
    made = graphs.CUDAGraph()
    try:
        with graphs.graph(made):
            step()
    finally:
        graphs.set_stream(graphs.default)
    return made


def test_a_capture_computes_nothing_and_a_replay_looks_again() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    weight = torch.full((3,), 2.0).requires_grad_()
    factor = [1.0]

    def step() -> None:
        (grad,) = torch.autograd.grad((weight * x).square().sum() * factor[0], [weight])
        total.add_(grad)

    graph = captured(step)
    assert total.tolist() == [0.0] * 3
    graph.replay()
    assert total.tolist() == [4.0] * 3
    x.mul_(2)
    factor[0] = 7.0  # comes too late
    graph.replay()
    assert total.tolist() == [20.0] * 3
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: x.sum().item())


def test_a_replay_reads_no_memory_that_was_given_up_and_waits_for_who_fills_it() -> None:
    total, stream = torch.zeros(2), graphs.Stream()
    graph = captured(lambda: total.add_(1))
    with graphs.in_stream(stream), pytest.raises(AssertionError, match="without waiting"):
        graph.replay()

    def of_what_goes() -> graphs.CUDAGraph:
        ones = torch.ones(2)
        return captured(lambda: total.add_(ones))

    graph = of_what_goes()
    with pytest.raises(AssertionError, match="given up"):
        graph.replay()
