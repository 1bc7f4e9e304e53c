"""Calls of networks with other tensors, where a tensor or a layer has several names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyfed.functional.tied_tensors import call_with, first_names, tensor_places, without_ties


class Shared(nn.Module):
    """One encoder under two names, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.right = self.left
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.cat([self.left(x), self.right(-x)], dim=1)
        return self.b(self.a(z).relu())


def test_every_name_leads_to_the_first_and_every_place_is_there_once() -> None:
    network = Shared()
    first = first_names(network)
    assert (first["right.0.weight"], first["b.weight"], first["b.bias"]) == ("left.0.weight", "a.weight", "b.bias")
    assert first["right.1.running_mean"] == "left.1.running_mean"
    assert not [name for name in tensor_places(network) if name.startswith("right")]
    assert tensor_places(network)["b.weight"] == "a.weight"


@pytest.mark.parametrize("named", ["first", "last"])
def test_tensors_of_any_name_are_used_everywhere_and_the_network_keeps_its_own(named: str) -> None:
    torch.manual_seed(0)
    network, x = Shared().eval(), torch.randn(5, 3)
    other = Shared().eval()
    first = first_names(network)
    last = {one: name for name, one in first.items()}
    names = first.values() if named == "first" else last.values()
    tensors = {name: t.detach().clone() for name, t in other.state_dict().items() if name in names}
    before, own = network(x), [*network.parameters()]
    assert torch.equal(call_with(network, tensors, (x,)), other(x))
    assert torch.equal(network(x), before)
    assert all(mine is kept for mine, kept in zip(network.parameters(), own, strict=True))


def test_clients_as_one() -> None:
    torch.manual_seed(0)
    networks, x_KBD = [Shared().eval() for _ in range(2)], torch.randn(2, 5, 3)
    stacked = {
        name: torch.stack([dict(network.named_parameters())[name] for network in networks])
        for name, _ in networks[0].named_parameters()
    }
    found = torch.func.vmap(lambda tensors, x: call_with(networks[0], tensors, (x,)))(stacked, x_KBD)
    expected = torch.stack([network(x) for network, x in zip(networks, x_KBD, strict=True)])
    torch.testing.assert_close(found, expected)
    assert torch.equal(networks[0](x_KBD[0]), expected[0]), "nothing of the call stays in a layer of two names"


def test_without_ties_keeps_the_first_of_each_and_tensors_without_memory() -> None:
    network = Shared()
    assert "right.0.weight" not in without_ties(network.state_dict())
    assert without_ties(network.state_dict()).keys() == set(first_names(network).values())
    empty = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(2, device="meta")}
    assert without_ties(empty | {"d": torch.empty(2, device="meta")}).keys() == {"a", "b", "c", "d"}
