"""The small transformer for texts: sizes, padding, fixed word vectors."""

from __future__ import annotations

import pytest
import torch

from polyfed.errors import ConfigError
from polyfed.models import build
from polyfed.models.texts import TextEncoder

IDS = torch.tensor([[5, 3, 9, 0, 0, 0], [4, 4, 2, 7, 8, 1], [0, 0, 0, 0, 0, 0]])


def test_padding_changes_nothing():
    torch.manual_seed(0)
    model = build("text-transformer", (6,), 2, words=12).eval()
    whole = model(IDS)
    assert torch.allclose(whole[:1], model(IDS[:1, :3]), atol=1e-6)
    other = IDS.clone()
    other[0, 1] = 6
    assert not torch.allclose(model(other)[0], whole[0])
    assert whole.isfinite().all()  # a text without words, too
    assert not model.extract(IDS)[2].any()


def test_sizes():
    with torch.device("meta"):
        model = build("text-transformer", (25,), 2, words=100)
    total = sum(p.numel() for p in model.parameters())
    assert total - 100 * 64 == 101_826
    assert model.feature_dim == 64
    assert {model.part_of(name) for name in model.state_dict()} == {"extractor", "intermediate", "head"}


def test_given_word_vectors_stay_and_are_mapped():
    vectors = torch.randn(12, 7)
    encoder = TextEncoder(vectors, 6)
    assert encoder(IDS).shape == (3, 64)
    assert all("vectors" not in name for name in encoder.state_dict())
    assert encoder.map.in_features == 7


def test_images_are_refused():
    with pytest.raises(ConfigError, match=r"text-transformer needs texts \(length,\), got the shape \(3, 8, 8\)"):
        build("text-transformer", (3, 8, 8), 2)
