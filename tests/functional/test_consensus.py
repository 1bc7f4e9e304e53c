"""The consensus of several networks against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.consensus import confidence_weights, consensus, transfer_loss
from tests.helpers.toys import softmax


def draw(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(scores):
    """Sample by sample, network by network."""
    labels, others, disputed = [], [], []
    for n in range(scores.shape[1]):
        s = scores[:, n]
        v = ((s - s.mean(1, keepdims=True)) ** 2).mean(1)
        label = (v[:, None] * s / v.sum()).sum(0).argmax()
        left = [i for i in range(len(s)) if s[i].argmax() != label]
        labels.append(label)
        others.append(sum(v[i] * s[i] for i in left) / sum(v[i] for i in left) if left else np.zeros(s.shape[1]))
        disputed.append(bool(left))
    return np.array(labels), np.array(others), np.array(disputed)


def test_consensus_by_hand():
    scores = draw(4, 60, 3)
    scores[:, :9] += 30 * torch.eye(3).repeat(3, 1)  # here all agree
    found, (labels, others, disputed) = consensus(scores), by_hand(scores.numpy())
    np.testing.assert_array_equal(found.labels, labels)
    np.testing.assert_allclose(found.others, others, atol=1e-12)
    np.testing.assert_array_equal(found.disagreement, disputed)
    assert 0 < disputed.sum() < 60
    assert not found.others[~found.disagreement].any()


def test_shares_sum_to_one_and_leave_out_who_is_not_counted():
    v, counted = draw(5, 40).square(), draw(5, 40, seed=1) > 0
    counted[:, 0] = False
    v[:, 1], counted[:, 1] = 0.0, torch.tensor([True, False, True, False, False])
    found = confidence_weights(v, counted)
    assert not found[~counted].any()
    torch.testing.assert_close(found.sum(0)[1:], torch.ones(39, dtype=torch.float64))
    assert not found[:, 0].any()
    assert found[:, 1].tolist() == [0.5, 0, 0.5, 0, 0]


def test_shares_do_not_depend_on_the_scale_of_confidences() -> None:
    confidences = torch.tensor([[0.01, 0.0], [0.03, 0.0]])
    expected = torch.tensor([[0.25, 0.5], [0.75, 0.5]])
    torch.testing.assert_close(confidence_weights(confidences, torch.ones(2, 2, dtype=torch.bool)), expected)


@pytest.mark.parametrize("weight", [0.0, 0.8])
def test_the_servers_loss_by_hand(weight):
    scores, agreed = draw(20, 3, seed=5).requires_grad_(), consensus(draw(3, 20, 3, seed=6))
    agreed = agreed._replace(disagreement=agreed.disagreement & (torch.arange(20) % 3 > 0))
    loss = transfer_loss(scores, agreed, weight)
    p, y = softmax(scores.detach().numpy()), agreed.labels.numpy()
    q, disputed = softmax(agreed.others.numpy()), agreed.disagreement.numpy()
    kl = disputed * (q * np.log(q / p)).sum(1)
    assert loss.item() == pytest.approx((-np.log(p[np.arange(20), y]) + weight * kl).mean())
    (gradient,) = torch.autograd.grad(loss, scores)
    expected = (p - np.eye(3)[y] + weight * disputed[:, None] * (p - q)) / 20
    np.testing.assert_allclose(gradient.numpy(), expected, atol=1e-12)
    assert 0 < disputed.sum() < 20
    assert ((p - q).min() < 0 < (p - q).max()).all()
