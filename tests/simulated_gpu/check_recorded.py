"""Steps of stacks that are recorded and replayed, on a simulated GPU: the results, what falls back, what a step costs.

The stand-in for CUDA graphs does the recorded operations again on changed memory: a value of Python's that a step read
while it was recorded is the old one then, and the comparison fails.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gpu
import graphs
import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, TrainingResult
from polyfed.core.settings import Training
from polyfed.engine.executors import recorded_step, stack_parts
from polyfed.engine.executors.shared_stacks import run_together
from polyfed.engine.executors.stack_parts import NextStep
from polyfed.engine.executors.stacked_clients import StackedClients
from polyfed.engine.federation import Federation
from polyfed.errors import RunError
from polyfed.functional.losses import cross_entropy
from polyfed.methods import FD, SCAFFOLD, FedAvg, FedDPA, FedHeNN, FedMD, FedProx, FedRep, FedSelect, FjORD, Local
from polyfed.testing.fixtures import CLASSES, all_state, difference, tiny_model, world
from tests.helpers.told import Told

CLOSE = 1e-5  # of the largest entry
NETWORK = functools.partial(tiny_model, 1, 4, 6)
NORMED = functools.partial(tiny_model, 1, 4, 6, norm=True)
RAGGED = (12, 30, 7, 16, 21)
TRAINING = Training(rounds=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01)


@pytest.fixture(autouse=True, scope="module")
def _simulated() -> None:
    gpu.enable()


def run(
    method: Method,
    device: str = "cuda",
    *,
    networks: Sequence[Callable[[], nn.Module]] = (NETWORK,),
    sizes: Sequence[int] = RAGGED,
    training: Training = TRAINING,
    **options: Any,
) -> tuple[Federation, dict[str, int]]:
    """A run on the device, with stacks there, and what was done on it."""
    labels = (tuple(range(CLASSES)),) * len(sizes)
    among = world(networks, public=24, sizes=sizes, labels=labels, device=device)
    executor = "serial" if device == "cpu" else "vectorized"
    with gpu.counting() as done:
        found = among.run(method, training, executor=executor, **options)
    return found, done


def replayed(method: Method, **options: Any) -> dict[str, int]:
    """Replays come to where the clients come alone on a CPU; what was done."""
    found, done = run(method, **options)
    expected, _ = run(method, "cpu", **options)
    assert difference(all_state(expected), all_state(found), CLOSE) is None
    assert graphs.current is graphs.default
    assert all(stream.idle for stream in graphs.Stream.every)
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
    assert replayed(FedAvg(), networks=[NORMED], sizes=sizes)["captures"] == 2  # or 8 rows of four clients, and of two


def test_single_clients_of_different_networks() -> None:
    networks = [functools.partial(tiny_model, 1, width, 6) for width in (3, 4, 5)]
    done = replayed(Local(), networks=networks, sizes=(20, 12, 30))
    assert done["captures"] == 3


def test_networks_take_turns_each_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[graphs.Stream] = []
    plain = graphs.CUDAGraph.replay

    def replay(graph: graphs.CUDAGraph) -> None:
        order.append(graphs.current)
        plain(graph)

    monkeypatch.setattr(graphs.CUDAGraph, "replay", replay)
    networks = [functools.partial(tiny_model, 1, width, 6) for width in (3, 4, 5)]
    replayed(Local(), networks=networks, sizes=(40, 40, 16), training=TRAINING.model_copy(update={"rounds": 4}))
    last = order[-(10 + 10 + 4) :]
    one, other, third = dict.fromkeys(last)
    assert last == [one, other, third] * 4 + [one, other] * 6
    assert graphs.default not in last


class OnlyIn(Local):
    """Fails where one client uploads, in the second round."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if client.round == 2 and client.id == 1:
            raise ValueError("no")
        return super().upload(client, trained)


def test_steps_are_recorded_on_the_second_device() -> None:
    assert run(Local(), "cuda:1")[1]["replays"] > 10
    assert torch.cuda.current_device() == 0


