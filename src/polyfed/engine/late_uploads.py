"""Uploads that arrive in a later round than they were sent in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.message import Message


@dataclass(frozen=True, eq=False)
class LateUpload:
    """An upload under way. round: in which it was sent. message: tensors of its own."""

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
        behind = [LateUpload(i, self._number, exchange, m) for i, m in sent.items() if i in late]
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
