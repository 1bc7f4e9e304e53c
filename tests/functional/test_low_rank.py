"""Low-rank encoding against NumPy's SVD: which rank, what comes back, how many numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional.low_rank import GROUPS, decode, encode, truncated_svd
from tests.helpers.quick import others_slow


def numel(encoded: Any) -> int:
    return sum(tensor.numel() for entries in encoded.values() for tensor in entries.values())


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def falling(rows: int, columns: int, rate: float, seed: int = 0) -> Tensor:
    """A matrix whose singular values are rate^k."""
    q, r = (np.linalg.qr(gaussian(n, min(rows, columns), seed=seed + n).double().numpy())[0] for n in (rows, columns))
    return torch.from_numpy((q * rate ** np.arange(min(rows, columns))) @ r.T).float()


def numpy_rank(matrix: np.ndarray, energy: float) -> int:
    s = np.linalg.svd(matrix.astype(float), compute_uv=False) ** 2
    return next(k for k in range(1, len(s) + 1) if s[:k].sum() >= energy * s.sum() * (1 - 1e-15))


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.95, 0.98, 0.999])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (20, 20), (2, 100)])
def test_rank_and_matrix_are_those_of_numpys_svd(shape: tuple[int, int], energy: float) -> None:
    matrix = falling(*shape, 0.6)
    found, rank = truncated_svd(matrix, energy), numpy_rank(matrix.numpy(), energy)
    if rank * (sum(shape) + 1) >= shape[0] * shape[1]:
        assert found is None
        return
    assert found is not None
    u, s, v = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    assert [tuple(t.shape) for t in found] == [(shape[0], rank), (rank,), (rank, shape[1])]
    np.testing.assert_allclose(found[1].numpy(), s[:rank], rtol=1e-5)
    back = decode(encode({"w": matrix}, energy), {"w": matrix})["w"]
    np.testing.assert_allclose(back.numpy(), (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-6)
    assert float((back - matrix).square().sum()) <= (1 - energy) * float(matrix.square().sum()) + 1e-6


def test_the_smallest_rank_that_reaches_the_energy() -> None:
    """Energies 16, 4, 1 of 21: with 16/21 one triple, a little more takes two."""
    matrix = torch.zeros(20, 30)
    for k, s in enumerate((4.0, -2.0, 1.0)):
        matrix[k, 2 * k] = s
    for energy, rank in ((0.5, 1), (16 / 21 - 1e-9, 1), (16 / 21 + 1e-9, 2), (20 / 21 - 1e-9, 2), (0.96, 3), (1.0, 3)):
        found = truncated_svd(matrix, energy)
        assert found is not None
        assert len(found[1]) == rank, energy


NETWORK = {
    "header": (2, 500),
    "head": (10, 500),
    "point": (32, 16, 1, 1),
    "conv": (64, 64, 3, 3),
    "conv5": (32, 16, 5, 5),
    "full": (500, 800),
    "row": (1, 40),
    "tiny": (2, 3),
    "bias": (64,),
    "count": (),
}


@pytest.mark.parametrize("energy", others_slow([0.5, 0.95, 0.98, 1.0], quick=[0.95]))
def test_never_more_than_the_weights_and_never_nothing(energy: float) -> None:
    """Fresh layers need almost every singular value: then they stay as they are instead of growing or vanishing."""
    tensors = {name: gaussian(*shape) for name, shape in NETWORK.items()}
    encoded = encode(tensors, energy)
    assert numel(encoded) <= sum(t.numel() for t in tensors.values())
    back = decode(encoded, tensors)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape
        assert float((back[name] - tensor).norm()) <= (1 - energy) ** 0.5 * float(tensor.norm()) + 1e-5
        one = encode({name: tensor}, energy)
        assert numel(one) <= tensor.numel()
        if energy == 1.0:
            assert torch.equal(back[name], tensor), "at full energy everything comes back as it was"
    assert encoded["raw"].keys() >= {"bias", "count", "row", "tiny"}


def test_a_convolution_is_a_matrix_of_its_filters() -> None:
    filters = falling(32, 400, 0.5)
    conv = filters.reshape(32, 16, 5, 5)
    encoded = encode({"conv": conv}, 0.95)
    rank = numpy_rank(filters.numpy(), 0.95)
    assert [tuple(encoded[g]["conv"].shape) for g in GROUPS[1:]] == [(32, rank), (rank,), (rank, 400)]
    assert numel(encoded) == rank * (32 + 400 + 1)
    assert torch.equal(
        decode(encoded, {"conv": conv})["conv"], decode(encoded, {"conv": filters})["conv"].reshape_as(conv)
    )


def test_exempt_and_types() -> None:
    tensors = {"w": falling(20, 30, 0.5).double(), "buffer": falling(20, 30, 0.5).half()}
    encoded = encode(tensors, 0.9, exempt=["buffer"])
    assert torch.equal(encoded["raw"]["buffer"], tensors["buffer"])
    assert encoded["raw"].keys() == {"buffer"}
    assert {t.dtype for g in GROUPS[1:] for t in encoded[g].values()} == {torch.float64}
    back = decode(encoded, tensors)
    assert [t.dtype for t in back.values()] == [torch.float64, torch.float16]
    half = decode(encode(tensors, 0.999), tensors)["buffer"]
    torch.testing.assert_close(half.float(), tensors["buffer"].float(), atol=3e-2, rtol=0)


@pytest.mark.parametrize(
    ("like", "message"),
    [({"v": torch.zeros(9, 9)}, "expected 'v' among"), ({"w": torch.zeros(9, 8)}, r"of shape \(9, 8\), got 81")],
)
def test_what_does_not_fit_is_named(like: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(encode({"w": gaussian(9, 9)}, 1.0), like)


@pytest.mark.parametrize("shape", [(4, 6), (5, 4), (5, 5), (6, 6), (3, 9), (2, 3), (2, 9), (1, 4)])
def test_triples_are_sent_only_where_they_are_fewer_numbers(shape: tuple[int, int]) -> None:
    rows, columns = shape
    for rank in range(1, min(shape) + 1):
        matrix = gaussian(rows, rank) @ gaussian(rank, columns, seed=1)
        found = truncated_svd(matrix.double(), 1 - 1e-12)
        assert (found is not None) == (rank * (rows + columns + 1) < rows * columns)


@pytest.mark.parametrize("group", GROUPS[1:])
def test_a_triple_that_lacks_a_part_is_named(group: str) -> None:
    encoded = encode({"w": gaussian(9, 1) @ gaussian(1, 9)}, 0.9)
    assert numel(encoded) == 9 + 1 + 9
    with pytest.raises(ValueError, match="expected 'w' among"):
        decode({name: entries for name, entries in encoded.items() if name != group}, {"w": torch.zeros(9, 9)})
