"""RBF kernels, their CKA and their features against NumPy float64 with an explicit H."""

import numpy as np
import pytest
import torch

from polyfed.functional.kernel_factor import kernel_factor
from polyfed.functional.kernels import cka, cka_to_factor
from polyfed.functional.rbf_kernel import (
    center_kernel,
    kernel_cka,
    median_width,
    nystroem_features,
    rbf_alignment,
    rbf_kernel,
)

F32, F64 = torch.float32, torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def numpy_distances(a):
    x = a.numpy().astype(np.float64)
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))


def numpy_width(a, factor):
    distances = numpy_distances(a)
    ordered = np.sort(distances[np.triu_indices(len(distances), 1)])
    return factor * ordered[(len(ordered) - 1) // 2]


def numpy_rbf(a, width):
    return np.exp(-(numpy_distances(a) ** 2) / (2 * width**2))


def numpy_centered(k):
    h = np.eye(len(k)) - np.ones((len(k), len(k))) / len(k)
    return h @ k @ h


def numpy_cka(k, m):
    kc, mc = numpy_centered(k), numpy_centered(m)
    return np.trace(kc @ mc) / (np.linalg.norm(kc) * np.linalg.norm(mc))


def own(a, factor):
    return numpy_rbf(a, numpy_width(a, factor))


# ---- width and kernel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3, 4, 31, 40])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_width_is_the_median_distance(rows, factor):
    a = draw(rows, 5) + 100
    assert float(median_width(a, factor)) == pytest.approx(numpy_width(a, factor), rel=1e-12)
    assert float(median_width(a.float(), factor)) == pytest.approx(numpy_width(a, factor), rel=1e-4)
    assert float(median_width(-7 * a, factor)) == pytest.approx(7 * numpy_width(a, factor), rel=1e-12)
    assert median_width(a.requires_grad_(), factor).requires_grad is False


def test_width_of_many_rows_is_that_of_evenly_spaced_ones():
    a = draw(50, 3) * torch.arange(1, 51, dtype=F64)[:, None]
    assert float(median_width(a, most=10)) == pytest.approx(numpy_width(a[::5], 0.5), rel=1e-12)
    assert float(median_width(a, most=50)) == pytest.approx(numpy_width(a, 0.5), rel=1e-12)
    assert abs(numpy_width(a[::5], 0.5) / numpy_width(a, 0.5) - 1) > 1e-3


def test_width_where_rows_are_equal():
    """More than half of the pairs: the root mean square. All: max|A|, or 1."""
    few = torch.zeros(10, 2, dtype=F64)
    few[0] = torch.tensor([3.0, 4.0])
    assert float(median_width(few, 1.0)) == pytest.approx(np.sqrt(9 * 25 / 45), rel=1e-12)
    for dtype in (F32, F64):
        same = draw(1, 300, dtype=dtype).expand(100, 300)
        assert float(median_width(same, 0.3)) == pytest.approx(0.3 * float(same.abs().max()), rel=1e-6)
        mostly = torch.cat([same, draw(20, 300, seed=1, dtype=dtype)])
        x = mostly.double()
        expected = np.sqrt((numpy_distances(x) ** 2)[np.triu_indices(120, 1)].mean())
        assert float(median_width(mostly, 1.0, most=120)) == pytest.approx(expected, rel=1e-4)
    assert median_width(torch.zeros(3, 4), 2.0) == 2
    assert median_width(torch.ones(1, 4)) > 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (F64, 1e-13)])
def test_kernel_is_the_definition(dtype, tolerance):
    a = draw(40, 6, dtype=dtype) + 3
    a[7] = a[3]
    for width in (0.5, 2.0, torch.tensor(30.0)):
        k = rbf_kernel(a, width)
        assert k.dtype == dtype
        np.testing.assert_allclose(k.numpy(), numpy_rbf(a, float(width)), atol=tolerance)
        assert k.diagonal().eq(1).all()
        assert k[3, 7] == 1, "equal rows"


def test_wrong_input():
    with pytest.raises(ValueError, match="finite factor above 0 and at least 2 rows, got 0 and 1000"):
        median_width(draw(4, 2), 0)
    with pytest.raises(ValueError, match=r"got 0.5 and 1$"):
        median_width(draw(4, 2), most=1)
    with pytest.raises(ValueError, match=r"finite width above 0, got -1\.0"):
        rbf_kernel(draw(4, 2), -1.0)
    with pytest.raises(ValueError, match=r"shape \(L, L\), got \(4, 2\)"):
        center_kernel(draw(4, 2))
    with pytest.raises(ValueError, match=r"one size, got \(4, 4\) and \(3, 3\)"):
        kernel_cka(draw(4, 4), draw(3, 3))
    with pytest.raises(ValueError, match="one size"):
        rbf_alignment(draw(4, 2), draw(5, 2), 0.5, False)
    with pytest.raises(ValueError, match="at least 1 landmark, got 0"):
        nystroem_features(draw(4, 2), 0.5, 0)
    with pytest.raises(ValueError, match="got inf or nan"):
        nystroem_features(draw(4, 2) / 0, 0.5, 2)


