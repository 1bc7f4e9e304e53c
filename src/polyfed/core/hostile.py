"""Hostile clients, simulated: who they are, what their data become, what they send in place of what a method uploads.

Four kinds, as `[hostile]` asks for them, drawn by the seed:

- label_flip: trains on labels C - 1 - y. All else is done as by everybody.
- sign_flip: of what the method uploads, trained weights w (groups that the method declares as `changes`) become
  w0 - scale (w - w0), w0 being what came down under the same names; other floats are negated, of packed matrices the
  values. Whole numbers, booleans, single numbers and running statistics go up as they are: they would betray it.
- inner_product, alie: these know what all honest clients send. With m the mean and s the standard deviation, number by
  number, of the honest clients' parts (`core.parts`: changes of weights, rows of one class, outputs on common inputs),
  theirs become -scale m (Xie et al., Fall of empires, UAI 2019: epsilon is `scale`), or m - scale s (Baruch et al., A
  little is enough, NeurIPS 2019: z is `scale`). What is no part, and running statistics, they send as they have it; so
  they do with a part that no honest client has.

What the method keeps at the client is what it would be without. Clip, noise and compression come after label_flip and
sign_flip, as everywhere, and before the two others, which look at what has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message
from polyfed.core.method import Method
from polyfed.core.parts import Copy, holders_of, parts_of
from polyfed.core.randomness import generator
from polyfed.core.settings import Hostile
from polyfed.core.uploads import counterparts, running_statistics
from polyfed.data.samples import ClientData, Samples
from polyfed.errors import RequestError

Kind = Literal["label_flip", "sign_flip", "inner_product", "alie"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_RUNNING = ("running_mean", "running_var")  # a negative variance would betray it


def drawn(settings: Hostile, count: int, seed: int) -> dict[int, Kind]:
    """Who is hostile, and how: number of client -> kind, in order of number.

    Args:
        count: of the federation's clients, also those that join later.

    Raises:
        RequestError: nobody would be honest.
    """
    counts = {kind: math.ceil(getattr(settings, kind) * count - 1e-9) for kind in KINDS}
    if count <= sum(counts.values()):
        told = " and ".join(f"{number} with {kind}" for kind, number in counts.items() if number)
        raise RequestError(f"hostile: expected at least one of the {count} clients to be honest, came {told}")
    order = torch.randperm(count, generator=generator(seed, "hostile")).tolist()
    found: dict[int, Kind] = {}
    for kind in KINDS:
        taken = order[len(found) : len(found) + counts[kind]]
        found |= dict.fromkeys(taken, kind)
    return dict(sorted(found.items()))


def enlist(client: Client, kind: Kind, settings: Hostile) -> None:
    """Make a client, which has its number of classes and data of its own, a hostile one."""
    if kind == "sign_flip":
        client.sign_flip = settings.scale
    if kind != "label_flip":
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
        if members.keys() == {"values", "scale"}:  # see `functional.quantization.pack`: no scale is negative
            return {**members, "values": -members["values"]}
        base = counterparts(method, entry, members, received)
        return {name: opposite(name, tensor, base) for name, tensor in members.items()}

    return {
        entry: opposite(entry, value, {}) if isinstance(value, Tensor) else of_group(entry, value)
        for entry, value in message.items()
    }


def colluded(
    liars: Mapping[int, Kind], scale: float, method: Method, uploads: Mapping[int, Message], sent: Mapping[int, Message]
) -> Mapping[int, Message]:
    """What clients that know all honest uploads send in place of theirs; the very same `uploads` where there are none.

    Args:
        liars: all hostile clients, of any kind. uploads: of one passage, by client. sent: what each was sent.
    """
    knowing = {i for i in uploads if liars.get(i) in ("inner_product", "alie")}
    honest = uploads.keys() - liars.keys()
    if not knowing or not honest:
        return uploads
    parts = parts_of(method, uploads, sent, of_changes=True)
    known = {i: {part.key: part for part in own} for i, own in parts.items()}
    copies = {i: Copy(uploads[i]) for i in knowing}
    for key, who in holders_of(parts).items():
        true = [known[i][key].vector.double() for i in who if i in honest]
        _, name, _ = known[who[0]][key].place
        if not true or (name or "").endswith(_RUNNING):
            continue
        vectors_KD = torch.stack(true)
        mean, spread = vectors_KD.mean(dim=0), vectors_KD.std(dim=0, correction=0)
        for i in knowing.intersection(who):
            part = known[i][key]
            lie = -scale * mean if liars[i] == "inner_product" else mean - scale * spread
            copies[i].put(part.place, part.moved_to(lie))
    return {i: copies[i].message if i in knowing else message for i, message in uploads.items()}
