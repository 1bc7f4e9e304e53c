"""FedSelect: personal weights selected entry by entry during training (Tamirisa et al., CVPR 2024).

m_k is 1 for the personal entries of client k; a_k is w_k at the last growth of the mask, initially the received
weights.
client k:  w_k <- w, where m_k = 0
           every q rounds:  in each weight tensor with less than `limit` personal, the fraction p of the entries
                            with m_k = 0 for which |w_k - a_k| is largest get m_k = 1;   a_k <- w_k
           personal_epochs epochs of SGD that move entries with m_k = 1 only, then shared_epochs of the others only
server:    per entry:  w <- mean of w_k over responding clients with m_k = 0;
           entries that nobody shares keep their values

Deviations from the paper: (1) Masks grow in tensors of two or more dimensions. Biases and BatchNorm's weights are
always shared, and BatchNorm's running statistics are averaged. (2) Among equal changes the first entries are taken,
never more than p; a tensor that did not change is not taken whole. (3) New personal entries start from the newest
shared value (the authors' code aggregates and sends by the old mask). (4) q counts the client's own rounds: the mask
grows before its rounds q + 1, 2 q + 1 and so on. (5) A client detects from the download that an upload was lost; it
then stops growing and sends its mask again.
In the authors' code, personal and shared epochs alternate; q counts all rounds, and growth starts one round later;
every tensor called `weight` has a mask, BatchNorm's too; the clients of round 1 are those of every round; buffers are
not averaged; all ties at the threshold are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, group, tensor
from polyfed.core.method import Context, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import floats, load
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional import masks
from polyfed.methods.building_blocks import weight_averaging

Share = Annotated[float, Field(ge=0, le=1)]


@hyperparameters
class FedSelect(Method):
    """Averaging of shared entries; the personal ones are selected during training."""

    name: ClassVar[str] = "fedselect"
    paper: ClassVar[str] = "Tamirisa et al., CVPR 2024"
    differs: ClassVar[str] = "depth; same-named tensors need the same shape (same-shape: anything)"
    down: ClassVar[str] = "P - M_k, M_k the client's personal entries"
    up: ClassVar[str] = "P - M_k (plus P / 32 when M_k grows)"
    form: ClassVar[upload_forms.Form | None] = {"model": upload_forms.thinned, "mask": upload_forms.bits}
    states: ClassVar[str] = "client: m_k, a_k; server: w, all m_k"
    ignores_initial_weights: ClassVar[bool] = True

    growth: Share = 0.25  # p, share of the entries still shared that becomes personal; 0 is FedAvg (uniform)
    limit: Share = 0.8  # of a tensor's entries; from here on it keeps its mask; 0 is FedAvg (uniform)
    every: Annotated[int, Field(ge=1)] = 3  # q, rounds of the client between growths
    # "same-shape": within an architecture; "by-name": also a head
    aggregation: weight_averaging.Aggregation = "layer-wise"
    weighting: weight_averaging.Weighting = "uniform"  # weights of the mean; "samples": by training samples

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.needs(self.aggregation)

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return {"model": "entries of weights, others whenever a mask has grown"}

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        model = weight_averaging.weights_for(server, self.aggregation, server.clients[client_id].architecture)
        return {"model": masks.shared(model, _masks(server.state, f"mask {client_id}"))}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models: dict[int, Group] = {}
        for i, message in uploads.items():
            model = weight_averaging.weights_for(server, self.aggregation, server.clients[i].architecture)
            if "mask" in message:
                bits = group(message, "mask")
                server.state[f"mask {i}"] = {name: masks.unpacked(b, model[name].shape) for name, b in bits.items()}
            models[i] = masks.filled(group(message, "model"), _masks(server.state, f"mask {i}"), model)

        def mean(base: Group, members: list[int]) -> dict[str, Tensor]:
            held = [_masks(server.state, f"mask {i}") for i in members]
            counts = [float(server.clients[i].n) if self.weighting == "samples" else 1.0 for i in members]
            return masks.entry_wise_mean([models[i] for i in members], counts, held, base)

        weight_averaging.server_step(server, self.aggregation, models, mean)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        values = group(message, "model")
        own = floats(client.model)
        known = _masks(client.state, "mask")  # to the server, too
        if masks.fits(values, known, own):
            mask_is_new = self._grow(client, own)
        else:  # its last upload was lost, the server still has the mask before
            known = _masks(client.state, "mask before")
            mask_is_new = True
        load(client.model, masks.filled(values, known, own))
        matrices = _matrices(client)
        if "anchor" not in client.state and matrices:
            client.state["anchor"] = matrices
        mask = _masks(client.state, "mask")
        nothing = torch.tensor(False)
        return {
            "personal": {name: mask.get(name, nothing) for name, _ in client.model.named_parameters()},
            "shared": {name: ~personal for name, personal in mask.items()},
            "rows": torch.arange(client.n if mask else 0),
            "mask is new": mask_is_new,
        }

    def _grow(self, client: Client, own: Group) -> bool:
        """Grow the masks when due; returns whether they changed. `own`: the weights after the last training."""
        state = client.state
        taken = int(tensor(state, "rounds")) if "rounds" in state else 0
        if not taken or taken % self.every or "anchor" not in state:
            return False
        old = _masks(state, "mask")
        grown: dict[str, Tensor] = {}
        for name, before in group(state, "anchor").items():
            mask = old.get(name, torch.zeros_like(before, dtype=torch.bool))
            more = masks.grown(mask, (own[name].cpu() - before).abs(), self.growth, self.limit)
            if not torch.equal(more, mask):
                grown[name] = more
        state["anchor"] = _matrices(client)
        if not grown:
            return False
        state["mask"] = {**old, **grown}
        state.pop("mask before", None)
        if old:  # an empty group does not outlive a checkpoint
            state["mask before"] = dict(old)
        return True

    def phases(self, training: Training) -> Sequence[Phase]:
        personal = Phase(training.local_epochs, rows="rows", mask="personal", name="personal")
        return personal, Phase(training.local_epochs, mask="shared", name="shared")

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        state = client.state
        mask = _masks(state, "mask")
        state["rounds"] = tensor(state, "rounds") + 1 if "rounds" in state else torch.tensor(1)
        message = {"model": masks.shared(floats(client.model), mask)}
        if client.context["mask is new"]:
            message["mask"] = {name: masks.packed(personal) for name, personal in mask.items()}
        return message


def _masks(state: State, name: str) -> Group:
    return group(state, name) if name in state else {}


def _matrices(client: Client) -> dict[str, Tensor]:
    """Copies of the weight tensors that can have masks."""
    parameters = client.model.named_parameters(remove_duplicate=False)
    return {name: p.detach().cpu().clone() for name, p in parameters if p.dim() > 1}
