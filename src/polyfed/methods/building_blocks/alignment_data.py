"""The alignment data (FedHeNN's RAD): unlabeled inputs that everybody sees, drawn as a function of one 63-bit seed.

Sent are the inputs themselves, where their rows stand in data that clients hold anyway, or that seed. In the server's
state: "rad" (L, ...), its rows, the round of its draw, what it is sent as, whether this round uses it, and who holds it
where it stays for more than one round; a client then keeps what it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client, PublicData
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry
from polyfed.errors import RunError
from polyfed.validation.hyperparameters import hyperparameters

_SENT_AS = ("rad", "rad_rows", "rad_seed")  # entries of a message, one of them by `transport`
_STATE = ("rad", "rad_indices", "rad_draw", "rad_sent", "rad_holders", "rad_live")

ACKNOWLEDGMENT = Entry((), (torch.int32,), 0, lambda known: known.server.round)  # form of "rad_draw"


@hyperparameters
class AlignmentData:
    """Inputs without labels that all networks represent, drawn from those that everybody may see (`Server.public`)."""

    size: Annotated[int, Field(ge=2)] = 5000  # L, rows of a draw
    # what is sent: the inputs, where their rows stand in data that all may see (4 L bytes), or the draw's seed (8)
    transport: Literal["data", "indices", "seed"] = "data"
    refresh: Annotated[int, Field(ge=0)] = 1  # rounds until a new draw; 0: never. Not 1: sent once, and kept by clients
    batch: Annotated[int, Field(ge=2)] = 256  # rows per step; L or more: all of them
    every: Annotated[int, Field(ge=1)] = 1  # compute the term every n-th step

    # server ------------------------------------------------------------------------------------------------

    def draw(self, server: Server) -> None:
        """The RAD for this round, drawn anew where that is due."""
        if "rad" in server.state and not (self.refresh and (server.round - 1) % self.refresh == 0):
            server.state["rad_live"] = torch.tensor(True)
            return
        self._clear(server)
        seed = server.generator("rad").initial_seed()
        rows = self._rows(seed, server.public)
        if server.public is None:
            raise RunError("expected data that everybody may see, got none")
        server.state |= {"rad": server.public.samples.x[rows], "rad_indices": rows}
        if self.transport == "indices":
            server.state["rad_sent"] = {"rad_rows": rows.int()}
        elif self.transport == "seed":
            server.state["rad_sent"] = {"rad_seed": torch.tensor(seed)}
        server.state |= {"rad_draw": torch.tensor(server.round, dtype=torch.int32), "rad_live": torch.tensor(True)}

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down, in a round that uses it: the RAD in the form it travels in, or only its number for who holds it.

        The number of a draw, four bytes each way, is sent where clients keep the RAD, so that it is never taken for
        another one.
        """
        if "rad" not in server.state or "rad_live" not in server.state:
            return {}
        number = {} if self.refresh == 1 else {"rad_draw": server.state["rad_draw"]}
        if client_id in self._holders(server):
            return number
        sent = get_group(server.state, "rad_sent") if "rad_sent" in server.state else {"rad": server.state["rad"]}
        return {**sent, **number}

    def end_round(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """After a round: who answered holds the RAD; where it lives for one round it is dropped."""
        if self.refresh == 1 or "rad" not in server.state:
            self._clear(server)
        elif "rad_live" in server.state:
            draw = server.state["rad_draw"]
            hold = [i for i, message in uploads.items() if "rad_draw" in message and message["rad_draw"] == draw]
            server.state["rad_holders"] = torch.tensor(sorted({*self._holders(server), *hold}))
            del server.state["rad_live"]

    def _clear(self, server: Server) -> None:
        """Drop the present draw."""
        server.state = {name: kept for name, kept in server.state.items() if name not in _STATE}

    def _holders(self, server: Server) -> list[int]:
        return get_tensor(server.state, "rad_holders").tolist() if "rad_holders" in server.state else []

    # client ------------------------------------------------------------------------------------------------

    def receive(self, client: Client, message: Message) -> Tensor | None:
        """The RAD (L, ...) as stored inputs, as received or as the client keeps it; None where there is none.

        Raises:
            RunError: what was received fits neither the client's own inputs nor the data that everybody may see.
        """
        sent = {name: get_tensor(message, name).clone() for name in _SENT_AS if name in message}
        if "rad_draw" in message:
            sent = self._kept(client, sent, get_tensor(message, "rad_draw").clone())
        if not sent:
            return None
        own = client.data.train.x
        if "rad" in sent:
            if _kind(sent["rad"]) != _kind(own):
                raise RunError(f"expected a RAD of inputs {_kind(own)}, got {_kind(sent['rad'])}")
            return sent["rad"]
        seed = int(sent["rad_seed"]) if "rad_seed" in sent else 0
        rows = sent["rad_rows"].long() if "rad_rows" in sent else self._rows(seed, client.public)
        held = 0 if client.public is None else len(client.public)
        if client.public is None or not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= held:
            raise RunError(f"expected a RAD of rows below {held} of what everybody may see, got others")
        return client.public.samples.x[rows]

    def _kept(self, client: Client, sent: dict[str, Tensor], draw: Tensor) -> dict[str, Tensor]:
        """What the client keeps of this draw: what was sent, which it keeps from now on, or what it kept before."""
        if sent:
            others = {name: kept for name, kept in client.state.items() if name not in _SENT_AS}
            client.state = {**others, **sent, "rad_draw": draw}
        elif "rad_draw" not in client.state or get_tensor(client.state, "rad_draw") != draw:
            raise RunError(f"expected a client that holds the RAD of round {int(draw)}, got one that does not")
        return {name: get_tensor(client.state, name) for name in _SENT_AS if name in client.state}

    def acknowledge(self, client: Client) -> Message:
        """Up, after a round that used it: which draw the client holds, where it keeps it."""
        return {"rad_draw": client.state["rad_draw"]} if self.refresh != 1 and "rad" in client.context else {}

    # both --------------------------------------------------------------------------------------------------

    def _rows(self, seed: int, public: PublicData | None) -> Tensor:
        """The rows of a draw, in random order, among all that everybody may see."""
        held = 0 if public is None else len(public)
        return torch.randperm(held, generator=torch.Generator().manual_seed(seed))[: self.size]


def _kind(x: Tensor) -> str:
    """Shape and type of one stored input, e.g. "(3, 32, 32) uint8"."""
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
