"""FedProto: averaged class prototypes (Tan et al., AAAI 2022, arXiv:2105.00243).

n_kc: number of training samples of class c at client k.
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda mean_d (phi_k(x) - P[y])^2
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
server:    P[c] <- sum_k n_kc C_k[c] / sum_k n_kc
           over clients that sent one ("count"), or their plain mean ("uniform")

Deviations from the paper: (1) Eq. 6 multiplies by n_kc / N_c and also divides by the number of senders, which would
shrink prototypes; here they are the weighted mean, or the plain one of the authors' code. (2) All known prototypes
are candidates; the authors' code searches the client's own classes.
The authors' code counts a prediction as correct by head and by prototype together, so its figures are not those of
either predictor. It collects prototypes in training mode while weights still change, without counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from polyfed.core.client import Client
from polyfed.core.message import Message, tensor
from polyfed.core.method import TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.core.upload_forms import Form
from polyfed.functional.class_targets import merge, renewed
from polyfed.methods.building_blocks import prototypes


@hyperparameters
class FedProto(prototypes.Prototypes):
    """Averaged class means of representations, which regularize local training."""

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "Tan et al., AAAI 2022"
    down: ClassVar[str] = "C D + C"
    up: ClassVar[str] = "S D + 2 S"
    states: ClassVar[str] = "client: last P received; server: P, clients' classes"
    form: ClassVar[Form | None] = prototypes.Prototypes.form
    unaligned_entries: ClassVar[tuple[str, ...]] = ("prototypes",)

    weighting: Literal["count", "uniform"] = "count"  # weights by samples of the class, or equal (no counts sent)

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        if "prototypes" not in server.state:
            return {}
        labels = tensor(server.state, "labels")
        rows = tensor(server.state, "prototypes")
        own = prototypes.wanted(server, client_id, labels)
        message = {"labels": labels[own], "prototypes": rows[own]}
        if self.candidates == "own" or bool(own.all()):
            return message
        return {**message, "others": {"labels": labels[~own], "prototypes": rows[~own]}}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.gather(uploads, "prototypes")
        if sent is None:
            return
        prototypes.remember(server, sent)
        labels, rows = merge(sent.rows, sent.labels, sent.counts)
        if "prototypes" in server.state:
            labels, rows = renewed(tensor(server.state, "prototypes"), tensor(server.state, "labels"), rows, labels)
        server.state |= {"labels": labels, "prototypes": rows}

    # client ------------------------------------------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return self._means(client, counts=self.weighting == "count")
