"""Adapters in the files of Hugging Face's `peft`: adapter_config.json and adapter_model.safetensors.

A network's adapters and head, without its base: `peft.PeftModel.from_pretrained(base, folder)` gives the same logits,
where `base` is the network as it was before it had adapters, with the base's weights. Names are those that the network
has without polyfed.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field
from torch import Tensor, nn

from polyfed.core.adapters import AdaptedLinear, adapted_layers, head_state
from polyfed.core.modules import as_split_model, load_state
from polyfed.errors import ConfigError
from polyfed.functional.lora import Adapter, rescale
from polyfed.results.fields import Count, Number, Record, validated
from polyfed.results.read import parse_json

__all__ = ["load_peft", "save_peft"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WRAPPER = "original."  # before the names of a module that `polyfed.split` has cut


class _Config(Record):
    """Of adapter_config.json what says how much an update counts: alpha / rank, by layer."""

    r: Count
    lora_alpha: Number
    rank_pattern: dict[str, Count] = Field({})
    alpha_pattern: dict[str, Number] = Field({})


def save_peft(network: nn.Module, folder: str | Path) -> None:
    """Write a network's adapters and head.

    Args:
        network: with adapters, such as `Federation.export` gives of fedlora. folder: is made.

    Raises:
        ConfigError: it has no adapters, or something was added to its base, which such files cannot hold.
    """
    from safetensors.torch import save_file

    layers = adapted_layers(network)
    if not layers:
        raise ConfigError(f"expected a network with adapters, got a {type(network).__name__} without")
    changed = [name for name, layer in layers.items() if layer.offset is not None and layer.offset.any()]
    if changed:
        raise ConfigError(
            f"expected a base as it was, got '{changed[0]}' with updates added (aggregation 'stack' and "
            "'select-and-fold' do so); export the whole network instead"
        )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {f"{_PREFIX}{_plain(name)}": tensor for name, tensor in head_state(network).items()}
    for name, layer in layers.items():
        tensors[f"{_PREFIX}{_plain(name)}.lora_A.weight"] = layer.adapter.a
        tensors[f"{_PREFIX}{_plain(name)}.lora_B.weight"] = layer.adapter.b
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, place / WEIGHTS)
    (place / CONFIG).write_text(json.dumps(_config(network, layers), indent=2) + "\n", encoding="utf-8")


def load_peft(network: nn.Module, folder: str | Path) -> None:
    """Read adapters and head into a network that has adapters for the same layers, of the same ranks.

    Raises:
        ConfigError: there are no such files, or they are of other layers or ranks.
    """
    config, stored = _read(Path(folder))
    found: dict[str, Tensor] = {}
    for name, layer in adapted_layers(network).items():
        plain = _plain(name)
        a = stored.get(f"{plain}.lora_A.weight")
        b = stored.get(f"{plain}.lora_B.weight")
        if a is None or b is None or a.shape != layer.lora_a.shape or b.shape != layer.lora_b.shape:
            found_rank = "none" if a is None or b is None else f"one of rank {len(a)}"
            raise ConfigError(
                f"expected an adapter of rank {len(layer.lora_a)} for '{plain}', got {found_rank} in {folder}"
            )
        scale = config.alpha_pattern.get(plain, config.lora_alpha) / config.rank_pattern.get(plain, config.r)
        adapter = rescale(Adapter(a, b, scale), layer.scale)
        found |= {f"{name}.lora_a": adapter.a, f"{name}.lora_b": adapter.b}
    found |= {name: stored[_plain(name)] for name in head_state(network) if _plain(name) in stored}
    load_state(network, found)


def _read(folder: Path) -> tuple[_Config, dict[str, Tensor]]:
    """What the files say, and their tensors by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        config = validated(_Config, parse_json((folder / CONFIG).read_bytes()))
        tensors = load((folder / WEIGHTS).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"expected {CONFIG} and {WEIGHTS} of peft in {folder}, got others: {error}") from None
    return config, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _config(network: nn.Module, layers: dict[str, AdaptedLinear]) -> dict[str, object]:
    """What `peft` must know: rank and alpha of each layer, and where the head is."""
    ranks = {_plain(name): len(layer.lora_a) for name, layer in layers.items()}
    alphas = {_plain(name): layer.scale * len(layer.lora_a) for name, layer in layers.items()}
    model = as_split_model(network)
    heads = {_plain(name).rpartition(".")[0] for name in model.names("head")}
    return {
        "peft_type": "LORA",
        "r": max(ranks.values()),
        "lora_alpha": next(iter(alphas.values())),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": list(ranks),
        "modules_to_save": sorted(heads),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _plain(name: str) -> str:
    """A tensor's or layer's name without polyfed's wrapper."""
    return name.removeprefix(_WRAPPER)
