"""The RAD: unlabeled inputs that all clients represent, and how they come to them (FedHeNN)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry
from polyfed.errors import RunError

_SENT_AS = ("rad", "rad_rows")  # entries of a message, one of them by `transport`

ACKNOWLEDGMENT = Entry((), (torch.int32,), 0, lambda known: known.server.round)  # form of "rad_draw"


@hyperparameters
class AlignmentData:
    """Unlabeled inputs that everybody sees (the RAD), drawn from `Server.public`.

    Sent are the inputs themselves, or where their rows stand in data that clients hold anyway. In the server's state:
    "rad" (L, ...), "rad_rows" (L,), and of a fixed RAD the round of its draw, "rad_draw", and who holds it,
    "rad_holders". A client keeps a fixed RAD in the form in which it was sent, and says so with its upload.
    """

    size: Annotated[int, Field(ge=2)] = 5000  # L, rows of the RAD
    # what is sent of the RAD: its inputs; "indices": their rows in public data
    transport: Literal["data", "indices"] = "data"
    fixed: bool = False  # one draw for all rounds, sent to each client once; else a new one in each round
    batch: Annotated[int, Field(ge=2)] = 256  # rows of the RAD per step; L or more: all
    every: Annotated[int, Field(ge=1)] = 1  # compute the term every n-th step, with n times the weight

    # server ------------------------------------------------------------------------------------------------

    def draw(self, server: Server) -> None:
        """The RAD for this round."""
        if self.fixed and "rad" in server.state:
            return
        if server.public is None:
            raise RunError("expected data that everybody may see, got none")
        rows = torch.randperm(len(server.public), generator=server.generator("rad"))[: self.size]
        server.state |= {"rad": server.public.samples.x[rows], "rad_rows": rows}
        if self.fixed:
            server.state["rad_draw"] = torch.tensor(server.round, dtype=torch.int32)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down, in a round that uses it: the RAD as it is sent, of a fixed one only its number to who holds it."""
        if "rad" not in server.state:
            return {}
        number = {"rad_draw": server.state["rad_draw"]} if self.fixed else {}
        if client_id in self._holders(server):
            return number
        if self.transport == "indices":
            return {"rad_rows": get_tensor(server.state, "rad_rows").int(), **number}
        return {"rad": server.state["rad"], **number}

    def end_round(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """After a round: who has acknowledged a fixed RAD holds it; any other one is dropped."""
        if not self.fixed:
            server.state = {name: kept for name, kept in server.state.items() if name not in _SENT_AS}
        elif hold := {i for i, message in uploads.items() if "rad_draw" in message}:
            server.state["rad_holders"] = torch.tensor(sorted({*self._holders(server), *hold}))

    def _holders(self, server: Server) -> list[int]:
        return get_tensor(server.state, "rad_holders").tolist() if "rad_holders" in server.state else []

    # client ------------------------------------------------------------------------------------------------

    def receive(self, client: Client, message: Message) -> Tensor | None:
        """The RAD (L, ...) as stored inputs, as received or as the client keeps it; None where there is none.

        Raises:
            RunError: what was received fits neither the client's own inputs nor the data that everybody may see.
        """
        sent = {name: get_tensor(message, name) for name in _SENT_AS if name in message}
        if self.fixed and "rad_draw" in message:
            if sent:
                kept = {**sent, "rad_draw": get_tensor(message, "rad_draw")}
                client.state |= {name: tensor.clone() for name, tensor in kept.items()}
            elif "rad_draw" not in client.state:
                raise RunError("expected a client that holds the RAD, got one that does not")
            sent = {name: get_tensor(client.state, name) for name in _SENT_AS if name in client.state}
        if not sent:
            return None
        own = client.data.train.x
        if "rad" in sent:
            if _kind(sent["rad"]) != _kind(own):
                raise RunError(f"expected a RAD of inputs {_kind(own)}, got {_kind(sent['rad'])}")
            return sent["rad"]
        rows = sent["rad_rows"].long()
        held = 0 if client.public is None else len(client.public)
        if client.public is None or not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= held:
            raise RunError(f"expected a RAD of rows below {held} of what everybody may see, got others")
        x = client.public.samples.at(next(client.model.parameters()).device).x
        return x[rows.to(x.device)]

    def acknowledge(self, client: Client) -> Message:
        """Up, after a round that used a fixed RAD: that the client holds it."""
        return {"rad_draw": client.state["rad_draw"]} if self.fixed and "rad" in client.context else {}


def _kind(x: Tensor) -> str:
    """Shape and type of one stored input, e.g. "(3, 32, 32) uint8"."""
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
