"""Fed-ET: clients' networks of several architectures teach a large one at the server (Cho et al., IJCAI 2022).

w_u is the network of architecture u, w the server's; all heads have the same tensors. x runs over public inputs, whose
labels nobody looks at; s_i(x) are client i's scores, v_i(x) their variance over the classes. All begin with w's head.
Client i:  w_i <- w_u;  E local epochs of SGD on CE(f_u(x; w_i), y).
Server:    head of w <- mean of the heads of w_i;  y(x) = argmax s(x), s = sum_i v_i s_i / sum_i v_i;
           s_div = the same sum over those i whose highest score is not y(x);
           `server_steps` of SGD in w on  CE(f(x; w), y(x)) + lambda KL(softmax s_div(x) || softmax f(x; w)), where all
           agree without the KL;  then w_u <- mean of the w_i of u, with the head of w.
Sent: down P; up P + 1. Kept: server: w, a w_u per architecture.
Deviations from the paper (arXiv:2204.12703): (1) The architectures' averaged networks are evaluated, not the server's
network. (2) v_i is the variance of logits, equal to that of log-probabilities. The paper's descriptions differ, and one
takes probabilities. If all variances are 0, networks have equal weights. (3) An architecture from which no client
answered keeps its weights and gets the new head. (4) `aggregation = "layer-wise"` follows FedIN, which runs the method
on nested networks. (5) Public inputs come from the recipe; the paper uses another data set's. They are scored once per
round. (6) The server's optimizer is plain SGD, created anew in each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.inference import public_outputs
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import Requirements, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import head_names
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.methods.building_blocks import ensemble_distillation, weight_averaging
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class FedET(FedAvg):
    """Ensemble distillation into a large server network, whose head is sent back."""

    # w_u: mean within each architecture; "layer-wise": of each tensor over all clients that have it
    aggregation: weight_averaging.Aggregation = "same-shape"
    weighting: weight_averaging.Weighting = "uniform"  # equal weights in all means; "samples": by training samples
    # the server's network: the "largest" or "smallest" of the clients', or a model's name
    network: Annotated[str, Field(min_length=1)] = "largest"
    diversity_weight: Annotated[float, Field(ge=0)] = 0.05  # lambda, weight of the diversity term; 0: off
    server_steps: Annotated[int, Field(ge=0)] = 128  # SGD steps per round; 0: only heads are averaged
    server_batch: Annotated[int, Field(ge=2)] = 64  # public inputs per step
    server_lr: Annotated[float, Field(ge=0)] = 0.005  # learning rate of these steps; 0: only the head changes

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.network)

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        super().init_server(server)
        w = server.initial_state(server.auxiliary_model)
        server.state["server"] = w
        self._share_head(server, w)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        super().aggregate(server, uploads)
        models = {i: get_group(message, "model") for i, message in uploads.items()}
        heads = [self._head(server, server.clients[i].architecture, model) for i, model in models.items()]
        weights = [server.share(i, self.weighting, get_tensor(uploads[i], "n")) for i in models]
        self._teach(server, models, weighted_mean(heads, weights))

    def _head(self, server: Server, architecture: str, weights: Group) -> dict[str, Tensor]:
        """A network's head, by tensor names within the head."""
        names = head_names(server.model(architecture, {}))
        return {inner: weights[own] for own, inner in names.items()}

    def _teach(self, server: Server, models: Mapping[int, Group], head: Group) -> None:
        """Distill into the server's network, from the mean head; share the resulting head."""
        names = head_names(server.model(server.auxiliary_model, {}))
        w = {**get_group(server.state, "server"), **{own: head[inner] for own, inner in names.items()}}
        if self.server_steps and server.public is not None:
            targets = consensus(torch.stack(public_outputs(server, models, "scores")))
            model = server.model(server.auxiliary_model, w)

            def loss(scores: Tensor, rows: Tensor) -> Tensor:
                agreed = Consensus(*(t[rows].to(scores.device) for t in targets))
                return transfer_loss(scores, agreed, self.diversity_weight)

            how = Training(rounds=self.server_steps, batch_size=self.server_batch, lr=self.server_lr)
            mean = ensemble_distillation.distill(model, server.public, loss, how, server.generator("transfer"))
            w = ensemble_distillation.copy_state(model)
            server.log["transfer_loss"] = mean
            server.log["disputed"] = float(targets.disagreement.float().mean())
        server.state["server"] = w
        self._share_head(server, w)

    def _share_head(self, server: Server, w: Group) -> None:
        """Copy the head of the server's network `w` into every architecture's shared model."""
        head = self._head(server, server.auxiliary_model, w)
        for architecture in server.architectures:
            names = head_names(server.model(architecture, {}))
            tensors = {own: head[inner] for own, inner in names.items()}
            weight_averaging.set_tensors(server, self.aggregation, architecture, tensors)

    # declared -------------------------------------------------------------------------------------------------
    @property
    def requirements(self) -> Requirements:
        nested = self.aggregation != "same-shape"
        instead = "set models.feature_dim to give all one width, or use fedmd, which averages no weights"
        return Requirements(
            split_model=True,
            same_head=True,
            shared_shapes=nested,
            same_input_shape=True,
            public=self.server_batch if self.server_steps else 0,
            classes="it distills probabilities of classes" if self.server_steps else "",
            shared_outputs=weight_averaging.AVERAGES_HEADS,
            hint=f"use method.aggregation = 'same-shape', {instead}" if nested else instead,
        )


