"""Adapters in a network: which layers have one, what is frozen, what they compute, merging."""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.adapters import Adapter, adapted_layers, adapter_state, add_adapters, draw_a, energy_beyond, product
from polyfed.core.modules import float_state
from polyfed.models.adapt import split
from polyfed.models.networks.vit import vision_transformer
from polyfed.models.split import SplitModel
from tests.helpers.toys import net


def vit() -> SplitModel:
    torch.manual_seed(0)
    return vision_transformer((1, 8, 8), 3, depth=2, width=12, heads=3)


def adapted(model: SplitModel, rank: int = 2, layers: str = "", offset: bool = False) -> SplitModel:
    """With a B other than zero, and an offset if there is one."""
    found = add_adapters(model, rank, 3.0, layers, offset)
    assert isinstance(found, SplitModel)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(found).values():
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=draws) / 10)
            if layer.offset is not None:
                layer.offset.copy_(torch.randn(layer.offset.shape, generator=draws) / 10)
    return found


def test_fresh_adapters_change_nothing() -> None:
    x = torch.randn(4, 1, 8, 8)
    before = vit()(x)
    model = add_adapters(vit(), 2, 3.0, "", True)
    assert torch.equal(model(x), before)
    assert all(layer.lora_a.any() for layer in adapted_layers(model).values())


@pytest.mark.parametrize("offset", [False, True])
def test_a_layer_computes_with_the_sum(offset: bool) -> None:
    model = adapted(vit(), offset=offset).eval()
    layer = adapted_layers(model)["extractor.block1.attention.qkv"]
    rows = torch.randn(5, 12)
    weight = layer.weight + layer.scale * layer.lora_b @ layer.lora_a
    if layer.offset is not None:
        weight = weight + layer.offset
    assert torch.allclose(layer(rows), rows @ weight.T + layer.bias, atol=1e-6)


def test_what_is_trained_are_adapters_and_head() -> None:
    model = adapted(vit(), layers="qkv out")
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"qkv", "out"}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {*adapter_state(model), "head.weight", "head.bias"}
    assert set(float_state(vit())) == set(float_state(model)) - set(adapter_state(model))


def test_a_rank_is_at_most_what_the_layer_can_have() -> None:
    layers = adapted_layers(adapted(net(width=6, features=5), rank=64))
    assert {name: len(layer.lora_a) for name, layer in layers.items()} == {
        "extractor.linear": 4,
        "intermediate.block1.linear": 6,
        "intermediate.last.linear": 5,
    }
    assert {layer.scale for layer in layers.values()} == {3 / 4, 3 / 6, 3 / 5}


def test_split_modules_have_adapters_too() -> None:
    """Their forward is recorded anew; part and export know the new tensors."""
    torch.manual_seed(0)
    inner = nn.Sequential(OrderedDict(one=nn.Linear(4, 6), act=nn.Tanh(), two=nn.Linear(6, 5), last=nn.Linear(5, 3)))
    x = torch.randn(3, 4)
    before = inner(x)
    model = add_adapters(split(copy.deepcopy(inner), head="last", extractor="one"), 2, 3.0, "")
    assert torch.equal(model(x), before)
    assert isinstance(model, SplitModel)
    assert model.part_of("original.one.lora_a") == "extractor"
    assert model.part_of("original.two.lora_b") == "intermediate"
    moved = adapted(split(inner, head="last", extractor="one"), layers="two")
    assert not torch.allclose(moved(x), before)


class Shared(nn.Module):
    """The same layer twice, and attention of PyTorch, which reads weights without calling layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(self.second(self.first(x).tanh())[:, None])
        logits: torch.Tensor = self.head(self.attention(tokens, tokens, tokens)[0][:, 0])
        return logits


def test_a_layer_used_twice_has_one_adapter_and_layers_that_are_never_called_have_none() -> None:
    model = add_adapters(split(Shared(), head="head", extractor=None), 2, 3.0, "")
    assert list(adapted_layers(model)) == ["original.first"]
    assert model.get_submodule("original.first") is model.get_submodule("original.second")


def test_a_is_drawn_within_one_over_the_root_of_inputs() -> None:
    a = draw_a(torch.empty(8, 16), torch.Generator().manual_seed(0))
    assert 0.2 < float(a.abs().max()) <= 0.25
    assert float(a.min()) < -0.2
    assert torch.equal(a, draw_a(torch.empty(8, 16), torch.Generator().manual_seed(0)))


def test_energy_beyond_a_rank() -> None:
    g = torch.Generator().manual_seed(0)
    adapter = Adapter(torch.randn(4, 5, generator=g), torch.randn(7, 4, generator=g), 1.5)
    update = product(adapter)
    np.testing.assert_allclose(update.numpy(), 1.5 * adapter.b.numpy() @ adapter.a.numpy(), atol=1e-5)
    np.testing.assert_allclose(adapter.scaled_b.numpy(), 1.5 * adapter.b.numpy())
    squares = np.linalg.svd(update.double().numpy(), compute_uv=False) ** 2
    for rank in range(6):
        assert energy_beyond(update, rank) == pytest.approx(squares[rank:].sum() / squares.sum(), abs=1e-9)
        assert energy_beyond(update.T, rank) == pytest.approx(energy_beyond(update, rank), abs=1e-12)
    assert energy_beyond(torch.zeros(3, 2), 1) == 0.0
