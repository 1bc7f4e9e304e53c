"""FedNova's normalizer against its closed forms and against an optimizer that walks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.averaging import layer_wise_mean, normalized_mean
from polyfed.functional.effective_steps import normalizer


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_closed_forms(steps):
    assert normalizer(steps) == steps
    for rho in (0.3, 0.9):
        expected = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        assert normalizer(steps, momentum=rho) == pytest.approx(expected, rel=1e-12)
    for pull in (0.01, 0.7):
        assert normalizer(steps, pull=pull) == pytest.approx((1 - (1 - pull) ** steps) / pull, rel=1e-12)
    assert normalizer(2, momentum=0.9) == pytest.approx(2.9)


@pytest.mark.parametrize("trial", range(8))
def test_an_optimizer_under_one_gradient(trial):
    """w^t - w = lr a g, for torch's own SGD with momentum on g w + (mu/2) (w - w^t)^2; gradients of both signs."""
    draws = np.random.default_rng(trial)
    steps, rho = int(draws.integers(1, 30)), float(draws.choice([0.0, 0.5, 0.9]))
    lr, mu = 0.05, float(draws.choice([0.0, 0.1, 3.0]))
    g, start = torch.tensor([2.0, -0.5], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    w = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([w], lr, momentum=rho)
    for _ in range(steps):
        optimizer.zero_grad()
        ((g * w).sum() + mu / 2 * (w - start).square().sum()).backward()
        optimizer.step()
    torch.testing.assert_close(start - w.detach(), lr * normalizer(steps, rho, lr * mu) * g, rtol=1e-9, atol=0)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"momentum": 1.0}, {"pull": 1.0}, {"pull": -0.1}])
def test_out_of_range(wrong):
    with pytest.raises(ValueError, match="expected steps of at least 0, momentum and pull in"):
        normalizer(**{"steps": 3, **wrong})


def models():
    g = torch.Generator().manual_seed(0)
    base = {"all": torch.randn(3, generator=g), "two": torch.randn(2, 2, generator=g), "none": torch.ones(1)}
    made = [{"all": torch.randn(3, generator=g), "two": torch.randn(2, 2, generator=g)} for _ in range(3)]
    del made[0]["two"]
    return base, made


def test_normalized_mean_by_hand():
    base, made = models()
    n, a = [1.0, 2.0, 5.0], [3.0, 1.5, 7.0]
    found = normalized_mean(made, n, a, base)
    for name, places in (("all", [0, 1, 2]), ("two", [1, 2])):
        p = np.array([n[i] for i in places]) / sum(n[i] for i in places)
        tau = sum(q * a[i] for q, i in zip(p, places, strict=True))
        w = base[name].double().numpy()
        d = [(w - made[i][name].double().numpy()) / a[i] for i in places]
        np.testing.assert_allclose(found[name], w - tau * sum(q * x for q, x in zip(p, d, strict=True)), atol=1e-6)
        assert {-1, 1} <= {int(s) for x in d for s in np.sign(x).ravel()}
    assert torch.equal(found["none"], base["none"])
    assert found["none"] is not base["none"]


def test_equal_normalizers_give_the_mean():
    base, made = models()
    found, mean = normalized_mean(made, [1, 2, 5], [4.2] * 3, base), layer_wise_mean(made, [1, 2, 5], base)
    assert all(torch.allclose(found[name], mean[name], atol=1e-6) for name in base)


def test_a_model_of_weight_0_has_no_say():
    base, made = models()
    found = normalized_mean(made, [1, 0, 1], [1.0, 2.0, 3.0], base)
    torch.testing.assert_close(found["two"], made[2]["two"])


@pytest.mark.parametrize(("a", "text"), [([1.0, 2.0], "2 for 3"), ([1.0, 0.0, 2.0], "got 0.0")])
def test_normalizers_must_fit(a, text):
    base, made = models()
    with pytest.raises(ValueError, match=text):
        normalized_mean(made, [1, 1, 1], a, base)
    with pytest.raises(ValueError, match="expected only tensors of the union model, got 'all' from model 0"):
        normalized_mean(made, [1, 1, 1], [1.0] * 3, {"two": base["two"]})


def test_no_steps_go_no_way():
    assert normalizer(0) == normalizer(0, momentum=0.9, pull=0.5) == 0
