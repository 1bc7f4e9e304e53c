"""Weighted, layer-wise and normalized means, and mixtures, against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional import averaging
from polyfed.functional.averaging import (
    distance,
    interpolate_towards,
    layer_wise_mean,
    model_gains,
    normalize,
    normalize_positive,
    normalized_mean,
    normalizer,
    weighted_mean,
)


def model(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 4, generator=g),
        "b": torch.randn(4, generator=g) * 1e-3,
        "steps": torch.tensor(seed, dtype=torch.int64),
    }


def test_against_numpy():
    models, n = [model(i) for i in range(5)], [10, 0.5, 3, 0, 7]
    mean = weighted_mean(models, n)
    for name in ("w", "b"):
        expected = sum(k * m[name].numpy().astype(np.float64) for k, m in zip(n, models, strict=True)) / sum(n)
        np.testing.assert_array_equal(mean[name].numpy(), expected.astype(np.float32))
    assert mean["steps"] == 4
    assert weighted_mean(models[:4], n[:4])["steps"] == 2, "a model of weight 0 has no say"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_identical_models_average_to_themselves_bit_for_bit(dtype):
    one = {"w": torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(dtype)}
    mean = weighted_mean([one] * 7, [0.1, 3, 17, 1e-7, 5, 5, 2.3])
    assert mean["w"].dtype == dtype
    assert torch.equal(mean["w"], one["w"])


@pytest.mark.parametrize("at_once", [1, 5, 11])
def test_the_mean_does_not_depend_on_what_is_summed_at_once_or_lies_where_in_memory(monkeypatch, at_once):
    draws, n = torch.Generator().manual_seed(0), [1, 2, 0, 4]
    models = [{"w": torch.randn(2, 3, 4, 5, generator=draws)} for _ in n]
    whole = weighted_mean(models, n)["w"]
    mixed = [{"w": m["w"].to(memory_format=torch.channels_last) if i % 2 else m["w"]} for i, m in enumerate(models)]
    strided = [{"w": m["w"].transpose(0, 3).contiguous().transpose(0, 3)} for m in models]
    monkeypatch.setattr(averaging, "ENTRIES_AT_ONCE", at_once)
    for given in (models, mixed, strided):
        mean = weighted_mean(given, n)["w"]
        assert torch.equal(mean, whole)
        assert mean.stride() == given[0]["w"].stride()


def test_nothing_is_shared_with_the_inputs_or_tracked():
    a = {"w": torch.ones(2, dtype=torch.float64, requires_grad=True), "n": torch.tensor([3])}
    for mean in (weighted_mean([a], [1]), layer_wise_mean([a], [1], a), layer_wise_mean([{}], [1], a)):
        assert mean.keys() == a.keys()
        for name in a:
            assert mean[name].data_ptr() != a[name].data_ptr()
            assert not mean[name].requires_grad
            assert torch.equal(mean[name], a[name])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "one weight per model"),
        ([1.0], "one weight per model"),
        ([0, 0], "positive"),
        ([1, -1], "at position 1"),
        ([float("nan"), 1], "at position 0"),
        ([float("inf"), 1], "finite"),
        ([1e308, 1e308], "finite sum"),
    ],
)
def test_bad_weights(weights, message):
    for mean in (weighted_mean, lambda m, w: layer_wise_mean(m, w, model(0))):
        with pytest.raises(ValueError, match=message):
            mean([model(0), model(1)], weights)
    if not weights:
        with pytest.raises(ValueError, match="at least one"):
            normalize(weights)


def test_models_that_do_not_fit():
    a, b = model(0), model(1)
    with pytest.raises(ValueError, match="only one of models 0 and 1 has 'b'"):
        weighted_mean([a, {k: v for k, v in b.items() if k != "b"}], [1, 1])
    with pytest.raises(ValueError, match=r"'w' of shape \(3, 4\).*got \(4, 3\) from model 1"):
        weighted_mean([a, {**b, "w": b["w"].T}], [1, 1])
    with pytest.raises(ValueError, match="'extra' from model 1"):
        layer_wise_mean([a, {"extra": b["w"]}], [1, 1], a)
    with pytest.raises(ValueError, match="'w' of shape"):
        layer_wise_mean([{"w": b["w"].T}], [1], a)


def test_layer_wise_of_one_architecture_is_the_plain_mean_and_a_sole_holder_keeps_its_tensor():
    """Of weights whose shares do not sum to exactly 1: to normalize these once more would change the last bits."""
    weights = [8, 9, 9, 9]
    assert sum(normalize(weights)) != 1
    models, base = [model(i) for i in range(4)], model(9)
    for name, tensor in weighted_mean(models, weights).items():
        assert torch.equal(layer_wise_mean(models, weights, base)[name], tensor)
    only = {"b": models[0]["b"]}
    mean = layer_wise_mean([only, {"w": models[1]["w"]}], [1, 3], base)
    assert torch.equal(mean["b"], only["b"])
    assert torch.equal(mean["steps"], base["steps"])


@pytest.mark.parametrize("largest", [0, 1, 2])
def test_of_counters_the_largest_is_kept_whoever_has_it(largest):
    models = [{"n": torch.tensor([9 if i == largest else i, -i])} for i in range(3)]
    for mean in (weighted_mean(models, [1, 1, 1]), layer_wise_mean(models, [1, 1, 1], models[0])):
        assert mean["n"].tolist() == [9, 0]


@pytest.mark.parametrize("trial", range(8))
def test_an_optimizer_under_one_gradient(trial):
    """w^t - w = lr a g, for torch's own SGD with momentum on g w + (mu/2) (w - w^t)^2; gradients of both signs."""
    draws = np.random.default_rng(trial)
    steps, rho = int(draws.integers(1, 30)), float(draws.choice([0.0, 0.5, 0.9]))
    lr, mu = 0.05, float(draws.choice([0.0, 0.1, 3.0]))
    g, start = torch.tensor([2.0, -0.5], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    w = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([w], lr, momentum=rho)
    for _ in range(steps):
        optimizer.zero_grad()
        ((g * w).sum() + mu / 2 * (w - start).square().sum()).backward()
        optimizer.step()
    torch.testing.assert_close(start - w.detach(), lr * normalizer(steps, rho, lr * mu) * g, rtol=1e-9, atol=0)


def models():
    g = torch.Generator().manual_seed(0)
    base = {"all": torch.randn(3, generator=g), "two": torch.randn(2, 2, generator=g), "none": torch.ones(1)}
    made = [{"all": torch.randn(3, generator=g), "two": torch.randn(2, 2, generator=g)} for _ in range(3)]
    del made[0]["two"]
    return base, made


def test_normalized_mean_by_hand():
    base, made = models()
    n, a = [1.0, 2.0, 5.0], [3.0, 1.5, 7.0]
    found = normalized_mean(made, n, a, base)
    for name, places in (("all", [0, 1, 2]), ("two", [1, 2])):
        p = np.array([n[i] for i in places]) / sum(n[i] for i in places)
        tau = sum(q * a[i] for q, i in zip(p, places, strict=True))
        w = base[name].double().numpy()
        d = [(w - made[i][name].double().numpy()) / a[i] for i in places]
        np.testing.assert_allclose(found[name], w - tau * sum(q * x for q, x in zip(p, d, strict=True)), atol=1e-6)
        assert {-1, 1} <= {int(s) for x in d for s in np.sign(x).ravel()}
    assert torch.equal(found["none"], base["none"])
    assert found["none"] is not base["none"]


def test_equal_normalizers_give_the_mean():
    base, made = models()
    found, mean = normalized_mean(made, [1, 2, 5], [4.2] * 3, base), layer_wise_mean(made, [1, 2, 5], base)
    assert all(torch.allclose(found[name], mean[name], atol=1e-6) for name in base)


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
