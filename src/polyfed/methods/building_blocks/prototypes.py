"""Rows by class, as clients send them and a server keeps them, and what methods with class prototypes share.

`PrototypeMethod` is a method but for its loss and for the server's prototypes. A sample whose class has no prototype
counts in the cross entropy alone; so does everything before there are any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.inference import representations
from polyfed.core.message import Message, get_group, get_tensor, members, nbytes
from polyfed.core.method import Context, Exposed, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import as_split_model
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import COUNTS, LABELS, rows_of
from polyfed.functional.class_prototypes import class_means, distances, to_dense, update_rows

_OWNED = "classes"


class ClassRows(NamedTuple):
    """All rows received, owners ascending, then classes: owners (M,) client numbers, labels (M,), rows (M, D).

    counts: (M,) samples behind each row, as float32; ones where no counts were sent. An upload of an earlier round may
    count less (`Server.upload_weight`).
    """

    owners: Tensor
    labels: Tensor
    rows: Tensor
    counts: Tensor


def class_means_message(client: Client, rows: Tensor, name: str, counts: bool) -> Message:
    """The mean of `rows` (N, D), one for each training sample, over the samples of each class: as `name` (S, D).

    The means are on the device of `rows`. Beside them "labels" (S,) int32, and with `counts` the number of samples
    behind each row, (S,) int32.
    """
    train = client.data.train
    labels, values, number = class_means(rows, train.y, client.classes, train.at(rows.device).y)
    return {"labels": labels, name: values, **({"counts": number.int()} if counts else {})}


def collect(server: Server, uploads: Mapping[int, Message], name: str) -> ClassRows | None:
    """The rows of all uploads, with their counts times `server.upload_weight`; None without any."""
    sent = {i: uploads[i] for i in sorted(uploads) if "labels" in uploads[i]}
    if not sent:
        return None
    labels = [get_tensor(message, "labels") for message in sent.values()]
    ones = [get_tensor(m, "counts").float() if "counts" in m else torch.ones(len(m["labels"])) for m in sent.values()]
    counts = [server.upload_weight(i) * count for i, count in zip(sent, ones, strict=True)]
    owners = torch.cat([torch.full_like(l, i) for i, l in zip(sent, labels, strict=True)])
    return ClassRows(
        owners, torch.cat(labels), torch.cat([get_tensor(m, name) for m in sent.values()]), torch.cat(counts)
    )


def record_owners(server: Server, sent: ClassRows) -> None:
    """Keep in the server's state which classes each client has sent rows of."""
    now = {str(i): sent.labels[sent.owners == i] for i in sent.owners.unique().tolist()}
    server.state[_OWNED] = {**members(server.state, _OWNED), **now}


def store(server: Server, labels: Tensor, rows: Tensor) -> None:
    """Keep prototypes (S, D) of classes (S,) in the server's state; other classes keep theirs."""
    if "prototypes" in server.state:
        before = get_tensor(server.state, "prototypes")
        labels, rows = update_rows(before, get_tensor(server.state, "labels"), rows, labels)
    server.state |= {"labels": labels, "prototypes": rows}


def own_and_others(server: Server, client_id: int, rows: Tensor, candidates: str) -> Message:
    """Prototypes (M, D) of the labels in the server's state: the client's own, and for "all" candidates "others"."""
    labels = get_tensor(server.state, "labels")
    own = mask_owned_classes(server, client_id, labels)
    message = {"labels": labels[own], "prototypes": rows[own]}
    if candidates == "own" or bool(own.all()):
        return message
    return {**message, "others": {"labels": labels[~own], "prototypes": rows[~own]}}


def mask_owned_classes(server: Server, client_id: int, labels: Tensor) -> Tensor:
    """Which of `labels` a client has samples of, as far as the server knows; of a new client, all. (M,) bool."""
    return torch.isin(labels, members(server.state, _OWNED).get(str(client_id), labels))


