"""What a round costs on a GPU: kernels, waits and copies, counted. More than these is a step back."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.optimizers import Optimizer
from polyfed.engine.weight_store import WeightRow
from polyfed.methods import FedAvg, FedHeNN
from polyfed.methods.building_blocks.alignment_data import AlignmentData
from polyfed.registry import METHODS
from polyfed.testing.fixtures import CLASSES, all_state, difference, tiny_model, world

CLIENTS = 20
NETWORK = functools.partial(tiny_model, 1, 4, 6)
STEPS = 5  # of a client in a round
PUBLIC = 24  # rows that everybody may see
AVERAGE = FedAvg(aggregation="same-shape")
MOST = {
    "serial": {"kernels": 4360, "syncs": 120, "h2d": 60, "h2d_bytes": 75360, "d2h": 120, "d2h_bytes": 43840},
    "vectorized": {"kernels": 784, "syncs": 3, "h2d": 4, "h2d_bytes": 22808, "d2h": 3, "d2h_bytes": 38800},
}
# of a round with one exchange: losses, uploads, one or two scorings; FedMD has a second exchange, of scores
WAITS = {
    **dict.fromkeys(["fd", "fedgh", "fedkwaz", "fedre", "fedsa", "fedsaf", "fedselect", "fiarse", "scaffold"], 4),
    **dict.fromkeys(["fedorgp", "fedproto", "fedtgp"], 3),
    "fedmd": 6,
}
WAITS_PER_CLIENT = {"feddpa": 1, "fedfomo": 2, "fedgen": 2, "fedin": 3, "fedkd": 1}  # see docs/gpu.md


def counted(
    executor: str,
    rounds: int,
    clients: int = CLIENTS,
    networks: Sequence[Callable[[], nn.Module]] = (NETWORK,),
    steps: Sequence[int] = (STEPS,),
    method: Method = AVERAGE,
    **training: Any,
) -> tuple[dict[str, int], Federation]:
    """What is done in so many rounds of clients of these small networks, who take so many steps in turn."""
    among = world(
        networks,
        public=PUBLIC,
        sizes=[8 * steps[place % len(steps)] for place in range(clients)],
        labels=(tuple(range(CLASSES)),) * clients,
        device="cuda",
    )
    settings = Training(rounds=rounds, local_epochs=1, batch_size=8, lr=0.1, **training)
    federation = among.federation(method, settings, evaluation=Evaluation(every_n_rounds=1), executor=executor)
    with gpu.counting() as done:
        federation.run()
    return done, federation


def third_round(executor: str, clients: int, method: Method = AVERAGE) -> dict[str, int]:
    """What is done in a round when everything that is brought to the device once is there."""
    two, _ = counted(executor, 2, clients, method=method)
    three, _ = counted(executor, 3, clients, method=method)
    return {name: three[name] - two[name] for name in MOST[executor]}


@pytest.mark.parametrize("executor", MOST)
def test_a_round_costs_no_more(executor: str) -> None:
    found = third_round(executor, CLIENTS)
    assert all(found[name] <= most for name, most in MOST[executor].items()), found


@pytest.mark.parametrize("executor", MOST)
@pytest.mark.parametrize("augmentation", ["none", "crop-flip"])
def test_a_step_waits_for_nothing_and_copies_nothing(executor: str, augmentation: str) -> None:
    """However many steps there are; what augmentation draws for them reaches the device in one copy."""
    short, _ = counted(executor, 1, clients=4, steps=(2, 3), augmentation=augmentation)
    long, _ = counted(executor, 1, clients=4, steps=(12, 13), augmentation=augmentation)
    assert long["kernels"] > short["kernels"]
    assert long["syncs"] == short["syncs"]
    assert long["h2d"] == short["h2d"]


def kernels_of_a_step(clients: int, network: Callable[[], nn.Module]) -> float:
    """Those of one step of all clients as one."""
    short, _ = counted("vectorized", 1, clients, [network], steps=(2,))
    long, _ = counted("vectorized", 1, clients, [network], steps=(12,))
    return (long["kernels"] - short["kernels"]) / 10


def kernels_in_plain_pytorch(network: nn.Module, clients: int | None) -> int:
    """Those of a step by PyTorch alone, of one client (None) or of several by `torch.func`: rows, gradients, SGD."""
    network = network.cuda()
    rows = torch.arange(8, device="cuda")
    x, y = torch.randn(16, 1, 6, 6, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")
    weights = {name: p.detach() for name, p in network.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(network, weights, (x,)), y)

    gradient = torch.func.grad(loss)
    if clients is not None:
        rows = rows.repeat(clients, 1)
        weights = {name: torch.stack([p] * clients) for name, p in weights.items()}
        gradient = torch.func.vmap(gradient)
    optimizer = Optimizer(list(weights.values()), Training(), 0.1)
    with gpu.counting() as done:
        optimizer.step(list(gradient(weights, x[rows], y[rows]).values()))
    return done["kernels"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("network", "most"), [(mlp, 20), (cnn, 26), (NETWORK, 35)])
def test_a_step_of_a_stack_costs_little_more_than_one_clients(network: Callable[[], nn.Module], most: int) -> None:
    """However many clients there are: above it is what vmap computes apart, such as biases."""
    few, many = (kernels_of_a_step(clients, network) for clients in (4, 12))
    assert few == many <= most
    assert few <= kernels_in_plain_pytorch(network(), None) + 7
    assert few <= kernels_in_plain_pytorch(network(), 4) - 21


@pytest.mark.parametrize("network", [mlp, cnn, NETWORK])
def test_all_steps_of_a_stack_are_alike(network: Callable[[], nn.Module]) -> None:
    """The same operations in every step, none of which waits or has a shape that depends on values.

    So a CUDA graph could record a step. An operation with such a shape counts as a wait.
    """

    def operations(steps: int) -> Counter[str]:
        counted("vectorized", 1, 4, [network], steps=(steps,))
        return Counter(gpu.by_name())

    two, seven, twelve = map(operations, (2, 7, 12))
    assert seven - two == twelve - seven
    assert not [name for name in twelve - seven if "sync" in name or "h2d" in name or "d2h" in name]


@pytest.mark.parametrize("room", [None, 0])
def test_another_client_of_a_stack_costs_no_wait_and_no_copy(room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, uploads and scores of all cross together; weights, too, where they have no room on the device."""
    if room is not None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, room))
    few, many = (third_round("vectorized", clients) for clients in (4, 12))
    assert (few["syncs"], few["d2h"]) == (many["syncs"], many["d2h"]) == (4, 4)
    samples = 0 if room is None else 4 * 8  # of 8 clients: inputs and labels to train on, inputs to be scored twice
    assert many["h2d"] == few["h2d"] + samples


