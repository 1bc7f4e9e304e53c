"""Work under way whose uploads the server has not got yet, and what checkpoints keep of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.message import Group, State, flatten, freeze, get_group, get_tensor, unflatten
from polyfed.core.method import TrainingResult
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.weight_store import WeightRow, WeightStore
from polyfed.errors import RunError
from polyfed.results.read import parse_json


@dataclass(frozen=True, eq=False)
class WorkInFlight:
    """A client's work that is under way on the simulated clock.

    Attributes:
        round: in which it began. seconds: until its upload arrives. result: what will have come of it; without losses
        and scores, which are in the record of that round.
    """

    round: int
    seconds: float
    result: JobResult

    @property
    def client_id(self) -> int:
        """Whose work it is."""
        return self.result.client_id


def pack(work: Sequence[WorkInFlight]) -> State:
    """Work as tensors: who began when, as JSON in bytes; and groups for uploads, weights and states."""
    facts = []
    groups: State = {}
    for place, one in enumerate(work):
        row = one.result.weights
        if row is not None and not isinstance(row, WeightRow):
            raise RunError(f"expected a row of the store as client {one.client_id}'s weights, got {type(row).__name__}")
        network = None if row is None else [row.architecture, row.variant]
        facts.append([one.client_id, one.round, one.seconds, one.result.refused, network])
        parts = {"upload": flatten(one.result.message), "state": flatten(one.result.state), "weights": dict(row or {})}
        groups |= {f"{place} {name}": tensors for name, tensors in parts.items()}
    return {"facts": torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8), **groups}


def unpack(stored: State, store: WeightStore) -> list[WorkInFlight]:
    """The inverse of `pack`. store: gets the weights; ValueError where they are not its networks'."""
    work = []
    for place, facts in enumerate(parse_json(bytes(get_tensor(stored, "facts").tolist()))):
        number, round, seconds, refused, network = facts
        upload, state, weights = (_group(stored, f"{place} {name}") for name in ("upload", "state", "weights"))
        row = None if network is None else store.store(number, network[0], network[1], weights)
        result = JobResult(number, freeze(unflatten(upload)), row, unflatten(state), TrainingResult(), refused=refused)
        work.append(WorkInFlight(round, seconds, result))
    return work


def _group(stored: State, name: str) -> Group:
    """A group, which has left nothing behind where it was empty."""
    empty: dict[str, Tensor] = {}
    return get_group(stored, name) if name in stored else empty
