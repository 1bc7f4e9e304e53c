"""Who gets which rows: index partitions of a labeled data set, every row accounted for.

``iid`` and ``dirichlet`` (as FedIN deals), ``by_class`` with three assignments: "shards" (as FedRep and FedHeNN),
"shamsian" (as FedGH, after Shamsian et al.) and "round_robin"; ``by_group``, by whom the rows come from. A partition
also records which share of every class each client was assigned, so that a test side can be assigned alike.

Which rows of a class a client gets is always drawn: a file may be in the order of time, or of people, and
its first rows are then no fair part of it.

Shapes: N rows, K clients, C classes. Rows of a client are sorted, so that nothing depends on the order of a draw.
"""

from __future__ import annotations

import math
import numbers
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyfed.errors import ConfigError
from polyfed.places import check_values

Rows = NDArray[np.int64]
Generators = Callable[[str], np.random.Generator]  # purpose of a draw -> generator

_LOWEST_SHARE = 0.4  # bounds of the uniform draws behind a class's shares (Shamsian et al. 2021)
_HIGHEST_SHARE = 0.6
_TRIES = 1000  # draws of a Dirichlet partition
_TINY = 1e-9  # two remainders closer than this count as equal: shares are quotients of small whole numbers


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of every client.

    Args:
        rows: one sorted int64 index array per client; no row in two of them.
        shares: (K, C) fraction of each class's rows that each client was assigned; None when not known.

    Raises:
        ConfigError: a row that two clients hold or that one holds twice, or indices that are not whole numbers >= 0.
    """

    rows: tuple[Rows, ...]
    shares: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        for client, rows in enumerate(self.rows):
            if rows.dtype != np.int64 or rows.ndim != 1 or (len(rows) and int(rows.min()) < 0):
                raise ConfigError(
                    f"expected int64 row numbers >= 0 of shape (N,), client {client} has {rows.dtype} of shape "
                    f"{rows.shape}"
                )
        every = np.sort(np.concatenate(self.rows)) if self.rows else np.empty(0, dtype=np.int64)
        twice = every[1:][every[1:] == every[:-1]]
        if len(twice):
            raise ConfigError(f"expected every row in one client at most, got row {twice[0]} more than once")


def iid(y: ArrayLike, clients: int, rng: np.random.Generator, class_count: int | None = None) -> Partition:
    """A random permutation cut into equal parts; sizes differ by at most 1.

    Args:
        y: (N,) labels 0..C-1.
        clients: K.
        rng: of all draws.
        class_count: C; default: the largest label plus one.

    Raises:
        ConfigError: more clients than rows.
    """
    labels, class_count = check_labels(y, clients, class_count)
    return sorted_partition(np.array_split(rng.permutation(len(labels)), clients), labels, class_count)


def dirichlet(
    y: ArrayLike,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 0.5,
    min_samples: int = 10,
    class_count: int | None = None,
) -> Partition:
    """Label skew: each class cut by proportions drawn from Dirichlet(alpha 1_K), balanced, as FedIN deals.

    Class by class, the proportions of clients that already hold >= N/K rows are set to 0 and the rest renormalized;
    everything is drawn anew until every client has `min_samples` rows. The rows themselves are shuffled once the sizes
    are accepted, which is the same in law and cheaper.

    Args:
        y, clients, rng, class_count: as of `iid`.
        alpha: concentration; small means few classes per client, large means equal shares.
        min_samples: smallest number of rows per client that is accepted.

    Raises:
        ConfigError: a minimum that cannot be met, or one that 1000 draws did not meet.
    """
    labels, class_count = check_labels(y, clients, class_count)
    if clients * min_samples > len(labels):
        raise ConfigError(
            f"expected at least {clients * min_samples} rows for {clients} clients with min_samples {min_samples}, got "
            f"{len(labels)}; use fewer clients or a min_samples of at most {len(labels) // clients}"
        )
    counts_C = np.bincount(labels, minlength=class_count)
    best = -1
    for _ in range(_TRIES):
        sizes_KC = _dirichlet_sizes(counts_C, clients, rng, alpha)
        smallest = int(sizes_KC.sum(axis=1).min())
        if smallest >= min_samples:
            break
        best = max(best, smallest)
    else:
        raise ConfigError(
            f"expected each of {clients} clients to get {min_samples} rows in one of {_TRIES} draws at alpha "
            f"{alpha}, got {best} for the smallest at best; use a larger alpha, fewer clients or a smaller min_samples"
        )
    held: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(class_count):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for client, part in enumerate(cut_rows(shuffled, sizes_KC[:, label])):
            held[client].append(part)
    return sorted_partition([np.concatenate(parts) for parts in held], labels, class_count)


def _dirichlet_sizes(
    counts_C: NDArray[np.int64], clients: int, rng: np.random.Generator, alpha: float
) -> NDArray[np.int64]:
    """(K, C) how many rows of each class each client gets in one draw."""
    total = int(counts_C.sum())
    sizes_KC = np.zeros((clients, len(counts_C)), dtype=np.int64)
    for label, count in enumerate(counts_C):
        open_K = sizes_KC.sum(axis=1) * clients < total
        if not open_K.any():  # only when all rows are assigned: what follows are empty classes
            break
        share_K = _dirichlet_shares(open_K, rng, alpha)
        # _TINY: without it a sum that falls just short of 1 hands one row to a last client whose share is 0
        cuts = (np.cumsum(share_K)[:-1] * count + _TINY).astype(np.int64)
        sizes_KC[:, label] = np.diff(cuts, prepend=0, append=count)
    return sizes_KC


def _dirichlet_shares(open_K: NDArray[np.bool_], rng: np.random.Generator, alpha: float) -> NDArray[np.float64]:
    """(K,) proportions from Dirichlet(alpha 1_K), 0 for clients that are not open, renormalized."""
    share_K = rng.dirichlet(np.full(len(open_K), float(alpha))) * open_K
    if not (np.isfinite(share_K).all() and share_K.sum() > 0):
        # a tiny alpha put everything on a client that is full: draw among the others, in its limit one of them
        share_K = np.zeros(len(open_K))
        share_K[rng.choice(np.flatnonzero(open_K))] = 1
    shares: NDArray[np.float64] = share_K / share_K.sum()
    return shares


def by_class(
    y: ArrayLike,
    clients: int,
    rng: np.random.Generator,
    classes_per_client: int = 2,
    class_assignment: str = "round_robin",
    class_count: int | None = None,
) -> Partition:
    """Each client holds `classes_per_client` classes.

    * ``round_robin``: client c holds classes c mod C, c + 1 mod C, ...; the rows of a class, shuffled, go to its
      holders in turn, like cards, so their shares differ by at most 1.
    * ``shards``: every class, shuffled, is cut into k K / C equal shards (the first ones take what is left over); a
      deck with each class once per shard is shuffled and handed out, a client takes a remaining shard of each of its
      classes. The authors' code cuts a class in file order. A card that the client already holds is put back; the
      authors' code keeps it.
    * ``shamsian``: each class draws its holders' shares (uniform in [0.4, 0.6], normalized); the clients one after the
      other pick classes at random among those with most free places, none twice; a share of n rows is floor(n share).
      A class has ceil(k K / C) places; a floor would leave too few when C does not divide k K.

    Args:
        y, clients, rng, class_count: as of `iid`.
        classes_per_client: k, at most C.
        class_assignment: "round_robin", "shards" or "shamsian".

    Raises:
        ConfigError: k above C, k K not divisible by C with shards, a client left without rows.
    """
    labels, class_count = check_labels(y, clients, class_count)
    if classes_per_client > class_count:
        raise ConfigError(f"expected classes_per_client of at most {class_count} classes, got {classes_per_client}")
    deals = {"round_robin": _round_robin, "shards": _shards, "shamsian": _shamsian}
    rows, shares_KC = deals[class_assignment](labels, clients, rng, classes_per_client, class_count)
    for client, mine in enumerate(rows):
        if len(mine) == 0:
            raise ConfigError(
                f"expected at least one row for every client, client {client} has none of the "
                f"{len(labels)} rows ({clients} clients, {classes_per_client} classes each); use fewer clients"
            )
    return sorted_partition(rows, labels, class_count, shares_KC)


def _round_robin(
    labels: Rows, clients: int, rng: np.random.Generator, each: int, class_count: int
) -> tuple[list[Rows], NDArray[np.float64]]:
    hold_KC = (np.arange(class_count) - np.arange(clients)[:, None]) % class_count < each
    held: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(class_count):
        mine = rng.permutation(np.flatnonzero(labels == label))
        holders = np.flatnonzero(hold_KC[:, label])
        for place, client in enumerate(holders):
            held[client].append(mine[place :: len(holders)])
    return [np.concatenate(parts) for parts in held], hold_KC / np.maximum(hold_KC.sum(axis=0), 1)


def _shards(
    labels: Rows, clients: int, rng: np.random.Generator, each: int, class_count: int
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
    hands = _distinct_hands(rng, clients, each, class_count, shards)
    stacks = []
    for label in range(class_count):
        parts = np.array_split(rng.permutation(np.flatnonzero(labels == label)), shards)
        stacks.append([parts[i] for i in rng.permutation(shards)])  # some are larger by a row
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
    cards left as there are clients to come must be in every one of their hands, so it is assigned first; with that, no
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
    labels: Rows, clients: int, rng: np.random.Generator, each: int, class_count: int
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


def by_group(
    values: ArrayLike, clients: int | None, rng: np.random.Generator, min_samples: int | None = None
) -> Partition:
    """Rows that share a value go to one client: tweets of a user, letters of a writer.

    With as many clients as values, client k gets the kth value in sorted order, and nothing is drawn. With fewer,
    whole groups are assigned: from the largest to the smallest (equal ones in drawn order), each to the client with the
    fewest rows so far. No client then has more than 4/3 of the rows that the largest client of the best possible
    deal has (Graham 1969), and two clients differ by no more than the largest group. Clients are numbered at random.

    Args:
        values: (N,) whole numbers or strings, one per row.
        clients: K; None for one per value.
        rng: of the order of equal groups, and of the clients.
        min_samples: values with fewer rows are left out; None: none is.

    Raises:
        ConfigError: more clients than values, or no value with so many rows.
    """
    names, group_N = np.unique(np.asarray(values), return_inverse=True)
    size_G = np.bincount(group_N, minlength=len(names))
    kept = np.arange(len(names))
    if min_samples is not None:
        kept = np.flatnonzero(size_G >= min_samples)
        if not len(kept):
            raise ConfigError(
                f"expected a value to deal by with min_samples = {min_samples} rows, got none with more "
                f"than {size_G.max(initial=0)}"
            )
    groups = len(kept)
    clients = groups if clients is None else clients
    if clients > groups:
        raise ConfigError(
            f"expected at most as many clients as there are values to deal by ({groups}), got {clients} clients"
        )
    client_G = np.full(len(names), -1)
    client_G[kept] = np.arange(groups)
    if clients < groups:
        drawn = kept[rng.permutation(groups)]
        held_K = np.zeros(clients, dtype=np.int64)
        for group in drawn[np.argsort(-size_G[drawn], kind="stable")]:
            client_G[group] = held_K.argmin()
            held_K[client_G[group]] += size_G[group]
        client_G[kept] = rng.permutation(clients)[client_G[kept]]
    client_N = client_G[group_N]
    return Partition(tuple(np.flatnonzero(client_N == client) for client in range(clients)))


def partition_like(partition: Partition, y: ArrayLike, rng: np.random.Generator) -> Partition:
    """Deal another side (test) by the class shares of a partition (of the training side).

    Each class is shuffled and cut; parts are rounded to whole rows by largest remainder, ties going to the client with
    fewest rows so far. A class that the partition did not deal, or assigned in part, stays unused to that part.

    Args:
        partition: of the training side, with `shares`.
        y: (M,) labels of the other side.
        rng: of the shuffling.
    """
    labels = np.asarray(y, dtype=np.int64)
    assert partition.shares is not None
    clients, class_count = partition.shares.shape
    held: list[list[Rows]] = [[] for _ in range(clients)]
    sizes_K = np.zeros(clients, dtype=np.int64)
    for label in range(class_count):
        mine = rng.permutation(np.flatnonzero(labels == label))
        share_K = partition.shares[:, label]
        rest = max(0.0, 1.0 - float(share_K.sum()))  # the part of the class that nobody was assigned
        take = largest_remainder(len(mine) * np.append(share_K, rest), len(mine), np.append(sizes_K, len(labels)))[:-1]
        for client, part in enumerate(cut_rows(mine, take)):
            held[client].append(part)
        sizes_K += take
    return sorted_partition([np.concatenate(parts) for parts in held], labels, class_count, partition.shares)


def hash_groups(values: ArrayLike, groups: int) -> NDArray[np.int64]:
    """(N,) group 0..groups-1 of each value by its CRC-32: the same on every machine and for every seed.

    Args:
        values: (N,) whole numbers or strings.
        groups: how many.
    """
    names, place_N = np.unique(np.asarray(values), return_inverse=True)
    group_V = np.array([zlib.crc32(str(name).encode()) % groups for name in names], dtype=np.int64)
    found: NDArray[np.int64] = group_V[place_N]
    return found


def groups_like(partition: Partition, values: NDArray[Any], other: NDArray[Any]) -> Partition:
    """Deal another side (test) by who was assigned which value of this one; draws nothing.

    Rows whose value no client holds, as it occurs on the other side alone, stay unused.

    Args:
        partition: of the rows that `values` belong to, by `by_group`.
        values: (N,) what the rows were assigned by.
        other: (M,) the same of the other side.
    """
    client_N = np.full(len(values), -1)
    for client, mine in enumerate(partition.rows):
        client_N[mine] = client
    names, first = np.unique(values, return_index=True)
    place_M = np.minimum(np.searchsorted(names, other), len(names) - 1)
    client_M = np.where(names[place_M] == other, client_N[first[place_M]], -1)
    return Partition(tuple(np.flatnonzero(client_M == client) for client in range(len(partition.rows))))


def class_shares(rows: Sequence[Rows], y: ArrayLike, class_count: int) -> NDArray[np.float64]:
    """(K, C) fraction of each class's rows that each client holds; 0 for a class without rows."""
    labels = np.asarray(y, dtype=np.int64)
    counts_KC = np.stack([np.bincount(labels[mine], minlength=class_count) for mine in rows]).astype(np.float64)
    return counts_KC / np.maximum(np.bincount(labels, minlength=class_count), 1)


