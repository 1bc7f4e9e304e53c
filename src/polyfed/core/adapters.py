"""Low-rank adapters (LoRA: Hu et al., ICLR 2022) in a client's network, with ranks by client.

The adapter of a linear layer with a frozen weight W (O, I) is A (r, I) and B (O, r); the layer computes with
W + offset + s B A, where s = alpha / r. The adapter's update is s B A = sum_j s b_j a_j over its r components, a_j a
row of A and b_j a column of B.

A rank above what a layer can have, min(inputs, outputs), is that. The head has no adapter and is trained; all else is
frozen. Client k has the (k mod L + 1)-th of a list of L ranks, as profiles of devices are assigned.

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.message import Group
from polyfed.core.modules import HEAD, float_state
from polyfed.core.upload_forms import Members, UploadContext, alike
from polyfed.errors import ConfigError
from polyfed.models.split import SplitModel

A, B = "lora_a", "lora_b"  # names of an adapter's tensors within its layer


class Adapter(NamedTuple):
    """a: A (r, I). b: B (O, r). scale: s."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """r, the number of components."""
        return len(self.a)

    @property
    def scaled_b(self) -> Tensor:
        """B times s, in float64."""
        return self.b.double() * self.scale


def product(adapter: Adapter) -> Tensor:
    """The update s B A (O, I)."""
    return (adapter.scale * (adapter.b.double() @ adapter.a.double())).to(adapter.a.dtype)


def energy_beyond(update_OI: Tensor, rank: int) -> float:
    """Share of the sum of squares of the singular values beyond the first `rank`; 0 for an update of zero."""
    smaller = update_OI.double() if len(update_OI) <= update_OI.shape[1] else update_OI.double().T
    # With the vectors, unused: without, PyTorch rounds otherwise when a mode, as one that counts operations, is on.
    values, _ = torch.linalg.eigh(smaller @ smaller.T)
    energy = values.clamp(min=0).flip(0)  # squares of singular values, falling
    total = float(energy.sum())
    return float(energy[rank:].sum()) / total if total else 0.0


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter; its weight and bias keep their names, and take no gradient.

    Args:
        layer: its weight W (O, I) and bias are shared. rank, alpha: see the top of this file.

    Attributes:
        lora_a, lora_b: A (r, I), drawn as PyTorch draws a linear layer, and B (O, r), zero.
        offset: (O, I), is added to the weight and takes no gradient; None: nothing is.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, with_offset: bool = False) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        rank = min(rank, layer.in_features, layer.out_features)
        self.scale = alpha / rank
        self.weight = layer.weight.requires_grad_(False)
        self.bias = None if layer.bias is None else layer.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(draw_a(layer.weight.new_empty(rank, layer.in_features)))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        zeros = torch.zeros_like(layer.weight)
        self.offset = nn.Parameter(zeros, requires_grad=False) if with_offset else None

    @property
    def adapter(self) -> Adapter:
        """The present adapter; not a copy."""
        return Adapter(self.lora_a.detach(), self.lora_b.detach(), self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        weight = self.weight if self.offset is None else self.weight + self.offset
        plain = functional.linear(x, weight, self.bias)
        return plain + self.scale * functional.linear(functional.linear(x, self.lora_a), self.lora_b)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.in_features}, {self.out_features}, rank={len(self.lora_a)}, scale={self.scale:g}"


def draw_a(a: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws A (r, I) in place, uniformly within 1 / sqrt(I) of 0."""
    bound = 1 / math.sqrt(a.shape[1])
    return nn.init.uniform_(a, -bound, bound, generator=generator)


def add_adapters(network: nn.Module, rank: int, alpha: float, layers: str, with_offset: bool = False) -> nn.Module:
    """The split model with an adapter for each of its linear layers but the head, frozen but for adapters and head.

    Args:
        network: is changed; what is returned is to be used. layers: the last names of layers that get one, as in
            "qkv out"; "" for all. with_offset: adapted layers have an offset, zero.

    Raises:
        ConfigError: a plain network, or there is no such layer.
    """
    if not isinstance(network, SplitModel):
        raise ConfigError(
            f"adapters need split models, got a plain {type(network).__name__}; split it with "
            "polyfed.split(module, head=..., extractor=...)"
        )
    model = network
    found = _linear_layers(model, layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.part_of(name) == "head")
    made: dict[nn.Module, nn.Module] = {}
    for layer in found.values():
        if layer not in made:
            made[layer] = AdaptedLinear(layer, rank, alpha, with_offset)
    return model.with_layers({name: made[layer] for name, layer in found.items()})


def any_parameter(name: str) -> bool:
    """As `Phase.trains`: all that takes a gradient, so that layers of which nothing does run in eval mode."""
    return True


def _linear_layers(model: SplitModel, layers: str) -> dict[str, nn.Linear]:
    """The linear layers that get an adapter, by name.

    Those of a class of their own are left out, as attention of PyTorch reads their weights without calling them.
    """
    whole = [name for name, part in model.named_modules() if isinstance(part, nn.TransformerEncoderLayer)]
    linear = {
        name: part
        for name, part in model.named_modules(remove_duplicate=False)
        if type(part) is nn.Linear
        and "weight" in part._parameters  # not what torch.nn.utils.weight_norm computes
        and model.part_of(f"{name}.weight") != "head"
        and not any(name.startswith(f"{prefix}.") for prefix in whole)
    }
    wanted = layers.split()
    found = {name: part for name, part in linear.items() if not wanted or name.rpartition(".")[2] in wanted}
    if not found:
        known = sorted({name.rpartition(".")[2] for name in linear})
        which = f"of these names ({', '.join(wanted)}); it has {', '.join(known)}" if wanted and known else "for one"
        raise ConfigError(
            f"{model.architecture}: expected a linear layer besides its head, to have an adapter, got none {which}"
        )
    return found


def adapted_layers(network: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers with adapters, by name; shared ones once."""
    return {name: part for name, part in network.named_modules() if isinstance(part, AdaptedLinear)}


def adapter_state(network: nn.Module) -> dict[str, Tensor]:
    """A and B of all adapters by their names in the network, detached, not copied."""
    return group_of({name: layer.adapter for name, layer in adapted_layers(network).items()})


def own_adapters(known: UploadContext, name: str) -> Members:
    """Form of an upload: A and B of the client's variant of the one architecture."""
    server = known.server
    (architecture,) = server.architectures
    return alike(adapter_state(server.model(architecture, {}, known.method.variant(server, known.client_id))))


def head_state(network: nn.Module) -> dict[str, Tensor]:
    """The head's tensors by their names in the network."""
    return float_state(network, parts=HEAD)


def group_of(adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """A and B of adapters by layer, as a message has them."""
    found = {}
    for name, adapter in adapters.items():
        found[f"{name}.{A}"] = adapter.a
        found[f"{name}.{B}"] = adapter.b
    return found


def adapters_of(group: Group, alpha: float | None = None) -> dict[str, Adapter]:
    """The adapters by layer of what `group_of` gives, with s = alpha / r, or 1 without alpha."""
    found = {}
    for key, a in group.items():
        name, _, kind = key.rpartition(".")
        if kind == A:
            found[name] = Adapter(a, group[f"{name}.{B}"], 1.0 if alpha is None else alpha / len(a))
    return found
