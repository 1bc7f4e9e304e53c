"""Bytes as in Table 3 of FedGH: real networks with 500 features, two rounds on random images."""

from __future__ import annotations

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.methods import FD, FedGH, FedProto, LGFedAvg
from polyfed.models import zoo
from tests.helpers.toys import Round, rounds


def second_round(method: Method, classes: int, present: int, count: int) -> Round:
    """The second round, in which everything is sent; client i holds `present` classes from i * present on."""
    g = torch.Generator().manual_seed(0)
    members = []
    for i in range(count):
        y = (torch.arange(present) + i * present) % classes
        images = torch.randint(0, 256, (present, 3, 32, 32), dtype=torch.uint8, generator=g)
        members.append(Client(f"fedgh-cnn{4 + i % 2}", (images, y)))
    names = ("fedgh-cnn4", "fedgh-cnn5")
    builders = {name: lambda name=name: zoo.build(name, (3, 32, 32), classes) for name in names}
    return rounds(method, members, builders, classes=classes, rounds=2, batch_size=present, lr=0.01)[1]


@pytest.mark.parametrize(
    ("method", "classes", "present", "count", "shown"),
    [
        (FedGH(), 10, 2, 10, "23.45"),
        (FedProto(), 10, 2, 2, "7.81"),
        (FedProto(), 100, 10, 2, "39.06"),
        (LGFedAvg(), 10, 2, 2, "39.14"),
        (LGFedAvg(), 100, 10, 2, "391.41"),
        (FD(), 10, 2, 6, "0.16"),  # client 5 has the classes of client 0; nobody else has what the others have
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bytes_are_the_papers(method: Method, classes: int, present: int, count: int, shown: str) -> None:
    """Both ways of a client, as the paper counts, in KiB with two decimals."""
    round = second_round(method, classes, present, count)
    of_clients = [sum(method.nbytes_in_paper(message[i]) for message in (round.down, round.up)) for i in range(count)]
    assert f"{of_clients[0] / 1024:.2f}" == shown
    assert round.record["bytes_up_paper"] + round.record["bytes_down_paper"] == sum(of_clients)