# shared --------------------------------------------------------------------------------------------------------------


def check_integer(name: str, value: Any, least: int) -> int:
    """`value` as an int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"expected {name} to be a whole number >= {least}, got {value!r}")
    check_values(int(value), name)
    return int(value)


def largest_remainder(quota: NDArray[np.floating[Any]], total: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole numbers that add up to `total`, each its quota rounded down or up.

    Among equal remainders the smallest of `sizes` goes first, then the first.
    """
    base: NDArray[np.int64] = np.floor(quota + _TINY).astype(np.int64)
    remainder = np.round((quota - base) / _TINY) * _TINY
    order = np.lexsort((np.arange(len(quota)), sizes, -remainder))
    base[order[: max(0, total - int(base.sum()))]] += 1
    return base


def cut_rows(rows: Rows, sizes: NDArray[np.int64]) -> list[Rows]:
    """Consecutive pieces of `rows` of the given sizes."""
    return np.split(rows, np.cumsum(sizes))[: len(sizes)]


def check_labels(y: ArrayLike, clients: int, class_count: int | None) -> tuple[Rows, int]:
    """The labels as int64 and the number of classes; there are rows enough for the clients."""
    labels = np.asarray(y, dtype=np.int64)
    if clients > len(labels):
        raise ConfigError(f"expected at most as many clients as rows ({len(labels)}), got {clients} clients")
    return labels, int(labels.max()) + 1 if class_count is None else class_count


