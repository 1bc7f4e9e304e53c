"""FedMRL: fused representations of a private network and the auxiliary model (Yi et al., NeurIPS 2024).

D: width of the client's own representation; D_s <= D: width of the auxiliary model's.
client k:  r = P_k [phi_s(x), phi_k(x)]                       a linear layer with bias, D_s + D to D
           E local epochs of SGD on  CE(h_k(r), y) + CE(h_s(r_1 ... r_Ds), y)     over all five
server:    phi_s, h_s <- sum over responding clients of p_k (phi_s, h_s)_k,   p_k = n_k / sum n_j, or 1 / their number

Deviations from the paper: (1) The auxiliary model is any that the federation can build, with `features` features or
its own width; the paper's is a smaller copy of the clients' networks. (2) It is averaged by samples; `weighting =
"uniform"` weights clients equally. (3) P_k is kept, trained on, and used in evaluation. If it were redrawn every
round, head and projection would never match. (4) Every client draws its own initial P_k. In the authors' code all
clients start with the same projection, and clients of one architecture with the same network.
In the authors' code, if all networks are alike, the auxiliary head is the first D_s columns of the private head; all
gradients are clipped at norm 50.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, Requirements, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import Composite, exported
from polyfed.errors import ConfigError
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import auxiliary_model


class Fused(Composite):
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
        return {**exported(self.own), **added}


@hyperparameters
class FedMRL(auxiliary_model.AuxiliaryModelMethod):
    """Nested heads on the fused representation of a private network and the auxiliary model."""

    name: ClassVar[str] = "fedmrl"
    paper: ClassVar[str] = "Yi et al., NeurIPS 2024"
    states: ClassVar[str] = "client: own network, projection; server: auxiliary model"

    features: Annotated[int, Field(ge=1)] | None = None  # D_s, by a projection; None: the auxiliary model's width

    @property
    def requirements(self) -> Requirements:
        return Requirements(split_model=True)

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.shared, self.features)

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        if auxiliary.feature_dim > own.feature_dim:
            raise ConfigError(
                f"FedMRL needs a common network of at most as many features as the clients' own; '{own.architecture}' "
                f"has {own.feature_dim}, the common network {auxiliary.feature_dim}; set method.features to at most "
                f"{own.feature_dim}"
            )
        return Fused(own, auxiliary)

    def personal_model(self, module: Any) -> nn.Module:
        fused: nn.Module = module
        return fused

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        r = model.represent(batch.x)
        common = model.auxiliary_model.head(r[:, : model.auxiliary_model.feature_dim])
        return cross_entropy(model.own.head(r), batch.y, batch.w) + cross_entropy(common, batch.y, batch.w)
