"""Steps of stacks that are recorded and replayed, by a stand-in for CUDA graphs: the results, and what falls back.

The stand-in does the recorded operations again on changed memory: a value of Python's that a step read while it was
recorded is the old one then, and the comparison fails.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method
from polyfed.core.settings import Training
from polyfed.engine.executors import recorded_step
from polyfed.engine.federation import Federation
from polyfed.functional.losses import cross_entropy
from polyfed.methods import SCAFFOLD, FedAvg, FedHeNN, FedMD, FedSelect, Local
from polyfed.testing.fixtures import CLASSES, all_state, difference, tiny_model, world
from tests.helpers import graphs
from tests.helpers.told import Told

CLOSE = 1e-5  # of the largest entry
NETWORK = functools.partial(tiny_model, 1, 4, 6)
RAGGED = (12, 30, 7, 16, 21)
TRAINING = Training(rounds=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.use(monkeypatch)


def run(
    method: Method,
    executor: str = "vectorized",
    *,
    network: Callable[[], nn.Module] = NETWORK,
    sizes: Sequence[int] = RAGGED,
    training: Training = TRAINING,
    **options: Any,
) -> tuple[Federation, dict[str, int]]:
    """A run, and how many graphs were captured and replayed in it."""
    before = dict(graphs.done)
    labels = (tuple(range(CLASSES)),) * len(sizes)
    found = world((network,), public=24, sizes=sizes, labels=labels).run(method, training, executor=executor, **options)
    return found, {name: count - before[name] for name, count in graphs.done.items()}


def replayed(method: Method, **options: Any) -> dict[str, int]:
    """Replays come to where the clients come alone; what was done."""
    found, done = run(method, **options)
    expected, _ = run(method, "serial", **{name: value for name, value in options.items() if name != "loggers"})
    assert difference(all_state(expected), all_state(found), CLOSE) is None
    return done


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_schedule": "cosine", "augmentation": "crop-flip"},
        {"momentum": 0.0, "weight_decay": 0.0, "class_weights": "balanced"},
        {"optimizer": "adam", "momentum": 0.0, "lr": 0.01},
    ],
    ids=str,
)
def test_ragged_sizes_and_every_way_to_move(changes: dict[str, Any]) -> None:
    assert replayed(Local(), training=TRAINING.model_copy(update=changes))["replays"] > 10


METHODS = [SCAFFOLD(), FedSelect(grow_interval=1), FedHeNN(alignment_data={"size": 8, "batch": 4}), FedMD()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_gradients_of_its_own_masks_inputs_and_phases(method: Method) -> None:
    same_shape = {"aggregation": "same-shape"} if hasattr(method, "aggregation") else {}
    assert replayed(dataclasses.replace(method, **same_shape))["replays"] > 3


@pytest.mark.parametrize("sizes", [(16, 12, 30, 28), (20, 20, 20)], ids=str)
def test_batchnorm_has_a_graph_for_each_width_that_all_have(sizes: Sequence[int]) -> None:
    """4 rows of 20 are one; where some have 4 rows and others 8, steps are launched."""
    normed = functools.partial(tiny_model, 1, 4, 6, norm=True)
    assert replayed(FedAvg(), network=normed, sizes=sizes)["captures"] == 2  # or 8 rows of four clients, and of two


@pytest.mark.parametrize("changes", [{"lr_schedule": "cosine"}, {"client_fraction": 0.6}], ids=str)
def test_later_rounds_replay_what_the_first_ones_have_recorded(changes: dict[str, Any]) -> None:
    few, many = (
        replayed(Local(), sizes=(16,) * 5, training=TRAINING.model_copy(update={"rounds": rounds, **changes}))
        for rounds in (2, 6)
    )
    assert few["captures"] == many["captures"] == 1
    assert many["replays"] == few["replays"] + 4 * 2 * 2


def test_who_is_through_is_computed_with_the_others_until_half_are() -> None:
    """Clients of 1 to 8 batches: one graph for 8 to 5 of them, one for 4 and 3, one for 2, one for the last."""
    assert replayed(Local(), sizes=[8 * (1 + place) for place in range(8)])["captures"] == 4


class Full(Local):
    """Memory runs out once, in the third round of a stack."""

    left: ClassVar[list[int]] = []

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if client.round == 3 and self.left:
            self.left.pop()
            raise torch.OutOfMemoryError
        return {}


def test_where_memory_runs_out_what_is_kept_is_given_up_and_steps_are_launched() -> None:
    Full.left.append(1)
    told = Told()
    assert replayed(Full(), sizes=(16,) * 4, loggers=[told])["captures"] == 1
    assert not Full.left
    assert "not recorded (memory ran out)" in told.messages[0]


class Varying(Local):
    """A context whose tensor is a shorter one, and whose number is another one, in every round."""

    def receive(self, client: Client, message: Message) -> Context:
        return {"weights": torch.ones(7 - client.round), "scale": 1.0 + client.round}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * context["weights"].mean() * context["scale"]


@pytest.mark.parametrize(("most", "captures", "lines"), [(48, 4, 0), (2, 2, 1)])
def test_contexts_of_other_shapes_have_graphs_as_long_as_these_are_worth_it(
    most: int, captures: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four rounds has a graph, which is replayed three times."""
    monkeypatch.setattr(recorded_step, "_MOST_CAPTURES", most)
    told = Told()
    training = TRAINING.model_copy(update={"rounds": 4, "lr": 0.02})
    assert replayed(Varying(), sizes=(16,) * 4, training=training, loggers=[told])["captures"] == captures
    assert len(told.messages) == lines


