"""A linear header that the server trains, and that clients begin every round with (FedGH, FedRE)."""

from __future__ import annotations

from typing import Literal

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Context, Method, Requirements
from polyfed.core.modules import as_split_model, load_state
from polyfed.core.server import Server


class TrainedHeader(Method):
    """Its state, what is sent down, and what clients load; how it is trained is the method's own."""

    def init_server(self, server: Server) -> None:
        first = server.architectures[0]
        head = as_split_model(server.model(first, server.initial_state(first))).head
        server.state["header"] = {name: t.detach().cpu().clone() for name, t in head.state_dict().items()}

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"header": get_group(server.state, "header")}

    def receive(self, client: Client, message: Message) -> Context:
        load_state(as_split_model(client.model).head, get_group(message, "header"))
        return {}

    requirements = Requirements(
        split_model=True,
        same_feature_dim=True,
        same_head=True,
        linear_head=True,
        classes="the server trains the header on means of classes",
        hint="set models.feature_dim to add a projection, or use fedhenn, which compares kernels",
    )

    @property
    def staleness_weighting(self) -> Literal["alike", "uploads"]:
        return "alike"  # representations of an earlier round are pairs like any others
