"""Rows by class: what clients send and a server remembers of them, and learning towards class prototypes.

`PrototypeMethod` is a whole method but for how the server makes its prototypes (FedProto); `TrainedPrototypes` trains
them (FedTGP, FedORGP). FedSA takes the functions alone. A sample whose class has no prototype counts in the cross
entropy alone; so does everything before there are any.
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
from polyfed.core.method import (
    Batch,
    Context,
    Exposed,
    Method,
    MethodCard,
    Requirements,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.modules import as_split_model
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import COUNTS, LABELS, rows_of
from polyfed.functional import server_prototypes
from polyfed.functional.class_prototypes import (
    class_means,
    nearest_prototype_scores,
    prototype_distance,
    to_dense,
)
from polyfed.functional.losses import cross_entropy

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

    It lies where they do. With it "labels" (S,) int32, and with `counts` the number of samples behind each row, (S,)
    int32.
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


def mask_owned_classes(server: Server, client_id: int, labels: Tensor) -> Tensor:
    """Which of `labels` a client has samples of, as far as the server knows; of a new client, all. (M,) bool."""
    return torch.isin(labels, members(server.state, _OWNED).get(str(client_id), labels))


def upload_means(client: Client, counts: bool = False) -> Message:
    """The class means of the network's representations of its training rows, as "prototypes" (S, D)."""
    z = representations(client.model, client.data.train, client.prepare)
    return class_means_message(client, z, "prototypes", counts)


# for methods that upload such means
CARD = MethodCard(
    differs="anything; equal feature width",
    down="C D + C",
    up="S D + S",
    form={"labels": LABELS, "prototypes": rows_of("D"), "counts": COUNTS},
    unaligned_entries=("prototypes",),
)
REQUIREMENTS = Requirements(
    split_model=True,
    same_feature_dim=True,
    classes="its prototypes are means of classes",
    hint="set models.feature_dim to add a projection, or use fedhenn, which compares kernels",
)
EXPOSED = Exposed("prototypes", "prototypes", lambda client: as_split_model(client.model).represent)


@hyperparameters
class PrototypeMethod(Method):
    """The client half. The server sends "labels" and "prototypes" (S, D), and further ones in the group "others"."""

    card = CARD

    # weight of the mean squared distance to the prototype of the sample's class; 0: training is Local's, bit for bit
    prototype_weight: Annotated[float, Field(ge=0)] = 1.0
    # predict by the nearest prototype, or by the head; the other one is evaluated, too
    predictor: Literal["prototype", "head"] = "prototype"
    candidates: Literal["all", "own"] = "all"  # prototypes to choose from; "own": those of the client's classes

    requirements = REQUIREMENTS
    exposed = EXPOSED

    @property
    def staleness_weighting(self) -> Literal["alike", "uploads"]:
        return "alike"  # a prototype of an earlier round is one like any other

    @property
    def evaluation_stage(self) -> Stage:
        return "received" if self.predictor == "prototype" else "personal"

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
        among = torch.isin(labels, client.data.train.y) if self.candidates == "own" else labels == labels
        if among.any():
            client.state |= {"labels": labels[among], "prototypes": rows[among]}
        prototypes, present = to_dense(rows.to(next(client.model.parameters()).dtype), labels, client.classes)
        return {"prototypes": prototypes, "known": present} if self.prototype_weight else {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        scores = model.head(z)
        task = cross_entropy(scores, batch.y, batch.w)
        sums = self.sums(z.detach(), batch, scores.shape[1])
        if "prototypes" not in context:
            return task, sums
        distance = self.distance(z, batch, context)
        return task + self.prototype_weight * distance, {"distance": distance, **sums}

    def sums(self, z: Tensor, batch: Batch, classes: int) -> Mapping[str, Tensor]:
        """What a batch's representations z (N, D) add to `TrainingResult.sums`: nothing."""
        return {}

    def distance(self, z: Tensor, batch: Batch, context: Context) -> Tensor:
        """How far representations z (N, D) are from their classes' prototypes: the loss term that is weighted."""
        return prototype_distance(z, batch.y, batch.w, context["prototypes"], context["known"])

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """By the prototypes that the client keeps, or by the head; also by the head before there are any."""
        z = model.represent(x)
        scores: Tensor = model.head(z)
        if self.predictor == "head" or "prototypes" not in context:
            return scores
        rows = get_tensor(context, "prototypes").to(z)
        return self.prototype_scores(z, rows, get_tensor(context, "labels"), scores.shape[1])

    def prototype_scores(self, z: Tensor, prototypes: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Scores (N, C) of representations z (N, D) by the prototypes (S, D) of `labels` (S,)."""
        return nearest_prototype_scores(z, prototypes, labels, classes)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return upload_means(client)

    def nbytes_in_paper(self, message: Message) -> int:
        """Prototypes of the client's own classes alone: no labels, no counts, nothing for choosing among the others."""
        return nbytes({"prototypes": message["prototypes"]}) if "prototypes" in message else 0


@hyperparameters
class TrainedPrototypes(PrototypeMethod):
    """A method whose server trains a network that makes the prototypes (FedTGP, FedORGP).

    A method gives the loss of the fit (`server_loss`).
    """

    card = dataclasses.replace(CARD, states="client: last P received; server: prototype network, P")

    server_epochs: Annotated[int, Field(ge=1)] = 1  # passes over the received means per round
    server_lr: Annotated[float, Field(ge=0)] = 0.01  # learning rate of the server's SGD; 0: prototypes stay as drawn

    def init_server(self, server: Server) -> None:
        """Draw the network; its hidden layer is as wide as the representations."""
        features = as_split_model(server.model(server.architectures[0], {})).feature_dim
        draws = server.generator("prototypes")
        server.state["network"] = server_prototypes.init_network(server.classes, features, features, draws)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = collect(server, uploads, "prototypes")
        if sent is None:
            return
        network, server.log["prototype_loss"] = server_prototypes.train_network(
            get_group(server.state, "network"),
            sent.rows,
            sent.labels,
            self.server_loss(server, sent.rows, sent.labels),
            self.server_epochs,
            server.training.batch_size,
            self.server_lr,
            server.generator("means"),
        )
        before = [get_tensor(server.state, "labels")] if "labels" in server.state else []
        labels = torch.cat([*before, sent.labels]).unique()
        rows = server_prototypes.prototypes(network)[labels.long()]
        server.state |= {"network": network, "labels": labels, "prototypes": rows}

    def server_loss(self, server: Server, means: Tensor, labels: Tensor) -> server_prototypes.Loss:
        """The loss that the prototype network is fitted with, for the class means received (M, D) and their labels."""
        raise NotImplementedError(f"{type(self).__name__} defines no server_loss")
