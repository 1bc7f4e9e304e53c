"""The server's pool of feature pairs, and how clients walk through what they get of it (FedIN).

A pair is what enters (s_in) and what leaves (s_out) the intermediate part of a client's network, for one sample. In a
message, pairs are the group "features": "s_in" (M, ...) and "s_out" (M, ...), row m of both from the same sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from polyfed.core.message import Group, Message, group

Mixing = Literal["mix", "one"]
_PARTS = ("s_in", "s_out")


def gather(uploads: Mapping[int, Message]) -> dict[str, Tensor]:
    """The pairs of all who sent any, one sender after the other, and "sender" (M,) int64; {} where nobody did."""
    sent = {i: group(message, "features") for i, message in uploads.items() if "features" in message}
    if not sent:
        return {}
    senders = [torch.full((len(features["s_in"]),), i) for i, features in sent.items()]
    return {**{name: torch.cat([f[name] for f in sent.values()]) for name in _PARTS}, "sender": torch.cat(senders)}


def draw(pool: Group, receiver: int, count: int, mixing: Mixing, generator: torch.Generator) -> dict[str, Tensor]:
    """Pairs for a client, in random order, none of them its own.

    Args:
        pool: what `gather` gave. receiver: the client's number. count: how many at most; fewer where there are fewer.
        mixing: "mix": from all other senders, without replacement; "one": from one other sender, drawn at random.
        generator: draws nothing where the result is empty.

    Returns:
        "s_in" and "s_out"; {} where nobody else has sent anything.
    """
    others = (pool["sender"] != receiver).nonzero().flatten() if pool else torch.empty(0)
    if not len(others):
        return {}
    if mixing == "one":
        senders = pool["sender"][others].unique()
        one = senders[torch.randint(len(senders), (), generator=generator)]
        others = others[pool["sender"][others] == one]
    rows = others[torch.randperm(len(others), generator=generator)[:count]]
    return {name: pool[name][rows] for name in _PARTS}


def minibatch(pairs: Group, visit: int, size: int) -> dict[str, Tensor]:
    """The pairs of the visit-th pass (from 0): `size` of them, round and round in their order; all where no more.

    >>> pairs = {"s_in": torch.arange(3), "s_out": torch.arange(3) * 10}
    >>> [minibatch(pairs, visit, 2)["s_out"].tolist() for visit in range(3)]
    [[0, 10], [20, 0], [10, 20]]
    """
    held = len(pairs["s_in"])
    if held <= size:
        return dict(pairs)
    rows = torch.arange(visit * size, (visit + 1) * size) % held
    return {name: rows_of[rows.to(rows_of.device)] for name, rows_of in pairs.items()}