def upload_means(client: Client, counts: bool = False) -> Message:
    """The class means of the network's representations of its training rows, as "prototypes" (S, D)."""
    z = representations(client.model, client.data.train, client.prepare)
    return class_means_message(client, z, "prototypes", counts)


# for methods that upload such means
UPLOAD_FORM = {"labels": LABELS, "prototypes": rows_of("D"), "counts": COUNTS}
REQUIREMENTS = Requirements(
    split_model=True,
    same_feature_dim=True,
    classes="its prototypes are means of classes",
    hint="set models.feature_dim to add a projection, or use fedhenn, which compares kernels",
)
EXPOSED = Exposed("prototypes", "prototypes", lambda client: as_split_model(client.model).represent)


@hyperparameters
class PrototypeMethod(Method):
    """What clients send, keep, and predict by. The server sends "labels" and "prototypes" (S, D)."""

    # weight of the distance to the prototype of the sample's class; 0: training is Local's, bit for bit
    prototype_weight: Annotated[float, Field(ge=0)] = 1.0
    # predict by the nearest prototype, or by the head; the other one is evaluated, too
    predictor: Literal["prototype", "head"] = "prototype"
    candidates: Literal["all", "own"] = "all"  # prototypes to choose from; "own": those of the client's classes

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        other: Literal["prototype", "head"] = "head" if self.predictor == "prototype" else "prototype"
        return {other: dataclasses.replace(self, predictor=other)}

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The "labels" and "prototypes" of all classes ever received; nothing before there are any."""
        return {name: server.state[name] for name in ("labels", "prototypes") if name in server.state}

    def receive(self, client: Client, message: Message) -> Context:
        """Keep the prototypes among which the client will choose; those of all classes are learnt towards."""
        if "prototypes" not in message:
            return {}
        parts = [message, *([get_group(message, "others")] if "others" in message else [])]
        labels = torch.cat([get_tensor(part, "labels") for part in parts])
        order = labels.argsort()
        labels = labels[order]
        rows = torch.cat([get_tensor(part, "prototypes") for part in parts])[order]
        is_candidate = torch.ones_like(labels, dtype=torch.bool)
        if self.candidates == "own":
            is_candidate = torch.isin(labels, client.data.train.y)
        if is_candidate.any():
            client.state |= {"labels": labels[is_candidate], "prototypes": rows[is_candidate]}
        prototypes, present = to_dense(rows.to(next(client.model.parameters()).dtype), labels, client.classes)
        return {"prototypes": prototypes, "known": present} if self.prototype_weight else {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """By the prototypes that the client keeps, or by the head; also by the head before there are any."""
        z = model.represent(x)
        scores: Tensor = model.head(z)
        if self.predictor == "head" or "prototypes" not in context:
            return scores
        by_class: Tensor = z.new_full(scores.shape, -torch.inf)  # classes without a prototype keep minus infinity
        by_class[:, get_tensor(context, "labels").long()] = self.similarity(z, get_tensor(context, "prototypes").to(z))
        return by_class

    def similarity(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """Scores (N, S) of representations z (N, D) by prototypes (S, D): the nearest one has the highest."""
        return -distances(z, prototypes)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return upload_means(client)

    def nbytes_in_paper(self, message: Message) -> int:
        """Prototypes of the client's own classes alone: no labels, no counts, nothing for choosing among the others."""
        return nbytes({"prototypes": message["prototypes"]}) if "prototypes" in message else 0

    requirements = REQUIREMENTS
    exposed = EXPOSED
    upload_form = UPLOAD_FORM
    unaligned_entries = ("prototypes",)

    @property
    def staleness_weighting(self) -> Literal["alike", "uploads"]:
        return "alike"  # a prototype of an earlier round is one like any other

    @property
    def evaluation_stage(self) -> Stage:
        return "received" if self.predictor == "prototype" else "personal"
