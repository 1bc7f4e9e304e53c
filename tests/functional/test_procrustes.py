"""The Procrustes distance against SciPy's orthogonal Procrustes problem and finite differences."""

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from polyfed.functional.procrustes import procrustes

F32, F64 = torch.float32, torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def rotation(d, seed=0):
    return torch.linalg.qr(draw(d, d, seed=seed)).Q


def numpy_unit(a):
    x = a.numpy().astype(np.float64)
    x = x - x.mean(0)
    return x / np.linalg.norm(x)


def oracle(a, m):
    """Least over orthogonal R of ||A - M R||_F^2, with SciPy's R put in."""
    x, y = numpy_unit(a), numpy_unit(m)
    r, _ = orthogonal_procrustes(y, x)
    return np.linalg.norm(x - y @ r) ** 2


SHAPES = [(30, 5), (30, 30), (12, 40), (2, 1), (3, 2), (40, 600)]


@pytest.mark.parametrize(("rows", "d"), SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (F64, 1e-12)])
def test_the_least_over_all_rotations(rows, d, dtype, tolerance):
    a, m = draw(rows, d) + 3, 5 * draw(rows, d, seed=1) - 2
    m[:, 0] += a[:, 0]
    expected = oracle(a, m)
    a, m = a.to(dtype), m.to(dtype)
    assert float(procrustes(a, m)) == pytest.approx(expected, abs=tolerance)
    assert float(procrustes(m, a)) == pytest.approx(expected, abs=tolerance)
    assert -tolerance <= expected <= 2
    assert procrustes(a, m).dtype == dtype


@pytest.mark.parametrize(("rows", "d"), [(50, 6), (8, 20)])
def test_zero_for_rotated_scaled_and_shifted(rows, d):
    m, other = draw(rows, d), draw(rows, d, seed=1)
    expected = float(procrustes(other, m))
    assert expected > 0.1
    for s in (2.5, -1e-4, 1e30):
        a = s * m @ rotation(d) + s * draw(1, d, seed=3)
        assert float(procrustes(a, m)) == pytest.approx(0, abs=1e-12)
        assert float(procrustes(a.float(), m.float())) == pytest.approx(0, abs=1e-5)
        assert float(procrustes(a, other)) == pytest.approx(expected, abs=1e-12)
        assert float(torch.func.grad(procrustes)(a, m).norm()) * abs(s) < 1e-12
    stretched = m * torch.logspace(-1, 1, d, dtype=F64)
    assert float(procrustes(stretched, m)) > 0.1


def test_two_is_the_largest():
    a, m = torch.zeros(4, 2, dtype=F64), torch.zeros(4, 2, dtype=F64)
    a[:, 0], m[:, 1] = torch.tensor([1.0, -1, 0, 0]), torch.tensor([0.0, 0, 1, -1])
    assert float(procrustes(a, m)) == 2


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "d"), [(12, 3), (4, 9), (7, 7)])
def test_gradient_by_finite_differences(rows, d):
    a, m = draw(rows, d) + 1, draw(rows, d, seed=1)
    expected, h = np.zeros((2, rows, d)), 1e-6
    for i in range(rows):
        for j in range(d):
            step = torch.zeros(rows, d, dtype=F64)
            step[i, j] = h
            expected[0, i, j] = oracle(a + step, m) - oracle(a - step, m)
            expected[1, i, j] = oracle(a, m + step) - oracle(a, m - step)
    both = torch.func.grad(procrustes, argnums=(0, 1))(a, m)
    for one, by_differences in zip(both, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), by_differences / (2 * h), atol=1e-8)
        assert float(one.sum(0).abs().max()) < 1e-14
    assert abs(float((both[0] * a).sum())) < 1e-13, "the distance does not see ||A||"
    x = a.clone().requires_grad_()
    procrustes(x, m).backward()
    torch.testing.assert_close(x.grad, both[0])


