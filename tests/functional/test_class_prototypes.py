"""Class means and the header step against NumPy by hand (fedgh 8.1, 8.4, 8.5, 8.11)."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed.functional.class_prototypes import class_means, header_sgd_step


def data(n=100, d=6, classes=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g).abs(), torch.randint(0, classes, (n,), generator=g)


def test_against_numpy():
    z, y = data()
    y[y == 3] = 1
    labels, means, counts = class_means(z, y, 5)
    assert labels.tolist() == [0, 1, 2, 4]
    assert (labels.dtype, means.dtype, counts.dtype) == (torch.int32, torch.float32, torch.int64)
    for s, mean, count in zip(labels.tolist(), means.numpy(), counts.tolist(), strict=True):
        rows = z.numpy()[y.numpy() == s].astype(np.float64)
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-7)
        assert count == len(rows)


def test_one_sample_is_its_representation_bit_for_bit():
    z, _ = data(5)
    labels, means, counts = class_means(z, torch.tensor([4, 0, 2, 1, 3]), 5)
    assert torch.equal(means, z[[1, 3, 2, 4, 0]])
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert counts.tolist() == [1] * 5


def test_duplicates_and_order_do_not_show():
    z, y = data(100)
    _, expected, _ = class_means(z, y, 5)
    _, doubled, counts = class_means(torch.cat([z, z]), torch.cat([y, y]), 5)
    assert torch.equal(doubled, expected)
    assert counts.sum() == 200
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(class_means(z[order], y[order], 5)[1], expected)


def test_other_kinds_of_rows():
    z = torch.tensor([[1.0], [3.0], [5.0]], requires_grad=True)
    y = torch.tensor([1, 1, 0])
    assert not class_means(z, y, 3)[1].requires_grad
    assert class_means(torch.zeros(0, 4), torch.zeros(0), 3)[1].shape == (0, 4)
    assert class_means(z.half(), y, 3)[1].dtype == torch.float32


def test_bad_calls():
    z, _ = data(4)
    with pytest.raises(ValueError, match=r"\[0, 3\), got -1 to 1"):
        class_means(z[:2], torch.tensor([-1, 1]), 3)
    with pytest.raises(ValueError, match=r"\[0, 3\), got 0 to 3"):
        class_means(z[:2], torch.tensor([0, 3]), 3)


# ---- the header ---------------------------------------------------------------------------------------------------


def numpy_step(weight, bias, z, y, w, lr, clip):
    """Pair by pair, float64: grad theta = sum v (p - e_y) z^T, grad b = sum v (p - e_y)."""
    grad_w, grad_b = np.zeros_like(weight), np.zeros_like(bias)
    for z_m, y_m, w_m in zip(z, y, w, strict=True):
        p = np.exp(weight @ z_m + bias)
        r = p / p.sum() - np.eye(len(bias))[y_m]
        grad_w += w_m / w.sum() * np.outer(r, z_m)
        grad_b += w_m / w.sum() * r
    norm = np.sqrt((grad_w**2).sum() + (grad_b**2).sum())
    shrink = min(1.0, clip / norm) if clip else 1.0
    return weight - lr * shrink * grad_w, bias - lr * shrink * grad_b


def header(c=4, d=6, m=7, seed=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    weight, bias, z = (torch.randn(*s, generator=g, dtype=dtype) for s in ((c, d), (c,), (m, d)))
    return weight, bias, z, torch.randint(0, c, (m,), generator=g), torch.rand(m, generator=g, dtype=dtype)


@pytest.mark.parametrize("clip", [None, 0, 0.05, 50])
@pytest.mark.parametrize("m", [1, 7])
def test_step_against_numpy_and_autograd(m, clip):
    weight, bias, z, y, w = header(m=m)
    new_weight, new_bias = header_sgd_step(weight, bias, z, y, w, 0.3, clip)
    expected = numpy_step(*(t.numpy() for t in (weight, bias, z, y, w)), 0.3, clip)
    np.testing.assert_allclose(new_weight.numpy(), expected[0], atol=1e-14)
    np.testing.assert_allclose(new_bias.numpy(), expected[1], atol=1e-14)
    params = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    ((w * F.cross_entropy(z @ params[0].T + params[1], y, reduction="none")).sum() / w.sum()).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(params, clip)
    torch.testing.assert_close(new_weight, weight - 0.3 * params[0].grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(new_bias, bias - 0.3 * params[1].grad, rtol=1e-5, atol=1e-7)


def test_pairs_without_weight_move_nothing():
    weight, bias, z, y, w = header()
    step = header_sgd_step(weight, bias, z, y, w, 0.3, 0)
    torch.testing.assert_close(header_sgd_step(weight, bias, z, y, 9 * w, 0.3, 0), step)
    assert torch.equal(header_sgd_step(weight, bias, z, y, 0 * w, 0.3, 0)[0], weight)
