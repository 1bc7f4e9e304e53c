"""What clients send class by class, one row for each class that they have, and what a server remembers of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group, tensor
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import class_means
from polyfed.profiling import timed

_OWNED = "classes"


class Sent(NamedTuple):
    """All rows that came, owners ascending, then classes: owners (M,) client numbers, labels (M,), rows (M, D).

    counts: (M,) samples behind each row, as float32; ones where no counts were sent.
    """

    owners: Tensor
    labels: Tensor
    rows: Tensor
    counts: Tensor


@timed("prototypes")
def means(client: Client, rows: Tensor, name: str, counts: bool) -> Message:
    """The mean of `rows` (N, D), one for each training sample, over the samples of each class: as `name` (S, D).

    With it "labels" (S,) int32, and with `counts` the number of samples behind each row, (S,) int32.
    """
    labels, values, number = class_means(rows, client.data.train.y, client.classes)
    return {"labels": labels, name: values, **({"counts": number.int()} if counts else {})}


def gather(uploads: Mapping[int, Message], name: str) -> Sent | None:
    """The rows of all uploads; None where nothing came."""
    came = {i: uploads[i] for i in sorted(uploads) if "labels" in uploads[i]}
    if not came:
        return None
    labels = [tensor(message, "labels") for message in came.values()]
    ones = [tensor(m, "counts").float() if "counts" in m else torch.ones(len(m["labels"])) for m in came.values()]
    owners = torch.cat([torch.full_like(l, i) for i, l in zip(came, labels, strict=True)])
    return Sent(owners, torch.cat(labels), torch.cat([tensor(m, name) for m in came.values()]), torch.cat(ones))


def remember(server: Server, sent: Sent) -> None:
    """Keep in the server's state which classes each client has sent rows of."""
    before: Group = group(server.state, _OWNED) if _OWNED in server.state else {}
    now = {str(i): sent.labels[sent.owners == i] for i in sent.owners.unique().tolist()}
    server.state[_OWNED] = {**before, **now}


def wanted(server: Server, client_id: int, labels: Tensor) -> Tensor:
    """Which of `labels` a client has training samples of, as far as it has told; of a new client, all. (M,) bool."""
    known: Group = group(server.state, _OWNED) if _OWNED in server.state else {}
    own = known.get(str(client_id), labels)
    return torch.isin(labels, own)
