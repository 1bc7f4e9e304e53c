"""Where a tensor stands in a network of repeated blocks, by its name.

``intermediate.stage3.1.conv2.weight`` is ``conv2.weight`` of block 1 in ``intermediate.stage3.``: a name's last part is
the tensor, the part before it the layer, and the last part before those that ends in a number is the block. Networks of
other depths then have the same names with other numbers. A tensor of which no such part is found (a stem, a head)
belongs to no block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

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
