"""ProtoNorm: FedProto with prototypes that the server pushes apart (Lee, Shin and Choi, 2025, arXiv:2507.04310).

P[c] is the mean of the clients' class means, as in FedProto; lr falls from 0.1.
server:    p[c] = P[c] / ||P[c]||,  then spread_steps times
           v[c] <- 0.9 v[c] + lr sum over c' of (p[c] - p[c']) / ||p[c] - p[c']||^2
           p[c] <- (p[c] + v[c]) / ||p[c] + v[c]||;    sends  scale p[c]
client k:  as in FedProto, towards scale p[c]
The method follows the authors' code, whose settings are the defaults. It was not verified against the paper's text.
Deviations from the paper: (1) In that code, a class that no client sends in a round has no prototype in the next. (2)
There, the steps end once the forces no longer change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from polyfed.core.message import Message, get_tensor
from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.functional.server_prototypes import spread
from polyfed.methods.fedproto import FedProto
from polyfed.validation.effect import ActsWith


@hyperparameters
class ProtoNorm(FedProto):
    """Averaged class means, pushed apart on the sphere and sent at one length."""

    card = replace(
        FedProto.card,
        name="protonorm",
        paper="Lee et al., arXiv:2507.04310",
        up="S D + S",
        states="client: last P received; server: P, what is sent of it, clients' classes",
    )

    prototype_weight: Annotated[float, Field(ge=0)] = 10.0
    weighting: Literal["count", "uniform"] = "uniform"  # clients count equally; "count": by their samples of the class
    spread_steps: Annotated[int, Field(ge=0)] = 500  # steps that push prototypes apart; 0: FedProto
    scale: Annotated[float, Field(gt=0), ActsWith("spread_steps")] = 80.0  # length of the prototypes that are sent

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        if self.spread_steps and "prototypes" in server.state:
            server.state["spread"] = self.scale * spread(get_tensor(server.state, "prototypes"), self.spread_steps)

    def prototypes_to_send(self, server: Server) -> Tensor:
        return get_tensor(server.state, "spread" if self.spread_steps else "prototypes")
