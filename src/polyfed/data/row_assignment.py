"""Who gets which rows of a source, by a partition's name, a function, a partitioner of flwr-datasets, or as given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data import flwr_partitioners
from polyfed.data.class_partition import by_class
from polyfed.data.options import PartitionOptions
from polyfed.data.partition import (
    Partition,
    Rows,
    by_group,
    check_integer,
    class_shares,
    dirichlet,
    groups_like,
    hash_groups,
    iid,
    partition_like,
    quantity,
)
from polyfed.data.pooled_rows import PooledRows
from polyfed.errors import ConfigError
from polyfed.registry import PARTITIONS

Generators = Callable[[str], np.random.Generator]  # purpose -> generator
_SETTINGS: tuple[tuple[Any, dict[str, str]], ...] = (  # parameter -> option, of our own partitions; others get none
    (iid, {}),
    (dirichlet, {"alpha": "dirichlet_alpha", "min_samples": "min_samples"}),
    (quantity, {"alpha": "dirichlet_alpha", "min_samples": "min_samples"}),
    (by_class, {"classes_per_client": "classes_per_client", "class_assignment": "class_assignment"}),
)


def is_by_group(partition: object) -> bool:
    """Whether rows are dealt by the values of a column, which may also say how many clients there are."""
    return isinstance(partition, str) and partition in PARTITIONS and PARTITIONS[partition] is by_group


def assign_rows(pool: PooledRows, rows: Rows, options: PartitionOptions, generators: Generators) -> Partition:
    """Deal rows of the pool; the result counts among them and always has class shares.

    Raises:
        ConfigError: a partition that does not fit the rows, the number of clients or its own settings.
    """
    y = pool.y[rows]
    class_count = pool.classes
    found = _partition(pool, rows, options, generators)
    if not is_by_group(options.partition):
        _check_partition(found, check_integer("num_clients", options.num_clients, 1), len(y))
    if found.shares is not None and found.shares.shape == (len(found.rows), class_count):
        return found
    return Partition(found.rows, found.unused, class_shares(found.rows, y, class_count))


def assign_test_rows(
    given: Partition, pool: PooledRows, rows: Rows, test_rows: Rows, options: PartitionOptions
) -> Partition:
    """Deal the official test side as the training side `rows` was dealt (`given`)."""
    if not is_by_group(options.partition):
        return partition_like(given, pool.y[test_rows])
    values = _group_values(pool, np.concatenate([rows, test_rows]), options)
    return groups_like(given, values[: len(rows)], values[len(rows) :])


def groups_of(
    partition: Partition, pool: PooledRows, rows: Rows, options: PartitionOptions
) -> tuple[tuple[str, ...], ...]:
    """The values, as text, that each client was dealt; nothing unless rows were dealt by them."""
    if not is_by_group(options.partition):
        return ()
    values = _group_values(pool, rows, options)
    return tuple(tuple(map(str, np.unique(values[mine]))) for mine in partition.rows)


def values_of(pool: PooledRows, rows: Rows, options: PartitionOptions) -> tuple[str, ...]:
    """All values, as text, of what rows are dealt by; nothing unless they are dealt so."""
    if not is_by_group(options.partition):
        return ()
    return tuple(map(str, np.unique(_group_values(pool, rows, options))))


def _partition(pool: PooledRows, rows: Rows, options: PartitionOptions, generators: Generators) -> Partition:
    """What the partition that is asked for makes of the rows."""
    wanted = options.partition
    if pool.source.is_regression and isinstance(wanted, str):
        _check_needs_no_classes(wanted)
    if is_by_group(wanted):
        values = _group_values(pool, rows, options)
        return by_group(values, options.num_clients, generators("partition"), options.min_samples)
    clients = check_integer("num_clients", options.num_clients, 1)
    if isinstance(wanted, Partition):
        _check_ready(wanted, clients, options.holdout)
        return wanted
    y = pool.y[rows]
    class_count = pool.classes
    if flwr_partitioners.is_flwr_partitioner(wanted):
        return flwr_partitioners.apply_partitioner(wanted, y, clients, pool.columns(rows), class_count)
    if str(wanted).startswith(flwr_partitioners.PREFIX):
        name = str(wanted).removeprefix(flwr_partitioners.PREFIX)
        seed = int(generators("partition").integers(2**31))
        partitioner = flwr_partitioners.make_partitioner(name, options.partitioner or {}, clients, seed)
        return flwr_partitioners.apply_partitioner(partitioner, y, clients, pool.columns(rows), class_count)
    function = wanted if callable(wanted) else PARTITIONS[wanted]
    for own, names in _SETTINGS:
        if function is own:
            asked = {name: getattr(options, option) for name, option in names.items()}
            settings = {name: value for name, value in asked.items() if value is not None}
            return own(y, clients, generators("partition"), class_count=class_count, **settings)  # type: ignore[no-any-return]
    return _as_partition(function(y, clients, generators("partition")), len(y))


def _check_needs_no_classes(partition: str) -> None:
    """Whether rows with numbers to predict can be dealt so."""
    fitting = [name for name, function in PARTITIONS.items() if function not in (dirichlet, by_class)]
    if partition not in fitting and not partition.startswith(flwr_partitioners.PREFIX):
        raise ConfigError(
            f"partition '{partition}' deals by classes; expected {', '.join(fitting)} where numbers are predicted"
        )


def _group_values(pool: PooledRows, rows: Rows, options: PartitionOptions) -> NDArray[Any]:
    """What rows are dealt by: a column's values, or their groups."""
    values = pool.column(options.group_by, rows)
    return values if options.num_groups is None else hash_groups(values, options.num_groups)


def _as_partition(found: Any, rows: int) -> Partition:
    """What a function of the user's own returned, for so many rows."""
    if isinstance(found, Partition):
        return found
    try:
        parts = [np.asarray(part) for part in found]
    except (TypeError, ValueError):
        parts = []
    if not parts or any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in parts):
        raise ConfigError(
            f"expected row numbers for every client, or a Partition, from the partition's function, got "
            f"{type(found).__name__}"
        )
    partition = Partition(tuple(np.sort(part.astype(np.int64)) for part in parts))
    return Partition(partition.rows, max(0, rows - sum(map(len, parts))))


def _check_ready(partition: Partition, clients: int, holdout: int) -> None:
    """A ready partition says itself how many clients there are, and counts all rows."""
    if len(partition.rows) != clients or holdout:
        raise ConfigError(
            f"a ready partition expects num_clients={len(partition.rows)} (its own number) and holdout=0, got "
            f"num_clients={clients}{' and a holdout' if holdout else ''}"
        )


def _check_partition(partition: Partition, clients: int, count: int) -> None:
    """Whether a partition is one of so many clients and so many rows."""
    if len(partition.rows) != clients:
        raise ConfigError(f"expected a partition of {clients} clients, got one of {len(partition.rows)}")
    for client, rows in enumerate(partition.rows):
        if len(rows) and int(rows.max()) >= count:
            raise ConfigError(f"expected rows below {count} in the partition, client {client} has {rows.max()}")
