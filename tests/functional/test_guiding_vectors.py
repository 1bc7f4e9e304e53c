"""Guiding vectors against NumPy, and their gradient against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.functional.guiding_vectors import guided_loss, meta_gradient
from tests.helpers.toys import softmax

CLASSES, INPUTS, FEATURES = 4, 5, 3


class Guided(nn.Module):
    """Linear scores; guided are these, or linear features before them."""

    def __init__(self, features: bool) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, FEATURES) if features else nn.Identity()
        self.head = nn.Linear(FEATURES if features else INPUTS, CLASSES)
        self.features = features

    def forward(self, x):
        z = self.body(x)
        scores = self.head(z)
        return scores, z if self.features else scores


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(features):
    module = Guided(features).double()
    for seed, p in enumerate(module.parameters()):
        p.data = draw(seed, *p.shape)
    study = draw(11, 6, INPUTS), torch.tensor([0, 1, 3, 1, 0, 3])  # nobody of class 2
    quiz = draw(12, 7, INPUTS), torch.tensor([2, 1, 0, 3, 1, 2, 0])
    return module, draw(13, CLASSES, FEATURES if features else CLASSES), study, quiz


def after_the_step(module, g, study, quiz, lr, weight):
    """CE on the quiz after a step of autograd on the study set."""
    (x, y), (xq, yq) = study, quiz
    scores, found = module(x)
    loss = F.cross_entropy(scores, y) + weight * (found - g[y]).square().mean()
    names, parameters = zip(*module.named_parameters(), strict=True)
    steps = zip(names, parameters, torch.autograd.grad(loss, parameters), strict=True)
    scores, _ = torch.func.functional_call(module, {n: p.detach() - lr * d for n, p, d in steps}, (xq,))
    return float(F.cross_entropy(scores, yq))


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_meta_gradient_against_finite_differences(features, weight):
    module, guides, study, quiz = problem(features)
    before = [p.clone() for p in module.parameters()]
    found = meta_gradient(module, guides, study, quiz, 0.5, weight).numpy()
    g, h, expected = guides.clone(), 1e-5, np.zeros(guides.shape)
    for at in np.ndindex(*g.shape):
        ends = []
        for sign in (1, -1):
            g[at] += sign * h
            ends.append(after_the_step(module, g, study, quiz, 0.5, weight))
            g[at] -= sign * h
        expected[at] = (ends[0] - ends[1]) / (2 * h)
    assert expected.min() < -1e-4 < 1e-4 < expected.max(), "both signs"
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert not found[2].any()
    assert all(torch.equal(a, p) for a, p in zip(before, module.parameters(), strict=True))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(("lr", "weight"), [(0.0, 1.0), (0.5, 0.0)])
def test_without_a_step_or_without_guidance_there_is_nothing_to_learn(lr, weight):
    assert not meta_gradient(*problem(False), lr, weight).any()


def test_the_loss_against_numpy():
    scores, found, guides = draw(1, 5, 4).requires_grad_(), draw(2, 5, 3).requires_grad_(), draw(3, 4, 3)
    y, w = torch.tensor([0, 3, 1, 1, 2]), torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    loss = guided_loss(scores, found, y, w, guides, 0.7)
    share, gap = w.numpy() / w.sum().item(), (found.detach() - guides[y]).numpy()
    ce = -np.log(softmax(scores.detach().numpy())[np.arange(5), y.numpy()])
    assert loss.item() == pytest.approx((share * (ce + 0.7 * (gap**2).mean(1))).sum())
    (gradient,) = torch.autograd.grad(loss, found)
    np.testing.assert_allclose(gradient.numpy(), 0.7 * share[:, None] * 2 * gap / 3)
    assert gap.min() < 0 < gap.max()
    assert guided_loss(scores, found, y, 0 * w, guides, 0.7).item() == 0
