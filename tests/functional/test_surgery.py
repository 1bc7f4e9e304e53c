"""FedIN's gradient combination against NumPy by hand."""

import numpy as np
import pytest
import torch

from polyfed.functional.surgery import combine, cosine

MODES = ("simple", "project", "none")


def pairs(count=200, shape=(4, 3), dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(*shape, generator=g, dtype=dtype), torch.randn(*shape, generator=g, dtype=dtype)


def dot(x, y):
    return float((x.double() * y.double()).sum())


def oracle(g_local, g_in, mode):
    x, y = g_local.numpy().astype(np.float64), g_in.numpy().astype(np.float64)
    a, b = (x * x).sum(), (x * y).sum()
    z = y if b >= 0 or a == 0 else y - b / a * x
    return {"simple": y + x / 2, "project": x + z, "none": x + y}[mode]


@pytest.mark.parametrize("mode", MODES)
def test_against_numpy_both_signs_of_b(mode):
    signs = set()
    for g_local, g_in in pairs():
        got = combine({"w": g_local}, {"w": g_in}, mode)["w"]
        np.testing.assert_allclose(got.numpy(), oracle(g_local, g_in, mode), atol=1e-13)
        signs.add(dot(g_local, g_in) > 0)
    assert signs == {True, False}


def test_the_cosine_is_that_of_one_long_vector():
    gen = torch.Generator().manual_seed(3)
    for _ in range(50):
        g_local = {k: torch.randn(n, generator=gen, dtype=torch.float64) for k, n in (("u", 2), ("v", 5))}
        g_in = {k: torch.randn(len(t), generator=gen, dtype=torch.float64) for k, t in g_local.items()}
        long = [torch.cat(list(g.values())) for g in (g_local, g_in)]
        expected = (long[0] @ long[1]) / (long[0].norm() * long[1].norm())
        torch.testing.assert_close(cosine(g_local, g_in), expected)


def test_zero_and_tiny_gradients():
    zero, one = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    assert cosine(zero, one) == 0
    assert cosine(one, zero) == 0
    tiny = {"w": 1e-25 * torch.tensor([1.0, 2.0, -2.0])}
    assert cosine(tiny, tiny) == pytest.approx(1, abs=1e-6)
    for mode in MODES:
        assert combine(zero, zero, mode)["w"].eq(0).all()
        assert combine(zero, one, mode)["w"].eq(1).all()


def test_half_precision_products_are_taken_in_float32():
    g_local, g_in = torch.full((100_000,), 2.0, dtype=torch.float16), torch.full((100_000,), -1.0, dtype=torch.float16)
    both = combine({"w": g_local}, {"w": g_in}, "project")["w"]  # a = 400000 overflows float16
    assert both.dtype == torch.float16
    assert torch.equal(both, g_local)


def test_under_vmap_equals_one_by_one():
    stacked = [torch.stack(ts) for ts in zip(*pairs(20), strict=True)]
    for mode in MODES:

        def one(x, y, mode=mode):
            return combine({"w": x}, {"w": y}, mode)["w"]

        torch.testing.assert_close(torch.func.vmap(one)(*stacked), torch.stack(list(map(one, *stacked))))
