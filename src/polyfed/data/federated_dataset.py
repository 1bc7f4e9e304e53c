"""From a source to a federation's data: holdout, deal, split, caps.

Order of things: rows for the server are set aside, the rest is dealt to the clients, each client's rows are split into
train, validation and test, caps are applied, some clients lose half of what is left, and last the features are skewed.
Every draw comes from a generator made for that purpose ("holdout", "test", "partition", "split", "halved", "skew"), so
that, say, a larger holdout does not change how splits are drawn.

Shapes: N samples, K clients, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import flwr_partitioners
from polyfed.data.datasets import Source
from polyfed.data.feature_shift import Skew
from polyfed.data.partition import (
    Partition,
    Rows,
    balanced_counts,
    class_shares,
    classes,
    deal_alike,
    dirichlet,
    hashed_groups,
    natural,
    natural_alike,
    proportional_counts,
    quantity,
    whole,
)
from polyfed.data.samples import ClientData, Samples
from polyfed.errors import RequestError
from polyfed.registry import PARTITIONS, nearest

TESTS = ("client", "global")


@dataclass(frozen=True, eq=False)
class Federated:
    """The data of a whole federation.

    Args:
        clients: one entry per client; rows in the source's order. With ``test="global"`` every client's test is the one
            common object.
        holdout: rows that belong to the server alone; may be empty.
        test: the common test set of ``test="global"``, else None.
        classes: C.
        source: what it was made from.
        unused: rows of the source that ended nowhere: dealt to nobody, or cut off by `max_train` and `max_test`.
        label_table: (K, C) int64 counts of the clients' training labels.
    """

    clients: tuple[ClientData, ...]
    holdout: Samples
    test: Samples | None
    classes: int
    source: Source
    unused: int
    label_table: NDArray[np.int64]

    def __repr__(self) -> str:
        rows = [len(client.train) for client in self.clients]
        each = f"{min(rows)} to {max(rows)}" if len(set(rows)) > 1 else f"{rows[0]}"
        who = f"{len(rows)} clients with {each} training samples"
        return f"Federated({self.source.name}, {who}, {self.classes} classes)"


@dataclass(frozen=True)
class _Split:
    """A parsed `split`: parts of train, validation and test; `official` when the source says what is test."""

    official: bool
    parts: tuple[int, int, int]


@dataclass(frozen=True)
class _Knobs:
    """What the partitions take, each its own; see `federate`."""

    alpha: float
    min_size: int
    classes_per_client: int
    deal: str
    natural_column: str | None
    natural_groups: int | None
    partitioner: Mapping[str, Any]


def federate(
    source: Source,
    *,
    clients: int | None,
    partition: str | Partition | Any,
    rng: Callable[[str], np.random.Generator],
    alpha: float = 0.5,
    min_size: int = 10,
    classes_per_client: int = 2,
    deal: str = "ring",
    split: str = "8:1:1",
    test: str = "client",
    holdout: int = 0,
    max_train: int | Sequence[int] | None = None,
    max_test: int | None = None,
    halved: float = 0.0,
    natural_column: str | None = None,
    natural_groups: int | None = None,
    partitioner: Mapping[str, Any] | None = None,
    skew: str = "none",
    skew_strength: float = 0.25,
) -> Federated:
    """Deal a source to clients.

    * ``split="a:b:c"``, ``test="client"``: both sides of the source are pooled and dealt; each client's rows are split
      train : validation : test, at random within each class, each class's parts within one row of the ratio.
    * ``split="official"``, ``test="client"``: the training side is dealt, the test side alike (same class shares; with
      "natural", each row to the client that holds its value, to nobody where none does). ``"official:9:1"`` also
      splits each client's training rows into train : validation.
    * ``test="global"``: one test set for all. It is the official test side if there is one, and then the training side
      alone is dealt and split a : b; otherwise a class-stratified c part of the pool is set aside before dealing.

    Args:
        source: what to deal.
        clients: K; None with "natural": one per value.
        partition: a name in `polyfed.registry.PARTITIONS`, or a function (one of your own is called with labels (N,),
            clients and generator, and returns the row numbers of every client, or a `Partition`); "flwr:" and the name
            of a partitioner of flwr-datasets; such a partitioner itself; or a ready `Partition` of the rows to deal:
            training rows first, then, where they are pooled, test rows. A ready one needs ``holdout=0``, and with
            ``test="global"`` an official test side.
        rng: purpose -> generator; all draws come from these.
        alpha: of "dirichlet" and "quantity".
        min_size: of "dirichlet" and "quantity": smallest number of dealt rows (before the split) per client.
        classes_per_client: of "classes".
        deal: of "classes".
        split: "a:b:c", "official" or "official:a:b".
        test: "client" or "global".
        holdout: rows of the training side that are set aside first for the server, equally many of each class as far
            as they go, drawn at random.
        max_train: at most this many training rows per client. The first rows of each class are kept, the classes in
            the proportion in which the client holds them, so that a cap does not change the label skew. Several caps:
            clients take them in turn, client k the (k mod M)th of M.
        max_test: likewise for each client's test rows, or for the common test set.
        halved: share of the clients, drawn at random, that keep half of their training rows (FedHeNN's Figure 3), each
            class in proportion, a single row always; those of a smaller share are among those of a larger one.
        natural_column: of "natural": which of the source's columns to deal by.
        natural_groups: of "natural": its values are put into so many groups by their hash (`hashed_groups`), and whole
            groups are dealt. With an official split a test row of a value that training rows do not have then goes to
            the client that holds its group; without groups, to nobody.
        partitioner: of "flwr:...": arguments of its constructor.
        skew: "rotation", "noise" or "colour": every client's own rows, its test rows too, are changed as
            `polyfed.data.feature_shift` says; the hold-out and a common test set are not.
        skew_strength: 0..1; 0 is off.

    Raises:
        RequestError: any setting out of its range, a source without the test side that was asked for, or a client that
            would end without training rows or without test rows.
    """
    plan = _parse_split(split)
    if test not in TESTS:
        raise RequestError(f"unknown test '{test}'{nearest(str(test), TESTS)}")
    if clients is not None or not _is(partition, natural):
        whole("clients", clients, 1)
    whole("holdout", holdout, 0)
    if not 0 <= halved <= 1:
        raise RequestError(f"halved: expected a share of the clients between 0 and 1, came {halved}")
    caps = list(max_train) if isinstance(max_train, Sequence) else [max_train]
    for name, most in (("max_train", caps), ("max_test", [max_test])):
        for cap in most:
            if cap is not None:
                whole(name, cap, 1)
    _check_test_side(source, plan, split, test)

    pool = _Pool(source)
    train_rows = np.arange(len(source.train))
    test_rows = np.arange(len(source.train), pool.size)
    if holdout >= len(train_rows):
        raise RequestError(f"expected a holdout below the {len(train_rows)} training rows, came {holdout}")
    held_out = _draw_balanced(pool.y[train_rows], holdout, rng("holdout")) if holdout else train_rows[:0]
    train_rows = np.setdiff1d(train_rows, held_out, assume_unique=True)

    common: Rows | None = None
    if test == "global":
        if source.test is not None:
            common = test_rows
        else:
            a, b, c = plan.parts
            rest, _, common = _split_rows(train_rows, pool.y, (a + b, 0, c), rng("test"))
            train_rows = rest
        dealt = train_rows
    else:
        dealt = train_rows if plan.official else np.concatenate([train_rows, test_rows])

    knobs = _Knobs(alpha, min_size, classes_per_client, deal, natural_column, natural_groups, partitioner or {})
    given = _deal(partition, pool, dealt, clients, rng, knobs, bool(holdout))
    view = Skew(skew, skew_strength, len(given.rows), rng)
    mine = [dealt[rows] for rows in given.rows]
    parts = (plan.parts[0], plan.parts[1], 0) if plan.official or test == "global" else plan.parts
    generator = rng("split") if sum(part > 0 for part in parts) > 1 else None
    trios = [_split_rows(rows, pool.y, parts, generator) for rows in mine]
    if test == "client" and plan.official:
        if _is(partition, natural):
            values = _natural_values(pool, np.concatenate([dealt, test_rows]), knobs)
            alike = natural_alike(given, values[: len(dealt)], values[len(dealt) :])
        else:
            alike = deal_alike(given, pool.y[test_rows])
        trios = [(t, v, test_rows[rows]) for (t, v, _), rows in zip(trios, alike.rows, strict=True)]

    if not 1 <= len(caps) <= len(trios):
        raise RequestError(
            f"max_train: expected one cap, or a list of at most {len(trios)}, one for each client; got {len(caps)} caps"
        )
    trios = [
        (_cap(t, pool.y, caps[k % len(caps)]), v, _cap(own, pool.y, max_test)) for k, (t, v, own) in enumerate(trios)
    ]
    if halved:
        few = set(rng("halved").permutation(len(trios))[: int(halved * len(trios) + 1e-9)].tolist())
        trios = [(_cap(t, pool.y, (len(t) + 1) // 2) if k in few else t, v, own) for k, (t, v, own) in enumerate(trios)]
    common = None if common is None else _cap(common, pool.y, max_test)
    _check_clients(trios, test)
    shared = None if common is None else pool.select(common)
    used = len(held_out) + (0 if common is None else len(common)) + sum(len(rows) for trio in trios for rows in trio)
    return Federated(
        clients=tuple(
            ClientData(
                view(pool.select(t), client, "train"),
                view(pool.select(v), client, "validation"),
                view(pool.select(own), client, "test") if shared is None else shared,
            )
            for client, (t, v, own) in enumerate(trios)
        ),
        holdout=pool.select(held_out),
        test=shared,
        classes=source.classes,
        source=source,
        unused=pool.size - used,
        label_table=np.stack([np.bincount(pool.y[t], minlength=source.classes) for t, _, _ in trios]),
    )


class _Pool:
    """Both sides of a source under one numbering: training rows first, then test rows."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._sides = [samples for _, samples in source.sides()]
        self.y: Rows = torch.cat([side.y for side in self._sides]).numpy()
        self.size = len(self.y)

    def column(self, name: str | None, rows: Rows) -> NDArray[Any]:
        """The further values of `rows` (training rows, test rows, or both) in a column.

        Raises:
            RequestError: no name, no such column, or one that a side lacks.
        """
        if name is None:
            raise RequestError("partition 'natural' expects natural_column, the column to deal by, came none")
        sides = (("training", self.source.train_columns), ("test", self.source.test_columns))
        used = [np.any(rows < len(self._sides[0])), np.any(rows >= len(self._sides[0]))]
        found = []
        for (what, columns), needed, side in zip(sides, used, self._sides, strict=False):
            if needed and name not in columns:
                hint = nearest(name, columns) if columns else ""
                more = "; with test = 'global' it needs none" if what == "test" else hint
                raise RequestError(f"the {what} side of '{self.source.name}' has no column '{name}' to deal by{more}")
            found.append(columns[name] if needed else np.empty(len(side), dtype=np.int64))
        if all(used) and found[0].dtype.kind != found[1].dtype.kind:
            raise RequestError(
                f"expected '{name}' of both sides of '{self.source.name}' in one type, came numbers and text"
            )
        values: NDArray[Any] = np.concatenate([part for part, needed in zip(found, used, strict=False) if needed])
        return values[rows if used[0] else rows - len(self._sides[0])]

    def columns(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """All further columns that every side of `rows` has."""
        held = set(self.source.train_columns)
        if np.any(rows >= len(self._sides[0])):
            held &= set(self.source.test_columns)
        return {name: self.column(name, rows) for name in sorted(held)}

    def select(self, rows: Rows) -> Samples:
        """The samples at `rows` (sorted), copied."""
        first = len(self._sides[0])
        here = self._sides[0].select(torch.from_numpy(rows[rows < first]))
        if not np.any(rows >= first):
            return here
        there = self._sides[1].select(torch.from_numpy(rows[rows >= first] - first))
        return there if not len(here) else Samples(torch.cat([here.x, there.x]), torch.cat([here.y, there.y]))


def _parse_split(split: str) -> _Split:
    """A split's words; raises `RequestError` for anything else."""
    match = re.fullmatch(r"(?:(official)(?::(\d+):(\d+))?|(\d+):(\d+):(\d+))", str(split))
    if match:
        official, a, b, train, validation, test = match.groups()
        parts = (int(a or 1), int(b or 0), 0) if official else (int(train), int(validation), int(test))
        if parts[0] > 0:
            return _Split(bool(official), parts)
    raise RequestError(
        f"expected split as 'train:validation:test' in whole numbers with train above 0 ('8:1:1'), 'official' or "
        f"'official:train:validation' ('official:9:1'), came '{split}'"
    )


def _check_test_side(source: Source, plan: _Split, split: str, test: str) -> None:
    """Refuse a test side that cannot be."""
    if source.test is None and plan.official:
        raise RequestError(f"split '{split}' expects an official test side, '{source.name}' has none; use '8:1:1'")
    from_ratio = not plan.official and (test == "client" or source.test is None)
    if from_ratio and plan.parts[2] == 0:
        raise RequestError(f"expected a test part above 0 in split, came '{split}'; use for instance '8:1:1'")


def _is(partition: object, function: Callable[..., Partition]) -> bool:
    """Whether `partition` is the name under which `function` is registered."""
    return isinstance(partition, str) and partition in PARTITIONS and PARTITIONS[partition] is function


def _natural_values(pool: _Pool, rows: Rows, knobs: _Knobs) -> NDArray[Any]:
    """What "natural" deals rows by: a column's values, or their groups."""
    values = pool.column(knobs.natural_column, rows)
    return values if knobs.natural_groups is None else hashed_groups(values, knobs.natural_groups)


def _deal(
    partition: str | Partition | Any,
    pool: _Pool,
    dealt: Rows,
    clients: int | None,
    rng: Callable[[str], np.random.Generator],
    knobs: _Knobs,
    holdout: bool,
) -> Partition:
    """Deal the rows `dealt` of the pool; the result counts among them and always has class shares."""
    y, class_count = pool.y[dealt], pool.source.classes
    if _is(partition, natural):
        given = natural(_natural_values(pool, dealt, knobs), clients, rng("partition"))
        return Partition(given.rows, given.unused, class_shares(given.rows, y, class_count))
    clients = whole("clients", clients, 1)
    if isinstance(partition, Partition):
        if len(partition.rows) != clients or holdout:
            raise RequestError(
                f"a ready partition expects clients={len(partition.rows)} (its own number) and holdout=0, came "
                f"clients={clients}{' and a holdout' if holdout else ''}"
            )
        given = partition
    elif flwr_partitioners.is_partitioner(partition):
        given = flwr_partitioners.deal(partition, y, clients, pool.columns(dealt), class_count)
    elif str(partition).startswith(flwr_partitioners.PREFIX):
        name, seed = str(partition).removeprefix(flwr_partitioners.PREFIX), int(rng("partition").integers(2**31))
        maker = flwr_partitioners.make(name, knobs.partitioner, clients, seed)
        given = flwr_partitioners.deal(maker, y, clients, pool.columns(dealt), class_count)
    else:
        function = partition if callable(partition) else PARTITIONS[partition]
        if function is dirichlet or function is quantity:
            given = function(y, clients, rng("partition"), knobs.alpha, knobs.min_size, class_count=class_count)
        elif function is classes:
            given = classes(y, clients, rng("partition"), knobs.classes_per_client, knobs.deal, class_count=class_count)
        else:
            given = _as_partition(function(y, clients, rng("partition")), len(y))
    if len(given.rows) != clients:
        raise RequestError(f"expected a partition of {clients} clients, came one of {len(given.rows)}")
    for client, rows in enumerate(given.rows):
        if len(rows) and int(rows.max()) >= len(y):
            raise RequestError(f"expected rows below {len(y)} in the partition, client {client} has {rows.max()}")
    if given.shares is not None and given.shares.shape == (clients, class_count):
        return given
    return Partition(given.rows, given.unused, class_shares(given.rows, y, class_count))


def _as_partition(found: Any, rows: int) -> Partition:
    """What a function of the user's own returned, for so many rows."""
    if isinstance(found, Partition):
        return found
    try:
        parts = [np.asarray(part) for part in found]
    except (TypeError, ValueError):
        parts = []
    if not parts or any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in parts):
        raise RequestError(
            f"expected row numbers for every client, or a Partition, from the partition's function, came "
            f"{type(found).__name__}"
        )
    partition = Partition(tuple(np.sort(part.astype(np.int64)) for part in parts))
    return Partition(partition.rows, max(0, rows - sum(map(len, parts))))


def _draw_balanced(y: Rows, count: int, generator: np.random.Generator) -> Rows:
    """`count` random rows, equally many of each class as far as they go; sorted."""
    take_C = balanced_counts(np.bincount(y), count)
    drawn = [generator.permutation(np.flatnonzero(y == label))[:take] for label, take in enumerate(take_C)]
    return np.sort(np.concatenate(drawn))


def _split_rows(
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


def _cap(rows: Rows, y: Rows, most: int | None) -> Rows:
    """At most `most` rows: the first ones of each class, the classes in the proportion they have."""
    if most is None or len(rows) <= most:
        return rows
    labels, counts = np.unique(y[rows], return_counts=True)
    take = proportional_counts(counts.astype(np.int64), most)
    return np.sort(np.concatenate([rows[y[rows] == label][:n] for label, n in zip(labels, take, strict=True)]))


def _check_clients(trios: list[tuple[Rows, Rows, Rows]], test: str) -> None:
    """Every client can train, and can be tested where that is its own business."""
    for client, (train, _, own) in enumerate(trios):
        if len(train) == 0:
            raise RequestError(
                f"expected at least one training row for every client, client {client} came out with none; use fewer "
                f"clients or more rows"
            )
        if test == "client" and len(own) == 0:
            raise RequestError(
                f"expected at least one test row for every client, client {client} came out with none ({len(train)} to "
                f"train on); use fewer clients, a larger test part in split, or test='global'"
            )
