"""FML: federated mutual learning, a private network and a common one that teach each other (Shen et al., 2020).

Client k:  m <- received;  E local epochs on the same batches, p_w and p_m being the softmax of w_k's and m's scores, by
               L_w = alpha CE(w_k) + (1 - alpha) KL(p_m || p_w)   for w_k, of any architecture,
               L_m = beta CE(m)    + (1 - beta) KL(p_w || p_m)    for m; neither passes a gradient to its teacher.
Server:    m <- sum_k p_k m_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Deviations from the paper (arXiv:2006.16765): (1) both steps are taken at once, from the same scores, by one optimizer
over both networks, whose parameters are apart: the same as two. (2) m is averaged by samples; `weighting = "uniform"`
counts clients alike. (3) Where numbers are predicted, which the paper does not do, the squared error takes the place of
CE, and the squared difference of both outputs that of KL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.functional.losses import kl_divergence, mse_loss, task_loss
from polyfed.methods.building_blocks import auxiliary_model


@hyperparameters
class FML(auxiliary_model.AuxiliaryModelMethod):
    """Mutual distillation between a private network and the averaged auxiliary model."""

    card = replace(auxiliary_model.AuxiliaryModelMethod.card, name="fml", paper="Shen et al., 2020")

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
