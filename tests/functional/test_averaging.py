"""Weighted, layer-wise and normalized means against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional import averaging
from polyfed.functional.averaging import (
    layer_wise_mean,
    normalize,
    normalized_mean,
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
