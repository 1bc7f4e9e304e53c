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
from polyfed.core.upload_forms import Entry, Form, Known
from polyfed.errors import RunError
from polyfed.functional.noise import noise_images

Origin = Literal["holdout", "other", "train", "noise"]
Transport = Literal["data", "indices", "seed"]

EXCHANGE = "rad"  # the exchange in which clients hand over inputs, where they are the source
_SENT_AS = ("rad", "rad_rows", "rad_seed")  # entries of a message, one of them by `transport`
_STATE = ("rad", "rad_draw", "rad_sent", "rad_asked", "rad_holders", "rad_live")


def _asked_of(known: Known) -> int:
    """How many of its inputs the client was asked for."""
    return int(tensor(known.sent, "rad_asked")) if "rad_asked" in known.sent else 0


FORM: Form = {
    "rad": Entry(None, (torch.float32, torch.uint8, torch.int64), rows=_asked_of),
    "rad_draw": Entry((), (torch.int32,), 0, lambda known: known.server.round),
}


def asked(message: Message) -> dict[str, Tensor]:
    """What a client remembers of a message in `EXCHANGE`: how many inputs it is to hand over."""
    return {name: value.clone() for name, value in message.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class AlignmentDataset:
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

    def check(self) -> None:
        """Refuse what cannot be; raises ValueError."""
        if self.transport == "indices" and self.origin not in ("holdout", "other"):
            raise ValueError(
                f"indices point into data that everybody may see; with rad_source '{self.origin}' send 'data'"
            )
        if self.transport == "seed" and self.origin == "train":
            raise ValueError("no seed tells what the clients handed over; with rad_source 'train' send 'data'")

    @property
    def public_origin(self) -> Literal["", "holdout", "other"]:
        """Of what kind the data that everybody may see must be; "" where none are needed."""
        return self.origin if self.origin == "holdout" or self.origin == "other" else ""

    # server ------------------------------------------------------------------------------------------------

    def plan(self, server: Server) -> bool:
        """A RAD for this round, drawn anew where that is due. False: the clients must be asked first (`EXCHANGE`)."""
        if "rad" in server.state and not (self.refresh and (server.round - 1) % self.refresh == 0):
            server.state["rad_live"] = torch.tensor(True)
            return True
        self.clear(server)
        if self.origin == "train":
            server.state["rad_asked"] = self._shares(server)
            return False
        seed = server.generator("rad").initial_seed()
        rows = self._rows(seed, server.public)
        server.state["rad"] = self._inputs(seed, rows, server.public, server.example)
        if self.transport == "indices":
            server.state["rad_sent"] = {"rad_rows": rows.int()}
        elif self.transport == "seed":
            server.state["rad_sent"] = {"rad_seed": torch.tensor(seed)}
        self._begin(server)
        return True

    def clear(self, server: Server) -> None:
        """Drop the present draw."""
        server.state = {name: kept for name, kept in server.state.items() if name not in _STATE}

    def request(self, server: Server, client_id: int) -> Message:
        """Down, in `EXCHANGE`: how many inputs the client is to hand over."""
        asked = group(server.state, "rad_asked") if "rad_asked" in server.state else {}
        return {"rad_asked": asked[str(client_id)]} if str(client_id) in asked else {}

    def collect(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """What the clients handed over is the RAD."""
        asked = group(server.state, "rad_asked") if "rad_asked" in server.state else {}
        handed = [tensor(uploads[i], "rad") for i in sorted(uploads) if str(i) in asked and "rad" in uploads[i]]
        if handed:
            self.clear(server)
            server.state["rad"] = torch.cat(handed)
            self._begin(server)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down, in a round that uses it: the RAD in the form it travels in, or only its number for who holds it."""
        if "rad" not in server.state or "rad_live" not in server.state:
            return {}
        number = {} if self.refresh == 1 else {"rad_draw": server.state["rad_draw"]}
        if client_id in self._holders(server):
            return number
        sent = group(server.state, "rad_sent") if "rad_sent" in server.state else {"rad": server.state["rad"]}
        return {**sent, **number}

    def end_round(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """After a round: who answered holds the RAD; where it lives for one round it is dropped."""
        if self.refresh == 1 or "rad" not in server.state:
            self.clear(server)
        elif "rad_live" in server.state:
            draw = server.state["rad_draw"]
            hold = [i for i, message in uploads.items() if "rad_draw" in message and message["rad_draw"] == draw]
            server.state["rad_holders"] = torch.tensor(sorted({*self._holders(server), *hold}))
            del server.state["rad_live"]

    def _begin(self, server: Server) -> None:
        server.state |= {"rad_draw": torch.tensor(server.round, dtype=torch.int32), "rad_live": torch.tensor(True)}

    def _holders(self, server: Server) -> list[int]:
        return tensor(server.state, "rad_holders").tolist() if "rad_holders" in server.state else []

    def _shares(self, server: Server) -> dict[str, Tensor]:
        """How many of `size` rows, drawn from all training rows alike, fall to each client."""
        numbers = sorted(server.clients)
        ends = torch.tensor([server.clients[i].n for i in numbers]).cumsum(0)
        rows = torch.randperm(int(ends[-1]), generator=server.generator("rad"))[: self.size]
        counts = torch.bincount(torch.searchsorted(ends, rows, right=True), minlength=len(numbers))
        return {str(i): count.int() for i, count in zip(numbers, counts, strict=True) if count}

    # client ------------------------------------------------------------------------------------------------

    def upload_samples(self, client: Client) -> Message:
        """Up, in `EXCHANGE`: as many inputs as were asked for, drawn at random."""
        if "rad_asked" not in client.context:
            return {}
        rows = torch.randperm(client.n, generator=client.generator("rad"))[: int(client.context["rad_asked"])]
        return {"rad": client.data.train.x[rows]}

    def receive(self, client: Client, message: Message) -> Tensor | None:
        """The RAD (L, ...) as stored inputs, from what came or what the client keeps; None where there is none.

        Raises:
            RunError: what came fits neither the client's own inputs nor the data that everybody may see.
        """
        sent = {name: tensor(message, name).clone() for name in _SENT_AS if name in message}
        if "rad_draw" in message:
            sent = self._kept(client, sent, tensor(message, "rad_draw").clone())
        if not sent:
            return None
        own = client.data.train.x
        if "rad" in sent:
            if _kind(sent["rad"]) != _kind(own):
                raise RunError(f"expected a RAD of inputs {_kind(own)}, got {_kind(sent['rad'])}")
            return sent["rad"]
        seed = int(sent["rad_seed"]) if "rad_seed" in sent else 0
        rows = sent["rad_rows"].long() if "rad_rows" in sent else self._rows(seed, client.public)
        if self.origin != "noise":
            _check_rows(rows, client.public)
        return self._inputs(seed, rows, client.public, own[:0])

    def _kept(self, client: Client, sent: dict[str, Tensor], draw: Tensor) -> dict[str, Tensor]:
        """What the client keeps of this draw: what was sent, which it keeps from now on, or what it kept before."""
        if sent:
            others = {name: kept for name, kept in client.state.items() if name not in _SENT_AS}
            client.state = {**others, **sent, "rad_draw": draw}
        elif "rad_draw" not in client.state or tensor(client.state, "rad_draw") != draw:
            raise RunError(f"expected a client that holds the RAD of round {int(draw)}, got one that does not")
        return {name: tensor(client.state, name) for name in _SENT_AS if name in client.state}

    def acknowledge(self, client: Client) -> Message:
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


def _check_rows(rows: Tensor, public: Public | None) -> None:
    """Raises RunError where there are no rows, or some that nobody has."""
    held = 0 if public is None else len(public)
    if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= held:
        raise RunError(f"expected a RAD of rows below {held} of what everybody may see, got others")


def _kind(x: Tensor) -> str:
    """Shape and type of one stored input, e.g. "(3, 32, 32) uint8"."""
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
