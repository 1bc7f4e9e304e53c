"""Every executor gives the result of `serial`: worker processes bit for bit, stacks of clients up to rounding.

The executor `ray` makes its federations of recipes: `test_ray_executor.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Context, Exchange, Method, Phase, TrainingResult
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.process_pool import ProcessPool
from polyfed.engine.executors.vectorized import VectorizedExecutor
from polyfed.engine.federation import Federation
from polyfed.methods import FML, SCAFFOLD, FedAvg, FedGH, FedHeNN, FedProto, HeteroFL, Local
from polyfed.methods.fedhenn_homogeneous import HomogeneousFedHeNN
from polyfed.plugins.settings import Availability
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TIMES, all_state, difference, grouped, records
from tests.helpers import toys

# FedDF's 128 steps of Adam on the server carry rounding beyond the tolerance on some processors
GENTLE: dict[str, dict[str, Any]] = {
    "feddf": {"server_steps": 16},
}


def gentle(name: str) -> Method:
    """The method of this name, for comparisons up to rounding after several large steps."""
    method: Method = METHODS[name](**GENTLE.get(name, {}))
    return method


CLOSE = 1e-5  # of the largest entry
TRAINING = Training(rounds=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01)
STAGES = Evaluation(extra_stages=["received", "after_training", "personal"], metrics=["f1", "auc", "confusion"])
UNRELIABLE = Availability(dropout_rate=0.2, dropout_stage="after", late_joiners=1)

Run = Callable[..., Federation]  # executor=, workers= -> a federation that has run


def near(one: Any, other: Any) -> bool:
    """Records that agree up to rounding, seconds apart."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(near(one[k], other[k]) for k in one if k not in TIMES)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == (pytest.approx(other, rel=1e-4, abs=1e-6) if isinstance(one, float) else other))


def check(run: Run, executor: str) -> Federation:
    """A run by this executor gives that of `serial`."""
    serial = run(executor="serial")
    found = run(executor=executor, workers=2 if executor == "processes" else None)
    assert isinstance(found.executor, ProcessPool if executor == "processes" else VectorizedExecutor)
    exact = executor == "processes"
    assert difference(all_state(serial), all_state(found), *([] if exact else [CLOSE])) is None
    assert records(serial) == records(found) if exact else near(serial.history, found.history)
    return found


def of_kit(method: Method, kinds: Mapping[str, Any] | None = None, **options: Any) -> Run:
    """Runs of the conformance kit's six clients; by default all have one network."""
    among = ConformanceKit(method=method).world(**({"one": True} if kinds is None else kinds))
    training = TRAINING.model_copy(update=options.pop("training", {}))
    return functools.partial(among.run, method, training, **{"evaluation": STAGES, **options})


class Passages(FedAvg):
    """Three exchanges in a round and a final one, with phases that no message could carry."""

    def exchanges(self, round: int) -> Sequence[Exchange]:
        heads = Phase(1, trains=lambda name: name.startswith("head"), name="heads")
        return Exchange(), Exchange("heads", who="all", phases=[heads]), Exchange("asked", trains=False)

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange("last", phases=[Phase(2, trains=lambda name: "bias" in name)]),)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {**super().upload(client, trained), "steps": torch.tensor(float(trained.steps))}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.log[f"steps {server.exchange}"] = sum(float(get_tensor(m, "steps")) for m in uploads.values())
        if server.exchange == "train":
            super().aggregate(server, {i: {"model": m["model"], "n": m["n"]} for i, m in uploads.items()})


class Thrice(Local):
    """Phases on other data, on some rows, on a part of the network."""

    def phases(self, training: Training) -> Sequence[Phase]:
        return Phase(1, data="validation", name="v"), Phase(1, lr=0.3, rows="few"), Phase(2, ("head",))

    def receive(self, client: Client, message: Message) -> Context:
        return {"few": torch.arange(client.id)}


def cropped_and_flipped(**options: Any) -> Federation:
    """Clients with unequal numbers of images that are changed in every batch."""
    x = torch.randint(0, 256, (14, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    build = lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3))  # noqa: E731
    data = [LabeledSamples(x[:n], torch.arange(n) % 3) for n in (14, 9, 3)]
    members = [Client("net", samples, data[2]) for samples in data]
    training = Training(rounds=2, batch_size=4, augmentation="crop-flip")
    federation = Federation(members, Local(), training, builders={"net": build}, **grouped(**options))
    federation.run()
    return federation


def shared_test_set(**options: Any) -> Federation:
    """Several networks, BatchNorm among them, and one test set for all."""
    members = toys.clients(["shallow", "bn", "shallow", "bn"], sizes=[12, 7, 9, 30])
    method = FedAvg(aggregation="same-shape")
    given = grouped(classes=toys.CLASSES, test=toys.samples(20, 77), builders=toys.NETS, **options)
    federation = Federation(members, method, TRAINING, STAGES, **given)
    federation.run()
    return federation


CASES: dict[str, Run] = {
    "two networks at each client": of_kit(FML()),
    "a state at client and server": of_kit(SCAFFOLD()),
    "class means, several networks": of_kit(FedGH(), {}),
    "another predictor": of_kit(FedProto()),
    "kernels": of_kit(FedHeNN(alignment_data={"size": 20, "batch": 10}), {}),
    "a final average": of_kit(HomogeneousFedHeNN(final_average=True, alignment_data={"size": 8, "batch": 8})),
    "slices": of_kit(HeteroFL()),
    "exchanges and phases": of_kit(Passages()),
    "phases on other data": of_kit(Thrice()),
    "some clients, at times": of_kit(FedAvg(), training={"client_fraction": 0.7}, availability=UNRELIABLE),
    "images cropped": cropped_and_flipped,
    "a shared test set": shared_test_set,
}
QUICK = {
    "processes": ["two networks at each client", "another predictor", "exchanges and phases", "a shared test set"],
    "vectorized": ["a state at client and server", "a final average", "phases on other data", "images cropped"],
}


@pytest.mark.parametrize(
    ("executor", "name"),
    [
        pytest.param(executor, name, marks=[] if name in quick else pytest.mark.slow)
        for executor, quick in QUICK.items()
        for name in CASES
    ],
)
def test_the_result_is_the_serial_one(executor: str, name: str) -> None:
    if executor == "processes" and sys.platform != "linux":
        pytest.skip("worker processes need Linux")
    check(CASES[name], executor)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [{}, {"one": True}, {"one": True, "norm": True}], ids=str)
@pytest.mark.parametrize("executor", QUICK)
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name: str, executor: str, kinds: dict[str, Any]) -> None:
    if name == "feddf" and "norm" in kinds:
        pytest.skip("the server's Adam moves biases in front of BatchNorm, whose gradient is 0, along rounding errors")
    check(of_kit(gentle(name), kinds), executor)
    check(of_kit(gentle(name), kinds, availability=UNRELIABLE), executor)


def test_stacks_give_the_same_bits_again() -> None:
    run = of_kit(FedAvg(), {"one": True, "norm": True})
    one, two, other, serial = (
        run(executor=name, workers=size)
        for name, size in [("vectorized", 6)] * 2 + [("vectorized", 3), ("serial", None)]
    )
    assert difference(all_state(one), all_state(two)) is None
    assert difference(all_state(one), all_state(other), CLOSE) is None
    assert difference(all_state(one), all_state(serial), CLOSE) is None
