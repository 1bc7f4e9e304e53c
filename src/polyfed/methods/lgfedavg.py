"""LG-FedAvg: personal extractors under a shared head (Liang et al., NeurIPS workshop 2019, arXiv:2001.01523).

client k:  h_k <- h;  E epochs of SGD on CE(h_k(phi_k(x)), y), over all weights
server:    h <- sum over responding clients of p_k h_k
           p_k = n_k / sum n_j
Heads are matched by tensor names within the head, so `fc` of one network and `classifier` of
another are the same.
Sent: down P_h; up P_h. Kept: server: h.
Deviations from the paper: (1) Only the head is shared, as in FedGH's comparison; the paper shares several upper layers,
which must be alike. (2) Clients start from a common head and their own extractors; the paper starts from a model
trained by FedAvg. (3) The paper's ensemble for new clients and its adversarial variant are not implemented. (4) A
head's float buffers are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Context, Method, Requirements, TrainingResult, follows_device, hyperparameters
from polyfed.core.modules import HEAD, float_state, head_names, load_state
from polyfed.core.server import Server
from polyfed.functional.averaging import layer_wise_mean


@hyperparameters
class LGFedAvg(Method):
    """A shared head on personal extractors."""

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        models = {a: server.initial_state(a) for a in server.architectures}
        largest = sorted(models, key=lambda a: sum(t.numel() for t in models[a].values()))[-1]
        names = _names(server.model(largest, models[largest]))
        server.state["shared"] = {name: models[largest][own].cpu() for name, own in names.items()}

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"shared": get_group(server.state, "shared")}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if uploads:
            sent = [get_group(message, "shared") for message in uploads.values()]
            weights = [server.share(i, "samples") for i in uploads]
            server.state["shared"] = layer_wise_mean(sent, weights, get_group(server.state, "shared"))

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        names = _names(client.model)
        load_state(client.model, {names[name]: t for name, t in get_group(message, "shared").items()})
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        own = client.model.state_dict()
        return {"shared": {name: own[mine] for name, mine in _names(client.model).items()}}

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(
        split_model=True,
        same_head=True,
        shared_parts=HEAD,
        shared_outputs="it averages heads",
        hint="set models.feature_dim to give all one width, or use fedproto; fedhenn and fd fit any heads",
    )
    staleness_weighting = "changes"
    upload_form = {"shared": upload_forms.as_sent}
    delta_entries = ("shared",)


def _names(model: nn.Module) -> dict[str, str]:
    """Shared name, which is that within the head -> the tensor's name in the network."""
    inner = head_names(model)
    return {f"head.{inner[name]}": name for name in float_state(model, parts=HEAD)}
