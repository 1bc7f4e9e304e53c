"""Counts of operations and of bytes, against what a pencil says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyfed.engine.operation_counter import AllocationTracker, flops


@pytest.mark.parametrize(
    ("module", "shape", "count"),
    [
        (nn.Linear(30, 20), (1, 30), 2 * 30 * 20),
        (nn.Conv2d(3, 8, 3), (1, 3, 10, 10), 2 * 27 * 8 * 64),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()), (1, 4, 5, 5), 2 * 9 * 4 * 9),
        (nn.LSTM(5, 7, 2, batch_first=True), (1, 6, 5), 6 * 2 * 4 * 7 * ((5 + 7) + (7 + 7))),
    ],
)
def test_operations_of_a_pass(module: nn.Module, shape: tuple[int, ...], count: int) -> None:
    assert flops(module, torch.zeros(shape)) == count
    assert flops(module, torch.zeros(3, *shape[1:])) == 3 * count


def test_a_pass_leaves_the_network_as_it_was() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Dropout().eval())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flops(net, torch.randn(3, 4))
    assert [part.training for part in net] == [True, True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_what_was_there_before_does_not_count_and_what_is_gone_is_given_back() -> None:
    weight = torch.zeros(100)
    with AllocationTracker() as made:
        half = weight.view(10, 10)[:5]  # a view
        one = torch.zeros(1000)
        assert made.held == 4000
        one.add_(1)  # in place
        other = one[10:] * 2
        assert (made.held, made.peak) == (4000 + 3960, 4000 + 3960)
        del one, other
        assert made.held == 0
        two = torch.ones(10)
    assert (made.held, made.peak) == (40, 7960)
    assert len(half) + len(two) == 15
