"""Adapters in the files of peft: there and back, and equal logits in peft itself, also of networks of transformers."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict

import pytest
import torch
from torch import nn

from polyfed.core.adapters import adapted_layers, add_adapters, merge_adapters
from polyfed.engine.peft_adapters import load_peft, save_peft
from polyfed.errors import ConfigError
from polyfed.models.adapt import split
from tests.helpers.toys import net


def drawn(model: nn.Module) -> nn.Module:
    """With a B other than zero."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=draws))
    return model


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(one=nn.Linear(4, 6), act=nn.Tanh(), two=nn.Linear(6, 5), head=nn.Linear(5, 3)))


def test_there_and_back(tmp_path):
    model = drawn(add_adapters(net(), 4, 6.0, ""))
    save_peft(model, tmp_path)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told["rank_pattern"]["extractor.linear"] == 4
    assert told["modules_to_save"] == ["head"]
    other = add_adapters(net(), 4, 3.0, "")  # another alpha: B is scaled
    base = {name: t for name, t in model.state_dict().items() if "lora" not in name and "head" not in name}
    other.load_state_dict(base, strict=False)
    load_peft(other, tmp_path)
    x = torch.randn(5, 4)
    assert torch.allclose(other(x), model(x), atol=1e-6)
    with pytest.raises(ConfigError, match=r"expected an adapter of rank 2 for 'extractor\.linear', got one of rank 4"):
        load_peft(add_adapters(net(), 2, 6.0, ""), tmp_path)


def test_what_such_files_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected a network with adapters"):
        save_peft(net(), tmp_path)
    model = add_adapters(net(), 2, 6.0, "", with_offset=True)
    save_peft(model, tmp_path / "zero")
    with torch.no_grad():
        adapted_layers(model)["extractor.linear"].offset += 1
    with pytest.raises(ConfigError, match=r"expected a base as it was, got 'extractor\.linear' with updates added"):
        save_peft(model, tmp_path)


def test_peft_gives_the_same_logits(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = plain()
    model = drawn(add_adapters(split(copy.deepcopy(base), head="head", extractor="one"), 2, 6.0, "")).eval()
    save_peft(model, tmp_path)
    x = torch.randn(5, 4)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.allclose(theirs(x), model(x), atol=1e-6)


def test_networks_of_transformers_have_adapters_in_their_attention_and_peft_reads_them(tmp_path):
    """Made of a configuration; nothing is downloaded."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    base = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(2, 3, 8, 8)
    before = base(x).logits
    model = add_adapters(split(copy.deepcopy(base), head="classifier", extractor=None), 2, 6.0, "query value")
    assert torch.allclose(model.eval()(x), before, atol=1e-6)
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"query", "value"}
    drawn(model)
    assert not torch.allclose(model(x), before, atol=1e-3)
    assert torch.allclose(merge_adapters(model)(x), model(x), atol=1e-5)
    save_peft(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.allclose(theirs(x).logits, model(x), atol=1e-5)
