"""FedMRL: a private and a common network whose representations are fused, nested heads (Yi et al., NeurIPS 2024).

phi_s and h_s are the auxiliary model's extractor and head, phi_k and h_k the client's own. D and
D_s <= D are the widths of their representations.
client k:  r = P_k [phi_s(x), phi_k(x)]                       a linear layer with bias, D_s + D to D
           E epochs of SGD on  CE(h_k(r), y) + CE(h_s(r_1 ... r_Ds), y)     over all five
server:    phi_s, h_s <- sum over responding clients of p_k (phi_s, h_s)_k
           p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
Sent: down P_m; up P_m + 1. Kept: client: own network, projection; server: auxiliary model.
Deviations from the paper: (1) The auxiliary model is any network that the federation can build; the paper's is a
smaller copy of the clients'. (2) It is averaged by samples; `weighting = "uniform"` weights clients equally. (3) P_k is
kept and used in evaluation; drawn anew in every round, it would never fit the heads. (4) Every client draws its own
first P_k. In the authors' code all clients start with one, and all clients of an architecture with one network. (5)
Both losses have weight 1, as in the paper's experiments. (6) In the authors' code, if all networks are alike, the
auxiliary head is the first D_s columns of the private one, and gradients are clipped at norm 50.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, Requirements, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import CompositeModel, export_state
from polyfed.errors import ConfigError
from polyfed.functional.losses import task_loss
from polyfed.methods.building_blocks.auxiliary_model import SHARED_HEAD, AuxiliaryModelMethod


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
class FedMRL(AuxiliaryModelMethod):
    """Nested heads on the fused representation of a private network and the auxiliary model."""

    # D_s, at most the width of the narrowest client's network; not set: the auxiliary model's width
    feature_dim: Annotated[int, Field(ge=1)] | None = None

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

    requirements = Requirements(split_model=True, shared_outputs=SHARED_HEAD)
