"""The common form of features, against NumPy's loops and pseudo-inverses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from polyfed.functional.feature_pooling import from_common, layout, random_orthogonal, to_common

SHAPES = [(5,), (5, 6, 4), (5, 3, 3), (10, 5), (9, 5)]  # a vector, maps, tokens with and without a class token


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def bins(size: int, to: int) -> np.ndarray:
    """Adaptive average pooling as its definition has it."""
    found = np.zeros((to, size))
    for i in range(to):
        start, end = i * size // to, math.ceil((i + 1) * size / to)
        found[i, start:end] = 1 / (end - start)
    return found


def by_hand(s: np.ndarray, p: np.ndarray, grid: int) -> np.ndarray:
    """`to_common` of one sample, place by place."""
    if s.ndim == 2:
        side = math.isqrt(len(s))
        tokens = s[len(s) - side * side :]
        summary = s[0] if len(s) > side * side else tokens.mean(0)
        places = tokens.reshape(side, side, -1)
    else:
        places = s.reshape(len(s), *(s.shape[1:] or (1, 1))).transpose(1, 2, 0)
        summary = places.mean((0, 1))
    rows, columns = bins(places.shape[0], grid), bins(places.shape[1], grid)
    out = [p @ summary]
    for i in range(grid):
        for j in range(grid):
            pooled = sum(
                rows[i, a] * columns[j, b] * places[a, b]
                for a in range(places.shape[0])
                for b in range(places.shape[1])
            )
            out.append(p @ pooled)
    return np.stack(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grid", [1, 2, 3, 8])
def test_the_common_form_by_hand(shape: tuple[int, ...], grid: int) -> None:
    s, p = torch.randn(2, *shape, generator=seeded()), random_orthogonal(4, 5, seeded(1))
    found = to_common(s, p, grid)
    assert found.shape == (2, 1 + grid * grid, 4)
    for one, expected in zip(found, s, strict=True):
        np.testing.assert_allclose(one, by_hand(expected.double().numpy(), p.double().numpy(), grid), atol=1e-5)


def operator(shape: tuple[int, ...], p: torch.Tensor, grid: int) -> np.ndarray:
    """`to_common` as one matrix, column by column; without the summary where it is a mean."""
    unit = torch.eye(math.prod(shape)).reshape(-1, *shape)
    form = to_common(unit, p, grid)
    return form[:, 0 if layout(shape).token else 1 :].flatten(1).T.numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("channels", "grid"), [(3, 2), (5, 3), (8, 3), (8, 5), (3, 8), (2, 1)])
def test_back_is_the_pseudo_inverse(shape: tuple[int, ...], channels: int, grid: int) -> None:
    """NumPy's, of the whole map at once: the right inverse, the inverse or the nearest, as the sizes have it."""
    p = random_orthogonal(channels, 5, seeded(2))
    forth, token = operator(shape, p, grid), layout(shape).token
    unit = torch.eye(forth.shape[0]).reshape(len(forth), -1, channels)
    form = unit if token else torch.cat([torch.full((len(unit), 1, channels), 7.0), unit], dim=1)  # no use for the 7
    back = from_common(form, p, shape)
    assert back.shape == (len(unit), *shape)
    np.testing.assert_allclose(back.flatten(1).T.numpy(), np.linalg.pinv(forth.astype(float), rcond=1e-6), atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (8, 3), (4, 4), (1, 6)])
def test_orthogonal(rows: int, columns: int) -> None:
    p = random_orthogonal(rows, columns, seeded())
    assert (p.shape, p.dtype) == ((rows, columns), torch.float32)
    product = p.numpy() @ p.numpy().T if rows <= columns else p.numpy().T @ p.numpy()
    np.testing.assert_allclose(product, np.eye(min(rows, columns)), atol=1e-6)
    assert torch.equal(p, random_orthogonal(rows, columns, seeded()))
    assert not torch.allclose(p.abs(), random_orthogonal(rows, columns, seeded(1)).abs())


@pytest.mark.parametrize("shape", [(), (12, 7), (3, 7), (2, 3, 4, 5)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected a vector \(D\), a map .* got \("):
        layout(shape)
