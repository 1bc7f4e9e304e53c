"""RBF kernels, their alignment and features against NumPy with an explicit H; Procrustes distances against SciPy."""

import numpy as np
import pytest
import torch

from polyfed.functional import kernel_similarity
from polyfed.functional.kernel_similarity import (
    alignment,
    kernel_distance,
    nystroem_features,
    procrustes,
    rbf_alignment,
)
from tests.helpers.kernels import draw, numpy_cka, rotation

F32, F64 = torch.float32, torch.float64
TO_FACTOR = pytest.mark.parametrize("to_factor", [True, False])


def draws(seed=0):
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


def own(a, factor):
    return numpy_rbf(a, numpy_width(a, factor))


def test_distance_is_the_one_named():
    a, b = draw(20, 5), draw(20, 5, seed=1)
    for factor in (True, False):
        assert kernel_distance("linear", a, b, factor=factor, width=0.5) == alignment(a, b)
        for width in (0.5, 2.0):
            assert kernel_distance("rbf", a, b, factor=factor, width=width) == rbf_alignment(a, b, width, factor)
    assert kernel_distance("procrustes", a, b, factor=False, width=0.5) == procrustes(a, b)
    half = a.bfloat16()
    assert kernel_distance("linear", half, b.float(), factor=False) == alignment(half.float(), b.float())


# ---- RBF kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0])
@pytest.mark.parametrize(("rows", "dtype", "tolerance"), [(40, F32, 1e-5), (40, F64, 1e-12), (31, F64, 1e-12)])
def test_alignment_is_the_definition(factor, rows, dtype, tolerance):
    """Of an even number of pairs the lower of the two middle distances; equal rows are no harm."""
    a, b = draw(rows, 5) + 3, draw(rows, 9, seed=1)
    b[:, :5] += a
    a[7] = a[3]
    homogeneous = 1 - numpy_cka(own(a, factor), own(b, factor))
    heterogeneous = 1 - numpy_cka(own(a, factor), (b @ b.T).numpy())
    assert 0.01 < homogeneous < 1
    assert abs(homogeneous - heterogeneous) > 1e-3
    a, b = a.to(dtype), b.to(dtype)
    assert float(rbf_alignment(a, b, factor, False)) == pytest.approx(homogeneous, abs=tolerance)
    assert float(rbf_alignment(a, b, factor, True)) == pytest.approx(heterogeneous, abs=tolerance)
    assert rbf_alignment(a, b, factor, True).dtype == dtype


def test_width_of_many_rows_is_that_of_evenly_spaced_ones(monkeypatch):
    a, b = draw(50, 3) * torch.arange(1, 51, dtype=F64)[:, None], draw(50, 4, seed=1)
    monkeypatch.setattr(kernel_similarity, "_MEDIAN_ROWS", 10)
    expected = 1 - numpy_cka(numpy_rbf(a, numpy_width(a[::5], 0.5)), (b @ b.T).numpy())
    assert float(rbf_alignment(a, b, 0.5, True)) == pytest.approx(expected, rel=1e-12)


def test_width_where_more_than_half_of_the_pairs_are_equal_is_the_root_mean_square():
    a, b = torch.cat([draw(1, 4).expand(20, 4), draw(5, 4, seed=1)]), draw(25, 3, seed=2)
    width = np.sqrt((numpy_distances(a) ** 2)[np.triu_indices(25, 1)].mean())
    expected = 1 - numpy_cka(numpy_rbf(a, width), (b @ b.T).numpy())
    assert float(rbf_alignment(a, b, 1.0, True)) == pytest.approx(expected, rel=1e-9)


@TO_FACTOR
def test_invariances_and_the_width_bites(to_factor):
    a, b = draw(60, 6), draw(60, 4, seed=1)

    def d(a, b, factor=0.5):
        return float(rbf_alignment(a, b, factor, to_factor))

    for s in (7.3, -0.01, 1e-30, 1e30):
        moved = s * (a @ rotation(6, 2)) + (2 * s)
        assert d(moved, b) == pytest.approx(d(a, b), abs=1e-12)
        assert d(moved.float(), b.float()) == pytest.approx(d(a, b), abs=1e-6)
    if not to_factor:
        assert d(a, -3 * a @ rotation(6, 2) + 1) == pytest.approx(0, abs=1e-12)
    assert abs(d(a, b, 0.5) - d(a, b, 1.0)) > 1e-3


