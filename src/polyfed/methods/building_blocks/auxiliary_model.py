"""Shared code of FML, FedKD, FedMRL, Ditto and Fed-RoD: clients train a network or a head of their own and an auxiliary
model, which is averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Context, Method, Requirements, TrainingResult, follows_device, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.upload_forms import SAMPLES, as_sent
from polyfed.functional.averaging import weighted_mean
from polyfed.methods.building_blocks import weight_averaging


class JointModel(nn.Module):
    """A client's own network and the auxiliary model, trained together. Scores come from the client's own."""

    def __init__(self, own: nn.Module, auxiliary: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.auxiliary_model = auxiliary

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.own(x)
        return scores


SHARED_HEAD = "all clients train one auxiliary model, head included"  # why outputs have to mean the same


@hyperparameters
class AveragedAuxiliaryModel(Method):
    """Clients train a network of their own and an auxiliary model. Only the latter is sent and averaged."""

    weighting: weight_averaging.Weighting = "samples"  # clients count by their samples; "uniform": equally

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel("smallest")

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        return JointModel(own, auxiliary)

    def personal_model(self, module: Any) -> nn.Module:
        own: nn.Module = module.own
        return own

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        name = server.auxiliary_model
        initial = server.initial_state(name)
        server.state["auxiliary_model"] = {key: initial[key] for key in float_state(server.model(name, initial))}

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"model": get_group(server.state, "auxiliary_model")}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if uploads:
            server.state["auxiliary_model"] = self.average(server, uploads)

    def average(self, server: Server, uploads: Mapping[int, Message]) -> dict[str, Tensor]:
        """Weighted mean of the group "model" over all uploads (at least one)."""
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        models = weight_averaging.client_weights(uploads)
        return weighted_mean([models[i] for i in uploads], [shares[i] for i in uploads])

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        module: Any = client.model
        load_state(module.auxiliary_model, get_group(message, "model"))
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        module: Any = client.model
        return {"model": float_state(module.auxiliary_model), "n": torch.tensor(client.n)}

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(shared_outputs=SHARED_HEAD)
    upload_form = {"model": as_sent, "n": SAMPLES}
    delta_entries: ClassVar[tuple[str, ...]] = ("model",)


@hyperparameters
class AuxiliaryModelMethod(AveragedAuxiliaryModel):
    """The same, where the auxiliary model may be another network than the clients'."""

    # the auxiliary model: "smallest", "largest", a model's name, or "package.module:function"
    shared: Annotated[str, Field(min_length=1)] = "smallest"

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.shared)
