"""FML: federated mutual learning, a private network and a common one that teach each other (Shen et al., 2020).

w_k is the private network, m the auxiliary model, and p are the softmax outputs.
client k:  m <- received;  E epochs of SGD, on each batch one step of both
           L_w = alpha CE(w_k) + (1 - alpha) KL(p_m || p_w)
           L_m = beta  CE(m)   + (1 - beta)  KL(p_w || p_m)
server:    m <- sum over responding clients of p_k m_k
           p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
No gradient passes through a teacher.
Sent: down P_m; up P_m + 1. Kept: client: own network; server: m.
Deviations from the paper (arXiv:2006.16765): (1) One optimizer steps both networks at once, from the same scores. (2) m
is averaged by samples; `weighting = "uniform"` weights clients equally. (3) Where numbers are predicted, squared errors
take the place of CE and KL.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.functional.losses import kl_divergence, mse_loss, task_loss
from polyfed.methods.building_blocks import auxiliary_model


@hyperparameters
class FML(auxiliary_model.AuxiliaryModelMethod):
    """Mutual distillation between a private network and the averaged auxiliary model."""

    # weight of the labels in L_w, the rest is distillation; 1: Local's networks
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5  # the same in L_m; 1: FedAvg's auxiliary model

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        private = model.own(batch.x)
        common = model.auxiliary_model(batch.x)
        return _taught(private, common, batch, self.alpha) + _taught(common, private, batch, self.beta)


def _taught(scores_NC: Tensor, teacher_NC: Tensor, batch: Batch, labels: float) -> Tensor:
    """Loss of a network with these scores; `labels`: weight of the labels, the rest is distillation."""
    task = task_loss(scores_NC, batch.y, batch.w)
    distill = mse_loss if batch.y.is_floating_point() else kl_divergence
    return labels * task + (1 - labels) * distill(scores_NC, teacher_NC, batch.w)
