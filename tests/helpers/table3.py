"""FedGH's Table 3: two rounds of real networks with 500 features on random images."""

from __future__ import annotations

import torch

from polyfed.core.client import Client
from polyfed.core.method import Method
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


def kib(method: Method, round: Round, number: int) -> str:
    """Both ways of one client, as the paper counts, in KiB with two decimals."""
    both = sum(method.nbytes_in_paper(message[number]) for message in (round.down, round.up))
    return f"{both / 1024:.2f}"