# ---- CKA ------------------------------------------------------------------------------------------------------------


def test_centering_and_cka_of_kernels_are_the_definition():
    k, m = numpy_rbf(draw(30, 4), 1.0), numpy_rbf(draw(30, 7, seed=1), 3.0)
    np.testing.assert_allclose(center_kernel(torch.from_numpy(k)).numpy(), numpy_centered(k), atol=1e-15)
    expected = numpy_cka(k, m)
    assert np.trace(numpy_centered(k) @ m) == pytest.approx(np.trace(numpy_centered(k) @ numpy_centered(m)), rel=1e-12)
    k, m = torch.from_numpy(k), torch.from_numpy(m)
    assert float(kernel_cka(k, m)) == pytest.approx(expected, rel=1e-12)
    assert float(kernel_cka(1e30 * k.float(), 1e-30 * m.float())) == pytest.approx(expected, rel=1e-5)
    assert float(kernel_cka(k, 5 + 3 * k)) == pytest.approx(1, abs=1e-12)
    linear = draw(30, 4) @ draw(30, 4).T
    assert float(kernel_cka(linear, m)) == pytest.approx(numpy_cka(linear.numpy(), m.numpy()), rel=1e-12)


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (F64, 1e-12)])
def test_alignment_is_the_definition(factor, dtype, tolerance):
    a, b = draw(40, 5) + 3, draw(40, 9, seed=1)
    b[:, :5] += a
    homogeneous = 1 - numpy_cka(own(a, factor), own(b, factor))
    heterogeneous = 1 - numpy_cka(own(a, factor), (b @ b.T).numpy())
    assert 0.01 < homogeneous < 1
    assert abs(homogeneous - heterogeneous) > 1e-3
    a, b = a.to(dtype), b.to(dtype)
    assert float(rbf_alignment(a, b, factor, False)) == pytest.approx(homogeneous, abs=tolerance)
    assert float(rbf_alignment(a, b, factor, True)) == pytest.approx(heterogeneous, abs=tolerance)
    assert rbf_alignment(a, b, factor, True).dtype == dtype


@pytest.mark.parametrize("target_is_factor", [True, False])
def test_invariances_and_the_width_bites(target_is_factor):
    a, b = draw(60, 6), draw(60, 4, seed=1)

    def d(a, b, factor=0.5):
        return float(rbf_alignment(a, b, factor, target_is_factor))

    q = torch.linalg.qr(draw(6, 6, seed=2)).Q
    for s in (7.3, -0.01, 1e-30, 1e30):
        moved = s * (a @ q) + (2 * s)
        assert d(moved, b) == pytest.approx(d(a, b), abs=1e-12)
        assert d(moved.float(), b.float()) == pytest.approx(d(a, b), abs=1e-6)
        assert d(a.float(), s * b.float()) == pytest.approx(d(a, b), abs=1e-6)
    if not target_is_factor:
        assert d(a, -3 * a @ q + 1) == pytest.approx(0, abs=1e-12)
    assert abs(d(a, b, 0.5) - d(a, b, 1.0)) > 1e-3
    fixed = [float(kernel_cka(rbf_kernel(s * a, 1.0), b @ b.T)) for s in (1, 7.3)]
    assert abs(fixed[0] - fixed[1]) > 1e-3, "a fixed width does see the scale"


