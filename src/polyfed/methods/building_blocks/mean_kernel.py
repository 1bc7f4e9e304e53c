"""The mean kernel K_bar at FedHeNN's server: whose kernels, how much each counts, and the factor F that is sent.

In the server's state: "kernel 7" (a representation of the RAD that client 7 uploaded) or, by `Server.keep`, its
weights; "strengths", what clients said of themselves; "last", who uploaded last; "factor all" or "factor 7", what is
sent in this round. Nothing here asks for a model where clients upload representations.
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
from polyfed.core.acting import ActsWith
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group, tensor
from polyfed.core.server import Server
from polyfed.errors import RunError
from polyfed.functional.kernel_similarity import Similarity, features
from polyfed.functional.kernels import FactorStream
from polyfed.functional.quantization import Precision, pack, unpack

_REMEMBERED = 2**28  # bytes of representations in all that are not computed again while weights and RAD are the same

_MEAN = ActsWith("setting", ("heterogeneous",))  # FedHeNN's other setting has no mean kernel
_RBF = ActsWith("similarity", ("rbf",))
Pool = Annotated[Literal["all", "selected", "seen"], _MEAN]
Strength = Annotated[Literal["uniform", "samples", "capacity", "validation"], _MEAN]
Control = Literal["none", "own", "permuted"]
Norm = Annotated[Literal["none", "fro"], _MEAN]
Excludes = Annotated[bool, _MEAN]
Rank = Annotated[int, Field(ge=1), _MEAN]
ExactRank = Annotated[int, Field(ge=0), _MEAN]
Packed = Annotated[Precision, _MEAN]
Width = Annotated[float, Field(gt=0), _RBF]
Landmarks = Annotated[int, Field(ge=1), _RBF, _MEAN]


@dataclass(frozen=True)
class _Represented:
    """What a client's weights, by the first tensor of them, made of a RAD."""

    rad: weakref.ref[Tensor]
    weights: weakref.ref[Tensor]
    seeded: bool
    a_LD: Tensor


