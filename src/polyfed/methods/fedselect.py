"""FedSelect: every client finds, entry by entry, which weights are its own (Tamirisa et al., CVPR 2024).

m_k is 1 for the personal entries of client k. a_k is w_k at the last growth of the mask,
initially the received weights.
client k:  every q rounds, in each weight tensor of which less than `max_personal_fraction` is
           personal, choose the share p of the entries with m_k = 0 for which |w_k - a_k| is
           largest;  a_k <- w_k
           w_k <- w, where m_k = 0;  then m_k <- 1 for the chosen entries
           E epochs of SGD that move entries with m_k = 1 only, then E epochs of the others only
server:    per entry:  w <- mean of w_k over responding clients with m_k = 0;  others are unchanged
Sent: down P - M_k, M_k the client's personal entries; up P - M_k (plus P / 32 when M_k grows). Kept: client: m_k, a_k;
server: w, all m_k.
Deviations from the paper: (1) Different architectures are averaged layer by layer or within each architecture; the
paper has one. (2) Only tensors of two or more dimensions have a mask; in the authors' code all that are called
`weight`. (3) Ties at the threshold are broken by position; the authors' code takes all of them. (4) A new personal
entry starts from the newest shared value; the authors' code aggregates and sends by the old mask. (5) While a client
has no personal entries, the first phase is skipped. (6) q counts the rounds in which the client took part. The authors'
code counts all rounds and grows one round later. (7) A client whose upload was lost sends its mask again. (8) The
authors' code alternates personal and shared entries by epoch, selects the first round's clients in every round, and
does not average buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor, members
from polyfed.core.method import Context, Method, Phase, Requirements, TrainingResult, follows_device, hyperparameters
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional import masks
from polyfed.functional.device_copies import move_group
from polyfed.methods.building_blocks import weight_averaging

Share = Annotated[float, Field(ge=0, le=1)]


@hyperparameters
class FedSelect(Method):
    """Averaging of shared entries; the personal ones are selected during training."""

    # p, share of a tensor's shared entries that becomes personal at each growth; 0: FedAvg (uniform), bit for bit
    personal_rate: Share = 0.25
    # personal share at which a tensor's mask stops growing (one growth may exceed it); 0: FedAvg (uniform)
    max_personal_fraction: Share = 0.8
    grow_interval: Annotated[int, Field(ge=1)] = 3  # q, rounds of the client between growths
    # each entry over all clients that have it; "same-shape": within each architecture
    aggregation: weight_averaging.Aggregation = "layer-wise"
    weighting: weight_averaging.Weighting = "uniform"  # clients count equally; "samples": by their samples

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        model = weight_averaging.weights_for(server, self.aggregation, server.clients[client_id].architecture)
        return {"model": masks.select_shared(model, members(server.state, f"mask {client_id}"))}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models: dict[int, Group] = {}
        for i, message in uploads.items():
            model = weight_averaging.weights_for(server, self.aggregation, server.clients[i].architecture)
            if "mask" in message:
                bits = get_group(message, "mask")
                server.state[f"mask {i}"] = {name: masks.unpack_bits(b, model[name].shape) for name, b in bits.items()}
            models[i] = masks.fill_personal(get_group(message, "model"), members(server.state, f"mask {i}"), model)

        def mean(base: Group, ids: list[int]) -> dict[str, Tensor]:
            held = [members(server.state, f"mask {i}") for i in ids]
            counts = [server.share(i, self.weighting) for i in ids]
            return masks.entry_wise_mean([models[i] for i in ids], counts, held, base)

        weight_averaging.server_step(server, self.aggregation, models, mean)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        values = get_group(message, "model")
        own = float_state(client.model)
        known = members(client.state, "mask")  # to the server, too
        if mask_matches(values, known, own):
            mask_is_new = self._grow(client, own)
        else:  # its last upload was lost, the server still has the mask before
            known = members(client.state, "mask before")
            mask_is_new = True
        load_state(client.model, masks.fill_personal(values, known, own))
        if "anchor" not in client.state and (matrices := _matrices(client)):
            client.state["anchor"] = matrices
        mask = members(client.state, "mask")
        nothing = torch.tensor(False)
        return {
            "personal": {name: mask.get(name, nothing) for name, _ in client.model.named_parameters()},
            "shared": {name: ~personal for name, personal in mask.items()},
            "rows": torch.arange(client.n if mask else 0),
            "mask is new": torch.tensor(mask_is_new),
        }

    def _grow(self, client: Client, own: Group) -> bool:
        """Grow the masks when due; returns whether they changed. `own`: the weights after the last training."""
        state = client.state
        taken = int(get_tensor(state, "rounds")) if "rounds" in state else 0
        if not taken or taken % self.grow_interval or "anchor" not in state:
            return False
        old = members(state, "mask")
        anchor = get_group(state, "anchor")
        now = move_group({name: own[name] for name in anchor}, "cpu")
        grown: dict[str, Tensor] = {}
        for name, before in anchor.items():
            mask = old.get(name, torch.zeros_like(before, dtype=torch.bool))
            moved = (now[name] - before).abs()
            more = grow_mask(mask, moved, self.personal_rate, self.max_personal_fraction)
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
        mask = members(state, "mask")
        state["rounds"] = get_tensor(state, "rounds") + 1 if "rounds" in state else torch.tensor(1)
        message = {"model": masks.select_shared(float_state(client.model), mask)}
        if client.context["mask is new"]:
            message["mask"] = {name: masks.pack_bits(personal) for name, personal in mask.items()}
        return message

    # declared -------------------------------------------------------------------------------------------------
    upload_form = {"model": upload_forms.sparsified, "mask": upload_forms.bits}
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.requirements(self.aggregation)

    fixed_entries = {"model": "entries of weights, others whenever a mask has grown"}


def _matrices(client: Client) -> dict[str, Tensor]:
    """Copies of the weight tensors that can have masks."""
    parameters = client.model.named_parameters(remove_duplicate=False)
    moved = move_group({name: p for name, p in parameters if p.dim() > 1}, "cpu")
    return {name: t.clone() for name, t in moved.items()}


def grow_mask(mask: Tensor, delta: Tensor, share: float, limit: float) -> Tensor:
    """The mask with `share` of the entries that are still shared added: those where `delta` is largest.

    Exactly round(share * shared) entries; of equal ones those that come first, so that a tensor that has not moved is
    not taken whole. A mask of which `limit` or more is True stays as it is, so that it may end beyond by one step.

    delta says how far each entry has moved, of the mask's shape and not negative.
    """
    more = mask.flatten().clone()
    open_places = (~more).nonzero().flatten()
    if len(more) - len(open_places) < limit * len(more):
        order = delta.flatten()[open_places].argsort(descending=True, stable=True)
        more[open_places[order[: round(share * len(open_places))]]] = True
    return more.reshape(mask.shape)


def mask_matches(values: Mapping[str, Tensor], masks: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    """Whether `values` have the shapes that `select_shared` gives tensors like `own` under these masks."""
    expected = {name: (int((~mask).sum()),) for name, mask in masks.items() if name in values}
    return all(value.shape == expected.get(name, own[name].shape) for name, value in values.items())
