"""Partitions in which every client holds some of the classes: three ways to deal them.

Shapes: N rows, K clients, C classes.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyfed.data.partition import Partition, Rows, check_integer, check_labels, sorted_partition
from polyfed.errors import ConfigError
from polyfed.registry import suggest

CLASS_ASSIGNMENTS = ("round_robin", "shards", "shamsian")
_LOWEST_SHARE = 0.4  # bounds of the uniform draws behind a class's shares (Shamsian et al. 2021)
_HIGHEST_SHARE = 0.6


def by_class(
    y: ArrayLike,
    clients: int,
    rng: np.random.Generator,
    classes_per_client: int = 2,
    class_assignment: str = "round_robin",
    distinct: bool = True,
    class_count: int | None = None,
) -> Partition:
    """Each client holds `classes_per_client` classes.

    * ``round_robin``: client c holds classes c mod C, c + 1 mod C, ...; the rows of a class go in file order to its
      holders in turn, like cards, so their shares differ by at most 1. Draws nothing.
    * ``shards``: every class is cut in file order into k K / C equal shards (the first ones take what is left over); a
      deck with each class once per shard is shuffled and dealt, and a client takes a random remaining shard of each of
      its classes. `distinct` puts a card back that the client already holds; False is the authors' code.
    * ``shamsian``: each class draws its holders' shares (uniform in [0.4, 0.6], normalized); the clients one after the
      other pick classes at random among those with most free places, none twice; a share of n rows is floor(n share).
      A class has ceil(k K / C) places; a floor would leave too few when C does not divide k K.

    Args:
        y: (N,) labels 0..C-1.
        clients: K.
        rng: of all draws.
        classes_per_client: k, at most C.
        class_assignment: "round_robin", "shards" or "shamsian".
        distinct: for shards: no class twice in a client.
        class_count: C; default: the largest label plus one.

    Raises:
        ConfigError: k not in 1..C, an unknown class_assignment, k K not divisible by C with shards, a client left
            without rows.
    """
    labels, class_count = check_labels(y, clients, class_count)
    check_integer("classes_per_client", classes_per_client, 1)
    if classes_per_client > class_count:
        raise ConfigError(f"expected classes_per_client of at most {class_count} classes, got {classes_per_client}")
    if class_assignment not in CLASS_ASSIGNMENTS:
        raise ConfigError(
            f"unknown class_assignment '{class_assignment}'{suggest(str(class_assignment), CLASS_ASSIGNMENTS)}"
        )
    hands = {"round_robin": _ring, "shards": _fedrep, "shamsian": _shamsian}[class_assignment]
    rows, shares_KC = hands(labels, clients, rng, classes_per_client, class_count, distinct)
    for client, mine in enumerate(rows):
        if len(mine) == 0:
            raise ConfigError(
                f"expected at least one row for every client, client {client} came out with none of the "
                f"{len(labels)} rows ({clients} clients, {classes_per_client} classes each); use fewer clients"
            )
    return sorted_partition(rows, labels, class_count, shares_KC)


# the three deals; each returns the clients' rows and the (K, C) shares -----------------------------------------------


def _ring(
    labels: Rows, clients: int, rng: np.random.Generator, each: int, class_count: int, distinct: bool
) -> tuple[list[Rows], NDArray[np.float64]]:
    hold_KC = (np.arange(class_count) - np.arange(clients)[:, None]) % class_count < each
    held: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(class_count):
        mine = np.flatnonzero(labels == label)
        holders = np.flatnonzero(hold_KC[:, label])
        for place, client in enumerate(holders):
            held[client].append(mine[place :: len(holders)])
    return [np.concatenate(parts) for parts in held], hold_KC / np.maximum(hold_KC.sum(axis=0), 1)


def _fedrep(
    labels: Rows, clients: int, rng: np.random.Generator, each: int, class_count: int, distinct: bool
) -> tuple[list[Rows], NDArray[np.float64]]:
    if each * clients % class_count:
        step = class_count // math.gcd(each, class_count)
        below = clients - clients % step
        raise ConfigError(
            f"class_assignment 'shards' expects classes_per_client x clients divisible by the {class_count} classes, "
            f"got {each} x {clients}; use {f'{below} or ' if below else ''}{below + step} clients, or class_assignment "
            "'round_robin'"
        )
    shards = each * clients // class_count
    if distinct:
        hands = _distinct_hands(rng, clients, each, class_count, shards)
    else:
        hands = list(rng.permutation(np.repeat(np.arange(class_count), shards)).reshape(clients, each))
    stacks = []
    for label in range(class_count):
        parts = np.array_split(np.flatnonzero(labels == label), shards)
        stacks.append([parts[i] for i in rng.permutation(shards)])
    shares_KC = np.zeros((clients, class_count))
    rows = []
    for client, hand in enumerate(hands):
        rows.append(np.concatenate([stacks[label].pop() for label in hand]))
        np.add.at(shares_KC[client], hand, 1 / shards)
    return rows, shares_KC


def _distinct_hands(
    rng: np.random.Generator, clients: int, each: int, class_count: int, shards: int
) -> list[NDArray[np.int64]]:
    """Deal a deck (each class `shards` times) so that no hand has a class twice; always ends.

    Cards are drawn one by one from the remaining deck, passing over classes already in the hand. A class with as many
    cards left as there are clients to come must be in every one of their hands, so it is dealt first; with that, no
    deal gets stuck.
    """
    left_C = np.full(class_count, shards, dtype=np.int64)
    hands = []
    for client in range(clients):
        must = np.flatnonzero(left_C == clients - client)
        may_C = np.where(left_C == clients - client, 0, left_C).astype(np.float64)
        drawn = []
        for _ in range(each - len(must)):
            drawn.append(int(rng.choice(class_count, p=may_C / may_C.sum())))
            may_C[drawn[-1]] = 0
        hand = np.concatenate([must, np.array(drawn, dtype=np.int64)])
        left_C[hand] -= 1
        hands.append(hand)
    return hands


def _shamsian(
    labels: Rows, clients: int, rng: np.random.Generator, each: int, class_count: int, distinct: bool
) -> tuple[list[Rows], NDArray[np.float64]]:
    places = -(-each * clients // class_count)  # ceil
    drawn_CP = rng.uniform(_LOWEST_SHARE, _HIGHEST_SHARE, size=(class_count, places))
    drawn_CP /= drawn_CP.sum(axis=1, keepdims=True)
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in range(class_count)]
    free_C = np.full(class_count, places, dtype=np.int64)
    start_C = np.zeros(class_count, dtype=np.int64)
    shares_KC = np.zeros((clients, class_count))
    rows = []
    for client in range(clients):
        mine: list[Rows] = []
        for _ in range(each):
            free = np.where(shares_KC[client] > 0, 0, free_C)
            label = int(rng.choice(np.flatnonzero(free == free.max())))
            free_C[label] -= 1
            share = float(drawn_CP[label, free_C[label]])
            size = int(len(shuffled[label]) * share)
            mine.append(shuffled[label][start_C[label] : start_C[label] + size])
            start_C[label] += size
            shares_KC[client, label] = share
        rows.append(np.concatenate(mine))
    if free_C.sum():
        unused = len(labels) - sum(len(mine) for mine in rows)
        warnings.warn(
            f"class_assignment 'shamsian' leaves {unused} of {len(labels)} rows unused: {clients} clients x {each} "
            f"classes is not a multiple of {class_count} classes",
            stacklevel=3,
        )
    return rows, shares_KC
