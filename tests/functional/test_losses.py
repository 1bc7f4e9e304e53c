"""Losses against NumPy."""

import numpy as np
import pytest
import torch

from polyfed.functional.losses import cross_entropy, kl_divergence, mse_loss, task_loss


def batch(n=9, c=4, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (
        5 * torch.randn(n, c, generator=g, dtype=dtype),
        torch.randint(0, c, (n,), generator=g),
        torch.rand(n, generator=g, dtype=dtype),
    )


def test_no_rows_give_no_loss_and_no_gradient():
    logits, y, w = batch()
    logits.requires_grad_()
    loss = cross_entropy(logits, y, 0 * w)
    loss.backward()
    assert loss == 0
    assert logits.grad.eq(0).all()


def test_squared_gaps_against_numpy_are_means_over_columns_and_train_the_first_alone():
    g = torch.Generator().manual_seed(3)
    found, target = (torch.randn(5, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    w = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    value = mse_loss(found, target, w)
    gap, share = (found - target).detach().numpy(), w.numpy() / w.sum().item()
    assert gap.min() < 0 < gap.max()
    assert value.item() == pytest.approx((share * np.square(gap).mean(1)).sum())
    mine, other = torch.autograd.grad(value, (found, target), allow_unused=True)
    np.testing.assert_allclose(mine.numpy(), share[:, None] * 2 * gap / 4)
    assert other is None
    assert mse_loss(found, target, 0 * w).item() == 0
    with pytest.raises(ValueError, match="found and target"):
        mse_loss(found, target[:, :3], w)


def test_divergence_against_numpy_sums_over_classes_and_trains_the_first_alone():
    g = torch.Generator().manual_seed(5)
    q, p = (torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    probabilities = [np.exp(t.detach().numpy()) for t in (p, q)]
    probabilities = [e / e.sum(1, keepdims=True) for e in probabilities]
    rows = (probabilities[0] * np.log(probabilities[0] / probabilities[1])).sum(1)
    found = kl_divergence(q, p, w)
    assert found.item() == pytest.approx((rows * w.numpy()).sum() / 4)
    found.backward()
    assert p.grad is None
    expected = w.numpy()[:, None] * (probabilities[1] - probabilities[0]) / 4
    np.testing.assert_allclose(q.grad.numpy(), expected, atol=1e-12)
    assert {np.sign(v) for v in expected.ravel()} >= {-1.0, 1.0}
    assert kl_divergence(p, p + 3, w).item() == pytest.approx(0, abs=1e-12)
    assert kl_divergence(q, p, 0 * w).item() == 0
    with pytest.raises(ValueError, match="found and target"):
        kl_divergence(q, p[:, :3], w)


def test_bad_losses():
    logits, y, w = batch()
    with pytest.raises(ValueError, match=r"got \(9, 4\), \(9,\) and \(8,\)"):
        cross_entropy(logits, y, w[:8])


def test_the_task_loss_is_that_of_classes_or_of_numbers() -> None:
    g = torch.Generator().manual_seed(5)
    outputs, w = torch.randn(7, 3, generator=g), torch.tensor([1.0, 1, 0, 1, 0, 1, 1])
    y = torch.tensor([0, 2, 1, 1, 0, 2, 2])
    assert torch.equal(task_loss(outputs, y, w), cross_entropy(outputs, y, w))
    one, targets = outputs[:, :1], outputs[:, 1]
    expected = np.average((one[:, 0] - targets).numpy().astype(float) ** 2, weights=w.numpy())
    assert float(task_loss(one, targets, w)) == pytest.approx(expected)
    one.requires_grad_()
    task_loss(one, targets, w).backward()
    slopes = 2 * w * (one.detach()[:, 0] - targets) / w.sum()
    torch.testing.assert_close(one.grad[:, 0], slopes)
    with pytest.raises(ValueError, match="expected found and target"):
        task_loss(outputs, targets, w)  # three outputs for one number
    with pytest.raises(ValueError, match=r"expected whole numbers as classes, got torch\.float32"):
        cross_entropy(outputs, targets, w)