# Shapes: S networks, N public inputs, C classes.


class Consensus(NamedTuple):
    """What is agreed on, and what those say who see it otherwise.

    labels: (N,) int64. others: (N, C) mean scores of those whose highest score is another class, 0 where there is
    nobody. disagreement: (N,) bool, whether there is anybody.
    """

    labels: Tensor
    others: Tensor
    disagreement: Tensor


def confidence_weights(v_SN: Tensor, counted_SN: Tensor) -> Tensor:
    """Shares (S, N): v over its sum among those counted, 0 for the others; equal ones where all counted have v = 0.

    The paper's alpha. They sum to 1 for every sample, or to 0 where nobody is counted.
    """
    kept_SN = torch.where(counted_SN, v_SN, torch.zeros_like(v_SN))
    kept_SN = torch.where(kept_SN.sum(dim=0) > 0, kept_SN, counted_SN.to(v_SN))
    total_N = kept_SN.sum(dim=0)
    return kept_SN / torch.where(total_N > 0, total_N, torch.ones_like(total_N))


def consensus(scores_SNC: Tensor) -> Consensus:
    """The class with the highest score in sum_s alpha_s score_s, and the same mean over those who see another class.

    A network is as sure of a sample, v, as the variance over the classes of its scores, which is also that of
    logarithms of probabilities. All is in float64, so that the order of the networks does not show.

    Source: section 3.2, weighted consensus and diversity.
    """
    wide_SNC = scores_SNC.double()
    v_SN = wide_SNC.var(dim=2, correction=0)
    everybody_SN = torch.ones_like(v_SN, dtype=torch.bool)
    labels_N = torch.einsum("sn,snc->nc", confidence_weights(v_SN, everybody_SN), wide_SNC).argmax(dim=1)
    differs_SN = wide_SNC.argmax(dim=2) != labels_N
    others_NC = torch.einsum("sn,snc->nc", confidence_weights(v_SN, differs_SN), wide_SNC)
    return Consensus(labels_N, others_NC.to(scores_SNC.dtype), differs_SN.any(dim=0))


def transfer_loss(scores_NC: Tensor, agreed: Consensus, diversity: float) -> Tensor:
    """The mean of CE(scores, labels), and of diversity * KL(softmax(others) || softmax(scores)) where others there are.

    What is agreed on is a constant for the gradient; diversity is lambda.
    """
    ones_N = torch.ones_like(scores_NC[:, 0])
    loss = cross_entropy(scores_NC, agreed.labels, ones_N)
    if not diversity:
        return loss
    disagreement_N = agreed.disagreement.to(scores_NC)
    return loss + diversity * disagreement_N.mean() * kl_divergence(scores_NC, agreed.others, disagreement_N)
