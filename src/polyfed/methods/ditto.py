"""Ditto: a personal network that is held near the common one (Li, Hu, Beirami and Smith, ICML 2021).

w is FedAvg's common network, v_k client k's own, F_k its mean cross entropy.
client k:  w_k <- w;  E epochs of SGD on  F_k(w_k)
           and, on the same batches, on   F_k(v_k) + (lambda / 2) ||v_k - w||^2,  w as it was received    (Algorithm 1)
server:    w <- sum over responding clients of p_k w_k
           p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
v_k is scored; it and w start alike.
Sent: down P; up P + 1. Kept: client: v_k; server: w.
Deviations from the paper (arXiv:2012.04221): (1) v_k takes as many steps as w_k, on the same batches, as in the
authors' code; the paper leaves their number open. One optimizer steps both. (2) Clients have one lambda; the paper's
variant lets each choose by validation rows. (3) Clients are drawn uniformly and weighted by samples. (4) The norm is
over parameters. BatchNorm's statistics of w are averaged like weights, those of v_k stay with it. (5) Adam and momentum
treat the term's gradient like the rest. (6) Robust aggregation is a plugin's.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Requirements, StepResult, hyperparameters
from polyfed.core.modules import copy_parameters
from polyfed.functional.losses import task_loss
from polyfed.methods.building_blocks.auxiliary_model import SHARED_HEAD, AveragedAuxiliaryModel
from polyfed.methods.building_blocks.proximal import add_pull


@hyperparameters
class Ditto(AveragedAuxiliaryModel):
    """A personal network per client, held near the averaged one by a proximal term."""

    # lambda, weight of the proximal term; 0: personal networks know of nobody
    pull: Annotated[float, Field(ge=0)] = 0.1

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        if not self.pull:
            return {}
        module: Any = client.model
        received = copy_parameters(module.auxiliary_model)
        return {"received": {f"own.{name}": w for name, w in received.items()}}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        personal = task_loss(model.own(batch.x), batch.y, batch.w)
        return personal + task_loss(model.auxiliary_model(batch.x), batch.y, batch.w)

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        plain = super().gradients(model, batch, context)
        return add_pull(plain, model, context["received"], self.pull) if self.pull else plain

    requirements = Requirements(
        same_architecture=True,
        shared_outputs=SHARED_HEAD,
        hint="fml and fedkd teach networks of any architecture by a common one",
    )
    common_start = "all"
