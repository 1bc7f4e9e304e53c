"""Buffered asynchrony: the event simulation, FedBuff's step by hand, reductions to synchronous rounds, and resuming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.message import get_group, get_tensor
from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.engine.wire import decode
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FD, FedAvg, FedGH, FedMD, FedProto, FedRep, LGFedAvg, Local
from polyfed.methods import SCAFFOLD as Scaffold
from polyfed.plugins.settings import Availability, Devices
from polyfed.plugins.upload_buffer import draw_starters, fill_buffer
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

ALIKE = Devices(profiles=["laptop"])
UNLIKE = Devices(profiles=["laptop", "raspberry-pi", "phone-low"])
CLIENTS = 6


def federation(method: Method, devices: Devices, rounds: int = 4, share: float = 1.0, **options: Any) -> Federation:
    """The kit's six clients."""
    training = Training(rounds=rounds, batch_size=8, lr=0.1, client_fraction=share)
    return ConformanceKit(method=method).usual.federation(method, training, devices=devices, **options)


def ran(*arguments: Any, **options: Any) -> Federation:
    made = federation(*arguments, **options)
    made.run()
    return made


def buffered(devices: Devices, size: int, **changes: Any) -> Devices:
    return devices.model_copy(update={"buffer_size": size, **changes})


# the event simulation ---------------------------------------------------------------------------------------------


def simulate(left: Mapping[int, float], then: Sequence[tuple[int, float]], size: int) -> tuple[list[int], float]:
    """The same with neither queue nor relative times: who arrives, and when, one after the other."""
    arrives = dict(left)
    waiting = list(then)
    arrived: list[int] = []
    while len(arrived) < size and len(arrived) < len(arrives):
        others = [client for client in arrives if client not in arrived]
        first = min(others, key=lambda client: (arrives[client], list(arrives).index(client)))
        arrived.append(first)
        if waiting:
            client, seconds = waiting.pop(0)
            arrives[client] = arrives[first] + seconds
    return arrived, arrives[arrived[-1]]


@pytest.mark.parametrize("seed", range(5))
def test_buffers_fill_as_in_a_plain_simulation(seed: int) -> None:
    draws = np.random.default_rng(seed)
    seconds = [float(value) for value in draws.integers(1, 6, 12)]  # whole numbers, so that there are ties
    size = int(draws.integers(1, 6))
    left = dict(enumerate(seconds[:5]))
    then = list(zip(range(5, 12), seconds[5:], strict=True))[: size - 1]
    filled = fill_buffer(left, then, size)
    assert (filled.arrived, filled.seconds) == simulate(left, then, size)
    assert sorted([*filled.arrived, *filled.left]) == [*left, *(client for client, _ in then)]
    assert all(rest >= 0 for rest in filled.left.values())


def test_a_share_of_the_clients_is_at_work_at_any_time() -> None:
    training = Training(client_fraction=0.5)
    first = draw_starters(training, 0, 1, range(10), [], 3)
    assert (len(first.at_once), len(first.then)) == (5, 2)
    later = draw_starters(training, 0, 2, range(10), [1, 2, 3, 4], 3)
    assert (len(later.at_once), len(later.then)) == (1, 2)
    assert not {*later.at_once, *later.then} & {1, 2, 3, 4}
    for record in ran(FedAvg(), buffered(UNLIKE, 2), share=0.5).history[1:]:
        assert len(record["clients"]) == len(record["aggregated"]) == 2


# reductions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    others_slow(
        [Local(), FedAvg(), FedGH(), FedProto(), FD(), LGFedAvg(), FedRep(final_head_epochs=1)],
        quick=[FedAvg()],
    ),
    ids=lambda method: method.name,
)
def test_equal_devices_and_a_buffer_for_all_are_synchronous_rounds(method: Method) -> None:
    synchronous, asynchronous = ran(method, ALIKE, rounds=3), ran(method, buffered(ALIKE, CLIENTS), rounds=3)
    assert difference(all_state(synchronous), all_state(asynchronous)) is None
    found = records(asynchronous)
    regular = [record for record in found if not record["final_round"]]
    assert [record.pop("aggregated") for record in regular] == [
        [{"client": client, "from": number} for client in range(CLIENTS)] for number in (1, 2, 3)
    ]
    assert found == records(synchronous)


