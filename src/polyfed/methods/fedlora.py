"""FedLoRA: adapters of unequal rank on one frozen network, by rules that are named after four papers (FLoRA, FlexLoRA,
HETLoRA, 2024, raFLoRA, 2026).

FLoRA was compared with its code (ATP-1010/FederatedLLM). Of HETLoRA, FlexLoRA and raFLoRA the abstracts alone were
read, so that no line below is an equation of theirs.
client k:  E epochs of SGD on CE, with layers W + s_k B_k A_k
           A_k (r_k, I),  B_k (O, r_k),  s_k = alpha / r_k;  r_k at most I and O, layer by layer
server:    the head is averaged; adapters by `aggregation`, p_k = n_k / sum of the uploads' n_j:
  pad     A <- sum p_k A_k,  B <- sum p_k s_k B_k,  with zeros up to the largest rank R (HETLoRA)    `join_padded`
  slices  component j (from 0): the same, over the clients with r_k > j (raFLoRA)                    `join_slices`
  svd     U D V' = sum p_k s_k B_k A_k:  A <- V', B <- U D of the R largest values D (FlexLoRA)      `join_svd`
  stack   W <- W + sum p_k s_k B_k A_k;  A_k is drawn anew, B_k = 0 (FLoRA)                          `Stack`
pad, slices, svd: A and B are the common adapters, A with R = max r_k rows; client k gets the first r_k, and B / s_k.
What is done to one layer's adapters is in `functional.lora`. The record's `energy_beyond_smallest_rank` is, as a mean
over layers, the share of the squares of singular values beyond the smallest rank: of B A, with stack of the sum of all
updates.
Sources: HETLoRA, arXiv:2401.06432; FlexLoRA, arXiv:2402.11505; FLoRA, arXiv:2409.05976; raFLoRA, arXiv:2602.13486.
Sent: down P_A(r) + P_h (stack: those of all clients); up P_A(r) + P_h. Kept: server: A, B, head; stack: the last
updates, the sum of all, who has added how many; client: how many it has added to W.
Deviations from the paper: (1) All rules have s_k = alpha / r_k; FLoRA's code has one s. (2) Heads are averaged under
every rule. (3) HETLoRA also prunes ranks, and weights clients by the norm of their updates. (4) `slices` averages A and
B apart; raFLoRA divides each client's update, of both, into parts by rank and averages each part over those that
contribute to it. (5) A client that missed a round of `stack` gets the sum of all updates. (6) Stacked updates are kept
beside W, at 4 I O bytes per layer. (7) The initial A is uniform within 1 / sqrt(I).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.adapters import (
    adapted_layers,
    adapter_state,
    adapters_of,
    add_adapters,
    any_parameter,
    draw_a,
    group_of,
    head_state,
)
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor, members
from polyfed.core.method import Context, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import load_state
from polyfed.core.server import Server
from polyfed.core.settings import Ranks, Training, in_turn, numbers_in
from polyfed.core.upload_forms import Entry, Members, UploadContext, alike, as_sent
from polyfed.functional import lora
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.lora import Adapter

# the rules that join adapters ---------------------------------------------------------------------------------------
# Of one layer: the adapters that clients sent, their shares p_k, the last common adapter -> the new one.

Join = Callable[[Sequence[Adapter], Sequence[float], Adapter], Adapter]


def join_padded(sent: Sequence[Adapter], shares: Sequence[float], common: Adapter) -> Adapter:
    """HETLoRA: sum_k p_k A_k and sum_k p_k s_k B_k, with components of zero up to R."""
    return lora.pad(sent, shares, common.rank)


def join_slices(sent: Sequence[Adapter], shares: Sequence[float], common: Adapter) -> Adapter:
    """raFLoRA: component j of these sums, over the clients with r_k > j; the last one where there is none."""
    return lora.mean_components(sent, shares, common)


def join_svd(sent: Sequence[Adapter], shares: Sequence[float], common: Adapter) -> Adapter:
    """FlexLoRA: the closest update of rank R to sum_k p_k s_k B_k A_k."""
    update_OI = lora.product(lora.stack(sent, shares))
    return lora.decompose(update_OI, common.rank)


# the method -------------------------------------------------------------------------------------------------------


def _own_adapters(known: UploadContext, name: str) -> Members:
    """A and B of the client's rank."""
    server = known.server
    (architecture,) = server.architectures
    return alike(adapter_state(server.model(architecture, {}, known.method.variant(server, known.client_id))))


