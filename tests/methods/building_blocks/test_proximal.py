"""Pulls on the gradients are the gradients of the penalties, by autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.method import StepResult
from polyfed.methods.building_blocks.proximal import add_pull, add_pull_to_length

Penalty = Callable[[Tensor], Tensor]  # of all differences in one row
REFERENCE = {"weight": torch.tensor([[0.5, -2.0]], dtype=torch.float64), "bias": torch.zeros(1, dtype=torch.float64)}
PULLS: list[tuple[Callable[..., StepResult], Penalty]] = [
    (lambda *given: add_pull(*given, 0.7), lambda d: 0.35 * d.square().sum()),
    (lambda *given: add_pull_to_length(*given, 0.7, 0.5), lambda d: 0.35 * (d.norm() - 0.5).square()),
    (lambda *given: add_pull_to_length(*given, 0.7, 9.0), lambda d: 0.35 * (d.norm() - 9.0).square()),
]


def step() -> StepResult:
    """Of a loss that does not reach the bias."""
    return StepResult({"weight": torch.ones(1, 2, dtype=torch.float64), "bias": None}, torch.tensor(2.0).double(), {})


@pytest.mark.parametrize(("pull", "penalty"), PULLS)
def test_against_autograd(pull: Callable[..., StepResult], penalty: Penalty) -> None:
    """Differences of both signs, and in a parameter that the loss itself does not move."""
    network = nn.Linear(2, 1).double()
    apart = {"weight": torch.tensor([[1.5, -0.4]]).double(), "bias": torch.tensor([0.3]).double()}
    network.load_state_dict({name: REFERENCE[name] + d for name, d in apart.items()})
    flat = torch.cat([d.flatten() for d in apart.values()]).requires_grad_()
    value = penalty(flat)
    (expected,) = torch.autograd.grad(value, [flat])
    found = pull(step(), network, REFERENCE)
    assert float(found.loss) == pytest.approx(2.0 + float(value.detach()))
    torch.testing.assert_close(found.grads["weight"], 1 + expected[:2].view(1, 2))
    torch.testing.assert_close(found.grads["bias"], expected[2:])


@pytest.mark.parametrize(("pull", "penalty"), PULLS)
def test_at_the_reference_nothing_pulls(pull: Callable[..., StepResult], penalty: Penalty) -> None:
    network = nn.Linear(2, 1).double()
    network.load_state_dict(REFERENCE)
    found = pull(step(), network, REFERENCE)
    assert torch.equal(found.grads["weight"], step().grads["weight"])
    assert not found.grads["bias"].any()
    assert float(found.loss) == pytest.approx(2.0 + float(penalty(torch.zeros(3))))
