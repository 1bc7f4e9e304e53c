"""A network beside the clients' own that all share: what FML, FedKD and FedMRL are made of.

Clients train both networks; the companion is averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group
from polyfed.core.method import Context, Method, TrainingResult, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import floats, load
from polyfed.core.server import Server
from polyfed.core.upload_forms import SAMPLES, Entry, Form, Known, Members, UpTo, as_sent
from polyfed.functional.averaging import weighted_mean
from polyfed.methods.building_blocks import weight_averaging


class Pair(nn.Module):
    """A client's own network and the companion, trained together; the scores are the former's."""

    def __init__(self, own: nn.Module, companion: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.companion = companion

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the client's own network."""
        scores: Tensor = self.own(x)
        return scores


def in_low_rank(known: Known, name: str) -> Members:
    """The companion's tensors as `functional.low_rank.encode` writes them, in its group of this name."""
    found = {}
    for key, tensor in held(known.server).items():
        rows = tensor.shape[:1].numel()
        columns = tensor.shape[1:].numel()
        rank = UpTo(f"rank of {key}", min(rows, columns))
        shapes = {"raw": tuple(tensor.shape), "left": (rows, rank), "scale": (rank,), "right": (rank, columns)}
        found[key] = (Entry(shapes[name], (tensor.dtype,)),)
    return Members(found, whole=False)


# the companion is averaged -----------------------------------------------------------------------------------------


def start(server: Server) -> None:
    """The companion's seeded initial weights and float buffers into the server's state, as "companion"."""
    initial = server.initial(server.auxiliary_model)
    server.state["companion"] = {name: initial[name] for name in floats(server.model(server.auxiliary_model, initial))}


def held(server: Server) -> Group:
    """The companion as the server has it."""
    return group(server.state, "companion")


def mean(uploads: Mapping[int, Message], weighting: weight_averaging.Weighting) -> dict[str, Tensor]:
    """The weighted mean of the group "model" of every upload; there must be one."""
    shares = weight_averaging.client_shares(uploads, weighting)
    return weighted_mean([group(message, "model") for message in uploads.values()], [shares[i] for i in uploads])


def statistics(module: nn.Module) -> frozenset[str]:
    """Names of the float buffers, BatchNorm's statistics: averaged like weights, and no more."""
    return frozenset(floats(module)) - frozenset(floats(module, buffers=False))


@hyperparameters
class Accompanied(Method):
    """Clients train a network of their own and a common one, which alone is sent and averaged."""

    differs: ClassVar[str] = "anything"
    down: ClassVar[str] = "P_m"
    up: ClassVar[str] = "P_m + 1"
    states: ClassVar[str] = "client: own network; server: m"
    delta_entries: ClassVar[tuple[str, ...]] = ("model",)
    form: ClassVar[Form | None] = {"model": as_sent, "n": SAMPLES}

    shared: Annotated[str, Field(min_length=1)] = "smallest"  # the common network: "largest", or a model's name
    weighting: weight_averaging.Weighting = "samples"  # "uniform" counts every client once

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.shared)

    def join_models(self, own: Any, companion: Any) -> nn.Module:
        """Both, each for itself."""
        return Pair(own, companion)

    def personal_model(self, module: Any) -> nn.Module:
        """The client's own network."""
        own: nn.Module = module.own
        return own

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        """Seeded initial weights of the companion."""
        start(server)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The companion's weights and float buffers."""
        return {"model": held(server)}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """The mean of what came."""
        if uploads:
            server.state["companion"] = mean(uploads, self.weighting)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        """The companion is the server's."""
        module: Any = client.model
        load(module.companion, group(message, "model"))
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """The companion's weights and float buffers, and the number of samples."""
        module: Any = client.model
        return {"model": floats(module.companion), "n": torch.tensor(client.n)}
