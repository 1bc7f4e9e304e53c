"""Hostile clients, simulated: who they are, what their data become, what they send in place of what a method uploads.

Two kinds, as `[hostile]` asks for them, drawn by the seed:

- label_flip: trains on labels C - 1 - y. All else is done as by everybody.
- sign_flip: of what the method uploads, trained weights w (groups that the method declares as `changes`) become
  w0 - scale (w - w0), w0 being what came down under the same names; other floats are negated, of packed matrices the
  values. Whole numbers, booleans, single numbers and running statistics go up as they are: they would betray it.

What the method keeps at the client is what it would be without. Clip, noise and compression come after, as everywhere.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message
from polyfed.core.method import Method
from polyfed.core.randomness import generator
from polyfed.core.settings import Hostile
from polyfed.core.uploads import counterparts, running_statistics
from polyfed.data.samples import ClientData, Samples
from polyfed.errors import RequestError

Kind = Literal["label_flip", "sign_flip"]


def drawn(settings: Hostile, count: int, seed: int) -> dict[int, Kind]:
    """Who is hostile, and how: number of client -> kind, in order of number.

    Args:
        count: of the federation's clients, also those that join later.

    Raises:
        RequestError: nobody would be honest.
    """
    flips = {kind: math.ceil(getattr(settings, kind) * count - 1e-9) for kind in ("label_flip", "sign_flip")}
    if count <= sum(flips.values()):
        raise RequestError(
            f"hostile: expected at least one of the {count} clients to be honest, came {flips['label_flip']} with "
            f"label_flip and {flips['sign_flip']} with sign_flip"
        )
    order = torch.randperm(count, generator=generator(seed, "hostile")).tolist()
    labels, signs = order[: flips["label_flip"]], order[flips["label_flip"] : sum(flips.values())]
    found: dict[int, Kind] = {**dict.fromkeys(labels, "label_flip"), **dict.fromkeys(signs, "sign_flip")}
    return dict(sorted(found.items()))


def enlist(client: Client, kind: Kind, settings: Hostile) -> None:
    """Make a client, which has its number of classes and data of its own, a hostile one."""
    if kind == "sign_flip":
        client.sign_flip = settings.scale
        return
    train = client.data.train
    flipped = Samples(train.x, client.classes - 1 - train.y)
    client.data = ClientData(flipped, client.data.validation, client.data.test)


def attacked(client: Client, method: Method, message: Message, received: Message) -> Message:
    """What a client at work sends in place of `message`; the very same of an honest one.

    Args:
        message: what the method uploads, on the CPU. received: what the client was sent.
    """
    if not client.sign_flip:
        return message
    spared = running_statistics(client.model)

    def opposite(name: str, tensor: Tensor, base: Group) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or name in spared:
            return tensor
        if name not in base:
            return -tensor
        start = base[name].to(tensor)
        return start - client.sign_flip * (tensor - start)

    def of_group(entry: str, members: Group) -> dict[str, Tensor]:
        if members.keys() == {"values", "scale"}:  # see `functional.precision.pack`: no scale is negative
            return {**members, "values": -members["values"]}
        base = counterparts(method, entry, members, received)
        return {name: opposite(name, tensor, base) for name, tensor in members.items()}

    return {
        entry: opposite(entry, value, {}) if isinstance(value, Tensor) else of_group(entry, value)
        for entry, value in message.items()
    }