class Looking(Local):
    """A loss that looks at a number of Python's beside its context, another one in every round."""

    scale: ClassVar[list[float]] = [1.0]

    def receive(self, client: Client, message: Message) -> Context:
        self.scale[0] = 1.0 + client.round
        return super().receive(client, message)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w) * self.scale[0]


def test_the_comparison_bites() -> None:
    with pytest.raises(AssertionError):
        replayed(Looking())


class Making(Local):
    """A loss that brings numbers to another device."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        torch.empty(CLASSES, device="meta").copy_(torch.arange(CLASSES))
        return cross_entropy(model(batch.x), batch.y, batch.w)


def test_what_a_capture_refuses_is_launched_and_said() -> None:
    """Not even tried: a capture that breaks off leaves things behind."""
    told = Told()
    assert replayed(Making(), sizes=(16,) * 4, loggers=[told]) == {"captures": 0, "replays": 0}
    (line,) = told.messages
    assert "net0: steps are launched one by one, not recorded (RuntimeError: " in line


def test_a_replay_that_gives_other_numbers_than_the_step_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = graphs.CUDAGraph.replay

    def wrong(graph: graphs.CUDAGraph) -> None:
        replay(graph)
        for _, _, results in graph.steps:
            for tensor in results:
                if tensor.is_floating_point():
                    tensor.mul_(0.9)
        replay(graph)  # once more than asked for

    monkeypatch.setattr(graphs.CUDAGraph, "replay", wrong)
    told = Told()
    assert replayed(FedAvg(), sizes=(16,) * 4, loggers=[told])["replays"] == 2
    assert "gives other numbers than launched" in told.messages[0]


def test_dropout_is_not_recorded_nor_anything_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, CLASSES))

    assert run(FedAvg(aggregation="same-shape"), network=dropping)[1]["captures"] == 0
    monkeypatch.setattr(recorded_step, "RECORDS", False)
    assert replayed(Local()) == {"captures": 0, "replays": 0}


# the stand-in ------------------------------------------------------------------------------------------------------


def test_a_replay_reads_no_memory_that_was_given_up() -> None:
    def of_what_goes() -> graphs.CUDAGraph:
        ones, total, made = torch.ones(2), torch.zeros(2), graphs.CUDAGraph()
        with graphs.graph(made):
            total.add_(ones)
        return made

    with pytest.raises(AssertionError, match="given up"):
        of_what_goes().replay()
