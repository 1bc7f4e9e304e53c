"""What representations are aligned on and to (FedHeNN): the alignment data, and the mean kernel of all clients.

The alignment data (the paper's RAD) are unlabeled inputs that everybody sees. A draw of them is a function of one
63-bit seed. Sent are the inputs themselves, where their rows stand in data that clients hold anyway, or that seed. In
the server's state: "rad" (L, ...), its rows, the round of its draw, what it is sent as, whether this round uses it, and
who holds it where it stays for more than one round; a client then keeps what it was sent.

The mean kernel K_bar is sent as a factor F. In the server's state: "kernel 7" (a representation of the RAD that client
7 uploaded) or, by `Server.keep`, its weights; "last", who uploaded last; "factor all" or "factor 7", what is sent in
this round. Nothing here asks for a model where clients upload representations.

Both classes are a method's settings, too: ``[method.alignment_data]`` and ``[method.kernel]``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client, PublicData
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.modules import as_split_model
from polyfed.core.public_passes import public_outputs
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Form, Members, UploadContext
from polyfed.errors import RunError
from polyfed.functional.compression import Precision, dequantize_columns, quantize_columns
from polyfed.functional.kernel_similarity import Similarity, nystroem_features
from polyfed.functional.kernels import MeanKernelFactor
from polyfed.validation.effect import ActsWith
from polyfed.validation.hyperparameters import hyperparameters

_SENT_AS = ("rad", "rad_rows", "rad_seed")  # entries of a message, one of them by `transport`
_STATE = ("rad", "rad_indices", "rad_draw", "rad_sent", "rad_holders", "rad_live")
REMEMBERED_BYTES = 2**28  # of representations in all that are not computed again while weights and RAD are the same
EXACT_RANK = 256  # columns up to which the factor is exact
LANDMARKS = 256  # RBF: Nystroem rows per client in the factor; with L or more it is exact

_MEAN = ActsWith("setting", ("heterogeneous",))  # FedHeNN's other setting has no mean kernel


def _representation_form(known: UploadContext, name: str) -> Members:
    """A_k on the RAD as an upload may hold it: what `functional.quantization.quantize_columns` writes."""
    rows = len(get_tensor(known.server.state, "rad"))
    types = (torch.float32, torch.float16, torch.int8)
    return Members({"values": (Entry((rows, "D"), types),), "scale": (Entry(), Entry(("D",)))}, whole=False)


FORM: Form = {
    "kernel": _representation_form,
    "rad_draw": Entry((), (torch.int32,), 0, lambda known: known.server.round),
}


# the alignment data -----------------------------------------------------------------------------------------------


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
        """The RAD (L, ...) as stored inputs, from what came or what the client keeps; None where there is none.

        Raises:
            RunError: what came fits neither the client's own inputs nor the data that everybody may see.
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


# the mean kernel --------------------------------------------------------------------------------------------------


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


@hyperparameters
class MeanKernel:
    """K_bar, the mean of the kernels K_j over `pool`, as a factor.

    A control sends something else in its place, to show whether it is the peers' kernels that help: "own" K_k alone to
    client k, "permuted" K_bar with its rows and columns in an order drawn anew for each round, so that none belongs to
    the input it stands at.
    """

    similarity: Similarity = "linear"  # kernel, or "procrustes" (homogeneous only, in its scale-free form)
    width: Annotated[float, Field(gt=0), ActsWith("similarity", ("rbf",))] = 0.5  # RBF: width over the median distance
    # clients whose kernels are averaged; selected: last round's; seen: all that uploaded
    pool: Annotated[Literal["all", "selected", "seen"], _MEAN] = "all"
    norm: Annotated[Literal["none", "fro"], _MEAN] = "none"  # "fro": K_j / ||H K_j H||_F: no network's scale dominates
    control: Literal["none", "own", "permuted"] = "none"  # control targets: K_k, or K_bar with rows permuted
    rank: Annotated[int, Field(ge=1), _MEAN] = 128  # columns of F, if the exact one has more than 256
    precision: Annotated[Precision, _MEAN] = "float32"  # of F, and of A_k in kernel uploads

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
        streams = {owner: MeanKernelFactor(self.rank, EXACT_RANK, self.norm) for owner in owners}
        first_nonfinite = 0  # networks with inf or nan on the RAD, as those of finite weights may have
        for j, a_LD in self._representations(server, members):
            if not bool(a_LD.isfinite().all()):
                first_nonfinite += 1
                continue
            features_LD = self._features(server, j, a_LD)
            for owner, stream in streams.items():
                if j in owners[owner]:
                    stream.add(features_LD, 1.0)
        if first_nonfinite:
            server.log["kernels_left_out"] = first_nonfinite
        for owner, stream in streams.items():
            if stream.total > 0:
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
                server.state[f"kernel {client_id}"] = dict(
                    self._checked(server, client_id, get_group(message, "kernel"))
                )

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

    def _representations(self, server: Server, members: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """A_j of all members in their order, as it was uploaded, or by a pass of the network."""
        for block in self._blocks(server, members):
            by_pass = self._passed(server, [j for j in block if f"kernel {j}" not in server.state])
            for j in block:
                yield j, by_pass[j] if j in by_pass else dequantize_columns(get_group(server.state, f"kernel {j}"))

    def _blocks(self, server: Server, members: Sequence[int]) -> Iterator[list[int]]:
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

    def _passed(self, server: Server, members: Sequence[int]) -> dict[int, Tensor]:
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

    def _features(self, server: Server, client_id: int, a_LD: Tensor) -> Tensor:
        """A_j, or another matrix with the kernel of client j."""
        draws = server.generator("landmarks", client_id)
        return a_LD if self.similarity == "linear" else nystroem_features(a_LD, self.width, LANDMARKS, draws)

    def _checked(self, server: Server, client_id: int, packed: Group) -> Group:
        rows = len(dequantize_columns(packed))
        expected = len(get_tensor(server.state, "rad"))
        if rows != expected:
            raise RunError(f"expected {expected} rows in the kernel of client {client_id}, got {rows}")
        return packed

    # client ------------------------------------------------------------------------------------------------

    def upload(self, client: Client, rad: Tensor) -> Group:
        """Up, where kernels are uploaded: the representation of the RAD, packed."""
        a_LD = inference.representations(client.model, rad, client.prepare).cpu()
        is_finite = bool(a_LD.isfinite().all())
        return (
            quantize_columns(a_LD, self.precision) if is_finite else {"values": a_LD}
        )  # as it is, for the engine to refuse
