"""State that a network keeps outside its state dict, and tensors that it half shares, are refused before round 1."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.engine.network_checks import check_state
from polyfed.errors import ConfigError

REFUSED = r"what its network gives depends on earlier batches by more than state_dict\(\)"
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)) + 1, torch.arange(12) % 2


class Kept(nn.Module):
    """A layer that keeps what `keep` makes of it and its inputs, and gives what `give` makes of both."""

    def __init__(self, start: Any, keep: Callable[[Any, Tensor], Any], give: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept, self.keep, self.give = start, keep, give

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = self.keep(self.kept, x)
        return self.give(self.kept, x)


def zeros() -> Tensor:
    return torch.zeros(4)


def blend(mean: Tensor, x: Tensor) -> Tensor:
    return 0.9 * mean + 0.1 * x.mean(0).detach()


class Unsaved(nn.Module):
    """A running mean in a buffer that is not in state_dict()."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept.copy_(blend(self.kept, x))
        return x - self.kept


class Draws(nn.Module):
    """Draws from all global generators, and from one of its own where it has one."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.kept = torch.Generator().manual_seed(0) if own else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return F.dropout(x + torch.randn(x.shape, generator=self.kept), 0.5) * random.random()


class Counted(nn.Module):
    """Counts in a place of its class's."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.steps += self.training
        return x * Counted.steps


def federation(layer: nn.Module, **options: Any) -> pf.Federation:
    network = nn.Sequential(layer, nn.Linear(4, 2))
    return pf.Federation([pf.Client(network, (X, Y))], pf.methods.Local(), pf.Training(rounds=1), **options)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Kept(zeros(), blend, lambda mean, x: x - mean),
        lambda: Kept(
            {"mean": zeros()}, lambda kept, x: {"mean": blend(kept["mean"], x)}, lambda kept, x: x - kept["mean"]
        ),
        lambda: Kept(None, lambda kept, x: x, lambda kept, x: x if kept is None else x + kept.mean()),
        lambda: Kept(0, lambda steps, x: steps + 1, lambda steps, x: x * min(steps, 5)),
        lambda: Unsaved(persistent=False),
        lambda: Draws(own=True),
        lambda: Counted(),
    ],
    ids=["mean", "in a list", "last batch", "ramp", "unsaved buffer", "generator", "of a class"],
)
def test_state_outside_the_state_dict_is_refused(layer: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=rf"client 0 \('Sequential'\): {REFUSED}.*register_buffer"):
        federation(layer())


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Kept(None, lambda kept, x: x.mean(0), lambda kept, x: x),  # features for somebody else
        lambda: Kept({}, lambda kept, x: {**kept, len(x): torch.ones(len(x), 1)}, lambda kept, x: x),  # by size
        lambda: Kept(0, lambda steps, x: steps + 1, lambda steps, x: x),  # for the log
        lambda: Unsaved(persistent=True),
        lambda: Draws(own=False),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()),
    ],
    ids=["features", "cache", "counter", "buffer", "draws", "PyTorch's own"],
)
def test_what_no_later_batch_depends_on_is_not(layer: Callable[[], nn.Module]) -> None:
    assert federation(layer()).run().result["rounds"] == 1


def test_the_trial_leaves_networks_and_global_generators_alone() -> None:
    network = nn.Sequential(Draws(own=False), nn.BatchNorm1d(4), Kept(None, lambda kept, x: x, lambda kept, x: x))
    before = random.getstate(), torch.get_rng_state(), copy.deepcopy(network.state_dict())
    check_state(pf.Client(network, (X, Y)), network, lambda: network)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in network.state_dict().items())


def test_a_network_that_is_split_is_tried_with_its_own_forward() -> None:
    layer = Kept(zeros(), blend, lambda mean, x: x - mean)
    model = pf.split(nn.Sequential(layer, nn.Linear(4, 2)), head="1", extractor=None)
    with pytest.raises(ConfigError, match=REFUSED):
        pf.Federation([pf.Client(model, (X, Y))], pf.methods.Local(), pf.Training(rounds=1))


@pytest.mark.parametrize("turned", [False, True])
def test_parameters_of_one_memory_that_are_not_one_are_refused(turned: bool) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(first.weight.t() if turned else first.weight)
    with pytest.raises(ConfigError, match=r"'0\.0\.weight' and '0\.1\.weight'.*tie them as one"):
        federation(nn.Sequential(first, second))


def test_parameters_side_by_side_in_one_memory_are_not() -> None:
    whole = torch.randn(8, 4)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.weight, second.weight = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    federation(nn.Sequential(first, second))


def test_parts_with_a_tensor_in_common_are_refused_where_a_method_needs_parts() -> None:
    body, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = body.weight
    model = pf.models.SequentialSplit(body, nn.ReLU(), head)
    clients = [pf.Client(model, (X, Y))]
    with pytest.raises(ConfigError, match=r"'extractor\.weight' and 'head\.weight' are one tensor"):
        pf.Federation(clients, pf.methods.FedRep(), pf.Training(rounds=1))
    pf.Federation(clients, pf.methods.FedAvg(), pf.Training(rounds=1))
