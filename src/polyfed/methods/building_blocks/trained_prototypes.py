"""Prototypes that the server trains: a network that makes one of each class's embedding (FedTGP, FedORGP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import hyperparameters
from polyfed.core.modules import as_split_model
from polyfed.core.server import Server
from polyfed.functional import server_prototypes
from polyfed.methods.building_blocks import prototypes


@hyperparameters
class TrainedPrototypes(prototypes.PrototypeMethod):
    """The server half: the prototype network, how it is fitted to what came, and what is sent of it.

    A method gives the loss of the fit (`server_loss`).
    """

    card = replace(prototypes.PrototypeMethod.card, states="client: last P received; server: prototype network, P")

    server_epochs: Annotated[int, Field(ge=1)] = 1  # passes over the received means per round
    server_lr: Annotated[float, Field(ge=0)] = 0.01  # learning rate of the server's SGD; 0: P stays random

    def init_server(self, server: Server) -> None:
        """Draw the network; its hidden layer is as wide as the representations."""
        features = as_split_model(server.model(server.architectures[0], {})).feature_dim
        draws = server.generator("prototypes")
        server.state["network"] = server_prototypes.init_network(server.classes, features, features, draws)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The "labels" and "prototypes" of all classes that ever came; nothing before there are any."""
        return {name: server.state[name] for name in ("labels", "prototypes") if name in server.state}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Fit the network to the class means that came."""
        sent = prototypes.collect(server, uploads, "prototypes")
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
        """The loss that the prototype network is fitted with.

        Args:
            server: of this round. means: (M, D) class means that came. labels: (M,) their classes.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no server_loss")
