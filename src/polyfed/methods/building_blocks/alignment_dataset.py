"""The unlabelled inputs that everybody sees (FedHeNN's RAD): where they come from, how they travel, how long they stay.

A draw is a function of one 63-bit seed. Sent is the RAD itself, where its rows stand in data that clients hold anyway,
or that seed. In the server's state: "rad" (L, ...), the round of its draw, what it is sent as, whether this round uses
it, and who holds it where it stays for more than one round; a client then keeps what it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyfed.core.client import Client, Public
from polyfed.core.message import Message, group, tensor
from polyfed.core.server import Server
from polyfed.errors import RunError
from polyfed.functional.noise import noise_images

Origin = Literal["holdout", "other", "train", "noise"]
Transport = Literal["data", "indices", "seed"]

EXCHANGE = "rad"  # the passage in which clients hand over inputs, where they are the source
_TICKETS = ("rad", "rad_rows", "rad_seed")
_OURS = ("rad", "rad_draw", "rad_sent", "rad_asked", "rad_holders", "rad_live")


@dataclass(frozen=True)
class Rad:
    """Inputs without labels that all networks represent.

    Attributes:
        size: L, rows of a draw.
        origin: "holdout" and "other" draw from `Server.public`; "train" asks the clients for inputs of theirs, in
            proportion to what they have (the authors' code; it gives their data away); "noise" draws images of noise.
        transport: "data" (L times the bytes of one stored input), "indices" (4 L bytes, into data that everybody may
            see) or "seed" (8 bytes).
        refresh: rounds until a new draw; 0: never. Where it is not 1, a client keeps the RAD and is sent it once; four
            bytes each way name the draw, so that it is never taken for another one.
    """

    size: int
    origin: Origin = "holdout"
    transport: Transport = "data"
    refresh: int = 1

    @property
    def problem(self) -> str | None:
        """Why this cannot be, or None."""
        if self.transport == "indices" and self.origin not in ("holdout", "other"):
            return f"indices point into data that everybody may see; with rad_source '{self.origin}' send 'data'"
        if self.transport == "seed" and self.origin == "train":
            return "no seed tells what the clients handed over; with rad_source 'train' send 'data'"
        return None

    # server ------------------------------------------------------------------------------------------------

    def plan(self, server: Server) -> bool:
        """A RAD for this round, drawn anew where that is due. False: the clients must be asked first (`EXCHANGE`)."""
        if "rad" in server.state and not (self.refresh and (server.round - 1) % self.refresh == 0):
            server.state["rad_live"] = torch.tensor(True)
            return True
        self.forget(server)
        if self.origin == "train":
            server.state["rad_asked"] = self._asked(server)
            return False
        seed = server.generator("rad").initial_seed()
        rows = self._rows(seed, server.public)
        server.state["rad"] = self._inputs(seed, rows, server.public, server.example)
        sent = {"indices": {"rad_rows": rows.int()}, "seed": {"rad_seed": torch.tensor(seed)}}
        server.state |= {"rad_sent": sent[self.transport]} if self.transport in sent else {}
        self._begin(server)
        return True

    def forget(self, server: Server) -> None:
        """Drop the present draw."""
        server.state = {name: kept for name, kept in server.state.items() if name not in _OURS}

    def request(self, server: Server, client_id: int) -> Message:
        """Down, in `EXCHANGE`: how many inputs the client is to hand over."""
        asked = group(server.state, "rad_asked") if "rad_asked" in server.state else {}
        return {"rad_asked": asked[str(client_id)]} if str(client_id) in asked else {}

    def collect(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """What the clients handed over is the RAD."""
        asked = group(server.state, "rad_asked") if "rad_asked" in server.state else {}
        handed = [tensor(uploads[i], "rad") for i in sorted(uploads) if str(i) in asked and "rad" in uploads[i]]
        if handed:
            self.forget(server)
            server.state["rad"] = torch.cat(handed)
            self._begin(server)

    def message(self, server: Server, client_id: int) -> Message:
        """Down, in a round that uses it: the RAD in the form it travels in, or only its number for who holds it."""
        if "rad" not in server.state or "rad_live" not in server.state:
            return {}
        number = {} if self.refresh == 1 else {"rad_draw": server.state["rad_draw"]}
        if client_id in self._holders(server):
            return number
        sent = group(server.state, "rad_sent") if "rad_sent" in server.state else {"rad": server.state["rad"]}
        return {**sent, **number}

    def settle(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """After a round: who answered holds the RAD; where it lives for one round it is dropped."""
        if self.refresh == 1 or "rad" not in server.state:
            self.forget(server)
        elif "rad_live" in server.state:
            draw = server.state["rad_draw"]
            hold = [i for i, message in uploads.items() if "rad_draw" in message and message["rad_draw"] == draw]
            server.state["rad_holders"] = torch.tensor(sorted({*self._holders(server), *hold}))
            del server.state["rad_live"]

    def _begin(self, server: Server) -> None:
        server.state |= {"rad_draw": torch.tensor(server.round, dtype=torch.int32), "rad_live": torch.tensor(True)}

    def _holders(self, server: Server) -> list[int]:
        return tensor(server.state, "rad_holders").tolist() if "rad_holders" in server.state else []

    def _asked(self, server: Server) -> dict[str, Tensor]:
        """How many of `size` rows, drawn from all training rows alike, fall to each client."""
        numbers = sorted(server.clients)
        ends = torch.tensor([server.clients[i].n for i in numbers]).cumsum(0)
        rows = torch.randperm(int(ends[-1]), generator=server.generator("rad"))[: self.size]
        counts = torch.bincount(torch.searchsorted(ends, rows, right=True), minlength=len(numbers))
        return {str(i): count.int() for i, count in zip(numbers, counts, strict=True) if count}

    # client ------------------------------------------------------------------------------------------------

    def hand_over(self, client: Client) -> Message:
        """Up, in `EXCHANGE`: as many inputs as were asked for, drawn at random."""
        if "rad_asked" not in client.context:
            return {}
        rows = torch.randperm(client.n, generator=client.generator("rad"))[: int(client.context["rad_asked"])]
        return {"rad": client.data.train.x[rows]}

    def received(self, client: Client, message: Message) -> Tensor | None:
        """The RAD (L, ...) as stored inputs, from what came or what the client keeps; None where there is none.

        Raises:
            RunError: what came fits neither the client's own inputs nor the data that everybody may see.
        """
        own = client.data.train.x
        came = {name: tensor(message, name).clone() for name in _TICKETS if name in message}
        if "rad_draw" in message:
            draw = tensor(message, "rad_draw").clone()
            if came:
                rest = {name: kept for name, kept in client.state.items() if name not in _TICKETS}
                client.state = {**rest, **came, "rad_draw": draw}
            elif "rad_draw" not in client.state or tensor(client.state, "rad_draw") != draw:
                raise RunError(f"expected a client that holds the RAD of round {int(draw)}, came one that does not")
            came = {name: tensor(client.state, name) for name in _TICKETS if name in client.state}
        if not came:
            return None
        if "rad" in came:
            if (kind := _kind(came["rad"])) != _kind(own):
                raise RunError(f"expected a RAD of inputs {_kind(own)}, came {kind}")
            return came["rad"]
        seed = int(came["rad_seed"]) if "rad_seed" in came else 0
        rows = came["rad_rows"].long() if "rad_rows" in came else self._rows(seed, client.public)
        held = 0 if client.public is None else len(client.public)
        if self.origin != "noise" and (not len(rows) or not 0 <= int(rows.min()) <= int(rows.max()) < held):
            raise RunError(f"expected a RAD of rows below {held} of what everybody may see, came others")
        return self._inputs(seed, rows, client.public, own[:0])

    def used(self, client: Client) -> Message:
        """Up, after a round that used it: which draw the client holds, where it keeps it."""
        return {"rad_draw": client.state["rad_draw"]} if self.refresh != 1 and "rad" in client.context else {}

    # both --------------------------------------------------------------------------------------------------

    def _rows(self, seed: int, public: Public | None) -> Tensor:
        held = 0 if public is None or self.origin == "noise" else len(public)
        return torch.randperm(held, generator=torch.Generator().manual_seed(seed))[: self.size]

    def _inputs(self, seed: int, rows: Tensor, public: Public | None, like: Tensor) -> Tensor:
        if public is None or self.origin == "noise":
            draws = torch.Generator().manual_seed(seed)
            return noise_images((self.size, *like.shape[1:]), like.dtype, draws)
        return public.samples.x[rows]


def _kind(x: Tensor) -> str:
    """Shape and type of one stored input, e.g. "(3, 32, 32) uint8"."""
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
