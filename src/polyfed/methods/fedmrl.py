"""FedMRL: a private and a common network whose representations are fused, nested heads (Yi et al., NeurIPS 2024).

Client k, private network (phi_k, h_k) of D features, common network (phi_s, h_s) of D_s <= D, projection P_k:
    r = P_k [phi_s(x), phi_k(x)], a linear layer (D_s + D to D) with bias;
    E local epochs of SGD on  CE(h_k(r), y) + CE(h_s(the first D_s entries of r), y)  over all of these weights.
Server:    (phi_s, h_s) <- sum_k p_k (phi_s, h_s)_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Scored:    h_k(r), so what a client exports is its own network under its own names, with the common one and P_k beside.
Deviations from the paper (arXiv:2406.00488): (1) the common network is any that the federation can build, of
`feature_dim` features by a projection or as many as it has; the paper's is a smaller copy of the clients'. (2)
Averaged by samples; `weighting = "uniform"` counts clients alike. (3) P_k is part of the client's weights: it is
trained on over all rounds, and what is scored uses it. (4) Every client draws its own first P_k; in the authors' code
all begin with one, and clients of one architecture with one network. (5) BatchNorm's running statistics are averaged
like weights. From the authors' code: where all networks are alike, the common head is the first D_s columns of the
private one; all gradients are clipped at norm 50.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, Requirements, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import CompositeModel, export_state
from polyfed.errors import ConfigError
from polyfed.functional.losses import task_loss
from polyfed.methods.building_blocks import auxiliary_model


class FusedModel(CompositeModel):
    """The private head on the fused representation of both networks."""

    def __init__(self, own: Any, common: Any) -> None:
        super().__init__()
        self.own = own
        self.auxiliary_model = common
        self.projection = nn.Linear(common.feature_dim + own.feature_dim, own.feature_dim)

    def represent(self, x: Tensor) -> Tensor:
        """Fused representation r (N x D)."""
        r: Tensor = self.projection(torch.cat([self.auxiliary_model.represent(x), self.own.represent(x)], dim=1))
        return r

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the private head."""
        scores: Tensor = self.own.head(self.represent(x))
        return scores

    def export(self) -> dict[str, Tensor]:
        """The own network's tensors by name; the others as ``beside.auxiliary_model.*`` and ``beside.projection.*``."""
        parts = {"auxiliary_model": self.auxiliary_model.state_dict(), "projection": self.projection.state_dict()}
        added = {f"beside.{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        return {**export_state(self.own), **added}


@hyperparameters
class FedMRL(auxiliary_model.AuxiliaryModelMethod):
    """Nested heads on the fused representation of a private network and the auxiliary model."""

    card = replace(
        auxiliary_model.AuxiliaryModelMethod.card,
        name="fedmrl",
        paper="Yi et al., NeurIPS 2024",
        states="client: own network, projection; server: auxiliary model",
    )

    # D_s, at most the width of the narrowest client's network; not set: the auxiliary model's width
    feature_dim: Annotated[int, Field(ge=1)] | None = None

    requirements = Requirements(split_model=True, shared_outputs=auxiliary_model.SHARED_HEAD)

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.shared, self.feature_dim)

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        if auxiliary.feature_dim > own.feature_dim:
            raise ConfigError(
                f"FedMRL needs a common network of at most as many features as the clients' own; '{own.architecture}' "
                f"has {own.feature_dim}, the common network {auxiliary.feature_dim}; set method.feature_dim to at most "
                f"{own.feature_dim}"
            )
        return FusedModel(own, auxiliary)

    def personal_model(self, module: Any) -> nn.Module:
        fused: nn.Module = module
        return fused

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        r = model.represent(batch.x)
        common = model.auxiliary_model.head(r[:, : model.auxiliary_model.feature_dim])
        return task_loss(model.own.head(r), batch.y, batch.w) + task_loss(common, batch.y, batch.w)
