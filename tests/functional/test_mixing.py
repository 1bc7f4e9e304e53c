"""Mixing models by what they gain, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.mixing import distance, interpolate_towards, model_gains, normalize_positive

MODEL = {"a": torch.tensor([[0.1, -0.7], [1.3, 0.2]]), "b": torch.tensor([0.3, -1e-3])}


def others(count: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{name: t + torch.randn(t.shape, generator=g) for name, t in MODEL.items()} for _ in range(count)]


def test_shares_by_hand() -> None:
    losses, distances = [0.5, 1.7, 0.9, 1.2], [2.0, 0.1, 0.5, 3.0]
    delta = (1.2 - np.array(losses)) / np.array(distances)
    assert set(np.sign(delta)) == {-1.0, 0.0, 1.0}
    found = model_gains(1.2, losses, distances)
    np.testing.assert_allclose(found, delta, atol=1e-6)
    positive = np.maximum(delta, 0)
    np.testing.assert_allclose(normalize_positive(found), positive / positive.sum(), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_shares_do_not_depend_on_the_losss_scale(scale: float) -> None:
    losses, distances = [0.5, 1.7, 0.9], [2.0, 0.1, 0.5]
    plain = normalize_positive(model_gains(1.0, losses, distances))
    scaled = normalize_positive(model_gains(scale, [scale * loss for loss in losses], distances))
    torch.testing.assert_close(plain, scaled)


def test_the_model_itself_and_what_is_not_finite_gain_nothing() -> None:
    found = model_gains(1.0, [1.0, 0.5, float("nan"), float("inf"), 0.5], [0.0, 1e-13, 1.0, 1.0, 1.0])
    assert found.tolist() == [0, 0, 0, 0, 0.5]
    assert model_gains(float("nan"), [1.0], [1.0]).tolist() == [0]
    assert model_gains(1.0, [], []).shape == (0,)


def test_if_all_are_worse_the_model_stays_bit_for_bit() -> None:
    shares = normalize_positive(model_gains(1.0, [1.5, 2.0], [1.0, 1.0]))
    assert shares.tolist() == [0, 0]
    mixed = interpolate_towards(MODEL, others(2), shares.tolist())
    assert all(torch.equal(mixed[name], t) and mixed[name] is not t for name, t in MODEL.items())


def test_a_single_better_one_is_taken_over_bit_for_bit() -> None:
    shares = normalize_positive(model_gains(1.0, [1.5, 0.9, 1.0], [1.0, 0.3, 1.0]))
    assert shares.tolist() == [0, 1, 0]
    candidates = others(3)
    mixed = interpolate_towards(MODEL, candidates, shares.tolist())
    assert all(torch.equal(mixed[name], candidates[1][name]) for name in MODEL)


def test_a_mixture_by_hand() -> None:
    candidates, shares = others(3), [0.2, 0.5, 0.3]
    del candidates[1]["b"]
    mixed = interpolate_towards(MODEL, candidates, shares)
    for name, own in MODEL.items():
        expected = own.double().numpy()
        for one, share in zip(candidates, shares, strict=True):
            if name in one:
                expected = expected + share * (one[name].double().numpy() - own.double().numpy())
        np.testing.assert_allclose(mixed[name], expected, atol=1e-6)
        assert mixed[name].dtype == own.dtype


def test_distances() -> None:
    (other,) = others(1)
    gaps = np.concatenate([(MODEL[n] - other[n]).numpy().ravel() for n in MODEL])
    assert distance(MODEL, other) == pytest.approx(np.sqrt((gaps**2).sum()), rel=1e-6)
    assert distance(MODEL, {"b": other["b"]}) == pytest.approx(float((MODEL["b"] - other["b"]).norm()), rel=1e-6)
    assert distance(MODEL, MODEL) == distance(MODEL, {}) == 0


def test_unequal_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one distance per loss"):
        model_gains(1.0, [1.0], [])
    with pytest.raises(ValueError, match="expected one share per model"):
        interpolate_towards(MODEL, others(2), [1.0])


def test_small_gains_of_large_losses_are_not_lost() -> None:
    gains = model_gains(1e4, [1e4 - 1e-5], [1e-2])
    assert float(gains) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mixture_shares_no_memory_with_the_model(dtype: torch.dtype) -> None:
    model = {"w": torch.ones(3, dtype=dtype)}
    for candidates, shares in (([], []), ([{"w": torch.zeros(3, dtype=dtype)}], [0.0])):
        mixed = interpolate_towards(model, candidates, shares)
        assert torch.equal(mixed["w"], model["w"])
        assert mixed["w"].data_ptr() != model["w"].data_ptr()
