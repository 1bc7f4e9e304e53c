"""The start of clients, where a method declares that nobody reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.model_factory import ModelFactory
from polyfed.core.server import Server
from polyfed.methods import FedAvg


def test_a_receive_or_broadcast_of_ones_own_says_so_anew() -> None:
    class Keeps(FedAvg):
        def receive(self, client: Client, message: Any) -> Any:
            return {}

    class SendsLess(FedAvg):
        def broadcast(self, server: Server, client_id: int) -> Any:
            return {}

    class Other(FedAvg):
        def upload(self, client: Client, trained: Any) -> Any:
            return {}

    said = [method.ignores_initial_weights for method in (Keeps, SendsLess, Other, FedAvg)]
    assert said == [False, False, True, True]


def test_a_network_of_ones_own_is_never_blank() -> None:
    builders = {"a": lambda: nn.Linear(4, 3)}
    start = ModelFactory(builders, lambda model, variant: model, 0, torch.device("cpu"), blank=True)
    assert not any(t.any() for t in start.starting_state("a", "", 0, None).values())
    own = nn.Linear(4, 3)
    assert torch.equal(start.starting_state("a", "", 0, own)["weight"], own.weight)