@TO_FACTOR
@pytest.mark.parametrize(("rows", "d"), [(15, 3), (6, 11)])
def test_gradient_by_finite_differences(to_factor, rows, d):
    """At the width of A, held: it is a constant for the gradient."""
    a, b = draw(rows, d) + 1, draw(rows, 4, seed=1)
    a[1] = a[0]
    width, target = numpy_width(a, 0.5), (b @ b.T).numpy() if to_factor else own(b, 0.5)
    expected, h = np.zeros((rows, d)), 1e-6
    for i in range(rows):
        for j in range(d):
            up, down = a.clone(), a.clone()
            up[i, j] += h
            down[i, j] -= h
            expected[i, j] = -(numpy_cka(numpy_rbf(up, width), target) - numpy_cka(numpy_rbf(down, width), target))
    gradient = torch.func.grad(rbf_alignment)(a, b, 0.5, to_factor)
    np.testing.assert_allclose(gradient.numpy(), expected / (2 * h), atol=1e-8)
    x = a.clone().requires_grad_()
    rbf_alignment(x, b, 0.5, to_factor).backward()
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-15)


@TO_FACTOR
@pytest.mark.parametrize("dtype", [F32, F64])
def test_equal_rows_give_zero_and_no_gradient(to_factor, dtype):
    constant = (torch.rand(1, 70, generator=draws(), dtype=F64) * 7).to(dtype).expand(300, 70)
    other = draw(300, 3, dtype=dtype)
    for a in (constant.clone(), torch.zeros(300, 70, dtype=dtype)):
        for x, y in ((a, other), (other, a)):
            assert rbf_alignment(x, y, 0.5, to_factor) == 1
            assert torch.func.grad(rbf_alignment)(x, y, 0.5, to_factor).eq(0).all()


@pytest.mark.parametrize("landmarks", [60, 1000])
@pytest.mark.parametrize("factor", [0.2, 0.5, 10.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-4), (F64, 1e-12)])
def test_all_rows_as_landmarks_are_exact_and_nothing_is_drawn(landmarks, factor, dtype, tolerance):
    a, generator = draw(60, 5, dtype=dtype) * 30 + 4, draws()
    before = generator.get_state()
    z = nystroem_features(a, factor, landmarks, generator)
    assert (z.shape, z.dtype) == ((60, 60), dtype)
    np.testing.assert_allclose((z @ z.T).numpy(), own(a, factor), atol=tolerance)
    assert torch.equal(generator.get_state(), before)


def test_the_error_falls_with_landmarks_which_the_generator_draws():
    a = draw(200, 6) @ torch.diag(torch.logspace(0.5, -1, 6, dtype=F64))
    exact, errors = own(a, 1.0), []
    for landmarks in (5, 20, 80):
        z = nystroem_features(a, 1.0, landmarks, draws(1))
        assert z.shape == (200, landmarks)
        errors.append(np.linalg.norm((z @ z.T).numpy() - exact) / np.linalg.norm(exact))
    assert errors[0] > 2 * errors[1] > 8 * errors[2] > 0
    assert torch.equal(z, nystroem_features(a, 1.0, 80, draws(1)))
    assert not torch.equal(z, nystroem_features(a, 1.0, 80, draws(2)))
    same = nystroem_features(torch.full((30, 4), 0.1), 0.5, 8, draws())
    torch.testing.assert_close(same @ same.T, torch.ones(30, 30))


# ---- Procrustes -----------------------------------------------------------------------------------------------------


def oracle(a, m):
    """Least over orthogonal R of ||A - M R||_F^2, with SciPy's R put in."""
    from scipy.linalg import orthogonal_procrustes

    x, y = (z - z.mean(0) for z in (a.numpy().astype(np.float64), m.numpy().astype(np.float64)))
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    r, _ = orthogonal_procrustes(y, x)
    return np.linalg.norm(x - y @ r) ** 2


@pytest.mark.parametrize(("rows", "d"), [(30, 5), (30, 30), (12, 40), (2, 1), (40, 600)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (F64, 1e-12)])
def test_the_least_over_all_rotations(rows, d, dtype, tolerance):
    a, m = draw(rows, d) + 3, 5 * draw(rows, d, seed=1) - 2
    m[:, 0] += a[:, 0]
    expected = oracle(a, m)
    a, m = a.to(dtype), m.to(dtype)
    assert float(procrustes(a, m)) == pytest.approx(expected, abs=tolerance)
    assert float(procrustes(m, a)) == pytest.approx(expected, abs=tolerance)
    assert procrustes(a, m).dtype == dtype


@pytest.mark.parametrize(("rows", "d"), [(50, 6), (8, 20)])
def test_zero_for_rotated_scaled_and_shifted(rows, d):
    m, other = draw(rows, d), draw(rows, d, seed=1)
    expected = float(procrustes(other, m))
    for s in (2.5, -1e-4, 1e30):
        a = s * m @ rotation(d) + s * draw(1, d, seed=3)
        assert float(procrustes(a, m)) == pytest.approx(0, abs=1e-12)
        assert float(procrustes(a.float(), m.float())) == pytest.approx(0, abs=1e-5)
        assert float(procrustes(a, other)) == pytest.approx(expected, abs=1e-12)
    assert float(procrustes(m * torch.logspace(-1, 1, d, dtype=F64), m)) > 0.1


