"""What a round costs on a GPU: kernels, waits and copies, counted. More than these is a step back."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gpu
import pytest
import torch

from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.methods import FedAvg
from polyfed.testing.fixtures import CLASSES, all_state, difference, tiny_model, world

CLIENTS = 20
STEPS = 5  # of a client in a round
MOST = {
    "serial": {"kernels": 4520, "syncs": 140, "h2d": 180, "h2d_bytes": 144320, "d2h": 140, "d2h_bytes": 75440},
    "vectorized": {"kernels": 1222, "syncs": 121, "h2d": 93, "h2d_bytes": 158400, "d2h": 121, "d2h_bytes": 75440},
}


def counted(
    executor: str, rounds: int, clients: int = CLIENTS, widths: Sequence[int] = (4,)
) -> tuple[dict[str, int], Federation]:
    """What is done in so many rounds of clients of small networks of these widths."""
    among = world(
        [functools.partial(tiny_model, 1, width, 6) for width in widths],
        public=0,
        sizes=(8 * STEPS,) * clients,
        labels=(tuple(range(CLASSES)),) * clients,
        device="cuda",
    )
    training = Training(rounds=rounds, local_epochs=1, batch_size=8, lr=0.1)
    federation = among.federation(
        FedAvg(aggregation="same-shape"), training, evaluation=Evaluation(every_n_rounds=1), executor=executor
    )
    with gpu.counting() as done:
        federation.run()
    return done, federation


@pytest.mark.parametrize("executor", MOST)
def test_a_round_costs_no_more(executor: str) -> None:
    """The third round, when everything that is brought to the device once is there."""
    two, _ = counted(executor, 2)
    three, _ = counted(executor, 3)
    found = {name: three[name] - two[name] for name in MOST[executor]}
    assert all(found[name] <= most for name, most in MOST[executor].items()), found


@pytest.mark.parametrize("executor", MOST)
def test_data_stream_where_the_device_has_no_room(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go up batch by batch then, or round by round, and the result is the same."""
    kept, held = counted(executor, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    streamed, again = counted(executor, 2)
    assert streamed["h2d_bytes"] > 1.2 * kept["h2d_bytes"]
    assert difference(all_state(held), all_state(again)) is None


def test_a_few_clients_of_a_network_are_no_stack() -> None:
    """Three of each network train one after the other: trials and a stack's step would take longer than they save."""
    serial, one_by_one = counted("serial", 2, clients=6, widths=(4, 5))
    vectorized, asked = counted("vectorized", 2, clients=6, widths=(4, 5))
    assert {name: vectorized[name] for name in MOST["serial"]} == {name: serial[name] for name in MOST["serial"]}
    assert difference(all_state(one_by_one), all_state(asked)) is None


def test_four_clients_of_a_network_are_a_stack() -> None:
    serial, _ = counted("serial", 2, clients=4)
    vectorized, _ = counted("vectorized", 2, clients=4)
    assert vectorized["kernels"] != serial["kernels"]
