"""Levels of width and who has which: "dynamic_a3-c1" and the like (HeteroFL, FedRolex)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator

from polyfed.core.server import Server

RATES = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}


def client_level(server: Server, rates: str, client_id: int) -> str:
    """The client's level, "a" to "e": "dynamic" draws it in every round, "fix" gives levels to blocks of clients."""
    if rates.startswith("dynamic"):
        places = sum(_levels(rates).values())
        place = int(torch.randint(places, (), generator=server.generator("rates", client_id)))
    else:
        places = len(server.all_client_ids)
        place = server.all_client_ids.index(client_id)
    return next(level for level, end in _block_ends(rates, places).items() if place < end)


def remarks(server: Server, rates: str, name: str) -> Sequence[str]:
    """Levels of a fixed mode that no client has; `name` is the method's."""
    clients = len(server.all_client_ids)
    ends = _block_ends(rates, clients)
    blocks = zip(ends, itertools.pairwise((0, *ends.values())), strict=True)
    missing = [level for level, (begin, end) in blocks if begin == end]
    if rates.startswith("dynamic") or not missing:
        return ()
    widest = max(RATES[level] for level in ends if level not in missing)
    return (
        f"{name}: rates = '{rates}' gives none of the {clients} clients level {', '.join(missing)}; "
        f"in a round they train {widest:g} of each layer's channels at most",
    )


def _block_ends(rates: str, places: int) -> dict[str, int]:
    """Where the block of each level ends among so many places, which have them by their shares."""
    levels = _levels(rates)
    ends = list(itertools.accumulate(levels.values()))
    return {level: end * places // ends[-1] for level, end in zip(levels, ends, strict=True)}


def _levels(rates: str) -> dict[str, int]:
    """Level -> its share, as a string of rates has them."""
    return {level[0]: int(level[1:]) for level in rates.partition("_")[2].split("-")}


def _checked(rates: str) -> str:
    form = "expected 'dynamic_' or 'fix_', then levels a to e, each with its share, as in 'dynamic_a1-b1-c1-d1-e1'"
    if not re.fullmatch(r"(dynamic|fix)_[a-e][0-9]+(-[a-e][0-9]+)*", rates):
        raise ValueError(f"{form}; got '{rates}'")
    named = rates.partition("_")[2].split("-")
    if len(_levels(rates)) != len(named) or not all(_levels(rates).values()):
        raise ValueError(f"{form}, every level once and no share 0; got '{rates}'")
    return rates


Rates = Annotated[str, AfterValidator(_checked)]