@pytest.mark.parametrize(
    "method",
    others_slow([FedAvg(), FedGH(), FedProto(weighting="uniform"), FD()], quick=[FedAvg()]),
    ids=lambda method: method.name,
)
def test_the_size_changes_the_server(method: Method) -> None:
    uneven = UNLIKE.model_copy(update={"time_jitter": 1.0})
    runs = [ran(method, buffered(uneven, 3), rounds=6), ran(method, buffered(uneven, 4), rounds=6)]
    assert any(entry["from"] < record["round"] for record in runs[0].history for entry in record["aggregated"])
    assert difference(all_state(runs[0]), all_state(runs[1])) is not None


# by hand ------------------------------------------------------------------------------------------------------------

ROWS = (5, 9)
LR = 0.3


def linear_clients() -> list[Client]:
    """A fast and a slow client, with one linear layer of the same weights and data of different size."""
    clients = []
    for place, rows in enumerate(ROWS):
        torch.manual_seed(place)
        data = (torch.randn(rows, 2), torch.arange(rows) % 3)
        torch.manual_seed(7)
        clients.append(Client(nn.Linear(2, 3), data, data))
    return clients


def change(weight: np.ndarray, bias: np.ndarray, client: Client) -> tuple[np.ndarray, np.ndarray]:
    """What one step of gradient descent on all rows changes."""
    x, y = client.data.train.x.numpy().astype(float), client.data.train.y.numpy()
    scores = x @ weight.T + bias
    p = np.exp(scores - scores.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(3)[y]
    return -LR * p.T @ x / len(x), -LR * p.mean(0)


def test_the_servers_steps_by_hand() -> None:
    """The slow client's only upload arrives in round 3 and is two rounds old."""
    clients = linear_clients()
    # seconds of the fast client: 2 latencies of 1; of the slow one: 5.5
    kinds: dict[str, Any] = {"flops": 1e15, "memory_bytes": 1e9, "download_bps": 1e15, "upload_bps": 1e15}
    custom = {"fast": {**kinds, "latency": 1.0}, "slow": {**kinds, "latency": 2.75}}
    settings = {"profiles": ["fast", "slow"], "custom": custom, "buffer_size": 1}
    devices = pf.Devices.model_validate(settings)
    training = pf.Training(rounds=3, batch_size=16, lr=LR)
    made = pf.Federation(clients, pf.methods.FedAvg(), training, plugins=[devices], task=pf.Task(classes=3))
    made.method.init_server(made.server)
    sent = get_group(made.method.broadcast(made.server, 0), "model")
    first = {name: t.double().numpy() for name, t in sent.items()}
    run = made.run()
    assert [record["aggregated"] for record in run.history] == [
        [{"client": 0, "from": 1}],
        [{"client": 0, "from": 2}],
        [{"client": 1, "from": 1}],
    ]
    assert [record["clients"] for record in run.history] == [[0, 1], [0], [0]]
    assert [record["simulated_seconds"] for record in run.history] == pytest.approx([2.0, 2.0, 1.5])
    w = (first["weight"], first["bias"])
    slow = change(*w, made.clients[1])
    for _ in range(2):
        w = tuple(a + b for a, b in zip(w, change(*w, made.clients[0]), strict=True))
    expected = [a + 3**-0.5 * b for a, b in zip(w, slow, strict=True)]
    sent = get_group(made.method.broadcast(made.server, 0), "model")
    for tensor, array in zip((sent["weight"], sent["bias"]), expected, strict=True):
        assert tensor.numpy() == pytest.approx(array, abs=1e-6)


def test_stale_prototypes_count_less_by_hand() -> None:
    """Counts 2 and 3, the second upload of weight one half: (2 * 1 + 1.5 * 8) / 3.5."""
    made = federation(FedProto(), ALIKE)
    labels, rows = torch.tensor([1], dtype=torch.int32), torch.ones(1, 4)
    uploads = {
        0: {"labels": labels, "prototypes": rows, "counts": torch.tensor([2], dtype=torch.int32)},
        1: {"labels": labels, "prototypes": 8 * rows, "counts": torch.tensor([3], dtype=torch.int32)},
    }
    made.server.upload_weights = {1: 0.5}
    made.method.aggregate(made.server, uploads)
    assert get_tensor(made.server.state, "prototypes").tolist() == [pytest.approx([4.0] * 4)]


def test_a_stale_pair_moves_the_header_less() -> None:
    """One pair of weight 1/2 is a step of half the length."""
    moved = []
    for lr, weight in ((0.2, 0.5), (0.1, 1.0)):
        made = federation(FedGH(header_lr=lr), ALIKE)
        made.method.init_server(made.server)
        width = get_group(made.server.state, "header")["weight"].shape[1]
        made.server.upload_weights = {3: weight}
        made.method.aggregate(made.server, {3: {"labels": torch.tensor([1]), "lars": torch.ones(1, width)}})
        moved.append(get_group(made.server.state, "header")["weight"])
    assert torch.equal(moved[0], moved[1])


# what is under way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", others_slow([FedAvg(), FedProto(), Local()], quick=[FedAvg()]), ids=lambda method: method.name
)
@pytest.mark.parametrize(
    "where", [pytest.param({"after": 2}, marks=pytest.mark.slow), {"within": 3}], ids=["between", "within"]
)
def test_an_interrupted_run_goes_on_bit_for_bit(method: Method, where: dict[str, int], tmp_path: Path) -> None:
    devices = buffered(UNLIKE, 2, time_jitter=0.3)
    whole = ran(method, devices, rounds=5)
    with pytest.raises(RunInterrupted):
        federation(method, devices, rounds=5, out=tmp_path, loggers=[Interrupt(**where)]).run()
    assert any(decode(file.read_bytes())["work"] for file in tmp_path.glob("checkpoint/round-*/states.safetensors"))
    resumed = federation(method, devices, rounds=5, out=tmp_path)
    resumed.run(resume=True)
    assert records(resumed) == records(whole)
    assert difference(all_state(resumed), all_state(whole)) is None


