"""K_bar, the mean of clients' kernels on the RAD: how the server has it, and how it is sent (FedHeNN).

In the server's state: "kernel 7" (a representation of the RAD that client 7 uploaded) or, by `Server.store_weights`,
its weights; "factor all" or "factor 7", what is sent in this round. Nothing here asks for a model where clients upload
representations.

Shapes: L rows of the RAD, D feature width of a client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry
from polyfed.errors import RunError
from polyfed.functional.kernel_similarity import nystroem_features
from polyfed.functional.mean_kernel_factor import MeanKernelFactor
from polyfed.validation.effect import ActsWith

NETWORKS_AT_ONCE = 16  # clients whose representations are in memory at the same time
EXACT_RANK = 256  # columns up to which the factor is exact
LANDMARKS = 256  # RBF: Nystroem rows per client in the factor; with L or more it is exact


# A_k on the RAD as an upload may hold it
REPRESENTATION = Entry((lambda known: len(get_tensor(known.server.state, "rad")), "D"))


@hyperparameters
class MeanKernel:
    """K_bar, the mean of the kernels K_j over `pool` (Algorithm 2), sent as a factor F."""

    similarity: Literal["linear", "rbf"] = "linear"  # kernel: of inner products; "rbf": of distances
    width: Annotated[float, Field(gt=0), ActsWith("similarity", ("rbf",))] = 0.5  # RBF: width over the median distance
    pool: Literal["all", "seen"] = "all"  # clients whose kernels are averaged; "seen": those that ever uploaded
    # "fro": each kernel is divided by its centered Frobenius norm, so that no scale dominates
    norm: Literal["none", "fro"] = "none"
    # target of a control: the client's "own" kernel, or the mean one with its rows "permuted" anew in each round
    control: Literal["none", "own", "permuted"] = "none"
    rank: Annotated[int, Field(ge=1)] = 128  # columns of F, if the exact factor has more than 256

    # server ------------------------------------------------------------------------------------------------
    def average(self, server: Server, selected: Sequence[int], of_weights: bool) -> None:
        """The factor for everybody; for the control "own" one for each selected client.

        Args:
            of_weights: whether it is weights that clients upload; those of clients that never did are the seeded ones.
        """
        self._clear(server)
        members = sorted(server.clients)
        if self.pool == "seen" or not of_weights:
            members = [j for j in members if f"kernel {j}" in server.state or server.has_weights(j)]
        if self.control == "own":
            for j in members:
                if j in selected:
                    self._average(server, [j], f"factor {j}")
        else:
            self._average(server, members, "factor all")

    def _average(self, server: Server, members: Sequence[int], name: str) -> None:
        """F F^T ~ H (sum of K_j over the members) H, of all whose networks give finite numbers on the RAD."""
        mean = MeanKernelFactor(self.rank, EXACT_RANK, self.norm)
        for j, a_LD in representations(server, members):
            if not bool(a_LD.isfinite().all()):  # as networks of finite weights may have it
                server.log["kernels_left_out"] = server.log.get("kernels_left_out", 0) + 1
            elif self.similarity == "linear":
                mean.add(a_LD)
            else:
                mean.add(nystroem_features(a_LD, self.width, LANDMARKS, server.generator("landmarks", j)))
        if not mean.count:
            return
        factor = mean.result()
        f_Lr = factor.matrix
        if self.control == "permuted":
            f_Lr = f_Lr[torch.randperm(len(f_Lr), generator=server.generator("permuted"))]
        server.state[name] = f_Lr.float()
        # part of K_bar that is left out
        server.log["factor_tail"] = max(factor.truncation_error, server.log.get("factor_tail", 0.0))

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down: the client's factor; nothing where there is none."""
        name = f"factor {client_id}" if self.control == "own" else "factor all"
        return {"factor": get_tensor(server.state, name)} if name in server.state else {}

    def end_round(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Drop the present factors, and keep the weights or representations that were uploaded."""
        self._clear(server)
        for client_id, message in uploads.items():
            if "model" in message:
                server.store_weights(client_id, get_group(message, "model"))
            elif "kernel" in message:
                server.state[f"kernel {client_id}"] = get_tensor(message, "kernel")

    def _clear(self, server: Server) -> None:
        server.state = {name: kept for name, kept in server.state.items() if not name.startswith("factor ")}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, message: Message, rad: Tensor) -> dict[str, Tensor]:
        """The factor of a message as "target", a row for each of the RAD's (L, ...), where these are; {} without one.

        Raises:
            RunError: it has other rows.
        """
        if "factor" not in message:
            return {}
        f_Lr = get_tensor(message, "factor")
        if f_Lr.dim() != 2 or len(f_Lr) != len(rad):
            raise RunError(f"expected a factor of {len(rad)} rows, got shape {tuple(f_Lr.shape)}")
        return {"target": f_Lr.to(rad.device)}

    def upload(self, client: Client, rad: Tensor) -> Tensor:
        """Up, where kernels are uploaded: the representation of the RAD."""
        return inference.representations(client.model, rad, client.prepare).to("cpu", torch.float32)


def representations(server: Server, members: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """A_j of all members in their order, as it was uploaded, or by a pass of the network."""
    rows = get_tensor(server.state, "rad_rows")
    for start in range(0, len(members), NETWORKS_AT_ONCE):
        block = members[start : start + NETWORKS_AT_ONCE]
        weights = {j: server.client_weights(j) for j in block if f"kernel {j}" not in server.state}
        outputs = inference.public_outputs(server, weights, "representations", rows)
        passed = dict(zip(weights, outputs, strict=True))
        for j in block:
            if j in passed:
                yield j, passed[j]
            else:
                yield j, get_tensor(server.state, f"kernel {j}").to(server.device)