def sorted_partition(
    rows: Sequence[Rows], labels: Rows, class_count: int, shares_KC: NDArray[np.float64] | None = None
) -> Partition:
    """A `Partition` with sorted rows; shares from the counts unless they are given."""
    ordered = tuple(np.sort(mine) for mine in rows)
    return Partition(ordered, class_shares(ordered, labels, class_count) if shares_KC is None else shares_KC)


def draw_balanced(y: Rows, count: int, generator: np.random.Generator) -> Rows:
    """`count` random rows, equally many of each class as far as they go; sorted.

    They are the first of a random order of all rows. The class that has one row more is drawn.
    """
    shuffled = [generator.permutation(np.flatnonzero(y == label)) for label in range(int(y.max(initial=-1)) + 1)]
    turn = np.concatenate([np.arange(len(mine)) for mine in shuffled])
    order = np.lexsort((generator.random(len(y)), turn))
    return np.sort(np.concatenate(shuffled)[order][:count])


def split_rows(
    rows: Rows, y: Rows, parts: tuple[int, int, int], generator: np.random.Generator | None
) -> tuple[Rows, Rows, Rows]:
    """Cut rows into three sets by a ratio, class by class; each class's parts are its quotas rounded down or up.

    What rounding leaves over in a class goes to the sets that lie furthest behind their quota over the classes so far
    (then to the first), so that the sets' sizes follow the ratio too. Sorted.
    """
    ratio = np.array(parts) / sum(parts)
    behind = np.zeros(3)
    sets: tuple[list[Rows], list[Rows], list[Rows]] = ([], [], [])
    for label in np.unique(y[rows]):
        mine = rows[y[rows] == label]
        mine = mine if generator is None else generator.permutation(mine)
        quota = len(mine) * ratio
        sizes = np.floor(quota + 1e-9).astype(np.int64)
        open_sets = quota - sizes > 1e-9
        behind += quota - sizes
        order = np.lexsort((np.arange(3), -np.round(behind, 9), ~open_sets))[: len(mine) - int(sizes.sum())]
        sizes[order] += 1
        behind[order] -= 1
        for chosen, part in zip(sets, np.split(mine, np.cumsum(sizes)[:2]), strict=True):
            chosen.append(part)
    none = rows[:0]
    train, validation, test = (np.sort(np.concatenate(s)) if s else none for s in sets)
    return train, validation, test


def draw_rows(rows: Rows, y: Rows, most: int | None, generator: np.random.Generator) -> Rows:
    """At most `most` rows, drawn at random, the classes in the proportion they have; all of them for None. Sorted.

    With one state of the generator, a smaller number of rows is among a larger one: they are the first of a
    random order in which row i of the n of a class stands at (i + 1/2) / n. Whose turn it is among equal places is
    drawn, too.
    """
    if most is None or len(rows) <= most:
        return rows
    shuffled = generator.permutation(rows)
    labels = y[shuffled]
    place = np.empty(len(rows))
    for label in np.unique(labels):
        count = int((labels == label).sum())
        place[labels == label] = (np.arange(count) + 0.5) / count
    return np.sort(shuffled[np.argsort(place, kind="stable")[:most]])