def test_gradient_is_the_closed_form_of_the_trace():
    """d/dA of -2 ||M^T A||_* / (||A|| ||M||) with M U V^T, from NumPy's factors."""
    a, m = draw(20, 4), draw(20, 4, seed=1)
    x, y = a.numpy() - a.numpy().mean(0), m.numpy() - m.numpy().mean(0)
    u, singular, vt = np.linalg.svd(y.T @ x)
    na, nm = np.linalg.norm(x), np.linalg.norm(y)
    expected = -2 * (y @ u @ vt / (na * nm) - singular.sum() * x / (na**3 * nm))
    np.testing.assert_allclose(torch.func.grad(procrustes)(a, m).numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_repeated_and_zero_singular_values_have_a_finite_gradient(dtype):
    """Repeated: M = Q with orthonormal centered columns. Zero: columns that one side or both have not."""
    q = torch.linalg.qr(draw(20, 4) - draw(20, 4).mean(0)).Q.to(dtype)
    a = q @ rotation(4).to(dtype) + 0.1
    assert float(procrustes(a, q)) == pytest.approx(0, abs=1e-5)
    assert float(torch.func.grad(procrustes)(a, q).norm()) < 1e-5
    thin = draw(20, 4, dtype=dtype)
    thin[:, 2:] = 7
    for x, y in ((thin, q), (q, thin), (thin, thin)):
        gradient = torch.func.grad(procrustes)(x, y)
        assert gradient.isfinite().all()
        assert float(gradient.norm()) < 10
    assert torch.func.grad(procrustes)(thin, 2 * thin)[:, 2:].abs().max() < 1e-5


@pytest.mark.parametrize(("rows", "d"), [(50, 4), (40, 700)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_equal_rows_are_farthest_and_have_no_gradient(rows, d, dtype):
    constant = (torch.rand(1, d, generator=torch.Generator().manual_seed(0), dtype=F64) * 7).to(dtype).expand(rows, d)
    other = draw(rows, d, dtype=dtype)
    for a in (constant.clone(), torch.zeros(rows, d, dtype=dtype)):
        for x, y in ((a, other), (other, a), (a, a)):
            assert procrustes(x, y) == 2
            assert all(g.eq(0).all() for g in torch.func.grad(procrustes, argnums=(0, 1))(x, y))


@pytest.mark.parametrize(("rows", "d"), [(20, 5), (6, 15)])
def test_under_functional_transforms(rows, d):
    a, m = torch.stack([draw(rows, d, seed=s) for s in range(3)]), draw(rows, d, seed=9)
    vmap, grad = torch.func.vmap, torch.func.grad
    torch.testing.assert_close(vmap(procrustes, in_dims=(0, None))(a, m), torch.stack([procrustes(x, m) for x in a]))
    apart = torch.stack([grad(procrustes)(x, m) for x in a])
    torch.testing.assert_close(vmap(grad(procrustes), in_dims=(0, None))(a, m), apart)
    torch.testing.assert_close(vmap(grad(procrustes))(a, m.expand(3, rows, d)), apart)


def test_half_precision_and_autocast_are_computed_in_float32():
    a, m = draw(50, 8, dtype=F32), draw(50, 8, seed=1, dtype=F32)
    expected, gradient = float(procrustes(a, m)), torch.func.grad(procrustes)(a, m)
    assert procrustes(a.half(), m.bfloat16()).dtype == F32
    assert procrustes(a.double(), m).dtype == F64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(procrustes(a, m)) == expected
        torch.testing.assert_close(torch.func.grad(procrustes)(a, m), gradient)


def test_nan_is_neither_hidden_nor_contagious():
    """The SVD raises at nan; here the distance is nan, and the other clients of a stack keep theirs."""
    a, m = torch.stack([draw(10, 3, seed=s) for s in range(2)]), draw(10, 3, seed=9)
    a[0, 0, 0] = float("nan")
    assert procrustes(a[0], m).isnan()
    assert procrustes(m, a[0]).isnan()
    stacked = torch.func.vmap(procrustes, in_dims=(0, None))(a, m)
    assert stacked[0].isnan()
    assert float(stacked[1]) == pytest.approx(float(procrustes(a[1], m)))


def test_one_shape_for_both():
    with pytest.raises(ValueError, match=r"one shape \(L, D\).*\(4, 2\) and \(4, 3\)"):
        procrustes(draw(4, 2), draw(4, 3))
    with pytest.raises(ValueError, match=r"\(4, 2\) and \(5, 2\)"):
        procrustes(draw(4, 2), draw(5, 2))
    with pytest.raises(ValueError, match=r"\(4,\) and \(4,\)"):
        procrustes(draw(4), draw(4))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_single_entry_that_is_no_number_gives_nan(value):
    a, m = draw(10, 3), draw(10, 3, seed=9)
    a[4, 1] = value
    assert procrustes(a, m).isnan()
    assert procrustes(m, a).isnan()
