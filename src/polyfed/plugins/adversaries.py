"""Hostile clients, simulated: who they are, what their data become, what they send in place of what a method uploads.

Two kinds, as `[adversaries]` asks for them, drawn by the seed:

- label_flip: trains on labels C - 1 - y. All else is done as by everybody.
- sign_flip: of what the method uploads, trained weights w (groups that the method declares as `delta_entries`) become
  w0 - scale (w - w0), w0 being what was sent under the same names; other floats are negated, of packed matrices the
  values. Whole numbers, booleans, single numbers and running statistics go up as they are: they would betray it.

What the method keeps at the client is what it would be without. Clip and noise come after it, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, first_nonfinite
from polyfed.core.method import Method
from polyfed.core.randomness import generator
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.engine.plugin import Plugin, Rejected, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import base_tensors, batchnorm_buffers
from polyfed.errors import ConfigError
from polyfed.plugins.settings import Adversaries

Kind = Literal["label_flip", "sign_flip"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def assign_attacks(settings: Adversaries, count: int, seed: int, held_out: Collection[int] = ()) -> dict[int, Kind]:
    """Who is hostile, and how: number of client -> kind, in order of number. held_out: who never trains."""
    everybody = torch.randperm(count, generator=generator(seed, "hostile")).tolist()
    order = [client for client in everybody if client not in held_out]
    count = len(order)
    counts = {kind: math.ceil(getattr(settings, f"{kind}_fraction") * count - 1e-9) for kind in KINDS}
    if count <= sum(counts.values()):
        asked = " and ".join(f"{number} with {kind}" for kind, number in counts.items() if number)
        raise ConfigError(f"adversaries: expected at least one of the {count} clients to be honest, got {asked}")
    found: dict[int, Kind] = {}
    for kind in KINDS:
        taken = order[len(found) : len(found) + counts[kind]]
        found |= dict.fromkeys(taken, kind)
    return dict(sorted(found.items()))


class AdversarialClients(Plugin):
    """Clients that play false.

    Attributes:
        kinds: number of a hostile client -> what it does.
    """

    name = "adversaries"
    settings_class = Adversaries

    def __init__(self, settings: Adversaries | None = None) -> None:
        super().__init__(settings)
        self.kinds: dict[int, Kind] = {}

    def validate(self, setup: Setup) -> None:
        """Draw who is hostile, and flip the labels of those who train on flipped ones."""
        self.kinds = assign_attacks(self.settings, len(setup.clients), setup.seed, setup.held_out)
        setup.unscored.update(self.kinds)
        if "label_flip" in self.kinds.values() and not setup.clients[0].classes:
            raise ConfigError("adversaries.label_flip_fraction: expected classes as labels, got numbers to predict")
        for number, kind in self.kinds.items():
            if kind == "label_flip":
                client = setup.clients[number]
                train = client.data.train
                flipped = LabeledSamples(train.x, client.classes - 1 - train.y)
                client.data = ClientData(flipped, client.data.validation, client.data.test)

    def facts(self) -> dict[str, Any]:
        """The settings, and who is hostile."""
        if not self.kinds:
            return super().facts()
        return {**super().facts(), "adversarial_clients": {str(number): kind for number, kind in self.kinds.items()}}

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The opposite of what the method uploads, where the client flips signs."""
        if self.kinds.get(client.id) != "sign_flip":
            return upload
        opposite = flip_signs(upload, client, method, received, self.settings.attack_scale)
        if name := first_nonfinite(opposite):
            raise Rejected(f"the upload is not finite ('{name}')")
        return opposite

    def record(self, round: Round) -> dict[str, Any]:
        """Who of those asked is hostile."""
        return {self.name: sorted(round.asked & self.kinds.keys())} if self.kinds else {}


def flip_signs(message: Message, client: Client, method: Method, received: Message, scale: float) -> Message:
    """What a client at work that flips signs sends in place of `message`. received: what it was sent."""
    spared = batchnorm_buffers(client.model)

    def opposite(name: str, tensor: Tensor, base: Group) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or name in spared:
            return tensor
        if name not in base:
            return -tensor
        start = base[name].to(tensor)
        return start - scale * (tensor - start)

    def of_group(entry: str, group: Group) -> dict[str, Tensor]:
        base = base_tensors(method, entry, group, received)
        return {name: opposite(name, tensor, base) for name, tensor in group.items()}

    return {
        entry: opposite(entry, value, {}) if isinstance(value, Tensor) else of_group(entry, value)
        for entry, value in message.items()
    }
