"""Work and uploads under way that the server has not got yet, and what checkpoints keep of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.message import Group, Message, State, clone, flatten, freeze, get_group, get_tensor, unflatten
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


@dataclass(frozen=True, eq=False)
class LateUpload:
    """An upload under way. round: in which it was sent. message: tensors of its own, none of the client's row."""

    client_id: int
    round: int
    exchange: str
    message: Message


class UploadQueue:
    """The uploads of one round, on their way from the clients to the server.

    Args:
        number: of the round. waiting: late uploads of earlier rounds.
        delay_rounds: rounds that a late one needs. accepts: whether the method takes late ones.

    Attributes:
        waiting: what is still under way, due after this round. late: who sent something that is late. arrived,
        discarded: late uploads that were handed over, and those that count for nothing: at once where the method takes
        none; as soon as a fresh one of the same client is in time, which what is older would undo; on arrival where the
        round has no such exchange.
    """

    def __init__(self, number: int, waiting: Sequence[LateUpload], delay_rounds: int, accepts: bool) -> None:
        self._number, self._accepts = number, accepts
        self._due = [upload for upload in waiting if upload.round + delay_rounds <= number]
        self.waiting = [upload for upload in waiting if upload.round + delay_rounds > number]
        self.late: set[int] = set()
        self.arrived: list[LateUpload] = []
        self.discarded: list[LateUpload] = []

    def collect(self, exchange: str, sent: Mapping[int, Message], late: Collection[int]) -> dict[int, Message]:
        """What the server gets in an exchange, by number of client: what was `sent` in time, and what was due."""
        fresh = {i: message for i, message in sent.items() if i not in late}
        behind = [LateUpload(i, self._number, exchange, freeze(clone(m))) for i, m in sent.items() if i in late]
        self.late |= {upload.client_id for upload in behind}
        overtaken = [upload for upload in self.waiting if upload.exchange == exchange and upload.client_id in fresh]
        self.waiting = [upload for upload in self.waiting if upload not in overtaken]
        self.discarded.extend(overtaken)
        if self._accepts:
            self.waiting.extend(behind)
        else:
            self.discarded.extend(behind)
        uploads = dict(fresh)
        for upload in [upload for upload in self._due if upload.exchange == exchange]:
            self._due.remove(upload)
            if upload.client_id in fresh:
                self.discarded.append(upload)
            else:
                self.arrived.append(upload)
            uploads.setdefault(upload.client_id, upload.message)
        return dict(sorted(uploads.items()))

    def record(self) -> dict[str, Any]:
        """The round's part of `rounds.jsonl`, when all its exchanges are over."""
        return {
            "late": sorted(self.late),
            "arrived": [{"client": u.client_id, "from": u.round} for u in self.arrived],
            "discarded": [{"client": u.client_id, "from": u.round} for u in [*self.discarded, *self._due]],
        }


def pack_late(late: Sequence[LateUpload]) -> State:
    """Uploads as tensors: who sent them when in which exchange, as JSON in bytes; and a group for each message."""
    facts = json.dumps([[u.client_id, u.round, u.exchange] for u in late])
    messages: State = {str(place): dict(flatten(u.message)) for place, u in enumerate(late)}
    return {"facts": torch.tensor(list(facts.encode()), dtype=torch.uint8), **messages}


def unpack_late(stored: State) -> list[LateUpload]:
    """The inverse of `pack_late`."""
    facts = parse_json(bytes(get_tensor(stored, "facts").tolist()))
    messages = [unflatten(_group(stored, str(place))) for place in range(len(facts))]
    return [LateUpload(i, sent, name, freeze(m)) for (i, sent, name), m in zip(facts, messages, strict=True)]
