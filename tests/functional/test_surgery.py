"""FedIN's gradient combination against NumPy by hand and a general solver (fedin 8.1, 8.2)."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from polyfed.functional.surgery import MODES, adaptive, combine, cosine, project, simple


def pairs(count=200, shape=(4, 3), dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(*shape, generator=g, dtype=dtype), torch.randn(*shape, generator=g, dtype=dtype)


def dot(x, y):
    return float((x.double() * y.double()).sum())


def oracle(g_local, g_in, mode, lam):
    x, y = g_local.numpy().astype(np.float64), g_in.numpy().astype(np.float64)
    a, b = (x * x).sum(), (x * y).sum()
    z = y if b >= 0 or a == 0 else y - b / a * x
    largest = max(1.0, -2 * b / a) if a > 0 else 1.0
    return {
        "simple": y + lam / 2 * x,
        "project": x + z,
        "literal": z,
        "adaptive": y + largest / 2 * x,
        "none": x + y,
    }[mode]


@pytest.mark.parametrize("mode", MODES)
def test_against_numpy_both_signs_of_b(mode):
    signs = set()
    for g_local, g_in in pairs():
        got = combine({"w": g_local}, {"w": g_in}, mode, 0.7)["w"]
        np.testing.assert_allclose(got.numpy(), oracle(g_local, g_in, mode, 0.7), atol=1e-13)
        signs.add(dot(g_local, g_in) > 0)
    assert signs == {True, False}


def test_projection_solves_the_constrained_problem():
    for g_local, g_in in pairs(8, (5,)):
        x, y = g_local.numpy(), g_in.numpy()
        found = minimize(
            lambda z, y=y: ((y - z) ** 2).sum(),
            y,
            constraints={"type": "ineq", "fun": lambda z, x=x: z @ x},
            options={"ftol": 1e-14},
        )
        np.testing.assert_allclose(project(g_local, g_in).numpy(), found.x, atol=1e-5)


def test_projection_properties():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        for g_local, g_in in pairs(dtype=dtype):
            z = project(g_local, g_in)
            assert z.dtype == dtype
            assert dot(z, g_local) >= -tolerance * float(z.norm() * g_local.norm())
            assert torch.equal(z, g_in) == (dot(g_local, g_in) >= 0)
            torch.testing.assert_close(project(g_local, z), z, rtol=0, atol=10 * tolerance)
            for s in (1e-30, 3.0, 1e30):
                torch.testing.assert_close(project(s * g_local, g_in), z, rtol=0, atol=10 * tolerance)
            assert z.norm() <= g_in.norm() * (1 + tolerance)
            torch.testing.assert_close(project(g_local, -g_local), 0 * z, rtol=0, atol=10 * tolerance)
            assert torch.equal(project(0 * g_local, g_in), g_in)


def test_simple_properties():
    for g_local, g_in in pairs(50):
        a, b = dot(g_local, g_local), dot(g_local, g_in)
        assert torch.equal(simple(g_local, g_in, 0.0), g_in)
        steps = [simple(g_local, g_in, lam) for lam in (0.0, 1.0, 2.0)]
        torch.testing.assert_close(steps[2] - steps[1], steps[1] - steps[0])
        assert dot(steps[1], g_local) == pytest.approx(b + a / 2)
        far = {"w": simple(g_local, g_in, 1e6)}
        assert cosine({"w": g_local}, far) == pytest.approx(1, abs=1e-9)
        if b < 0:
            torch.testing.assert_close(simple(g_local, g_in, -2 * b / a), project(g_local, g_in))


def test_adaptive_keeps_the_paper_s_mix_where_it_is_enough():
    seen = set()
    for g_local, g_in in pairs(2000, (3,)):
        z = adaptive(g_local, g_in)
        enough = dot(simple(g_local, g_in, 1.0), g_local) >= 0
        seen.add(enough)
        assert dot(z, g_local) >= -1e-12
        if enough:
            assert torch.equal(z, simple(g_local, g_in, 1.0))
        else:
            torch.testing.assert_close(z, project(g_local, g_in))
    assert seen == {True, False}
    assert torch.equal(adaptive(torch.zeros(2), torch.ones(2)), torch.ones(2))


def test_project_keeps_the_local_gradient_s_direction():
    for g_local, g_in in pairs(50):
        got = combine({"w": g_local}, {"w": g_in}, "project", 1.0)["w"]
        assert dot(got, g_local) >= dot(g_local, g_local) * (1 - 1e-12)


def test_the_cosine_is_that_of_one_long_vector():
    gen = torch.Generator().manual_seed(3)
    for _ in range(50):
        g_local = {k: torch.randn(n, generator=gen, dtype=torch.float64) for k, n in (("u", 2), ("v", 5))}
        g_in = {k: torch.randn(len(t), generator=gen, dtype=torch.float64) for k, t in g_local.items()}
        long = [torch.cat(list(g.values())) for g in (g_local, g_in)]
        single = combine(g_local, g_in, "literal", 0.7)
        assert sum(dot(single[k], g_local[k]) for k in single) >= -1e-12, "per tensor implies the block constraint"
        expected = (long[0] @ long[1]) / (long[0].norm() * long[1].norm())
        torch.testing.assert_close(cosine(g_local, g_in), expected)


def test_zero_and_tiny_gradients():
    zero, one = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    assert cosine(zero, one) == 0
    assert cosine(one, zero) == 0
    tiny = {"w": 1e-25 * torch.tensor([1.0, 2.0, -2.0])}
    assert cosine(tiny, tiny) == pytest.approx(1, abs=1e-6)
    for mode in MODES:
        assert combine(zero, zero, mode, 1.0)["w"].eq(0).all()
        assert combine(zero, one, mode, 1.0)["w"].eq(1).all()


def test_half_precision_products_are_taken_in_float32():
    g_local, g_in = torch.full((100_000,), 2.0, dtype=torch.float16), torch.full((100_000,), -1.0, dtype=torch.float16)
    z = project(g_local, g_in)  # a = 400000 overflows float16
    assert z.dtype == torch.float16
    assert z.abs().max() == 0


def test_under_vmap_equals_one_by_one():
    stacked = [torch.stack(ts) for ts in zip(*pairs(20), strict=True)]
    for mode in MODES:

        def one(x, y, mode=mode):
            return combine({"w": x}, {"w": y}, mode, 0.7)["w"]

        torch.testing.assert_close(torch.func.vmap(one)(*stacked), torch.stack(list(map(one, *stacked))))


def test_bad_calls():
    w = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"expected a mode among simple, project.*got 'sum'"):
        combine(w, w, "sum", 1.0)
    with pytest.raises(ValueError, match="only one has 'v'"):
        combine(w, {**w, "v": w["w"]}, "none", 1.0)
    with pytest.raises(ValueError, match=r"'w' in one shape, got \(2,\) and \(3,\)"):
        cosine(w, {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="at least one tensor"):
        cosine({}, {})
    with pytest.raises(ValueError, match="one shape"):
        project(torch.ones(2), torch.ones(1))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_gradients_of_a_single_entry(scale):
    one, other = {"w": torch.tensor([[scale, 0.0]])}, {"w": torch.tensor([[-2.0, 3.0]])}
    assert float(cosine(one, other)) == pytest.approx(-2 / 13**0.5)
    assert float(cosine(one, one)) == pytest.approx(1.0)
    assert project(one["w"], other["w"]).flatten().tolist() == pytest.approx([0.0, 3.0], abs=1e-6)