def _stacks(known: UploadContext) -> int:
    """How many updates have been added to the network."""
    return int(get_tensor(known.server.state, "stacks"))


@hyperparameters
class FedLoRA(Method):
    """Low-rank adapters of unequal rank on a frozen network."""

    ranks: Ranks = "2 4 8"  # ranks of the adapters, given to the clients in turn
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0  # an update is scaled by alpha / rank
    layers: str = ""  # last names of the linear layers with adapters, as in "qkv out"; "": all but the head
    # how the server joins adapters of unequal rank
    aggregation: Literal["stack", "svd", "slices", "pad"] = "stack"

    @property
    def _ranks(self) -> list[int]:
        """All ranks, ascending."""
        return sorted(map(int, numbers_in(self.ranks)))

    @property
    def _rule(self) -> CommonAdapters | Stack:
        return RULES[self.aggregation]

    # the client's network ------------------------------------------------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        return in_turn(self.ranks, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        rank = int(variant or self._ranks[-1])
        return add_adapters(model, rank, self.alpha, self.layers, self._rule.has_offset)

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        (architecture,) = server.architectures
        largest = str(self._ranks[-1])
        network = server.model(architecture, server.initial_state(architecture, largest), largest)
        server.state["head"] = {name: t.cpu().clone() for name, t in head_state(network).items()}
        self._rule.init(server, network)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"head": get_group(server.state, "head"), **self._rule.broadcast(self, server, client_id)}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        uploads = dict(sorted(uploads.items()))
        shares = [server.share(i, "samples") for i in uploads]
        server.state["head"] = weighted_mean([get_group(message, "head") for message in uploads.values()], shares)
        updates = self._rule.aggregate(self, server, uploads, shares)
        beyond = [lora.energy_beyond(update, self._ranks[0]) for update in updates.values()]
        server.log["energy_beyond_smallest_rank"] = statistics.fmean(beyond)

    def sent(self, uploads: Mapping[int, Message]) -> list[dict[str, Adapter]]:
        """The adapters that clients uploaded, by layer, with s_k = alpha / r_k."""
        return [adapters_of(get_group(message, "adapters"), self.alpha) for message in uploads.values()]

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "head"))
        self._rule.receive(client, message)
        return {}

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(training.local_epochs, trains=any_parameter),)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        own: Message = {"adapters": adapter_state(client.model), "head": head_state(client.model)}
        return {**own, **self._rule.upload(client)}

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(same_architecture=True, split_model=True)
    evaluation_stage = "received"
    upload_form = {"adapters": _own_adapters, "head": as_sent, "stacks_added": Entry((), (torch.int64,), 0, _stacks)}
    delta_entries = ("adapters", "head")
    common_start = "all"

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        drawn = "factors A that the client drew, and B beside them; use another method.aggregation, as 'slices'"
        return {"adapters": drawn} if self.aggregation == "stack" else {}


# what a rule keeps and sends --------------------------------------------------------------------------------------


class CommonAdapters:
    """The server joins adapters layer by layer to common ones; client k gets the first r_k components."""

    has_offset = False  # whether clients keep an update of W beside their adapters

    def __init__(self, join: Join) -> None:
        self.join = join

    def init(self, server: Server, network: nn.Module) -> None:
        """Common adapters of rank R."""
        server.state["common"] = {name: t.cpu().clone() for name, t in adapter_state(network).items()}

    def broadcast(self, method: FedLoRA, server: Server, client_id: int) -> Message:
        rank = int(method.variant(server, client_id))
        parts = {name: lora.first_components(adapter, rank) for name, adapter in _common(server).items()}
        return {"adapters": group_of({n: lora.rescale(part, method.alpha / part.rank) for n, part in parts.items()})}

    def aggregate(
        self, method: FedLoRA, server: Server, uploads: Mapping[int, Message], shares: Sequence[float]
    ) -> dict[str, Tensor]:
        """Join what the clients sent; the update of each layer."""
        sent = method.sent(uploads)
        common = {
            name: self.join([own[name] for own in sent], shares, before) for name, before in _common(server).items()
        }
        server.state["common"] = group_of(common)
        return {name: lora.product(adapter) for name, adapter in common.items()}

    def receive(self, client: Client, message: Message) -> None:
        load_state(client.model, get_group(message, "adapters"))

    def upload(self, client: Client) -> Message:
        return {}