def test_a_pool_of_processes_gives_the_same() -> None:
    devices = buffered(UNLIKE, 2)
    serial, pool = (ran(FedAvg(), devices, executor=name, workers=n) for name, n in (("serial", 1), ("processes", 2)))
    assert records(serial) == records(pool)
    assert difference(all_state(serial), all_state(pool)) is None


def test_clients_keep_their_networks_until_their_work_is_done() -> None:
    made = ran(Local(), buffered(UNLIKE, 1), rounds=1)
    (entry,) = made.history[0]["aggregated"]
    assert made.history[0]["clients"] == list(range(CLIENTS))
    assert [client.id for client in made.clients if client.weights is not None] == [entry["client"]]


def test_rejected_work_takes_a_place_in_the_buffer() -> None:
    made = federation(FedAvg(), buffered(ALIKE, CLIENTS), rounds=2)
    made.clients[2].data.train.x[:] = torch.nan
    made.run()
    for record in made.history:
        assert [entry["client"] for entry in record["refused"]] == [2]
        assert [entry["client"] for entry in record["aggregated"]] == [0, 1, 3, 4, 5]


# what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        (Scaffold(), {}, "expected a method whose server takes uploads of earlier rounds, got scaffold"),
        (FedMD(), {}, "expected a method with one exchange a round, of the selected clients, got fedmd"),
        (pf.alone(FedAvg()), {}, "fedavg, alone: expected no devices.buffer_size"),
        (FedAvg(), {"availability": Availability(dropout_rate=0.1)}, "availability.dropout_rate: expected 0 beside"),
        (FedAvg(), {"availability": Availability(late_joiners=5)}, "expected at most the 1 clients of round 1, got 2"),
        (FedAvg(), {"evaluation": Evaluation(extra_stages=["after_training"])}, "got 'after_training'"),
        (
            FedAvg(),
            {"privacy": Privacy(upload_clip_norm=1.0, target_epsilon=5.0)},
            "privacy.target_epsilon: expected 0",
        ),
    ],
)
def test_what_cannot_be_buffered_is_refused_before_round_1(method: Method, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        federation(method, buffered(UNLIKE, 2), **options)


def test_a_buffer_and_a_deadline_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="expected round_timeout or buffer_size, got both"):
        Devices(profiles=["laptop"], buffer_size=2, round_timeout=1.0)
