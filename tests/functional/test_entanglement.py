"""Mixtures of class means, and header steps on them, against NumPy and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed.functional.class_prototypes import header_sgd_step
from polyfed.functional.entanglement import entangle, soft_header_sgd_step


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


def test_a_lone_class_is_not_mixed() -> None:
    mixture, encoding = entangle(ROWS[:1], LABELS[:1], torch.tensor([0.3]), classes=6)
    assert torch.equal(mixture, ROWS[0])
    assert encoding.tolist() == [0, 0, 0, 0, 1, 0]


def test_mixing_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"expected rows \(S, D\).* got \(3, 5\), \(2,\) and \(3,\)"):
        entangle(ROWS, LABELS[:2], WEIGHTS, 6)
    with pytest.raises(ValueError, match="expected rows"):
        entangle(ROWS[:0], LABELS[:0], WEIGHTS[:0], 6)
    with pytest.raises(ValueError, match=r"expected positive weights, got 0\.0"):
        entangle(ROWS, LABELS, torch.tensor([1.0, 0.0, 1.0]), 6)


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


def test_one_hot_labels_give_fedghs_step() -> None:
    theta, bias = header()
    z, y = draw(3, 5, seed=3), torch.tensor([1, 3, 0])
    soft = soft_header_sgd_step(theta, bias, z, F.one_hot(y, 4).float(), 0.1)
    hard = header_sgd_step(theta, bias, z, y, torch.ones(3), 0.3, None)  # a mean over three
    torch.testing.assert_close(soft, hard)


def test_random_mixtures_tell_the_classes_apart() -> None:
    """No mixture is of a single class, yet the header learns each of them."""
    theta, bias = torch.zeros(3, 4), torch.zeros(3)
    means = 3 * torch.eye(4)[:3]
    draws = torch.Generator().manual_seed(0)
    for _ in range(300):
        weights = 1 - torch.rand(3, generator=draws)
        mixture, encoding = entangle(means, torch.arange(3), weights, 3)
        theta, bias = soft_header_sgd_step(theta, bias, mixture[None], encoding[None], 0.3)
    assert (means @ theta.T + bias).argmax(1).tolist() == [0, 1, 2]


def test_a_step_says_what_does_not_fit() -> None:
    theta, bias = header()
    with pytest.raises(ValueError, match=r"expected bias \(4,\), z \(M, 5\) and encodings \(M, 4\), got"):
        soft_header_sgd_step(theta, bias, draw(3, 5), torch.ones(2, 4), 0.1)
    assert np.isfinite(soft_header_sgd_step(theta, bias, draw(0, 5), torch.ones(0, 4), 0.1)[0].numpy()).all()
