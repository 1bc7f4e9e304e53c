"""FedHeNN among equal networks: FedAvg, aligned to the received weights (Makhija et al., ICML 2022, Algorithm 1).

client k:  w_k <- w;  E epochs of SGD on  CE(f(x; w_k), y) + eta(t) d(K_k, K(w))
           K_k: the kernel of its representations of the L common inputs (RAD)
           K(w): that of the weights received
           d = 1 - CKA, or with "procrustes" the distance up to a rotation and a scale
           eta(t) = eta0 sqrt(t - 1)     or eta0 (t - 1), or eta0;  rounds t from 1
server:    w <- sum over responding clients of n_k w_k / sum n_j
Sent: down P + L inputs; up P + 1. Kept: server: the RAD, w.
Deviations from the paper: (1) The average over all clients at the end of Algorithm 1 is off by default
(`final_average`), as in the authors' code, and on in the recipes for Table 1. (2) The Procrustes distance is free
of scale. (3) FedHeNN's deviations concerning the RAD and the steps apply here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import (
    Context,
    Exchange,
    Requirements,
    TrainingResult,
    follows_device,
    hyperparameters,
    table,
)
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.upload_forms import SAMPLES, own_network
from polyfed.functional.kernel_similarity import Similarity, kernel_distance
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.building_blocks.alignment_data import ACKNOWLEDGMENT
from polyfed.methods.building_blocks.kernel_alignment import KernelAlignment
from polyfed.methods.fedhenn import FedHeNN
from polyfed.validation.effect import ActsWith


@hyperparameters
class KernelSimilarity:
    """How representations of the same inputs are compared."""

    similarity: Similarity = "linear"  # kernel: of inner products; "rbf": of distances; or "procrustes", free of scale
    width: Annotated[float, Field(gt=0), ActsWith("similarity", ("rbf",))] = 0.5  # RBF: width over the median distance


@hyperparameters
class HomogeneousFedHeNN(KernelAlignment):
    """Federated averaging of one architecture, aligned to the received weights."""

    kernel: Annotated[KernelSimilarity, table(KernelSimilarity)] = KernelSimilarity()
    final_average: bool = False  # average all clients' latest weights after the last round

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange("average", who="all", trains=False),) if self.final_average else ()

    # client ------------------------------------------------------------------------------------------------
    loss = FedHeNN.loss

    def distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        """d(K_k, K(w)), both of a step's rows of the RAD."""
        kernel = self.kernel
        return kernel_distance(kernel.similarity, a_Bd, context["rad_target"], factor=False, width=kernel.width)

    def receive(self, client: Client, message: Message) -> Context:
        if "model" in message:
            load_state(client.model, get_group(message, "model"))
        rad = self.receive_rad(client, message)
        if rad is None:
            return {}
        return {"rad": rad, "target": inference.representations(client.model, rad, client.prepare)}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        n = torch.tensor(client.n)
        if client.exchange == "average" and client.weights is None:  # it never trained
            return {"n": n}
        acknowledged = self.alignment_data.acknowledge(client) if client.exchange == "train" else {}
        return {**acknowledged, "model": float_state(client.model), "n": n}

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, "same-shape")

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        if self.uses_rad(server.round):
            self.alignment_data.draw(server)

    def broadcast(self, server: Server, client_id: int) -> Message:
        if server.exchange == "average":
            return {}
        weights = weight_averaging.broadcast(server, "same-shape", client_id)
        return {**self.alignment_data.broadcast(server, client_id), **weights}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        self.alignment_data.end_round(server, uploads)
        counts = {i: float(get_tensor(message, "n")) for i, message in uploads.items() if "n" in message}
        # in the last average the weights that all have stand for who never trained
        average = weight_averaging.weights_for(server, "same-shape", server.architectures[0])
        models = {i: get_group({"model": average, **uploads[i]}, "model") for i in counts}
        weight_averaging.average(server, "same-shape", models, counts)

    # declared -------------------------------------------------------------------------------------------------
    name = "fedhenn-homogeneous"
    evaluation_stage = "received"
    upload_form = {"model": own_network, "n": SAMPLES, "rad_draw": ACKNOWLEDGMENT}
    delta_entries = ("model",)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(
            super().requirements, same_architecture=True, hint="use fedhenn", shared_outputs="it averages networks"
        )

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return {"model": "whole weights, of which none are sent down"} if self.final_average else {}