@dataclass(frozen=True)
class MeanKernel:
    """K_bar = sum_j w_j K_j over `kernel_pool`, as a factor; the attributes are FedHeNN's knobs of the same names.

    A control sends something else in its place, to show whether it is the peers' kernels that help: "own" K_k alone to
    client k, "permuted" K_bar with its rows and columns in an order drawn anew for each round, so that none belongs to
    the input it stands at.
    """

    uploads: Literal["weights", "kernels"]
    kernel_pool: Pool
    kernel_weights: Strength
    kernel_norm: Literal["none", "fro"]
    exclude_self: bool
    control: Control
    rank: int
    exact_rank: int
    precision: Precision
    similarity: Similarity
    width: float
    landmarks: int

    @property
    def problem(self) -> str | None:
        """Why this cannot be, or None."""
        if self.exclude_self and self.control == "own":
            return "exclude_self: expected control 'none' or 'permuted', as nothing is left of a client's own kernel"
        return None

    @property
    def by_client(self) -> bool:
        """Whether each client gets a kernel of its own."""
        return self.exclude_self or self.control == "own"

    # server ------------------------------------------------------------------------------------------------

    def plan(self, server: Server, selected: Sequence[int]) -> None:
        """The factor for everybody, or one for each selected client."""
        self.forget(server)
        members = self._members(server)
        streams = {
            owner: FactorStream(self.rank, self.exact_rank, self.kernel_norm)
            for owner in ([str(i) for i in selected] if self.by_client else ["all"])
        }
        shares = {owner: self._shares(server, self._kernels_of(owner, members)) for owner in streams}
        blown_up = 0  # networks with inf or nan on the RAD, as those of finite weights may have
        for j in members:
            a_LD = self._representation(server, j)
            if not bool(a_LD.isfinite().all()):
                blown_up += 1
                continue
            features_LD = self._features(server, j, a_LD)
            for owner, stream in streams.items():
                if j in shares[owner]:
                    stream.add(features_LD, shares[owner][j])
        if blown_up:
            server.log["kernels_left_out"] = blown_up
        for owner, stream in streams.items():
            if stream.total > 0:
                made = stream.result()
                server.state[f"factor {owner}"] = pack(self._ordered(server, made.matrix), self.precision)
                server.log["factor_tail"] = max(made.tail, server.log.get("factor_tail", 0.0))  # part of K_bar left out

    def message(self, server: Server, client_id: int) -> Message:
        """Down: the client's factor, packed; nothing where there is none."""
        name = f"factor {client_id if self.by_client else 'all'}"
        return {"factor": group(server.state, name)} if name in server.state else {}

    def forget(self, server: Server) -> None:
        """Drop the present factors."""
        server.state = {name: kept for name, kept in server.state.items() if not name.startswith("factor ")}

    def collect(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Keep what came: weights or representations, and what the clients say of themselves."""
        if uploads:
            server.state["last"] = torch.tensor(sorted(uploads))
        for client_id, message in uploads.items():
            if "model" in message:
                server.keep(client_id, group(message, "model"))
            elif "kernel" in message:
                server.state[f"kernel {client_id}"] = dict(self._checked(server, client_id, group(message, "kernel")))
        said = {str(i): tensor(message, "strength") for i, message in uploads.items() if "strength" in message}
        if said:
            known = group(server.state, "strengths") if "strengths" in server.state else {}
            server.state["strengths"] = {**known, **said}

    def _members(self, server: Server) -> list[int]:
        """Whose kernels are averaged."""
        known = [j for j in server.clients if f"kernel {j}" in server.state or server.has_kept(j)]
        last = tensor(server.state, "last").tolist() if "last" in server.state else []
        everybody = self.kernel_pool == "all" and self.uploads == "weights"  # of who never answered the seeded weights
        chosen = server.clients if everybody else known if self.kernel_pool != "selected" else {*known} & {*last}
        return sorted(chosen)

    def _kernels_of(self, owner: str, members: Sequence[int]) -> list[int]:
        """Whose kernels are averaged for an owner of a factor: a client's number, or "all"."""
        if self.control == "own":
            return [j for j in members if str(j) == owner]
        return [j for j in members if str(j) != owner]

    def _ordered(self, server: Server, factor_Lr: Tensor) -> Tensor:
        """The factor as it is, or for the control with its rows in another order."""
        if self.control != "permuted":
            return factor_Lr
        return factor_Lr[torch.randperm(len(factor_Lr), generator=server.generator("permuted"))]

    def _representation(self, server: Server, client_id: int) -> Tensor:
        """A_j, as it was uploaded or by a pass."""
        if self.uploads == "kernels":
            return unpack(group(server.state, f"kernel {client_id}"))
        rad = tensor(server.state, "rad")
        seeded = not server.has_kept(client_id)  # and so as they were in every round before
        weights = server.weights(client_id)
        first = next(iter(weights.values()))
        known: _Represented | None = server.memory.pop(("represented", client_id), None)
        if not (known and known.rad() is rad and (known.weights() is first or (known.seeded and seeded))):
            model = server.model(server.clients[client_id].architecture, weights)
            a_LD = inference.represent(model, rad, server.prepare).cpu()
            known = _Represented(weakref.ref(rad), weakref.ref(first), seeded, a_LD)
        if known.a_LD.nbytes * len(server.clients) <= _REMEMBERED:  # as what a state holds is never written into
            server.memory["represented", client_id] = known
        return known.a_LD

    def _features(self, server: Server, client_id: int, a_LD: Tensor) -> Tensor:
        """A_j, or another matrix with the kernel of client j."""
        draws = server.generator("landmarks", client_id)
        return features(self.similarity, a_LD, width=self.width, landmarks=self.landmarks, generator=draws)

    def _shares(self, server: Server, members: Sequence[int]) -> dict[int, float]:
        """w_j before normalisation; who has not yet said its strength counts as the mean of those who have."""
        said = group(server.state, "strengths") if "strengths" in server.state else {}
        strengths = {j: float(said[str(j)]) for j in members if str(j) in said}
        usual = sum(strengths.values()) / len(strengths) if strengths else 1.0
        shares = {j: strengths.get(j, usual) for j in members}
        return shares if any(shares.values()) else dict.fromkeys(members, 1.0)

    def _checked(self, server: Server, client_id: int, packed: Group) -> Group:
        rows, expected = len(unpack(packed)), len(tensor(server.state, "rad"))
        if rows != expected:
            raise RunError(f"expected {expected} rows in the kernel of client {client_id}, came {rows}")
        return packed

    # client ------------------------------------------------------------------------------------------------

    def upload(self, client: Client, rad: Tensor | None) -> Message:
        """Up: the representation of `rad` where kernels are uploaded, and the client's strength where it counts."""
        message: dict[str, Tensor | Group] = {}
        if self.uploads == "kernels" and rad is not None:
            a_LD = inference.represent(client.model, rad, client.prepare).cpu()
            finite = bool(a_LD.isfinite().all())  # else it goes as it is, for the engine to refuse
            message["kernel"] = pack(a_LD, self.precision) if finite else {"values": a_LD}
        if self.kernel_weights != "uniform":
            message["strength"] = torch.tensor(float(self._strength(client)))
        return message

    def _strength(self, client: Client) -> float:
        if self.kernel_weights == "samples":
            return client.n
        if self.kernel_weights == "capacity":
            return sum(p.numel() for p in client.model.parameters())
        held = client.data.validation
        scores = inference.apply(client.model, client.model, held.x, client.prepare).cpu()
        return float((scores.argmax(dim=1) == held.y).float().mean())
