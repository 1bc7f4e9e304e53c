"""Partitioners of flwr-datasets as a way to deal: any that assigns whole rows, by its class's name.

A partitioner is handed a table with the row's number, its label (column "label") and whatever further columns are
known; where it puts the numbers is the partition. Images never pass through it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data.partition import Partition, class_shares
from polyfed.errors import ConfigError, first_line, kind_and_line
from polyfed.registry import suggest

PREFIX = "flwr:"
_LABEL = "label"
_NO_ROWS = ("Partitioner", "VerticalEvenPartitioner", "VerticalSizePartitioner")  # the base class; they deal columns


def make_partitioner(name: str, arguments: Mapping[str, Any], clients: int, seed: int) -> Any:
    """A partitioner by its class's name and the arguments of its constructor.

    What the class takes and `arguments` do not hold is filled in: num_partitions with `clients`, partition_by with
    "label", seed with `seed`, which is derived from the run's.
    """
    kinds = _kinds()
    usable = sorted(set(kinds) - set(_NO_ROWS))
    if name not in usable:
        why = "it deals columns, not rows" if name in kinds else "unknown"
        raise ConfigError(f"partition 'flwr:{name}': {why}{suggest(name, usable)}")
    takes = inspect.signature(kinds[name]).parameters
    filled = {"num_partitions": clients, "partition_by": _LABEL, "seed": seed}
    given = {**{key: value for key, value in filled.items() if key in takes}, **arguments}
    asked = given.get("num_partitions", clients)
    if asked != clients:
        raise ConfigError(
            f"expected num_partitions of {name} to be the number of clients ({clients}), got {asked}; leave it out and "
            f"set data.num_clients"
        )
    try:
        return kinds[name](**given)
    except Exception as error:  # whatever their checks raise
        raise ConfigError(f"{name} refuses its arguments in [data.partitioner]: {first_line(error)}") from error


def apply_partitioner(
    partitioner: Any, y: NDArray[np.int64], clients: int, columns: Mapping[str, NDArray[Any]], class_count: int
) -> Partition:
    """The partition that a partitioner makes of rows with these labels (N,) and further columns, (N,) each."""
    kind = type(partitioner).__name__
    further = {name: values for name, values in columns.items() if name != _LABEL}
    row = "row" + "_" * sum(name.startswith("row") for name in further)
    try:
        from datasets import Dataset

        partitioner.dataset = Dataset.from_dict({row: np.arange(len(y)), _LABEL: y, **further})
        count = int(partitioner.num_partitions)
        parts = [partitioner.load_partition(client) for client in range(clients)] if count == clients else []
    except Exception as error:  # theirs raise nearly anything
        raise ConfigError(f"{kind} fails: {kind_and_line(error)}") from error
    if count != clients:
        raise ConfigError(f"expected {clients} partitions of {kind}, one per client, got {count}; set data.num_clients")
    rows = [np.sort(np.array(part.select_columns([row])[:][row], dtype=np.int64)) for part in parts]
    return Partition(tuple(rows), class_shares(rows, y, class_count))


def _kinds() -> dict[str, Any]:
    try:
        module = importlib.import_module("flwr_datasets.partitioner")
    except ImportError:
        raise ConfigError(
            "a partition 'flwr:...' needs the package 'flwr-datasets'; install it with: pip install "
            "'polyfed[flwr-datasets]'"
        ) from None
    return {name: getattr(module, name) for name in module.__all__}
