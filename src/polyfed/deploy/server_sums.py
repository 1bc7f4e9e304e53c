"""The server's part in a sum of which it learns the total alone (`masked_sums`)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

from polyfed.core.message import Group, Message
from polyfed.core.method import Method
from polyfed.deploy.masked_sums import MaskOfTotal
from polyfed.deploy.protocol import Kind, SumAnswer, SumRequest
from polyfed.functional import fixed_point
from polyfed.plugins.settings import SecureSums

# asks clients, by number, one kind of request, with these facts; gives the answers that can be read
Ask = Callable[[Kind, Mapping[int, Mapping[str, Any]]], Mapping[int, SumAnswer]]


class ServerSum:
    """A sum under way.

    Args:
        settings: the recipe's. asked: clients. all_rows: of all clients of the federation. ask: reaches them.

    Attributes:
        sharers: the clients that may send their addends.
    """

    def __init__(self, settings: SecureSums, asked: Collection[int], all_rows: int, ask: Ask) -> None:
        self._ask = ask
        self._facts: dict[str, Any] = {"name": secrets.token_hex(8), "all_rows": all_rows}
        self._shares: dict[int, dict[int, str]] = {}  # who has shared -> with whom -> what
        self.sharers: list[int] = []
        told = {client: answer.keys for client, answer in self._ask_all("keys", asked).items() if answer.keys}
        clients = sorted(told)
        if len(clients) < max(settings.min_clients, settings.needed(len(asked))):
            return
        self._needed = settings.needed(len(clients))
        self._keys = {client: bytes.fromhex(told[client]) for client in clients}
        self._facts |= {"clients": clients, "keys": [told[client] for client in clients]}
        for client, answer in self._ask_all("shares", clients).items():
            if len(answer.shares) == len(clients):
                self._shares[client] = dict(zip(clients, answer.shares, strict=True))
        if len(self._shares) >= self._needed:
            self.sharers = sorted(self._shares)
            self._facts["sharers"] = self.sharers

    def _ask_all(self, kind: Kind, clients: Collection[int]) -> Mapping[int, SumAnswer]:
        return self._ask(kind, dict.fromkeys(clients, self.request))

    @property
    def request(self) -> Mapping[str, Any]:
        """What a sharer is told with its job."""
        return {"sum": SumRequest(**self._facts)}

    def open(self, uploads: Mapping[int, Group], method: Method, sent: Message) -> Group | None:
        """The total of masked addends in fixed point; None: too few help to open it.

        Args:
            uploads: by number of client. sent: the method's message to one of them.
        """
        survivors = sorted(uploads)
        if not {*survivors} <= {*self.sharers}:
            return None
        requests = {}
        for client in survivors:
            shares = [self._shares[sharer][client] for sharer in self.sharers]
            requests[client] = {"sum": SumRequest(**self._facts, survivors=survivors, shares=shares)}
        answers: dict[int, dict[int, bytes]] = {}
        for client, answer in self._ask("unmask", requests).items():
            if len(answer.shares) == len(self.sharers) and len(answers) < self._needed:
                answers[client] = dict(zip(self.sharers, map(bytes.fromhex, answer.shares), strict=True))
        if len(answers) < self._needed:
            return None
        known = SumRequest(**self._facts).digest(method, sent)
        mask = MaskOfTotal(self._keys, self.sharers, survivors, answers, known)
        total = fixed_point.add_up(uploads.values())
        limbs = fixed_point.limbs_of(total)
        return fixed_point.from_limbs(limbs - mask.limbs(len(limbs)), total)
