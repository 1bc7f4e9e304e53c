"""The mean kernel K_bar at FedHeNN's server: whose kernels are averaged, and the factor F that is sent.

In the server's state: "kernel 7" (a representation of the RAD that client 7 uploaded) or, by `Server.keep`, its
weights; "last", who uploaded last; "factor all" or "factor 7", what is sent in this round. Nothing here asks for a
model where clients upload representations.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group, tensor
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Known, Members
from polyfed.errors import RunError
from polyfed.functional.kernel_similarity import Similarity, features
from polyfed.functional.kernels import FactorStream
from polyfed.functional.quantization import Precision, pack, unpack
from polyfed.validation.effect import ActsWith

_REMEMBERED = 2**28  # bytes of representations in all that are not computed again while weights and RAD are the same
_EXACT_RANK = 256  # columns up to which the factor is exact
_LANDMARKS = 256  # RBF: Nystroem rows per client in the factor; with L or more it is exact

_MEAN = ActsWith("setting", ("heterogeneous",))  # FedHeNN's other setting has no mean kernel
_RBF = ActsWith("similarity", ("rbf",))
Pool = Annotated[Literal["all", "selected", "seen"], _MEAN]
Control = Literal["none", "own", "permuted"]
Norm = Annotated[Literal["none", "fro"], _MEAN]
Rank = Annotated[int, Field(ge=1), _MEAN]
Packed = Annotated[Precision, _MEAN]
Width = Annotated[float, Field(gt=0), _RBF]


def representation_form(known: Known, name: str) -> Members:
    """A_k on the RAD as an upload may hold it: what `functional.quantization.pack` writes."""
    rows = len(tensor(known.server.state, "rad"))
    types = (torch.float32, torch.float16, torch.int8)
    return Members({"values": (Entry((rows, "D"), types),), "scale": (Entry(), Entry(("D",)))}, whole=False)


@dataclass(frozen=True)
class _CachedRepresentation:
    """What a client's weights, by the first tensor of them, made of a RAD."""

    rad: weakref.ref[Tensor]
    weights: weakref.ref[Tensor]
    seeded: bool
    a_LD: Tensor

    def is_of(self, rad: Tensor, weights: Tensor, seeded: bool) -> bool:
        """Whether it is of this RAD and these weights."""
        return self.rad() is rad and (self.weights() is weights or (self.seeded and seeded))


