"""Mixtures of class means, and header steps on them, against NumPy and autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from polyfed.functional.class_prototypes import entangle, soft_header_sgd_step


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROWS, LABELS, WEIGHTS = draw(3, 5), torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([0.2, 0.9, 0.5])


def test_the_mixture_and_its_label_have_the_same_weights() -> None:
    mixture, encoding = entangle(ROWS, LABELS, WEIGHTS, classes=6)
    shares = WEIGHTS.double().numpy() / 1.6
    assert mixture.numpy() == pytest.approx(shares @ ROWS.double().numpy(), abs=1e-6)
    assert encoding.tolist() == pytest.approx([shares[1], 0, shares[2], 0, shares[0], 0])
    again = entangle(ROWS, LABELS, 7 * WEIGHTS, classes=6)
    assert torch.allclose(again[0], mixture)
    assert torch.allclose(again[1], encoding)


def header() -> tuple[torch.Tensor, torch.Tensor]:
    return draw(4, 5, seed=1), draw(4, seed=2)


def test_a_step_is_that_of_autograd() -> None:
    theta, bias = header()
    z, q = draw(3, 5, seed=3), torch.softmax(draw(3, 4, seed=4), 1)
    w, b = theta.clone().requires_grad_(), bias.clone().requires_grad_()
    F.cross_entropy(z @ w.T + b, q, reduction="sum").backward()
    found = soft_header_sgd_step(theta, bias, z, q, 0.3)
    assert w.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(found[0], theta - 0.3 * w.grad)
    torch.testing.assert_close(found[1], bias - 0.3 * b.grad)
    assert torch.equal(theta, header()[0])
    assert all(map(torch.equal, soft_header_sgd_step(theta, bias, z, q, 0.0), (theta, bias)))