def test_a_wide_kernel_tends_to_the_linear_one():
    common = draw(80, 10, seed=9)
    a = torch.relu(common @ draw(10, 60) + draw(80, 60, seed=3))
    b = torch.relu(common @ draw(10, 40, seed=4) + draw(80, 40, seed=5))
    linear = 1 - float(cka(a, b))
    for dtype in (F32, F64):
        x, y = a.to(dtype), b.to(dtype)
        gaps = [abs(float(rbf_alignment(x, y, f, False)) - linear) for f in (0.5, 2.0, 10.0, 1e3, 1e5)]
        assert gaps[2] < 1e-3
        assert gaps[0] > gaps[1] > gaps[2] > gaps[3]
        assert gaps[4] < 1e-5, "and stays exact where K is 1 up to rounding"


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_is_factor", [True, False])
@pytest.mark.parametrize(("rows", "d"), [(15, 3), (6, 11)])
def test_gradient_by_finite_differences(target_is_factor, rows, d):
    """At the width of A, held: it is a constant for the gradient."""
    a, b = draw(rows, d) + 1, draw(rows, 4, seed=1)
    a[1] = a[0]
    width, target = numpy_width(a, 0.5), (b @ b.T).numpy() if target_is_factor else own(b, 0.5)
    expected, h = np.zeros((rows, d)), 1e-6
    for i in range(rows):
        for j in range(d):
            up, down = a.clone(), a.clone()
            up[i, j] += h
            down[i, j] -= h
            expected[i, j] = -(numpy_cka(numpy_rbf(up, width), target) - numpy_cka(numpy_rbf(down, width), target))
    gradient = torch.func.grad(rbf_alignment)(a, b, 0.5, target_is_factor)
    np.testing.assert_allclose(gradient.numpy(), expected / (2 * h), atol=1e-8)
    assert float(gradient.sum(0).abs().max()) < 1e-14
    x = a.clone().requires_grad_()
    rbf_alignment(x, b, 0.5, target_is_factor).backward()
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-15)
    y = a.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: kernel_cka(rbf_kernel(a, 1.5), torch.from_numpy(target)), y)


@pytest.mark.parametrize("target_is_factor", [True, False])
def test_under_functional_transforms(target_is_factor):
    a, f = torch.stack([draw(20, 6, seed=s) for s in range(3)]), draw(20, 5, seed=9)

    def one(a, f):
        return rbf_alignment(a, f, 0.5, target_is_factor)

    vmap, grad = torch.func.vmap, torch.func.grad
    torch.testing.assert_close(vmap(one, in_dims=(0, None))(a, f), torch.stack([one(x, f) for x in a]))
    apart = torch.stack([grad(one)(x, f) for x in a])
    torch.testing.assert_close(vmap(grad(one), in_dims=(0, None))(a, f), apart)
    torch.testing.assert_close(vmap(grad(one))(a, f.expand(3, 20, 5)), apart)


