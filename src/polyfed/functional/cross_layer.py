"""Where a tensor stands in a network of repeated blocks, and updates of deep layers steered by those of other layers.

``intermediate.stage3.1.conv2.weight`` is ``conv2.weight`` of block 1 in ``intermediate.stage3.``: a name's last part is
the tensor, the part before it the layer, and the last part before those that ends in a number is the block. Networks of
other depths then have the same names with other numbers. A tensor of which no such part is found (a stem, a head)
belongs to no block.

An update is what averaging changes: new weights minus old. Shapes: O, I channels of a convolution, K x K its kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Blocks = dict[str, dict[int, dict[str, str]]]  # stage -> number of the block -> layer -> the tensor's name

_NUMBERED = re.compile(r"(.*?)(\d+)")


class Place(NamedTuple):
    """stage: all before the block's number. block: its number. layer: all after it."""

    stage: str
    block: int
    layer: str


def place(name: str) -> Place | None:
    """The place of a tensor, or None for one outside of blocks.

    >>> place("intermediate.stage3.1.conv2.weight")
    Place(stage='intermediate.stage3.', block=1, layer='conv2.weight')
    >>> place("intermediate.block2.linear.bias")
    Place(stage='intermediate.block', block=2, layer='linear.bias')
    >>> place("extractor.conv1.weight")
    """
    parts = name.split(".")
    for i in range(len(parts) - 3, -1, -1):
        if found := _NUMBERED.fullmatch(parts[i]):
            before = "".join(f"{part}." for part in parts[:i])
            return Place(before + found[1], int(found[2]), ".".join(parts[i + 1 :]))
    return None


def blocks(names: Iterable[str]) -> Blocks:
    """All blocks among these tensors; numbers ascending, layers in the order of `names`.

    >>> blocks(["a.1.fc.weight", "a.0.fc.weight", "head.weight"])
    {'a.': {0: {'fc.weight': 'a.0.fc.weight'}, 1: {'fc.weight': 'a.1.fc.weight'}}}
    """
    found: Blocks = {}
    for name in names:
        if where := place(name):
            found.setdefault(where.stage, {}).setdefault(where.block, {})[where.layer] = name
    return {stage: dict(sorted(members.items())) for stage, members in found.items()}


_EPSILON = 1e-7  # these three constants are those of the authors' code
THETA_MAX = 5.0
UPDATE_MAX = 0.1  # largest entry of a corrected update


def shallow_references(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Which convolution is corrected by which: name -> name of its reference.

    Corrected are the convolutions (larger than 1 x 1) of all blocks of a stage but its first. The reference is the
    first block's last convolution of the same shape: in a basic block conv2, as its conv1 may have another input
    width. Without one of that shape a convolution is left out.

    Source: InCo Aggregation (Chan et al., ICLR 2024) and its authors' code.
    """
    found: dict[str, str] = {}
    kernels = [name for name, t in weights.items() if t.dim() == 4 and t.shape[2:].numel() > 1]
    for members in blocks(kernels).values():
        first, *deeper = members.values()
        for name in (name for block in deeper for name in block.values()):
            alike = [other for other in first.values() if weights[other].shape == weights[name].shape]
            found |= {name: alike[-1]} if alike else {}
    return found


def correct_updates(g_k: Tensor, g_0: Tensor) -> Tensor:
    """The update g_k (O, I, K, K) of a deep convolution, turned by that of a shallow one of its shape.

    For every kernel by itself, (g_k / ||g_k|| + theta g_0 / ||g_0||) (||g_k|| + ||g_0||) / 2 with
    theta = min(|<g_0, g_k>| / (<g_0, g_0> + 1e-7), 5).

    Where g_k or g_0 is zero, g_k stays as it is; entries of the result are at most 0.1 in size.

    Source: the authors' code of InCo Aggregation, with which its published figures were made.
    """
    deep = g_k.double().flatten(2)
    shallow = g_0.double().flatten(2)
    alpha = (shallow * shallow).sum(-1, keepdim=True)
    beta = (shallow * deep).sum(-1, keepdim=True)
    deep_norm = deep.norm(dim=-1, keepdim=True)
    shallow_norm = shallow.norm(dim=-1, keepdim=True)
    theta = (beta.abs() / (alpha + _EPSILON)).clamp(max=THETA_MAX)
    turned = (deep / deep_norm + theta * shallow / shallow_norm) * (deep_norm + shallow_norm) / 2
    turned = torch.where((deep_norm > 0) & (shallow_norm > 0), turned, deep)
    return turned.clamp(-UPDATE_MAX, UPDATE_MAX).reshape(g_k.shape).to(g_k.dtype)


def last_blocks(small: Mapping[str, Tensor], large: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """A small network's last blocks, and what they can learn from in a larger one.

    Of every stage in which the larger has more blocks, the tensors of the small network's last block.

    Returns:
        Name in `small` -> names in `large`: that block and all deeper ones of the stage. None where these are not all
        of one shape (in a block that halves its input or changes its width).

    Source: InclusiveFL (Liu et al., KDD 2022), momentum knowledge distillation; stages are FedIN's reading.
    """
    found: dict[str, list[str]] = {}
    deeper = blocks(large)
    for stage, members in blocks(small).items():
        last = max(members)
        others = [layers for number, layers in deeper.get(stage, {}).items() if number >= last]
        if len(others) > 1:
            for layer, name in members[last].items():
                names = [layers[layer] for layers in others if layer in layers]
                alike = len(names) == len(others) and all(large[n].shape == small[name].shape for n in names)
                found[name] = names if alike else []
    return found
