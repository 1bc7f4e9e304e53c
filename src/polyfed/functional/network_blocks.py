"""Where a tensor stands in a network of repeated blocks, by its name.

``intermediate.stage3.1.conv2.weight`` is ``conv2.weight`` of block 1 in ``intermediate.stage3.``: a name's last part is
the tensor, the part before it the layer, and the last part before those that ends in a number is the block. Networks of
other depths then have the same names with other numbers. A tensor of which no such part is found (a stem, a head)
belongs to no block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Blocks = dict[str, dict[int, dict[str, str]]]  # stage -> number of the block -> layer -> the tensor's name

_IN_BLOCK = re.compile(r"(?P<stage>(?:.*\.)?[^.]*?)(?P<block>\d+)\.(?P<layer>.+\..+)")


def blocks(names: Iterable[str]) -> Blocks:
    """All blocks among these tensors; numbers ascending, layers in the order of `names`.

    >>> blocks(["intermediate.block2.linear.bias", "extractor.conv1.weight"])
    {'intermediate.block': {2: {'linear.bias': 'intermediate.block2.linear.bias'}}}
    >>> blocks(["a.1.fc.weight", "a.0.fc.weight", "head.weight"])
    {'a.': {0: {'fc.weight': 'a.0.fc.weight'}, 1: {'fc.weight': 'a.1.fc.weight'}}}
    """
    found: Blocks = {}
    for name in names:
        match = _IN_BLOCK.fullmatch(name)
        if match is not None:
            found.setdefault(match["stage"], {}).setdefault(int(match["block"]), {})[match["layer"]] = name
    return {stage: dict(sorted(members.items())) for stage, members in found.items()}
