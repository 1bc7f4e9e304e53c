"""The inputs on which the clients of a run are compared: the same rows for all of them, on which none has trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.randomness import numpy_generator
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import suggest
from polyfed.report.run_records import RunRecord

__all__ = ["ROWS", "ProbeInputs", "common_inputs", "load_run_data"]

ROWS = ("test", "holdout")


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """Inputs for all clients of a run.

    x: (L, ...) as stored. y: (L,) int64. about: what they are, in words. class_names: one per class.
    Any first n rows are as evenly spread over the classes as their numbers allow.
    """

    x: Tensor
    y: Tensor
    about: str
    class_names: tuple[str, ...]


def common_inputs(run: RunRecord, count: int, rows: str = "test", data: DataCache | None = None) -> ProbeInputs:
    """Draw inputs that are the same for all clients of a run, and for all runs with its data and seed.

    Args:
        run: its recipe names the data. count: L; all rows where there are fewer.
        rows: "test": of the common test set where the run has one, else of all clients' test rows put together;
            "holdout": of those that the server set aside (on which some methods align representations).
        data: where data are kept between calls.

    Raises:
        ConfigError: an unknown choice, no hold-out, a recipe without data, or data that are dealt otherwise now.
    """
    if rows not in ROWS:
        raise ConfigError(f"unknown rows '{rows}'{suggest(rows, ROWS)}")
    dealt = load_run_data(run, data)
    if rows == "holdout":
        if not len(dealt.holdout):
            raise ConfigError(f"expected rows that the server set aside (data.holdout), got {run.path} without any")
        x = dealt.holdout.x
        y = dealt.holdout.y
        whose = "rows that the server set aside"
    elif dealt.test is not None:
        x = dealt.test.x
        y = dealt.test.y
        whose = "rows of the common test set"
    else:
        x = torch.cat([client.test.x for client in dealt.clients])
        y = torch.cat([client.test.y for client in dealt.clients])
        whose = "test rows of all clients together"
        skew = run.recipe.data.get("feature_shift", "none")
        whose += "" if skew == "none" else f", each with its client's {skew}"
    order = balanced_order(y, numpy_generator(run.seed, "analysis inputs"))[:count]
    which = f"all {len(y)} {whose}" if len(order) == len(y) else f"{len(order)} of the {len(y)} {whose}, classes evenly"
    return ProbeInputs(x[order], y[order], which, tuple(dealt.source.class_names))


def balanced_order(y: Tensor, generator: np.random.Generator) -> Tensor:
    """An order of all rows (N,) whose every beginning has the classes as evenly as they go; random within classes."""
    labels = y.numpy()
    shuffled = generator.permutation(len(labels))
    turn = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        mine = shuffled[labels[shuffled] == label]
        turn[mine] = np.arange(len(mine))
    return torch.from_numpy(np.lexsort((labels, turn)))


def load_run_data(run: RunRecord, data: DataCache | None = None) -> FederatedDataset:
    """The data of a finished run's clients, dealt again from its recipe.

    Raises:
        ConfigError: a recipe without data, or of code that is not trusted; data that are not there; or a deal that is
            not the run's.
    """
    path = run.path / "recipe.toml"
    if not run.recipe.data.get("dataset"):
        raise ConfigError(f"expected a recipe that names the data in {path}, got none: the run was given its data")
    dealt = (data or DataCache()).federated(Recipe.of_run(run.path, run.trusted))
    had = [row.samples for row in run.result.clients_table or ()]
    now = [len(client.train) for client in dealt.clients]
    if had and had != now:
        client = next((n for n, (a, b) in enumerate(zip(had, now, strict=False)) if a != b), min(len(had), len(now)))
        raise ConfigError(f"{path} deals other data now than the run had: client {client} has another number of rows")
    return dealt
