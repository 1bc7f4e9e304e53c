"""A node's part in a sum of which the server learns the total alone (`masked_sums`).

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
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.message import ADDENDS, Message, members
from polyfed.core.method import Method
from polyfed.deploy.answer_limits import AnswerLimits
from polyfed.deploy.masked_sums import Participant
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_disk import load_or_create_key
from polyfed.deploy.protocol import Envelope, Kind, SumAnswer, TaskRequest
from polyfed.errors import ConfigError, RunError
from polyfed.functional.fixed_point import MOST_CLIENTS, from_limbs, limbs_of

_SECRET = "sums.secret"


class NodeSum:
    """One sum, as a node takes part in it.

    Args:
        recipe: the node's own. config: its configuration. task: what is asked for. limits: count what it answers.

    Raises:
        ConfigError: its own recipe has no secure sums. RunError: the lists are not those of a sum, or it is one sum too
            many.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig, task: TaskRequest, limits: AnswerLimits) -> None:
        self._settings = recipe.secure_sums
        if not self._settings.enabled:
            raise ConfigError("expected secure_sums.enabled = true in this node's recipe, got a request for a sum")
        limits.count_sum(task)
        self._client, self._task, self._limits = config.client_id, task, limits
        self._method: Method = recipe.chosen_method
        asked = self._asked = task.sum
        name = json.dumps([task.experiment, task.round, task.exchange_index, task.is_final, asked.name])
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
        limbs: Tensor = self._participant.mask(limbs_of(addends), self._keys, self._asked.sharers, known)
        return {**upload, ADDENDS: from_limbs(limbs, addends)}

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
        if not least <= len({*asked.clients}) == len({*asked.keys}) == len(asked.clients) <= MOST_CLIENTS:
            raise RunError(f"expected the keys of {least} to {MOST_CLIENTS} different clients, got {len(asked.keys)}")
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
