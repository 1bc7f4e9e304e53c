"""Linear CKA and the kernel factor against NumPy float64 L x L definitions (fedhenn 8.2 to 8.8, 8.10)."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyfed.functional import kernel_similarity, mean_kernel_factor
from polyfed.functional.centering import center, center_and_scale
from polyfed.functional.kernel_similarity import alignment, cka
from polyfed.functional.mean_kernel_factor import MeanKernelFactor
from tests.helpers.kernels import draw, kernel_factor, numpy_cka, rotation

F64 = torch.float64


def kernel(a):
    x = a.numpy().astype(np.float64)
    return x @ x.T


def numpy_linear_cka(a, b):
    return numpy_cka(kernel(a), kernel(b))


def closed_form(a, f):
    """The gradient of the alignment in A."""
    a, f = a.detach() - a.detach().mean(0), f.detach() - f.detach().mean(0)
    ab, aa, ff = (f.mT @ a).square().sum(), (a.mT @ a).norm(), (f.mT @ f).norm()
    return -2 / (aa * ff) * (f @ (f.mT @ a) - ab / aa**2 * a @ (a.mT @ a))


def numpy_mean_kernel(representations, norm="none"):
    k_bar = 0
    for a in representations:
        x = a.numpy().astype(np.float64)
        x = x - x.mean(0)
        k_bar = k_bar + x @ x.T / (np.linalg.norm(x @ x.T) if norm == "fro" else 1)
    return k_bar


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that any operation allocates (no views), forward and backward."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.seen |= {tuple(t.shape) for t in new if t.untyped_storage().data_ptr() not in given}
        return out


# ---- values -------------------------------------------------------------------------------------------------------

SHAPES = [(30, 5, 5), (30, 5, 9), (30, 50, 4), (30, 50, 40), (2, 1, 1), (40, 3, 700), (40, 600, 700), (530, 520, 540)]


@pytest.mark.parametrize(("rows", "d", "e"), SHAPES)
def test_cka_is_the_definition(rows, d, e):
    a, b = draw(rows, d) + 3, draw(rows, e, seed=1) - 2
    b[:, 0] += a[:, 0]
    assert float(cka(a, b)) == pytest.approx(numpy_linear_cka(a, b), rel=1e-12)
    assert float(cka(b, a)) == pytest.approx(float(cka(a, b)), rel=1e-13)
    assert float(cka(a.float(), b.float())) == pytest.approx(numpy_linear_cka(a, b), abs=2e-6)
    assert 0 <= float(cka(a, b)) <= 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (F64, 1e-12)])
@pytest.mark.parametrize(("d", "e"), [(6, 4), (80, 4)])
def test_invariances(dtype, tolerance, d, e):
    a, b = draw(60, d), draw(60, e, seed=1)
    expected = float(cka(a.to(dtype), b.to(dtype)))
    assert float(cka(a.to(dtype), a.to(dtype))) == pytest.approx(1, abs=tolerance)
    for s in (-2.5, 1e-4, 1e6):
        moved = s * (a @ rotation(d)) + s * draw(1, d, seed=3)
        assert float(cka(moved.to(dtype), b.to(dtype))) == pytest.approx(expected, abs=tolerance)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert float(cka(a[order].to(dtype), b[order].to(dtype))) == pytest.approx(expected, abs=tolerance)
    assert abs(float(cka(a[order], b)) - expected) > 1e-4, "but not if only one side is permuted"


@pytest.mark.parametrize("s", [1e-30, 1e-12, 1e12, 1e30])
def test_float32_scales_neither_under_nor_overflow(s):
    a, b = draw(50, 8, dtype=torch.float32), draw(50, 6, seed=1, dtype=torch.float32)
    assert float(cka(s * a, b)) == pytest.approx(numpy_linear_cka(a, b), abs=1e-6)
    assert float(cka(b, s * a)) == pytest.approx(numpy_linear_cka(a, b), abs=1e-6)
    factor = kernel_factor([s * a, s * b]).matrix
    expected = numpy_cka(kernel(a), kernel(a) + kernel(b))
    assert float(cka(a, factor)) == pytest.approx(expected, abs=1e-6)


def test_rows_must_agree():
    with pytest.raises(ValueError, match=r"\(4, 2\) and \(5, 2\)"):
        cka(draw(4, 2), draw(5, 2))
    with pytest.raises(ValueError, match=r"\(L, D\)"):
        alignment(draw(4, 2, 2), draw(4, 2))


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "d", "r"), [(20, 3, 4), (9, 15, 4), (7, 12, 20)])
def test_gradient_by_finite_differences_against_the_definition(rows, d, r):
    a, f = draw(rows, d) + 1, draw(rows, r, seed=1)
    expected, h = np.zeros((rows, d)), 1e-6
    for i in range(rows):
        for j in range(d):
            up, down = a.clone(), a.clone()
            up[i, j] += h
            down[i, j] -= h
            expected[i, j] = -(numpy_linear_cka(up, f) - numpy_linear_cka(down, f)) / (2 * h)
    np.testing.assert_allclose(closed_form(a, f).numpy(), expected, atol=1e-9)  # the other tests' oracle
    np.testing.assert_allclose(torch.func.grad(alignment)(a, f).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(("rows", "d", "e"), [*SHAPES[:1], *SHAPES[2:4], *SHAPES[5:]])
@pytest.mark.parametrize("block", [512, 7])
def test_autograd_is_the_closed_form(rows, d, e, block, monkeypatch):
    monkeypatch.setattr(kernel_similarity, "WIDE", block)
    if block == 7 and rows > 100:
        rows, d, e = 53, 52, 54
    for a, b in ((draw(rows, d) + 3, 5 * draw(rows, e, seed=1)), (5 * draw(rows, e, seed=1), draw(rows, d) + 3)):
        loss = alignment(a.requires_grad_(), b)
        assert float(loss.detach()) == pytest.approx(1 - numpy_linear_cka(a.detach(), b), rel=1e-12)
        loss.backward()
        closed = closed_form(a, b)
        torch.testing.assert_close(a.grad, closed, rtol=1e-9, atol=1e-9 * float(closed.abs().max()))
        assert float(a.grad.sum(0).abs().max()) < 1e-12 * float(closed.norm())
        assert abs(float((a.grad * a.detach()).sum())) < 1e-10 * float(closed.norm() * a.detach().norm())


@pytest.mark.parametrize(("d", "block"), [(2, 512), (6, 2)])
def test_second_derivatives(d, block, monkeypatch):
    monkeypatch.setattr(kernel_similarity, "WIDE", block)
    a, f = (draw(4, d) + 1).requires_grad_(), draw(4, 5, seed=1)
    assert torch.autograd.gradgradcheck(alignment, (a, f))
    (through,) = torch.autograd.grad(torch.autograd.grad(alignment(a, f), a, create_graph=True)[0].square().sum(), a)
    nested = torch.func.grad(lambda x: torch.func.grad(alignment)(x, f).square().sum())(a.detach())
    torch.testing.assert_close(nested, through)


@pytest.mark.parametrize(("d", "block"), [(6, 512), (60, 8)])
def test_under_functional_transforms(d, block, monkeypatch):
    monkeypatch.setattr(kernel_similarity, "WIDE", block)
    a, f = torch.stack([draw(30, d, seed=s) for s in range(3)]), draw(30, 40, seed=9)
    vmap, grad = torch.func.vmap, torch.func.grad
    torch.testing.assert_close(vmap(alignment, in_dims=(0, None))(a, f), torch.stack([alignment(x, f) for x in a]))
    closed = torch.stack([closed_form(x, f) for x in a])
    torch.testing.assert_close(vmap(grad(alignment), in_dims=(0, None))(a, f), closed)
    torch.testing.assert_close(vmap(grad(alignment))(a, f.expand(3, 30, 40)), closed)
    torch.testing.assert_close(vmap(grad(cka))(a, a.flip(0))[0], -closed_form(a[0], a[2]))


def test_columns_of_the_gradient_sum_to_zero_far_from_the_origin():
    """In float32 the means of such columns are rounded; what is left of that in the gradient would move a bias."""
    a = draw(50, 6, dtype=torch.float32) + 1000
    slope = torch.func.grad(alignment)(a, draw(50, 8, seed=1, dtype=torch.float32))
    assert float(slope.mean(dim=0).abs().max()) < 5e-7 * float(slope.abs().max())


@pytest.mark.parametrize(("rows", "d"), [(50, 4), (5000, 64), (40, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_rows_give_zero_and_no_gradient(rows, d, dtype):
    """Also where the column means of equal numbers are not exactly those numbers (L = 5000)."""
    constant = (torch.rand(1, d, generator=torch.Generator().manual_seed(0), dtype=F64) * 7).to(dtype).expand(rows, d)
    other = draw(rows, 3, dtype=dtype)
    for a in (constant.clone(), torch.zeros(rows, d, dtype=dtype)):
        a.requires_grad_()
        for loss in (alignment(a, other), alignment(a, a)):
            assert loss == 1
            (gradient,) = torch.autograd.grad(loss, a)
            assert gradient.eq(0).all()
        assert torch.func.grad(alignment)(other, a.detach()).eq(0).all()
        assert torch.func.grad(alignment)(a.detach(), other).eq(0).all()
    assert float(cka(constant + draw(rows, d, seed=5, dtype=dtype), other)) > 0, "alive ones are not mistaken for it"


# ---- the mean kernel ------------------------------------------------------------------------------------------------

WIDTHS = (3, 70, 12, 40, 5)


def clients(rows=60, dtype=F64):
    """Unequal sizes, offsets and a common part, so that K_bar has a decaying spectrum."""
    common = draw(rows, 10, seed=50) * torch.logspace(1, -1, 10, dtype=F64)
    many = [common @ draw(10, d, seed=d) + 0.3 * draw(rows, d, seed=d + 1) + 2 for d in WIDTHS]
    return [(s * a).to(dtype) for s, a in zip((1, 0.15, 2, 0.9, 12), many, strict=True)]


def up_to_scale(factor, k_bar):
    k = factor.numpy().astype(np.float64) @ factor.numpy().astype(np.float64).T
    return np.linalg.norm(k / np.linalg.norm(k) - k_bar / np.linalg.norm(k_bar))


@pytest.fixture(params=["columns", "kernel"])
def gathered_as(request, monkeypatch):
    """What is gathered where it is not exact: columns, or from the client of 70 columns on the kernel of 60 rows."""
    monkeypatch.setattr(mean_kernel_factor, "KERNEL_ROWS", {"columns": 59, "kernel": 60}[request.param])
    return request.param


@pytest.mark.parametrize("norm", ["none", "fro"])
@pytest.mark.parametrize("rank", [None, 60, 500])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (F64, 1e-12)])
def test_exact_and_full_rank_factors_are_the_mean_kernel(norm, rank, dtype, tolerance, gathered_as):
    many = clients(dtype=dtype)
    k_bar = numpy_mean_kernel(many, norm)
    hyperparameters = {} if rank is None else {"rank": rank, "exact_rank": 0}
    factor = kernel_factor(many, norm=norm, **hyperparameters)
    assert up_to_scale(factor.matrix, k_bar) < tolerance
    assert factor.truncation_error <= tolerance
    assert factor.rank == factor.matrix.shape[1]
    assert factor.rank == sum(WIDTHS) if rank is None else 40 < factor.rank <= 60
    assert factor.matrix.dtype == dtype
    assert float(factor.matrix.abs().max()) == 1
    assert float(factor.matrix.sum(0).abs().max()) < 60 * tolerance
    for a in many:
        expected = numpy_cka(kernel(a), k_bar)
        assert float(cka(a, factor.matrix)) == pytest.approx(expected, abs=tolerance)


def tail_of(factor, k_bar):
    """Tau from its definition, with the best s F F^T."""
    kernel = factor @ factor.T
    s = np.trace(factor.T @ k_bar @ factor) / np.linalg.norm(kernel) ** 2
    return np.linalg.norm(k_bar - s * kernel) / np.linalg.norm(k_bar)


@pytest.mark.parametrize("norm", ["none", "fro"])
@pytest.mark.parametrize("rank", [1, 3, 8, 20])
def test_truncation_is_near_the_best_and_within_its_bound(rank, norm, gathered_as):
    many = clients()
    k_bar = numpy_mean_kernel(many, norm)
    values = np.linalg.eigvalsh(k_bar)[::-1]
    best = np.sqrt((values[rank:] ** 2).sum() / (values**2).sum())
    factor = kernel_factor(many, rank=rank, exact_rank=0, norm=norm)
    assert factor.rank == rank
    tail = tail_of(factor.matrix.numpy(), k_bar)
    assert best * (1 - 1e-9) <= tail < best * 1.05
    assert tail * (1 - 1e-9) <= factor.truncation_error < tail * 1.5
    bound = np.sqrt(2 - 2 * np.sqrt(1 - factor.truncation_error**2))
    for a in many:
        error = float(cka(a, factor.matrix)) - numpy_cka(kernel(a), k_bar)
        assert abs(error) <= bound + 1e-12
    half = factor.matrix.half()
    for a in many:
        assert float(cka(a, half)) == pytest.approx(float(cka(a, factor.matrix)), abs=1e-4)


@pytest.mark.parametrize("exact_rank", [0, 256])
@pytest.mark.parametrize("norm", ["none", "fro"])
def test_dead_networks_add_nothing(norm, exact_rank):
    many = clients(dtype=torch.float32)
    dead = torch.full((60, 9), 0.1)
    with_dead = kernel_factor([*many, dead], norm=norm, exact_rank=exact_rank)
    assert up_to_scale(with_dead.matrix, numpy_mean_kernel(many, norm)) < 1e-5
    nothing = kernel_factor([dead, 0 * dead], norm=norm, exact_rank=exact_rank)
    assert nothing.matrix.eq(0).all()
    assert nothing.truncation_error == 0
    assert alignment(many[0], nothing.matrix) == 1


def test_many_clients_in_little_memory():
    """60 clients, wide and narrow, in any order; at first those of 40 columns are kept, then only what they make."""
    common, alive = draw(50, 20, seed=1) * torch.logspace(0, -2, 20, dtype=F64), []

    def one(j):
        assert sum(ref() is not None for ref in alive) <= 5, "those that are kept while it is exact"
        a = (1 + j % 7) * common @ draw(20, 40 if j % 10 == 0 else 9, seed=j)
        alive.append(weakref.ref(a))
        return a

    def factor(order):
        alive.clear()
        with Shapes() as shapes:
            found = kernel_factor(map(one, order), rank=4, exact_rank=40)
        assert max(shape[1] for shape in shapes.seen if shape[:1] == (50,) and shape[1:]) <= 40, "2 (4 + 16)"
        return found

    alive.clear()
    many = [one(j) for j in range(60) if not alive.clear()]
    k_bar = numpy_mean_kernel(many)
    values = np.linalg.eigvalsh(k_bar)[::-1]
    best = np.sqrt((values[4:] ** 2).sum() / (values**2).sum())
    forth, back = factor(range(60)), factor(range(59, -1, -1))
    for each in (forth, back):
        tail = tail_of(each.matrix.numpy(), k_bar)
        assert best * (1 - 1e-9) <= tail < best * 1.01
        assert tail <= each.truncation_error < 2 * tail
    assert up_to_scale(forth.matrix, back.matrix.numpy() @ back.matrix.numpy().T) < 0.1 * best


def test_a_factor_is_exact_up_to_its_largest_width_and_counts_what_it_has():
    stream = MeanKernelFactor(rank=2, exact_rank=73)
    assert stream.count == 0
    for count, (a, columns) in enumerate(zip(clients(), (3, 73, 2), strict=False), 1):
        stream.add(a)
        assert (stream.count, stream.result().rank) == (count, columns)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (0, 3), (3, 0)])
def test_what_is_no_matrix_is_not_centered(shape):
    for prepare in (center, center_and_scale):
        with pytest.raises(ValueError, match=r"expected a representation of shape \(L, D\)"):
            prepare(torch.ones(shape))