@dataclass(frozen=True)
class MeanKernel:
    """K_bar, the mean of K_j over `pool`, as a factor; the attributes are FedHeNN's settings of these names.

    A control sends something else in its place, to show whether it is the peers' kernels that help: "own" K_k alone to
    client k, "permuted" K_bar with its rows and columns in an order drawn anew for each round, so that none belongs to
    the input it stands at.
    """

    uploads: Literal["weights", "kernels"]
    pool: Pool
    norm: Literal["none", "fro"]
    control: Control
    rank: int
    precision: Precision
    similarity: Similarity
    width: float

    # server ------------------------------------------------------------------------------------------------

    def plan(self, server: Server, selected: Sequence[int]) -> None:
        """The factor for everybody; for the control "own" one for each selected client."""
        self.clear(server)
        members = self._members(server)
        if self.control == "own":
            owners = {str(i): [j for j in members if j == i] for i in selected}
        else:
            owners = {"all": members}
        streams = {owner: FactorStream(self.rank, _EXACT_RANK, self.norm) for owner in owners}
        not_finite = 0  # networks with inf or nan on the RAD, as those of finite weights may have
        for j in members:
            a_LD = self._representation(server, j)
            if not bool(a_LD.isfinite().all()):
                not_finite += 1
                continue
            features_LD = self._features(server, j, a_LD)
            for owner, stream in streams.items():
                if j in owners[owner]:
                    stream.add(features_LD, 1.0)
        if not_finite:
            server.log["kernels_left_out"] = not_finite
        for owner, stream in streams.items():
            if stream.total > 0:
                factor = stream.result()
                server.state[f"factor {owner}"] = pack(self._ordered(server, factor.matrix), self.precision)
                # part of K_bar that is left out
                server.log["factor_tail"] = max(factor.tail, server.log.get("factor_tail", 0.0))

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down: the client's factor, packed; nothing where there is none."""
        name = f"factor {client_id}" if self.control == "own" else "factor all"
        return {"factor": group(server.state, name)} if name in server.state else {}

    def clear(self, server: Server) -> None:
        """Drop the present factors."""
        server.state = {name: kept for name, kept in server.state.items() if not name.startswith("factor ")}

    def update(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Keep the weights or representations that were uploaded."""
        if uploads:
            server.state["last"] = torch.tensor(sorted(uploads))
        for client_id, message in uploads.items():
            if "model" in message:
                server.keep(client_id, group(message, "model"))
            elif "kernel" in message:
                server.state[f"kernel {client_id}"] = dict(self._checked(server, client_id, group(message, "kernel")))

    def _members(self, server: Server) -> list[int]:
        """Whose kernels are averaged."""
        if self.pool == "all" and self.uploads == "weights":  # of clients that never answered, the seeded weights
            return sorted(server.clients)
        known = [j for j in server.clients if f"kernel {j}" in server.state or server.has_kept(j)]
        if self.pool == "selected":
            last = tensor(server.state, "last").tolist() if "last" in server.state else []
            known = [j for j in known if j in last]
        return sorted(known)

    def _ordered(self, server: Server, factor_Lr: Tensor) -> Tensor:
        """The factor as it is, or for the control with its rows in another order."""
        if self.control != "permuted":
            return factor_Lr
        return factor_Lr[torch.randperm(len(factor_Lr), generator=server.generator("permuted"))]

    def _representation(self, server: Server, client_id: int) -> Tensor:
        """A_j, as it was uploaded or by a pass, which is not made again for the same weights and RAD."""
        if self.uploads == "kernels":
            return unpack(group(server.state, f"kernel {client_id}"))
        rad = tensor(server.state, "rad")
        is_seeded = not server.has_kept(client_id)  # and so as they were in every round before
        weights = server.weights(client_id)
        first = next(iter(weights.values()))
        cached: _CachedRepresentation | None = server.memory.pop(("represented", client_id), None)
        if cached is None or not cached.is_of(rad, first, is_seeded):
            model = server.model(server.clients[client_id].architecture, weights)
            a_LD = inference.represent(model, rad, server.prepare).cpu()
            cached = _CachedRepresentation(weakref.ref(rad), weakref.ref(first), is_seeded, a_LD)
        if cached.a_LD.nbytes * len(server.clients) <= _REMEMBERED:  # as what a state holds is never written into
            server.memory["represented", client_id] = cached
        return cached.a_LD

    def _features(self, server: Server, client_id: int, a_LD: Tensor) -> Tensor:
        """A_j, or another matrix with the kernel of client j."""
        draws = server.generator("landmarks", client_id)
        return features(self.similarity, a_LD, width=self.width, landmarks=_LANDMARKS, generator=draws)

    def _checked(self, server: Server, client_id: int, packed: Group) -> Group:
        rows = len(unpack(packed))
        expected = len(tensor(server.state, "rad"))
        if rows != expected:
            raise RunError(f"expected {expected} rows in the kernel of client {client_id}, got {rows}")
        return packed

    # client ------------------------------------------------------------------------------------------------

    def upload(self, client: Client, rad: Tensor) -> Group:
        """Up, where kernels are uploaded: the representation of the RAD, packed."""
        a_LD = inference.represent(client.model, rad, client.prepare).cpu()
        is_finite = bool(a_LD.isfinite().all())
        return pack(a_LD, self.precision) if is_finite else {"values": a_LD}  # as it is, for the engine to refuse
