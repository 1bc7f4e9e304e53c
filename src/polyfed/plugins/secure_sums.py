"""Sums of uploads of which the server learns the total alone.

At the client the addends of an upload (`Method.addends`) become whole numbers modulo 2^40 (`functional.fixed_point`);
at the server `Method.aggregate_sum` gets their total in the place of the uploads. In a deployment they are masked on
their way (`deploy.secure_sums`). A simulation adds up the same whole numbers, so that the result is the same, bit for
bit; it hides nothing from anybody.

A sum is begun if at least `min_clients` are asked, and opened if at least a share `threshold` of them has answered.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import ADDENDS, Group, Message, members
from polyfed.core.method import Method, has_addends
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import Plugin, Rejected, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import has_upload
from polyfed.errors import ConfigError
from polyfed.functional import fixed_point
from polyfed.plugins.settings import RobustAggregation, SecureSums


class SecureSummation(Plugin):
    """Has the method aggregate totals.

    Attributes:
        rows: of all clients together, which set the unit of the fixed point.
        is_on: at the server, whether there is anything to be summed.
    """

    name = "secure_sums"
    settings_class = SecureSums
    rows = 0
    is_on = False

    def validate(self, setup: Setup) -> None:
        """Whether uploads add up, and no other setting needs to see one of them."""
        self._setup = setup
        self.is_on = self.settings.enabled and has_upload(setup.method)
        if not self.is_on:
            return
        _check(setup)
        setup.method.check_addends(setup.server)
        self.rows = sum(client.n for client in setup.clients if client.id not in setup.held_out)

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The upload with its addends in fixed point."""
        if not self.settings.enabled or not upload:
            return upload
        try:
            addends, others = method.addends(client, upload)
            if not addends:
                return others
            return {**others, ADDENDS: fixed_point.encode(addends, client.n, self.rows)}
        except ValueError as problem:
            raise Rejected(str(problem)) from None

    def receive(self, round: Round, jobs: Sequence[TrainJob], outcomes: Sequence[JobResult]) -> list[JobResult]:
        """The outcomes; who has sent other addends than most is refused, as they do not add up."""
        forms = {o.client_id: _form(members(o.message, ADDENDS)) for o in outcomes if o.counts and ADDENDS in o.message}
        if len({*forms.values()}) <= 1:
            return list(outcomes)
        (usual, _), *_ = Counter(forms.values()).most_common(1)
        refused = "expected addends of the names and shapes that most clients send, got others"
        return [
            dataclasses.replace(o, message={}, refused=refused) if forms.get(o.client_id, usual) != usual else o
            for o in outcomes
        ]

    def asked(self, method: Method, jobs: Sequence[TrainJob]) -> list[int]:
        """The clients of the sum to be begun with these jobs; none if they are too few."""
        found = [job.client.id for job in jobs if method.sends_addends(self._setup.server, job.client.id)]
        return found if len(found) >= self.settings.min_clients else []

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Note whom the sum is to be of."""
        if self.is_on:
            round.notes[self.name] = {"asked": self.asked(round.method, jobs), "summed": []}

    def aggregate(self, round: Round, uploads: Mapping[int, Message]) -> bool:
        """Open the total, if enough are there, and have the method aggregate it."""
        if not self.is_on:
            return False
        note = round.notes[self.name]
        given = {i: members(uploads[i], ADDENDS) for i in note["asked"] if ADDENDS in uploads.get(i, {})}
        needed = self.settings.needed(len(note["asked"]))
        total = self._setup.executor.add_up(given) if len(given) >= needed else None
        if total is None and note["asked"]:
            self._setup.tell(
                "message",
                f"round {round.number}: expected {needed} of {len(note['asked'])} clients at the end of the sum, got "
                "fewer; no total is opened",
            )
        note["summed"] = [] if total is None else sorted(given)
        others = {i: {k: v for k, v in message.items() if k != ADDENDS} for i, message in uploads.items()}
        opened = {} if total is None else fixed_point.decode(total, self.rows)
        round.method.aggregate_sum(round.server, opened, note["summed"], others)
        return True

    def record(self, round: Round) -> dict[str, Any]:
        """Who was asked for addends of the round's last sum, and whose are in its total."""
        note = round.notes.get(self.name, {"asked": []})
        return {self.name: note} if note["asked"] else {}


def _form(addends: Group) -> Hashable:
    """Names and shapes; what is not in fixed point is of a form of its own."""
    return tuple(
        (name, tuple(tensor.shape), tensor.dtype == torch.uint8 and tensor.dim() and tensor.shape[-1] in (5, 10))
        for name, tensor in sorted(addends.items())
    )


def _check(setup: Setup) -> None:
    """Refuse what needs to see single uploads."""
    method, plugins = setup.method, {plugin.name: plugin.settings for plugin in setup.plugins}
    if not has_addends(method):
        raise ConfigError(
            f"secure_sums: expected a method whose uploads add up (closed-form, closed-form-columns, "
            f"own-plus-common, fedavg, fedprox, moon), got {'a method alone' if method.is_alone else method.name}"
        )
    needs_uploads = {
        "robust_aggregation": plugins["robust_aggregation"] != RobustAggregation(),
        "devices.buffer_size": plugins["devices"].buffer_size,
    }
    for place, is_set in needs_uploads.items():
        if is_set:
            raise ConfigError(f"secure_sums: expected no {place}, which acts on single uploads, got some")
    if len(setup.clients) > fixed_point.MOST_CLIENTS:
        raise ConfigError(f"secure_sums: expected at most {fixed_point.MOST_CLIENTS} clients, got {len(setup.clients)}")