@pytest.mark.parametrize(("rows", "d"), [(12, 3), (4, 9), (7, 7)])
def test_procrustes_gradient_by_finite_differences(rows, d):
    a, m = draw(rows, d) + 1, draw(rows, d, seed=1)
    expected, h = np.zeros((rows, d)), 1e-6
    for i in range(rows):
        for j in range(d):
            step = torch.zeros(rows, d, dtype=F64)
            step[i, j] = h
            expected[i, j] = (oracle(a + step, m) - oracle(a - step, m)) / (2 * h)
    slope = torch.func.grad(procrustes)(a, m)
    np.testing.assert_allclose(slope.numpy(), expected, atol=1e-8)
    x = a.clone().requires_grad_()
    procrustes(x, m).backward()
    torch.testing.assert_close(x.grad, slope)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_repeated_and_zero_singular_values_have_a_finite_gradient(dtype):
    """Repeated: M = Q with orthonormal centered columns. Zero: columns that one side or both have not."""
    q = torch.linalg.qr(draw(20, 4) - draw(20, 4).mean(0)).Q.to(dtype)
    a = q @ rotation(4).to(dtype) + 0.1
    assert float(torch.func.grad(procrustes)(a, q).norm()) < 1e-5
    thin = draw(20, 4, dtype=dtype)
    thin[:, 2:] = 7
    for x, y in ((thin, q), (q, thin), (thin, thin)):
        assert float(torch.func.grad(procrustes)(x, y).norm()) < 10
    assert torch.func.grad(procrustes)(thin, 2 * thin)[:, 2:].abs().max() < 1e-5
    same = torch.ones(20, 4, dtype=dtype)
    for x, y in ((same, q), (q, same), (same, same)):  # equal rows are farthest and have no gradient
        assert procrustes(x, y) == 2
        assert torch.func.grad(procrustes)(x, y).eq(0).all()


# ---- all ------------------------------------------------------------------------------------------------------------

DISTANCES = {
    "linear": alignment,
    "to a factor": lambda a, b: rbf_alignment(a, b, 0.5, True),
    "of two RBF kernels": lambda a, b: rbf_alignment(a, b, 0.5, False),
    "procrustes": procrustes,
}


@pytest.mark.parametrize("name", DISTANCES)
def test_under_functional_transforms(name):
    one = DISTANCES[name]
    a, f = torch.stack([draw(20, 6, seed=s) for s in range(3)]), draw(20, 6, seed=9)
    vmap, grad = torch.func.vmap, torch.func.grad
    torch.testing.assert_close(vmap(one, in_dims=(0, None))(a, f), torch.stack([one(x, f) for x in a]))
    apart = torch.stack([grad(one)(x, f) for x in a])
    torch.testing.assert_close(vmap(grad(one), in_dims=(0, None))(a, f), apart)
    torch.testing.assert_close(vmap(grad(one))(a, f.expand(3, 20, 6)), apart)


@pytest.mark.parametrize("name", DISTANCES)
def test_half_precision_and_autocast_are_computed_in_float32(name):
    one = DISTANCES[name]
    a, b = draw(50, 8, dtype=F32), draw(50, 8, seed=1, dtype=F32)
    expected, gradient = one(a, b), torch.func.grad(one)(a, b)
    assert one(a.half(), b.bfloat16()).dtype == F32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = one(a.requires_grad_(), b)
        inside = nystroem_features(a, 0.5, 20, draws())
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, a)[0], gradient)
    assert torch.equal(inside, nystroem_features(a, 0.5, 20, draws()))


@pytest.mark.parametrize("name", DISTANCES)
def test_nan_is_neither_hidden_nor_contagious(name):
    """Not for the other clients of a stack either."""
    one = DISTANCES[name]
    a, m = torch.stack([draw(10, 3, seed=s) for s in range(2)]), draw(10, 3, seed=9)
    for value in (float("nan"), float("inf")):
        a[0, 4, 1] = value
        assert one(a[0], m).isnan()
        assert one(m, a[0]).isnan()
        stacked = torch.func.vmap(one, in_dims=(0, None))(a, m)
        assert stacked[0].isnan()
        assert float(stacked[1]) == pytest.approx(float(one(a[1], m)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rbf_alignment(draw(4, 2), draw(5, 2), 0.5, False), "of the same L inputs"),
        (lambda: procrustes(draw(4, 2), draw(4, 3)), r"one shape \(L, D\).*\(4, 2\) and \(4, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