@pytest.mark.parametrize("name", WAITS)
def test_a_method_waits_as_often_whatever_the_number_of_clients(name: str) -> None:
    """Class means, uploads and what clients keep of a round leave the device as one; so do predictions."""
    few, many = (third_round("vectorized", clients, METHODS[name]()) for clients in (4, 8))
    assert few["syncs"] == few["d2h"] == many["syncs"] == many["d2h"] == WAITS[name]


@pytest.mark.parametrize("name", WAITS_PER_CLIENT)
def test_other_methods_wait_for_each_client_no_more_often(name: str) -> None:
    few, many = (third_round("vectorized", clients, METHODS[name]()) for clients in (4, 8))
    assert many["syncs"] - few["syncs"] <= 4 * WAITS_PER_CLIENT[name]


@pytest.mark.parametrize("executor", MOST)
def test_weights_stay_on_the_device_between_rounds(executor: str) -> None:
    """And are read in main memory."""
    _, held = counted(executor, 2)
    rows = [client.weights for client in held.clients]
    assert all(isinstance(row, WeightRow) and row.bytes.is_cuda for row in rows)
    assert not any(t.is_cuda for row in rows for t in (row or {}).values())


@pytest.mark.parametrize("executor", MOST)
@pytest.mark.parametrize(("rows", "copies"), [(PUBLIC, 0), (PUBLIC - 1, 1)])
def test_alignment_data_are_where_the_steps_are(executor: str, rows: int, copies: int) -> None:
    """A step of FedHeNN copies the numbers of the rows that a client draws, and nothing where it takes all rows."""
    method = FedHeNN(alignment_data=AlignmentData(size=PUBLIC, batch=rows))
    short, _ = counted(executor, 2, clients=4, steps=(2,), method=method)
    long, _ = counted(executor, 2, clients=4, steps=(12,), method=method)
    assert long["h2d"] - short["h2d"] == 4 * 10 * copies  # in the second round, the first that aligns
    assert long["syncs"] == short["syncs"]


@pytest.mark.parametrize("executor", MOST)
def test_data_stream_where_the_device_has_no_room(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go up batch by batch then, or round by round, as do weights, and the result is the same."""
    kept, held = counted(executor, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    streamed, again = counted(executor, 2)
    assert streamed["h2d_bytes"] > 1.2 * kept["h2d_bytes"]
    assert difference(all_state(held), all_state(again)) is None
    assert all(isinstance(client.weights, WeightRow) and client.weights.bytes.is_cpu for client in again.clients)


def test_a_few_clients_of_a_network_are_no_stack() -> None:
    """Three of each network train one after the other: trials and a stack's step would take longer than they save."""
    two = [functools.partial(tiny_model, 1, width, 6) for width in (4, 5)]
    serial, one_by_one = counted("serial", 2, clients=6, networks=two)
    vectorized, asked = counted("vectorized", 2, clients=6, networks=two)
    assert {name: vectorized[name] for name in MOST["serial"]} == {name: serial[name] for name in MOST["serial"]}
    assert difference(all_state(one_by_one), all_state(asked)) is None


def test_four_clients_of_a_network_are_a_stack() -> None:
    serial, _ = counted("serial", 2, clients=4)
    vectorized, _ = counted("vectorized", 2, clients=4)
    assert vectorized["kernels"] != serial["kernels"]
