"""A sum of which the server learns the total alone (`masked_sums`): a node's part, and the server's.

Whatever a server asks, a node

- sends no addends that are not masked;
- takes part in so many sums of an exchange as its recipe needs, with room for a server that is started again;
- answers one list of clients, one of sharers and one of survivors for each sum, noted on its disk before, and never for
  fewer clients than its own recipe says. A server thus never gets shares of both secrets of a client;
- helps to open `answers` different totals of the same addends. As each needs more than half of its clients, no two
  totals, nor any number of them, differ by one client.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.message import ADDENDS, Group, Message, members
from polyfed.core.method import Method
from polyfed.deploy.answer_limits import AnswerLimits
from polyfed.deploy.masked_sums import MaskOfTotal, Participant
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_disk import load_or_create_key
from polyfed.deploy.protocol import Envelope, Kind, SumAnswer, SumRequest, TaskRequest
from polyfed.errors import ConfigError, RunError
from polyfed.functional import fixed_point
from polyfed.plugins.settings import SecureSums

_SECRET = "sums.secret"
# asks clients, by number, one kind of request, with these facts; gives the answers that can be read
Ask = Callable[[Kind, Mapping[int, Mapping[str, Any]]], Mapping[int, SumAnswer]]


class NodeSum:
    """One sum, as a node takes part in it. recipe: its own. task: what is asked for. limits: count what it answers.

    Raises:
        ConfigError: its own recipe has no secure sums. RunError: the lists are not those of a sum, or it is one sum too
            many.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig, task: TaskRequest, limits: AnswerLimits) -> None:
        self._settings = recipe.secure_sums
        if not self._settings.enabled:
            raise ConfigError("expected secure_sums.enabled = true in this node's recipe, got a request for a sum")
        self._client, self._task, self._limits = config.client_id, task, limits
        self._method: Method = recipe.chosen_method
        asked = self._asked = task.sum
        name = json.dumps([task.experiment, task.round, task.exchange_index, task.is_final, asked.name])
        limits.count_sum(task, name)
        self._participant = Participant(load_or_create_key(config.state, _SECRET), self._client, name)
        self._name = name
        self._keys = {client: bytes.fromhex(key) for client, key in zip(asked.clients, asked.keys, strict=False)}

    def answer(self, kind: Kind) -> Envelope:
        """The answer to one of the protocol's own requests: "keys", "shares" or "unmask".

        Raises:
            RunError: there is none; the reason.
        """
        answers: dict[Kind, Callable[[], SumAnswer]] = {
            "keys": lambda: SumAnswer(keys=self._participant.keys().hex()),
            "shares": self._shares,
            "unmask": self._unmask,
        }
        return Envelope(kind, answers[kind]().model_dump())

    def _shares(self) -> SumAnswer:
        self._check_clients()
        shares = self._participant.shares(self._keys, self._settings.needed(len(self._keys)))
        return SumAnswer(shares=[shares[client].hex() for client in self._asked.clients])

    def mask(self, upload: Message, received: Message) -> Message:
        """An upload with its addends masked. received: what the client was sent."""
        self._check_sharers()
        addends = members(upload, ADDENDS)
        known = self._asked.digest(self._method, received)
        limbs: Tensor = self._participant.mask(fixed_point.limbs_of(addends), self._keys, self._asked.sharers, known)
        return {**upload, ADDENDS: fixed_point.from_limbs(limbs, addends)}

    def _unmask(self) -> SumAnswer:
        self._check_sharers()
        asked = self._asked
        self._check_list("survivors", asked.survivors, asked.sharers)
        self._once("survivors", sorted(asked.survivors))
        self._limits.count_total(self._task, _digest([self._task.experiment, sorted(asked.survivors)]))
        sealed = {client: bytes.fromhex(one) for client, one in zip(asked.sharers, asked.shares, strict=True)}
        shares = self._participant.unmask(self._keys, sealed, asked.survivors)
        return SumAnswer(shares=[shares[client].hex() for client in asked.sharers])

    def _once(self, what: str, given: Any) -> None:
        self._limits.count_once(f"{what} of the sum {self._name}", _digest(given))

    # the lists --------------------------------------------------------------------------------------------------------

    def _check_clients(self) -> None:
        asked, least = self._asked, self._settings.min_clients
        if not least <= len({*asked.clients}) == len({*asked.keys}) == len(asked.clients) <= fixed_point.MOST_CLIENTS:
            raise RunError(
                f"expected the keys of {least} to {fixed_point.MOST_CLIENTS} different clients, got {len(asked.keys)}"
            )
        if self._keys.get(self._client) != self._participant.keys():
            raise RunError(f"expected the keys of client {self._client} among those of the sum, got others")
        self._once("clients", sorted(zip(asked.clients, asked.keys, strict=True)))

    def _check_sharers(self) -> None:
        self._check_clients()
        self._check_list("sharers", self._asked.sharers, self._asked.clients)
        self._once("sharers", sorted(self._asked.sharers))

    def _check_list(self, what: str, listed: Collection[int], of: Collection[int]) -> None:
        needed = self._settings.needed(len(self._keys))
        if self._client not in listed or not {*listed} <= {*of} or not needed <= len({*listed}) == len(listed):
            raise RunError(
                f"expected at least {needed} of the sum's clients as {what}, this one among them, got {len(listed)}"
            )


def _digest(given: Any) -> str:
    return hashlib.sha256(json.dumps(given).encode()).hexdigest()


class ServerSum:
    """A sum under way, of the clients that are `asked`; the `sharers` of them may send their addends.

    all_rows: of all clients of the federation.
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
