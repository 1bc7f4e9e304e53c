"""The mean kernel K_bar of clients' representations (FedHeNN, Algorithm 2), sent as a factor F.

In the server's state: "kernel 7" (a representation of the RAD that client 7 uploaded) or, by `Server.store_weights`,
its weights; "last", who uploaded last; "factor all" or "factor 7", what is sent in this round. Nothing here asks for a
model where clients upload representations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.inference import public_outputs
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.modules import as_split_model
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Members, UploadContext
from polyfed.errors import RunError
from polyfed.functional.compression import Precision, dequantize_columns, quantize_columns
from polyfed.functional.kernel_similarity import Similarity, nystroem_features
from polyfed.functional.kernels import MeanKernelFactor
from polyfed.validation.effect import ActsWith
from polyfed.validation.hyperparameters import hyperparameters

REMEMBERED_BYTES = 2**28  # of representations in all that are not computed again while weights and RAD are the same
EXACT_RANK = 256  # columns up to which the factor is exact
LANDMARKS = 256  # RBF: Nystroem rows per client in the factor; with L or more it is exact


def representation_form(known: UploadContext, name: str) -> Members:
    """A_k on the RAD as an upload may hold it: what `quantize_columns` writes."""
    rows = len(get_tensor(known.server.state, "rad"))
    types = (torch.float32, torch.float16, torch.int8)
    return Members({"values": (Entry((rows, "D"), types),), "scale": (Entry(), Entry(("D",)))}, whole=False)


@hyperparameters
class KernelSimilarity:
    """How representations of the same inputs are compared."""

    similarity: Similarity = "linear"  # kernel, or "procrustes", in its scale-free form
    width: Annotated[float, Field(gt=0), ActsWith("similarity", ("rbf",))] = 0.5  # RBF: width over the median distance


@hyperparameters
class MeanKernel(KernelSimilarity):
    """K_bar, the mean of the kernels K_j over `pool`, as a factor.

    A control sends something else in its place, to show whether it is the peers' kernels that help: "own" K_k alone to
    client k, "permuted" K_bar with its rows and columns in an order drawn anew for each round, so that none belongs to
    the input it stands at.
    """

    similarity: Literal["linear", "rbf"] = "linear"  # kernel
    # clients whose kernels are averaged; selected: last round's; seen: all that uploaded
    pool: Literal["all", "selected", "seen"] = "all"
    norm: Literal["none", "fro"] = "none"  # "fro": K_j / ||H K_j H||_F: no network's scale dominates
    control: Literal["none", "own", "permuted"] = "none"  # control targets: K_k, or K_bar with rows permuted
    rank: Annotated[int, Field(ge=1)] = 128  # columns of F, if the exact one has more than 256
    precision: Precision = "float32"  # of F, and of A_k in kernel uploads

    # server ------------------------------------------------------------------------------------------------

    def average(self, server: Server, selected: Sequence[int], of_weights: bool) -> None:
        """The factor for everybody; for the control "own" one for each selected client.

        Args:
            of_weights: whether it is weights that clients upload; those of clients that never did are the seeded ones.
        """
        self.clear(server)
        members = self._members(server, of_weights)
        if self.control == "own":
            owners = {str(i): [j for j in members if j == i] for i in selected}
        else:
            owners = {"all": members}
        # one mean over all members; for the control one of each client's own
        streams = {owner: MeanKernelFactor(self.rank, EXACT_RANK, self.norm) for owner in owners}
        left_out = 0  # networks with inf or nan on the RAD, as those of finite weights may have
        for j, a_LD in representations(server, members):
            if not bool(a_LD.isfinite().all()):
                left_out += 1
                continue
            features_LD = self._features(server, j, a_LD)
            for owner, stream in streams.items():
                if j in owners[owner]:
                    stream.add(features_LD)
        if left_out:
            server.log["kernels_left_out"] = left_out
        for owner, stream in streams.items():
            if stream.count:
                factor = stream.result()
                server.state[f"factor {owner}"] = quantize_columns(self._ordered(server, factor.matrix), self.precision)
                # part of K_bar that is left out
                server.log["factor_tail"] = max(factor.truncation_error, server.log.get("factor_tail", 0.0))

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down: the client's factor, packed; nothing where there is none."""
        name = f"factor {client_id}" if self.control == "own" else "factor all"
        return {"factor": get_group(server.state, name)} if name in server.state else {}

    def clear(self, server: Server) -> None:
        """Drop the present factors."""
        server.state = {name: kept for name, kept in server.state.items() if not name.startswith("factor ")}

    def update(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Keep the weights or representations that were uploaded."""
        if uploads:
            server.state["last"] = torch.tensor(sorted(uploads))
        for client_id, message in uploads.items():
            if "model" in message:
                server.store_weights(client_id, get_group(message, "model"))
            elif "kernel" in message:
                packed = get_group(message, "kernel")
                rows = len(dequantize_columns(packed))
                expected = len(get_tensor(server.state, "rad"))
                if rows != expected:
                    raise RunError(f"expected {expected} rows in the kernel of client {client_id}, got {rows}")
                server.state[f"kernel {client_id}"] = dict(packed)

    def _members(self, server: Server, of_weights: bool) -> list[int]:
        """Whose kernels are averaged."""
        if self.pool == "all" and of_weights:
            return sorted(server.clients)
        known = [j for j in server.clients if f"kernel {j}" in server.state or server.has_weights(j)]
        if self.pool == "selected":
            last = get_tensor(server.state, "last").tolist() if "last" in server.state else []
            known = [j for j in known if j in last]
        return sorted(known)

    def _ordered(self, server: Server, factor_Lr: Tensor) -> Tensor:
        """The factor as it is, or for the control with its rows in another order."""
        if self.control != "permuted":
            return factor_Lr
        return factor_Lr[torch.randperm(len(factor_Lr), generator=server.generator("permuted"))]

    def _features(self, server: Server, client_id: int, a_LD: Tensor) -> Tensor:
        """A_j, or another matrix with the kernel of client j."""
        draws = server.generator("landmarks", client_id)
        return a_LD if self.similarity == "linear" else nystroem_features(a_LD, self.width, LANDMARKS, draws)

    # client ------------------------------------------------------------------------------------------------

    def upload(self, client: Client, rad: Tensor) -> Group:
        """Up, where kernels are uploaded: the representation of the RAD, packed."""
        a_LD = inference.representations(client.model, rad, client.prepare).cpu()
        if not bool(a_LD.isfinite().all()):
            return {"values": a_LD}  # as it is, for the engine to refuse
        return quantize_columns(a_LD, self.precision)


# representations of the RAD, as many at a time as memory allows -----------------------------------------------------


def representations(server: Server, members: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """A_j of all members in their order, as it was uploaded, or by a pass of the network."""
    for block in _blocks(server, members):
        by_pass = _passed(server, [j for j in block if f"kernel {j}" not in server.state])
        for j in block:
            yield j, by_pass[j] if j in by_pass else dequantize_columns(get_group(server.state, f"kernel {j}"))


def _blocks(server: Server, members: Sequence[int]) -> Iterator[list[int]]:
    """The members in their order, so many together as may be in memory at the same time."""
    block: list[int] = []
    held = 0
    for j in members:
        nbytes = 0 if f"kernel {j}" in server.state else _pass_nbytes(server, j)
        if block and held + nbytes > REMEMBERED_BYTES:
            yield block
            block = []
            held = 0
        block.append(j)
        held += nbytes
    yield block


def _passed(server: Server, members: Sequence[int]) -> dict[int, Tensor]:
    """A_j by passes, which are not made again for the same weights and RAD."""
    rad = get_tensor(server.state, "rad")
    cache: _RepresentationCache | None = server.cache.get(("representations", 0))
    if cache is None or not cache.is_of(rad):
        cache = server.cache["representations", 0] = _RepresentationCache(rad)
    firsts = {j: next(iter(server.client_weights(j).values())) if server.has_weights(j) else None for j in members}
    known = {j: cache.get(j, firsts[j]) for j in members}
    found = {j: a_LD for j, a_LD in known.items() if a_LD is not None}
    missing = {j: server.client_weights(j) for j in members if j not in found}
    rows = get_tensor(server.state, "rad_indices")
    outputs = public_outputs(server, missing, "representations", rows)
    for j, a_LD in zip(missing, outputs, strict=True):
        found[j] = a_LD
        cache.keep(j, firsts[j], a_LD)
    return found


class _RepresentationCache:
    """Representations of one RAD by clients' networks, as many as fit into `REMEMBERED_BYTES`.

    A network is known by the first tensor of its weights; None: by the client's initial weights.
    """

    def __init__(self, rad: Tensor) -> None:
        self._rad = weakref.ref(rad)
        self._kept: dict[int, tuple[weakref.ref[Tensor] | None, Tensor]] = {}
        self._nbytes = 0

    def is_of(self, rad: Tensor) -> bool:
        """Whether it is of this RAD."""
        return self._rad() is rad

    def get(self, client_id: int, first: Tensor | None) -> Tensor | None:
        """A_j (L, D), if it is here of these weights."""
        if client_id not in self._kept:
            return None
        weights, a_LD = self._kept[client_id]
        is_same = first is None if weights is None else weights() is first
        return a_LD if is_same else None

    def keep(self, client_id: int, first: Tensor | None, a_LD: Tensor) -> None:
        """Keep A_j in place of what was here of this client, if there is room."""
        if client_id in self._kept:
            self._nbytes -= self._kept.pop(client_id)[1].nbytes
        if self._nbytes + a_LD.nbytes <= REMEMBERED_BYTES:
            self._kept[client_id] = (None if first is None else weakref.ref(first), a_LD)
            self._nbytes += a_LD.nbytes


def _pass_nbytes(server: Server, client_id: int) -> int:
    """Bytes of A_j, and of the client's initial weights where these have to be drawn for its pass."""
    model = as_split_model(server.model(server.clients[client_id].architecture, {}))
    drawn = 0 if server.has_weights(client_id) else sum(p.nbytes for p in model.parameters())
    return 4 * len(get_tensor(server.state, "rad")) * model.feature_dim + drawn