class Stack:
    """All adapters beside each other are added to W everywhere, as an "offset"; A is drawn anew, B is zero (FLoRA)."""

    has_offset = True

    def init(self, server: Server, network: nn.Module) -> None:
        layers = adapted_layers(network)
        server.state["sum_of_stacks"] = {name: torch.zeros_like(w.weight).cpu() for name, w in layers.items()}
        server.state["stacks"] = torch.tensor(0)

    def broadcast(self, method: FedLoRA, server: Server, client_id: int) -> Message:
        """What the client has not added yet: the adapters of the last round, or, after several, all updates' sum."""
        stacks = get_tensor(server.state, "stacks")
        behind = int(stacks) - int(members(server.state, "stacks_added").get(str(client_id), torch.tensor(0)))
        if behind > 1:
            return {"stacks": stacks, "sum_of_stacks": get_group(server.state, "sum_of_stacks")}
        return {"stacks": stacks, **({"stack": get_group(server.state, "stack")} if behind else {})}

    def aggregate(
        self, method: FedLoRA, server: Server, uploads: Mapping[int, Message], shares: Sequence[float]
    ) -> dict[str, Tensor]:
        sent = method.sent(uploads)
        stacked = {name: lora.stack([own[name] for own in sent], shares) for name in sent[0]}
        updates = _add(get_group(server.state, "sum_of_stacks"), stacked)
        added = {str(i): get_tensor(message, "stacks_added") for i, message in uploads.items()}
        server.state["sum_of_stacks"] = updates
        server.state["stack"] = group_of(stacked)
        server.state["stacks"] = get_tensor(server.state, "stacks") + 1
        server.state["stacks_added"] = {**members(server.state, "stacks_added"), **added}  # how many by each client
        return updates

    def receive(self, client: Client, message: Message) -> None:
        """Add what the client has not added yet; draw A anew, and set B to zero."""
        layers = adapted_layers(client.model)
        stacks = get_tensor(message, "stacks")
        before = get_tensor(client.state, "stacks_added") if "stacks_added" in client.state else torch.tensor(0)
        state = client.model.state_dict()
        if "sum_of_stacks" in message:
            whole = get_group(message, "sum_of_stacks")
            load_state(client.model, {f"{name}.offset": whole[name] for name in layers})
        elif "stack" in message and not torch.equal(before, stacks):  # else an upload was lost
            stacked = adapters_of(get_group(message, "stack"))
            added = _add({name: state[f"{name}.offset"].cpu() for name in layers}, stacked)
            load_state(client.model, {f"{name}.offset": update for name, update in added.items()})
        draws = client.generator("adapters")
        fresh = {}
        for name, layer in layers.items():
            a = draw_a(torch.empty(layer.lora_a.shape), draws)
            fresh[name] = Adapter(a, torch.zeros(layer.lora_b.shape))
        load_state(client.model, group_of(fresh))
        client.state["stacks_added"] = stacks.clone()

    def upload(self, client: Client) -> Message:
        return {"stacks_added": get_tensor(client.state, "stacks_added")}


def _common(server: Server) -> dict[str, Adapter]:
    """The common adapters by layer, of scale 1."""
    return adapters_of(get_group(server.state, "common"))


def _add(update: Group, stacked: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """The update of each layer, and what is stacked."""
    return {name: update[name] + lora.product(adapter).to(update[name]) for name, adapter in stacked.items()}


RULES: dict[str, CommonAdapters | Stack] = {
    "pad": CommonAdapters(join_padded),
    "slices": CommonAdapters(join_slices),
    "svd": CommonAdapters(join_svd),
    "stack": Stack(),
}