def test_who_fails_beside_others_is_named() -> None:
    networks = [functools.partial(tiny_model, 1, width, 6) for width in (3, 4, 5)]
    with pytest.raises(RunError, match=r"client 1 \(net1\), round 2, uploading: ValueError: no"):
        run(OnlyIn(), networks=networks, sizes=(20, 12, 30))


def test_widths_that_a_client_draws_have_a_graph_each() -> None:
    assert replayed(FjORD(), sizes=(64,) * 3)["captures"] > 3


def test_bf16_is_that_of_steps_that_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, done = run(Local(), precision="bf16")
    assert done["replays"] > 10
    monkeypatch.setattr(recorded_step, "RECORDS", False)
    launched, _ = run(Local(), precision="bf16")
    assert difference(all_state(launched), all_state(recorded), CLOSE) is None


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
def test_what_steps_draw_reaches_the_device_together(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many copies for 4 as for 24 steps; with less memory, in pieces."""
    monkeypatch.setattr(stack_parts, "_AHEAD", ahead)
    short, long = (replayed(Drawing(), sizes=(8 * steps,) * 3) for steps in (4, 24))
    assert long["replays"] - short["replays"] == 3 * 2 * 20
    if ahead == 2**26:
        assert long["h2d"] == short["h2d"]
    else:
        assert long["h2d"] > short["h2d"]


# what is kept --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"lr_schedule": "cosine"}, {"client_fraction": 0.6}], ids=str)
def test_later_rounds_replay_what_the_first_ones_have_recorded(changes: dict[str, Any]) -> None:
    few, many = (
        replayed(Local(), sizes=(16,) * 5, training=TRAINING.model_copy(update={"rounds": rounds, **changes}))
        for rounds in (2, 6)
    )
    assert few["captures"] == many["captures"] == 1
    assert many["replays"] == few["replays"] + 4 * 2 * 2


def test_a_step_of_a_stack_is_one_launch() -> None:
    short, long = (run(Local(), sizes=(8 * steps,) * 4)[1] for steps in (2, 12))
    assert long["kernels"] - short["kernels"] == long["replays"] - short["replays"] == 3 * 2 * 10
    assert (long["syncs"], long["h2d"], long["captures"]) == (short["syncs"], short["h2d"], 1)


def test_who_is_through_rides_along_until_half_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 1 to 8 batches: one graph for 8 to 5 of them, one for 4 and 3, one for 2, one for the last."""
    assert replayed(Local(), sizes=[8 * (1 + place) for place in range(8)])["captures"] == 4
    monkeypatch.setattr(recorded_step, "_MOST_GRAPHS", 1)
    monkeypatch.setattr(recorded_step, "_MOST_STACKS", 1)
    replayed(FedRep(aggregation="same-shape"))


@pytest.mark.parametrize("networks", [[NETWORK], [NETWORK, functools.partial(tiny_model, 1, 5, 6)]], ids=["one", "two"])
def test_runs_side_by_side_replay_the_steps_of_one(networks: Sequence[Callable[[], nn.Module]]) -> None:
    """Also where learning rates differ, and change from round to round."""

    def runs(device: str, executor: str, count: int) -> list[Federation]:
        given: list[Federation] = []
        for seed in range(count):
            among = world(networks, public=24, sizes=(16,) * 4, labels=((0, 1, 2),) * 4, device=device)
            training = TRAINING.model_copy(update={"lr": 0.1 / (1 + seed), "lr_schedule": "cosine"})
            given.append(among.federation(Local(), training, seed=seed, executor=executor))
        return given

    launched = []
    for count in (1, 3):
        expected = runs("cpu", "serial", count)
        for federation in expected:
            federation.run()
        found = runs("cuda", "vectorized", count)
        with gpu.counting() as done:
            run_together([federation.run for federation in found], 64, torch.device("cuda"))
        launched.append((done["captures"], done["replays"]))
        for one, other in zip(expected, found, strict=True):
            assert difference(all_state(one), all_state(other), CLOSE) is None
    assert launched[0] == launched[1]
    assert launched[0][1] == len(networks) * 3 * 2 * 2  # the first step is launched, and one replay is a trial


class Fixed(nn.Module):
    """A network with a tensor that is no part of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 36), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.flatten(1) * self.scale)
        return found


def test_the_network_of_a_run_that_is_over_is_kept_for_the_others() -> None:
    """Their graphs are those that the first run has recorded, with its network."""

    def finished(rounds: int) -> None:
        training = TRAINING.model_copy(update={"rounds": rounds})
        run(Local(), networks=[Fixed], sizes=(16,) * 4, training=training)
        gc.collect()

    run_together([functools.partial(finished, rounds) for rounds in (2, 5)], 4, torch.device("cuda"))


class Full(Local):
    """Memory runs out once, in the third round on a GPU."""

    left: ClassVar[list[int]] = [1]

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if client.round == 3 and next(client.model.parameters()).is_cuda and self.left:
            self.left.pop()
            raise torch.OutOfMemoryError
        return {}


def test_what_is_kept_is_given_up_where_memory_runs_out() -> None:
    assert replayed(Full(), sizes=(16,) * 4)["captures"] == 2
    assert not Full.left


def held() -> set[int]:
    """The numbers of clients whose stacks are in memory."""
    gc.collect()
    stacks = [each for each in gc.get_objects() if type(each) is recorded_step.RecordedStack]
    return {len(next(iter(stack.tensors.values()))) for stack in stacks}


def test_a_stack_that_did_not_fit_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(stack: StackedClients, part: Any, step: NextStep, *others: Any) -> Any:
        if len(step.rows) > 4:
            raise torch.OutOfMemoryError
        return plain(stack, part, step, *others)

    def finished(seed: int) -> None:
        run(Local(), sizes=(16,) * 4, seed=seed)
        seen.append(held())

    seen: list[set[int]] = []
    plain = StackedClients.gradients
    monkeypatch.setattr(StackedClients, "gradients", gradients)
    run_together([functools.partial(finished, seed) for seed in range(2)], 64, torch.device("cuda"))
    assert seen == [{4}, {4}]


class Varying(Local):
    """A context whose tensor is a shorter one in every round."""

    def receive(self, client: Client, message: Message) -> Context:
        return {"weights": torch.ones(7 - client.round, device=next(client.model.parameters()).device)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["weights"].sum()


def test_contexts_of_other_shapes() -> None:
    training = TRAINING.model_copy(update={"rounds": 4, "lr": 0.02})
    assert replayed(Varying(), sizes=(16,) * 4, training=training)["captures"] == 4


@pytest.mark.parametrize(("worth", "captures", "lines"), [(3, 4, 0), (4, 2, 1)])
def test_steps_of_ever_other_kinds_are_launched(
    worth: int, captures: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contexts of each of four rounds have a graph, which is replayed three times."""
    monkeypatch.setattr(recorded_step, "_MOST_CAPTURES", 2)
    monkeypatch.setattr(recorded_step, "_WORTH", worth)
    told = Told()
    _, done = run(Varying(), sizes=(16,) * 4, training=TRAINING.model_copy(update={"rounds": 4}), loggers=[told])
    assert (done["captures"], len(told.messages)) == (captures, lines)


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


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_step, "RECORDS", False)
    done = replayed(Local())
    assert done["captures"] == done["replays"] == 0


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
        like = next(client.model.parameters())
        return {"scale": 1.0 + client.round, "tensor": like.new_full((), 1.0 + client.round)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        loss = cross_entropy(model(batch.x), batch.y, batch.w)
        return 0.5 * loss * context["scale"] + 0.5 * loss * context["tensor"]


def test_a_number_that_was_frozen_in_is_found_out() -> None:
    with pytest.raises(AssertionError):
        replayed(Looking())


def test_numbers_of_the_context_are_not_frozen_in() -> None:
    assert replayed(Given())["captures"] > 3  # for each round and number of clients


class Counting(Local):
    """A context with a whole number in main memory, in one tensor for all clients."""

    shared: ClassVar[list[Tensor]] = [torch.tensor(place) for place in range(4)]

    def receive(self, client: Client, message: Message) -> Context:
        return {"round": self.shared[client.round]}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["round"]


def test_whole_numbers_that_all_share_are_not_frozen_in() -> None:
    assert replayed(Counting(), sizes=(16,) * 4)["captures"] == 1


class Making(Local):
    """A loss that brings numbers from the host, and waits for them or not."""

    waits: ClassVar[bool] = False

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        weights = torch.arange(1.0, 1.0 + CLASSES).to(batch.x.device, non_blocking=not self.waits)
        return cross_entropy(model(batch.x), batch.y, batch.w * weights[batch.y])


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_capture_refuses_is_launched_and_said(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Making, "waits", waits)
    kept: list[set[int]] = []
    told = Told(lambda record: kept.append(held()))
    run(Making(), sizes=(16,) * 4, loggers=[told])
    done = replayed(Making(), sizes=(16,) * 4)
    assert done["captures"] == done["replays"] == 0  # not even tried: a capture that breaks off leaves things behind
    assert kept == [set()] * 3
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
    run(FedAvg(), sizes=(16,) * 4, loggers=[told])
    assert replayed(FedAvg(), sizes=(16,) * 4)["replays"] == 1
    assert "gives other numbers than launched" in told.messages[0]


def test_a_trial_that_fails_leaves_no_step_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no room to compare")

    monkeypatch.setattr(recorded_step, "_is_same_step", full)
    assert replayed(FedAvg(), sizes=(16,) * 4)["replays"] == 1


def test_samples_that_have_no_room_on_the_device_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    told = Told()
    run(Local(), sizes=(16,) * 2, loggers=[told])
    what = "steps are launched one by one, not recorded (its samples stay in main memory)"
    assert told.messages == [f"local: net0: {what}"]


def test_dropout_is_not_recorded() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, CLASSES))

    found, done = run(FedAvg(aggregation="same-shape"), networks=[dropping])
    assert done["captures"] == 0
    again, _ = run(FedAvg(aggregation="same-shape"), networks=[dropping])
    assert difference(all_state(found), all_state(again)) is None


