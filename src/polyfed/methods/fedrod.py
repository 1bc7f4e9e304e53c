"""Fed-RoD: a generic head that does not learn class shares, and a personal head that adds them (Chen and Chao, ICLR
2022).

phi and h are the common network's extractor and head, g_k client k's own head, n_kc its training rows of class c.
client k:  phi_k, h_k <- phi, h;  E epochs of SGD, on each batch one step on the sum of
           CE(h_k(phi_k(x)) + gamma log n_k, y)            moves phi_k and h_k: the balanced softmax (eq. 6)
           CE(h_k(phi_k(x)) + g_k(phi_k(x)), y)            moves g_k alone                           (eq. 7)
server:    phi, h <- sum over responding clients of p_k (phi_k, h_k)
           p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
prediction:  h_k(phi_k(x)) + g_k(phi_k(x));  generic: h(phi(x))
Sent: down P; up P + 1. Kept: client: g_k; server: phi, h.
Deviations from the paper (arXiv:2107.00778): (1) g_k is a head of its own, the paper's "linear"; its variant that makes
g_k from a client's class shares by a hypernetwork is not implemented. (2) One optimizer steps both losses at once, on
the same scores. (3) A class without rows counts as 1e-38 rows. (4) Other losses for unequal classes, which the paper
compares, are not implemented. (5) BatchNorm's statistics of phi are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, Requirements, hyperparameters
from polyfed.core.modules import CompositeModel, export_state
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks.auxiliary_model import AveragedAuxiliaryModel


class TwoHeads(CompositeModel):
    """The common network with a personal head beside its own."""

    def __init__(self, common: Any, head: nn.Module) -> None:
        super().__init__()
        self.auxiliary_model = common
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both heads' scores."""
        z = self.auxiliary_model.represent(x)
        scores: Tensor = self.auxiliary_model.head(z) + self.head(z)
        return scores

    def export(self) -> dict[str, Tensor]:
        """The common network's tensors by name; those of the personal head as ``beside.head.*``."""
        personal = {f"beside.head.{name}": t for name, t in self.head.state_dict().items()}
        return {**export_state(self.auxiliary_model), **personal}


@hyperparameters
class FedRoD(AveragedAuxiliaryModel):
    """A generic head trained by a balanced softmax, and personal heads whose scores are added to its."""

    # weight of the log class counts in the generic head's loss; 0: FedAvg's network
    gamma: Annotated[float, Field(ge=0)] = 1.0
    predictor: Literal["both", "generic"] = "both"  # scored: the sum of both heads, or the generic head alone

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        return TwoHeads(auxiliary, own.head)

    def personal_model(self, module: Any) -> nn.Module:
        both: nn.Module = module
        return both

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        counts = torch.bincount(client.data.train.y, minlength=client.classes).float()
        known = counts.clamp(min=torch.finfo(counts.dtype).tiny)  # finite, as padding may be of any class
        return {"offsets": self.gamma * known.log()}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        z = model.auxiliary_model.represent(batch.x)
        generic = model.auxiliary_model.head(z)
        balanced = cross_entropy(generic + context["offsets"], batch.y, batch.w)
        personal = generic.detach() + model.head(z.detach())
        return balanced + cross_entropy(personal, batch.y, batch.w)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        scores: Tensor = model(x) if self.predictor == "both" else model.auxiliary_model(x)
        return scores

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        """By the generic head alone, or by both."""
        other: Literal["both", "generic"] = "generic" if self.predictor == "both" else "both"
        return {other: replace(self, predictor=other)}

    requirements = Requirements(
        split_model=True,
        same_architecture=True,
        classes="its loss is balanced between classes",
        hint="fedproto and fedgh personalize networks of any architecture",
    )
