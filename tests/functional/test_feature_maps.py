"""Fixed random maps: their form by the inputs, and each against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional.feature_maps.feature_map import FeatureMap, count_features, draw_map


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IMAGES = torch.randn(3, 2, 12, 10, generator=stream(1))
SERIES = torch.randn(3, 4, 30, generator=stream(2))
TABLE = torch.tensor([[0.5, 2.0, 0.0], [-1.0, 0.0, 1.0]])  # a number and columns of 3 and 2 categories
TEXTS = torch.tensor([[5, 1, 5, 0, 0], [2, 3, 4, 2, 2]])


@pytest.mark.parametrize(
    ("x", "width"),
    [(IMAGES, 594), (torch.randn(2, 1, 8, 8), 600), (SERIES, 600), (TABLE, 601), (TEXTS, 601)],
    ids=["images", "small images", "series", "table", "texts"],
)
def test_the_width_and_the_stream(x: Tensor, width: int) -> None:
    drawn = draw_map(x, 601, stream())
    found = drawn(x)
    assert found.shape == (len(x), width)
    assert count_features(x[:0], 601) == (None if x is TEXTS else width)
    assert found.dtype == torch.float32
    torch.testing.assert_close(torch.cat([drawn(row.unsqueeze(0)) for row in x]), found)
    assert torch.equal(draw_map(x[:1] * 0, 601, stream())(x), found)  # the form of inputs counts alone
    assert x is TEXTS or not torch.equal(draw_map(x, 601, stream(1))(x), found)


@pytest.mark.parametrize("x", [IMAGES, SERIES, TABLE], ids=["images", "series", "table"])
def test_unit_features_have_norm_one_without_what_is_common(x: Tensor) -> None:
    plain, drawn = draw_map(x, 90, stream()), draw_map(x, 90, stream(), unit=True)
    assert all(torch.equal(drawn.tensors[name], tensor) for name, tensor in plain.tensors.items())
    found = drawn(5 * x).double()
    norms = found.norm(dim=1)
    assert norms.max() <= 1
    torch.testing.assert_close(norms, torch.ones(len(x), dtype=torch.float64), rtol=0, atol=2e-6)
    assert (found @ drawn.tensors["common"].double()).abs().max() < 1e-5
    features = plain(5 * x)
    residual = features - (features @ drawn.tensors["common"])[:, None] * drawn.tensors["common"]
    torch.testing.assert_close(found.float(), residual / residual.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_filters_have_norm_one_and_no_mean() -> None:
    drawn = draw_map(IMAGES, 90, stream())
    assert drawn.tensors["filters"].shape == (10, 2, 5, 5)
    torch.testing.assert_close(drawn.tensors["filters"].flatten(1).norm(dim=1), torch.ones(10))
    torch.testing.assert_close(drawn.tensors["filters"].sum(dim=(1, 2, 3)), torch.zeros(10), atol=1e-5, rtol=0)
    maps = torch.relu(torch.nn.functional.conv2d(IMAGES, drawn.tensors["filters"], drawn.tensors["bias"], padding=2))
    torch.testing.assert_close(drawn(IMAGES)[:, 0], maps[:, 0, :4, :4].mean(dim=(1, 2)).sqrt())


def test_kernels_against_a_loop() -> None:
    drawn = draw_map(SERIES, 80, stream())
    of_kernels = {
        int(name.split()[-1]): rows.double().numpy() for name, rows in drawn.tensors.items() if "kernels" in name
    }
    every = [(dilation, place) for dilation in sorted(of_kernels) for place in range(len(of_kernels[dilation]))]
    kernels = np.concatenate([*of_kernels.values()])
    assert {int((k != 0).any(0).sum()) for k in kernels} == {7, 9, 11}
    assert len({int((k != 0).any(1).sum()) for k in kernels}) > 1, "kernels see some of the channels"
    assert max(of_kernels) > 1
    found = FeatureMap(dict(sorted(drawn.tensors.items(), reverse=True)))(SERIES)  # in a file, names have another order
    assert torch.equal(found, drawn(SERIES))
    for place in (0, 7, 39):
        dilation, row = every[int(drawn.tensors["place"][place])]
        padded = np.pad(SERIES[1].double().numpy(), ((0, 0), (5 * dilation, 5 * dilation)))
        kernel, bias = of_kernels[dilation][row], float(drawn.tensors[f"bias of dilation {dilation}"][row])
        values = [(kernel * padded[:, step : step + 10 * dilation + 1 : dilation]).sum() + bias for step in range(30)]
        assert float(found[1, place]) == pytest.approx(np.maximum(values, 0).mean() ** 0.5, abs=1e-5)
        assert float(found[1, 40 + place]) == pytest.approx(np.mean(np.array(values) > 0), abs=1e-5)


def test_categories_are_one_hot() -> None:
    drawn = draw_map(TABLE, 16, stream(), categories=(0, 3, 2))
    hot = torch.tensor([[0.5, 0, 0, 1, 1, 0], [-1.0, 1, 0, 0, 0, 1]])
    torch.testing.assert_close(drawn(TABLE), torch.relu(hot @ drawn.tensors["projection"] + drawn.tensors["bias"]))


def test_words_count_once_and_padding_never() -> None:
    drawn = draw_map(TEXTS, 16, stream(), words=6)
    assert drawn(TEXTS).tolist() == [[0, 1, 0, 0, 0, 1], [0, 0, 1, 1, 1, 0]]
    assert draw_map(TEXTS, 4, stream())(TEXTS).tolist() == [[0, 1, 0, 0], [1, 0, 1, 1]], "5 is 1, and 4 is 0"