# the stand-in ------------------------------------------------------------------------------------------------------


def captured(step: Callable[[], None]) -> graphs.CUDAGraph:
    made = graphs.CUDAGraph()
    try:
        with graphs.graph(made):
            step()
    finally:
        graphs.set_stream(graphs.default)
    return made


def test_a_capture_computes_nothing_and_a_replay_looks_again() -> None:
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    weight = torch.full((3,), 2.0, device="cuda").requires_grad_()
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


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.add_(torch.ones(2).to("cuda")),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0])],
    ],
)
def test_a_capture_refuses_what_a_gpu_refuses(step: Callable[[Tensor], Any]) -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: step(x))


def test_a_replay_reads_no_memory_that_was_given_up() -> None:
    total = torch.zeros(2, device="cuda")

    def of_what_goes() -> graphs.CUDAGraph:
        ones = torch.ones(2, device="cuda")
        return captured(lambda: total.add_(ones))

    graph = of_what_goes()
    with pytest.raises(AssertionError, match="given up"):
        graph.replay()


def test_a_stream_waits_for_who_fills_its_tensors() -> None:
    total, stream = torch.zeros(2, device="cuda"), graphs.Stream()
    graph = captured(lambda: total.add_(1))
    with graphs.in_stream(stream), pytest.raises(AssertionError, match="without waiting"):
        graph.replay()
    stream.wait_stream(graphs.default)
    with graphs.in_stream(stream):
        graph.replay()
    assert not stream.idle
    graphs.default.wait_stream(stream)
    assert stream.idle
