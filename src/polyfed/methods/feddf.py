"""FedDF: an average per architecture, then distilled from the ensemble of all clients' networks (Lin et al., NeurIPS
2020, arXiv:2006.07242).

w_u is the network of architecture u; x runs over public inputs; s_i(x) are client i's scores.
Client i:  w_i <- w_u;  E local epochs of SGD on CE(f_u(x; w_i), y).
Server:    w_u <- sum_i p_i w_i over the clients of u, p_i = n_i / sum n_i;
           s(x) = mean over all clients i of s_i(x)  (the paper's AVGLOGITS);
           `server_steps` of Adam in each w_u on  KL(softmax s(x) || softmax f_u(x; w_u)),  the learning rate falling
           from `server_lr` to 0 along a cosine.
Sent: down P; up P + 1. Kept: server: a w_u per architecture.
Deviations from the paper: (1) Each client is evaluated on its own test rows; the paper has one test set for all. (2)
Distillation takes 128 steps. The paper takes up to 10 000 steps and stops once validation accuracy has not risen for
1000 of them. (3) All clients enter s. The paper leaves out those that are no better than chance. (4) An architecture
from which no client answered keeps its network, undistilled (not verified against the paper). (5) Public inputs are
scored once per round, in eval mode and without augmentation. (6) The upload of a single client is not distilled,
because Adam would take full steps along rounding errors. Alone, FedDF thus equals FedAvg. (7) Gradients are not
clipped; the authors' code clips them at norm 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import PublicData
from polyfed.core.inference import public_outputs
from polyfed.core.message import Message
from polyfed.core.method import Method, Requirements, hyperparameters
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.core.upload_forms import SAMPLES, as_sent
from polyfed.functional.losses import kl_divergence
from polyfed.methods.building_blocks import ensemble_distillation, weight_averaging
from polyfed.methods.fedavg import FedAvg

_WITHIN: weight_averaging.Aggregation = "same-shape"


@hyperparameters
class FedDF(Method):
    """Averaging within each architecture, then distillation from all clients' networks."""

    server_steps: Annotated[int, Field(ge=0)] = 128  # Adam steps per round; 0: FedAvg within each architecture
    server_batch: Annotated[int, Field(ge=2)] = 128  # public inputs per step
    server_lr: Annotated[float, Field(ge=0)] = 0.001  # first learning rate; 0: only BatchNorm's statistics change

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, _WITHIN)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return weight_averaging.broadcast(server, _WITHIN, client_id)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(server, uploads, "samples")
        weight_averaging.average(server, _WITHIN, models, shares)
        if len(uploads) < 2 or not self.server_steps or server.public is None:
            return  # one client's scores are those of its own network
        scores_SNC = torch.stack(public_outputs(server, models, "scores"))
        targets_NC = scores_SNC.double().mean(dim=0).to(scores_SNC.dtype)  # in float64 no order of the networks shows
        answered = {server.clients[i].architecture for i in uploads}
        losses = [self._distill(server, u, targets_NC, server.public) for u in server.architectures if u in answered]
        server.log["distillation_loss"] = sum(losses) / len(losses)

    def _distill(self, server: Server, architecture: str, targets_NC: Tensor, public: PublicData) -> float:
        """Distill the ensemble's scores into an architecture's network; returns the mean loss."""
        w = weight_averaging.weights_for(server, _WITHIN, architecture)
        model = server.model(architecture, w)
        how = Training(
            rounds=self.server_steps,
            batch_size=self.server_batch,
            optimizer="adam",
            lr=self.server_lr,
            lr_schedule="cosine",
        )

        def loss(scores_BC: Tensor, rows: Tensor) -> Tensor:
            return kl_divergence(scores_BC, targets_NC[rows].to(scores_BC.device), torch.ones_like(scores_BC[:, 0]))

        draws = server.generator("distillation")  # every architecture learns from the same batches
        mean = ensemble_distillation.distill(model, public, loss, how, draws)
        learned = ensemble_distillation.copy_state(model)
        weight_averaging.set_tensors(server, _WITHIN, architecture, {name: learned[name] for name in w})
        return mean

    # client ------------------------------------------------------------------------------------------------
    receive = FedAvg.receive
    upload = FedAvg.upload

    # declared -------------------------------------------------------------------------------------------------
    evaluation_stage = "received"
    upload_form = {"model": as_sent, "n": SAMPLES}
    delta_entries = ("model",)
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        if not self.server_steps:
            return Requirements(shared_outputs=weight_averaging.AVERAGES_HEADS)
        return Requirements(
            public=self.server_batch, same_input_shape=True, classes="it distills probabilities of classes"
        )
