"""Which entries of tensors are shared: masks that grow, what is sent and put back, means entry by entry (FedSelect);
sub-models of the entries largest in magnitude, with a gradient that knows of the threshold (FIARSE).

A mask is a boolean tensor, True where the entry is its owner's own and is not shared. A name that a group of masks does
not have is a tensor that is shared whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.functional.averaging import layer_wise_mean

Masks = Mapping[str, Tensor]


def grow_mask(mask: Tensor, delta: Tensor, share: float, limit: float) -> Tensor:
    """The mask with `share` of the entries that are still shared added: those where `delta` is largest.

    Exactly round(share * shared) entries; of equal ones those that come first, so that a tensor that has not moved is
    not taken whole. A mask of which `limit` or more is True stays as it is, so that it may end beyond by one step.

    delta says how far each entry has moved, of the mask's shape and not negative.

    Source: FedSelect (Tamirisa et al., CVPR 2024), and its code.
    """
    more = mask.flatten().clone()
    open_places = (~more).nonzero().flatten()
    if len(more) - len(open_places) < limit * len(more):
        order = delta.flatten()[open_places].argsort(descending=True, stable=True)
        more[open_places[order[: round(share * len(open_places))]]] = True
    return more.reshape(mask.shape)


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


def mask_matches(values: Mapping[str, Tensor], masks: Masks, own: Mapping[str, Tensor]) -> bool:
    """Whether `values` have the shapes that `select_shared` gives tensors like `own` under these masks."""
    expected = {name: (int((~mask).sum()),) for name, mask in masks.items() if name in values}
    return all(value.shape == expected.get(name, own[name].shape) for name, value in values.items())


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


def magnitude_threshold(tensors: Sequence[Tensor], share: float) -> Tensor:
    """The magnitude of the k-th largest entry of all tensors together, 0-d; k = floor(share * entries), at least 1."""
    count = sum(tensor.numel() for tensor in tensors)
    kept = max(1, int(share * count + 1e-9))  # 0.29 * 100 is a little less than 29
    magnitudes = torch.cat([tensor.detach().abs().flatten() for tensor in tensors])
    return magnitudes.kthvalue(count - kept + 1).values


def keep_large(tensor: Tensor, theta: Tensor) -> Tensor:
    """The entries of at least `theta` in magnitude, the others 0, with a gradient that knows of the threshold.

    The gradient is that of tensor * M, where M = [|x| >= theta] has the derivative 2 theta / (|x| + theta)^2 in |x|:
    M * (1 + 2 |x| theta / (|x| + theta)^2).

    theta is 0-d and not negative; 0 leaves nothing out, with the plain gradient.

    Source: Wu et al. (FIARSE), NeurIPS 2024, threshold-controlled biased gradient descent.
    """
    x = tensor.detach()
    magnitude = x.abs()
    mask = (magnitude >= theta).to(x.dtype)
    bias = 2 * magnitude * theta / (magnitude + theta).square()  # NaN where both are 0
    slope = mask * (1 + bias.nan_to_num(0.0))
    return x * mask + (tensor - x) * slope
