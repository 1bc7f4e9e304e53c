"""Which entries of tensors are shared, by masks: what is sent and put back, and means entry by entry.

A mask is a boolean tensor, True where the entry is its owner's own and is not shared. A name that a group of masks does
not have is a tensor that is shared whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.functional.averaging import layer_wise_mean

Masks = Mapping[str, Tensor]


def pack_bits(mask: Tensor) -> Tensor:
    """Eight entries of a mask in a byte, the first in the lowest bit; (ceil(n / 8),) uint8."""
    bits = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).reshape(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_bits`: a boolean tensor of this shape.

    Raises:
        ValueError: not as many bytes as the shape needs.
    """
    count = torch.Size(shape).numel()
    if bits.dtype != torch.uint8 or bits.shape != (-(-count // 8),):
        expected = f"{-(-count // 8)} bytes for a mask of shape {tuple(shape)}"
        raise ValueError(f"expected {expected}, got {bits.dtype} of shape {tuple(bits.shape)}")
    entries = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return entries.flatten()[:count].reshape(tuple(shape)).bool()


def select_shared(tensors: Mapping[str, Tensor], masks: Masks) -> dict[str, Tensor]:
    """What is sent: of a tensor with a mask the entries where it is False, (n,); all others as they are.

    Tensors on a GPU are not waited for if the masks are in main memory.
    """
    return {name: t.flatten()[_shared_places(masks[name], t)] if name in masks else t for name, t in tensors.items()}


def _shared_places(mask: Tensor, tensor: Tensor) -> Tensor:
    """(n,) int64, on the tensor's device: places in the flat tensor of the entries where the mask is False."""
    return (~mask).flatten().nonzero().squeeze(1).to(tensor.device)


def fill_personal(values: Mapping[str, Tensor], masks: Masks, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `select_shared`: whole tensors with `values` where the masks are False, and `own` elsewhere.

    Raises:
        ValueError: not as many values as the mask leaves.
    """
    whole = {}
    for name, value in values.items():
        if name not in masks:
            whole[name] = value
            continue
        tensor = own[name].detach()
        places = _shared_places(masks[name], tensor)
        if value.shape != places.shape:
            raise ValueError(f"expected {len(places)} shared entries of '{name}', got shape {tuple(value.shape)}")
        whole[name] = tensor.flatten().index_copy(0, places, value.to(tensor)).reshape(tensor.shape)
    return whole


def entry_wise_mean(
    models: Sequence[Mapping[str, Tensor]], weights: Sequence[float], masks: Sequence[Masks], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Entry by entry the mean over the models that have the tensor and share the entry.

    An entry that nobody shares keeps the value that it has in `base`. Where nobody has a mask for a tensor this is
    `averaging.layer_wise_mean`, bit for bit. Sums are float64 and cast back.

    Args:
        models, base: as in `layer_wise_mean`, with the same errors; what models hold in places that are not shared has
            no say.
        weights: one positive number per model; an entry's are divided by their sum over those who share it.
    """
    mean = layer_wise_mean(models, weights, base)
    for name in {name for group in masks for name in group if name in base}:
        parts = zip(models, weights, masks, strict=True)
        held = [(m[name], weight, group.get(name)) for m, weight, group in parts if name in m]
        total = torch.zeros_like(base[name], dtype=torch.float64, requires_grad=False)
        count = torch.zeros_like(total)
        for tensor, weight, mask in held:
            share = torch.full_like(count, weight) if mask is None else weight * (~mask).to(count)
            total += share * tensor.detach()
            count += share
        entries = (total / count.clamp(min=torch.finfo(count.dtype).tiny)).to(base[name].dtype)
        mean[name] = torch.where(count > 0, entries, base[name].detach())
    return mean
