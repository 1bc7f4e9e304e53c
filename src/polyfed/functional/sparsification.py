"""Tensors in fewer bytes: their largest entries alone, and numbers of 16 or 8 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyfed.functional.masks import pack_bits, unpack_bits
from polyfed.functional.quantization import Precision, dequantize_columns, quantize_columns

_WIDTH = {"float32": 4, "float16": 2, "int8": 1}  # bytes of a number
_PLACE = torch.int32  # how a place is told, where that takes fewer bytes than a bit for every entry


def top_k_count(numel: int, share: float) -> int:
    """How many entries of a tensor with `numel` the largest `share` are: at least one.

    >>> top_k_count(25, 0.1), top_k_count(3, 0.1)
    (3, 1)
    """
    return min(numel, max(1, math.ceil(share * numel - 1e-9)))  # 0.07 * 100 is 7.000000000000001


def quantized_nbytes(shape: tuple[int, ...], precision: Precision) -> int:
    """Bytes of what `quantize` gives: with int8 a scale for every row, with float16 one.

    >>> quantized_nbytes((10, 64), "int8"), quantized_nbytes((64,), "int8"), quantized_nbytes((10, 64), "float16")
    (680, 68, 1284)
    """
    scales = {"float32": 0, "float16": 1, "int8": shape[0] if len(shape) > 1 else 1}[precision]
    return _WIDTH[precision] * math.prod(shape) + 4 * scales


def index_nbytes(numel: int, count: int) -> int:
    """Bytes that tell which `count` of `numel` entries are meant: int32 each, or a bit for every entry.

    >>> index_nbytes(6400, 640), index_nbytes(6400, 64)
    (800, 256)
    """
    return min(_PLACE.itemsize * count, -(-numel // 8))


@torch.no_grad()
def quantize(tensor: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Values in the tensor's shape, and their scale, float32: see `functional.quantization.quantize_columns`.

    float16: one scale (0-d), the largest magnitude. int8: one for every row, an index of the first of two or more
    dimensions, or for the whole vector: its largest magnitude / 127; so the error is at most half of it.

    Args:
        tensor: floats, finite, with entries. precision: "float16" or "int8".

    Raises:
        ValueError: see `functional.quantization.quantize_columns`.

    >>> quantize(torch.tensor([[127.0, -3.0], [0.0, 254.0]]), "int8")
    (tensor([[127,  -3],
            [  0, 127]], dtype=torch.int8), tensor([1., 2.]))
    """
    made = quantize_columns(_rows(tensor).T, precision)
    return made["values"].T.reshape(tensor.shape).contiguous(), made["scale"]


@torch.no_grad()
def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """What `quantize` made, as float32 in its shape.

    Raises:
        ValueError: what `quantize` does not make; see `functional.quantization.dequantize_columns`.
    """
    if not values.dim() or not values.numel():
        raise ValueError(f"expected quantized values with entries, got shape {tuple(values.shape)}")
    return dequantize_columns({"values": _rows(values).T, "scale": scale}).T.reshape(values.shape).contiguous()


@torch.no_grad()
def top_k_sparsify(tensor: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The `top_k_count` entries of largest magnitude, (k,) in the tensor's order; and their places, for `densify`.

    The places are (k,) int32, or (ceil(n / 8),) uint8, a bit for every entry, where that takes fewer bytes.

    >>> top_k_sparsify(torch.tensor([[0.5, -3.0], [2.0, 1.0]]), 0.5)
    (tensor([-3.,  2.]), tensor([6], dtype=torch.uint8))
    """
    flat = tensor.flatten()
    count = top_k_count(len(flat), share)
    places = flat.abs().topk(count, sorted=False).indices.sort().values
    if index_nbytes(len(flat), count) == _PLACE.itemsize * count:
        return flat[places], places.to(_PLACE)
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[places] = True
    return flat[places], pack_bits(mask)


@torch.no_grad()
def densify(values: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape with `values` (k,) at their places, and zeros elsewhere.

    Raises:
        ValueError: the places are none of a tensor of this shape, or not as many as the values.
    """
    numel = math.prod(shape)
    bits = places.dtype == torch.uint8
    if places.dim() != 1 or (not bits and places.dtype != _PLACE) or (bits and len(places) != -(-numel // 8)):
        came = f"{places.dtype} of shape {tuple(places.shape)}"
        raise ValueError(f"expected places among {numel} entries as {_PLACE} or as bits, got {came}")
    found = unpack_bits(places, (numel,)).nonzero().flatten() if bits else places.long()
    if values.shape != found.shape:
        raise ValueError(f"expected as many values as places, got {tuple(values.shape)} and {len(found)}")
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= numel):
        raise ValueError(f"expected places from 0 to {numel - 1}, got {int(found.min())} to {int(found.max())}")
    whole = torch.zeros(numel, dtype=values.dtype)
    whole[found] = values
    return whole.reshape(shape)


def _rows(tensor: Tensor) -> Tensor:
    """As a matrix: a vector is one row."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