def test_half_precision_and_autocast_are_computed_in_float32():
    a, b = draw(50, 8, dtype=F32), draw(50, 6, seed=1, dtype=F32)
    for flag in (True, False):
        expected = float(rbf_alignment(a, b, 0.5, flag))
        gradient = torch.func.grad(rbf_alignment)(a, b, 0.5, flag)
        assert rbf_alignment(a.half(), b.bfloat16(), 0.5, flag).dtype == F32
        assert float(rbf_alignment(a.half(), b, 0.5, flag)) == pytest.approx(expected, abs=1e-3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert float(rbf_alignment(a, b, 0.5, flag)) == expected
            torch.testing.assert_close(torch.func.grad(rbf_alignment)(a, b, 0.5, flag), gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = nystroem_features(a, 0.5, 20)
    assert torch.equal(inside, nystroem_features(a, 0.5, 20))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("d", [4, 700])
def test_equal_rows_give_zero_and_no_gradient(dtype, d):
    constant = (torch.rand(1, d, generator=generator(), dtype=F64) * 7).to(dtype).expand(300, d)
    other = draw(300, 3, dtype=dtype)
    for a in (constant.clone(), torch.zeros(300, d, dtype=dtype)):
        a.requires_grad_()
        for flag in (True, False):
            loss = rbf_alignment(a, other, 0.5, flag)
            assert loss == 1
            (gradient,) = torch.autograd.grad(loss, a)
            assert gradient.eq(0).all()
            x = other.clone().requires_grad_()
            loss = rbf_alignment(x, a.detach(), 0.5, flag)
            assert loss == 1
            (gradient,) = torch.autograd.grad(loss, x)
            assert gradient.eq(0).all()


def test_a_few_equal_rows_and_columns_do_no_harm():
    a = torch.relu(draw(60, 12, dtype=F32) - 1)
    a[:20] = 0
    a[:, 3] = 5
    gradient = torch.func.grad(rbf_alignment)(a, draw(60, 4, seed=1, dtype=F32), 0.5, True)
    assert gradient.isfinite().all()
    assert gradient[:20].abs().sum() > 0
    assert gradient[:, 3].abs().max() < 1e-7, "no distance changes at first order along a constant column"


def test_nan_is_not_hidden():
    a = draw(10, 3)
    a[0, 0] = float("nan")
    for flag in (True, False):
        assert rbf_alignment(a, draw(10, 2), 0.5, flag).isnan()
        assert rbf_alignment(draw(10, 2), a, 0.5, flag).isnan()


# ---- Nystroem -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("landmarks", [60, 1000])
@pytest.mark.parametrize("factor", [0.2, 0.5, 10.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-4), (F64, 1e-12)])
def test_all_rows_as_landmarks_are_exact(landmarks, factor, dtype, tolerance):
    a = draw(60, 5, dtype=dtype) * 30 + 4
    z = nystroem_features(a, factor, landmarks)
    assert z.shape == (60, 60)
    assert z.dtype == dtype
    np.testing.assert_allclose((z @ z.T).numpy(), own(a, factor), atol=tolerance)


def test_error_falls_with_landmarks():
    a = draw(400, 6) @ torch.diag(torch.logspace(0.5, -1, 6, dtype=F64))
    exact = own(a, 1.0)
    errors = []
    for landmarks in (5, 20, 80, 400):
        z = nystroem_features(a, 1.0, landmarks, generator())
        assert z.shape == (400, landmarks)
        errors.append(np.linalg.norm((z @ z.T).numpy() - exact) / np.linalg.norm(exact))
    assert errors[0] > 2 * errors[1] > 8 * errors[2] > 0
    assert errors[3] < 1e-12


def test_landmarks_come_from_the_generator_alone():
    a = draw(50, 4)
    before = torch.get_rng_state()
    z = nystroem_features(a, 0.5, 10, generator(1))
    assert torch.equal(z, nystroem_features(a, 0.5, 10, generator(1)))
    assert not torch.equal(z, nystroem_features(a, 0.5, 10, generator(2)))
    assert torch.equal(nystroem_features(a, 0.5, 10), nystroem_features(a, 0.5, 10))
    assert torch.equal(torch.get_rng_state(), before)


def test_features_of_equal_rows_are_those_of_the_constant_kernel():
    z = nystroem_features(torch.full((30, 4), 0.1), 0.5, 8)
    torch.testing.assert_close(z @ z.T, torch.ones(30, 30))
    many = [z, nystroem_features(draw(30, 4, dtype=F32), 0.5, 8)]
    alone = kernel_factor(many[1:], [1]).matrix
    torch.testing.assert_close(cka_to_factor(alone, kernel_factor(many, [1, 1]).matrix), torch.ones(()))


@pytest.mark.parametrize("norm", ["none", "fro"])
def test_a_factor_of_a_mean_of_rbf_kernels(norm):
    """Stacked features against the mean of exact kernels, and alignment to it as the client computes it."""
    many = [s * draw(80, d, seed=d) + draw(80, 1, seed=99) for s, d in ((1, 3), (50, 20), (0.1, 7))]
    kernels = [own(a, 0.5) for a in many]
    weights = np.array([1.0, 2.0, 1.0]) / 4
    centered = [numpy_centered(k) for k in kernels]
    parts = [w * k / (np.linalg.norm(k) if norm == "fro" else 1) for w, k in zip(weights, centered, strict=True)]
    k_bar = np.sum(parts, axis=0)
    z = [nystroem_features(a, 0.5, 80) for a in many]
    factor = kernel_factor(z, [1, 2, 1], norm=norm)
    assert factor.truncation_error == 0
    f = factor.matrix.numpy()
    assert np.linalg.norm(f @ f.T / np.linalg.norm(f @ f.T) - k_bar / np.linalg.norm(k_bar)) < 1e-10
    for a, k in zip(many, kernels, strict=True):
        expected = 1 - numpy_cka(k, k_bar)
        assert float(rbf_alignment(a, factor.matrix, 0.5, True)) == pytest.approx(expected, abs=1e-10)
    rough = kernel_factor([nystroem_features(a, 0.5, 40, generator()) for a in many], [1, 2, 1], norm=norm)
    for a, k in zip(many, kernels, strict=True):
        expected = 1 - numpy_cka(k, k_bar)
        assert float(rbf_alignment(a, rough.matrix, 0.5, True)) == pytest.approx(expected, abs=0.15)


def test_with_as_many_landmarks_as_rows_nothing_is_drawn():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    nystroem_features(draw(12, 3), 0.5, 12, generator)
    assert torch.equal(generator.get_state(), before)
    nystroem_features(draw(12, 3), 0.5, 11, generator)
    assert not torch.equal(generator.get_state(), before)


def test_the_width_of_two_rows_is_their_distance():
    a = torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 4.0], [9.0, 9.0]])
    assert float(median_width(a, 1.0, most=2)) == pytest.approx(5.0)  # of the first and the third
    with pytest.raises(ValueError, match="at least 2 rows"):
        median_width(a, 1.0, most=1)
