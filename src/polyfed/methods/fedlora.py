"""FedLoRA: adapters of unequal rank on one frozen network, joined by the rule of one of four papers (FLoRA, FlexLoRA,
HETLoRA, 2024, raFLoRA, 2026).

client k:  E epochs of SGD on CE, of the head and of A_k and B_k in layers W + s_k B_k A_k
           A_k (r_k, I),  B_k (O, r_k),  s_k = alpha / r_k;  r_k at most I and O, layer by layer
server:    joins A_k and B_k of each layer by the rule `aggregation`;  p_k = n_k / sum of n_j over those who sent
  pad        A = sum p_k A_k,  B = sum p_k s_k B_k,  all with zeros up to the rank R = max r_k      `pad` (HETLoRA)
  slices     component j (from 0) of these sums over the clients with r_k > j alone                 `slices` (raFLoRA)
  svd        U D V' = sum p_k s_k B_k A_k;  A = V', B = U D, of the R largest values D              `svd` (FlexLoRA)
           after these, client k gets the first r_k components of A and B, this over s_k            `first_components`
  stack      A and B: all A_k and p_k s_k B_k beside each other, so that B A = sum p_k s_k B_k A_k  `stack` (FLoRA)
           then all clients have W + B A, an A_k drawn anew, and B_k = 0                            `add`, `restart`
           the head becomes sum p_k head_k                                                          `aggregate`
scored:    the network as received: of `stack` W + B A added, of the others with the client's first r_k components
FLoRA was compared with its code (ATP-1010/FederatedLLM). Of HETLoRA, FlexLoRA and raFLoRA the abstracts alone were
read, so that no line above is an equation of theirs. Rules are held against NumPy by
`tests/methods/test_fedlora_by_hand.py`, rounds of `stack`, also missed ones, by `tests/methods/test_fedlora.py`. The
record's `energy_beyond_smallest_rank` is, as a mean over layers, the share of the squares of singular values beyond the
smallest rank: of B A, with stack of the sum of all updates.
Sources: HETLoRA, arXiv:2401.06432; FlexLoRA, arXiv:2402.11505; FLoRA, arXiv:2409.05976; raFLoRA, arXiv:2602.13486.
Sent: down P_A(r) + P_h (stack: those of all clients, and their number; to who missed some I O per layer); up
P_A(r) + P_h (stack: and how many it has added). Kept: server: A, B, head; stack: the last updates, the sum of all, who
has added how many; client: how many it has added to W, each once.
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
from torch.nn import functional as F

from polyfed.core import adapters
from polyfed.core.adapters import Adapter
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor, members
from polyfed.core.method import Context, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import load_state
from polyfed.core.server import Server
from polyfed.core.settings import Ranks, Training, in_turn, numbers_in
from polyfed.core.upload_forms import Entry, as_sent
from polyfed.functional.averaging import normalize, weighted_mean

# the rules, of one layer ---------------------------------------------------------------------------------------------
# sent: what the clients sent, with scales s_k. n: their numbers of samples. common: the last A and B, of rank R. What
# is joined has scale 1.


def weighted_sum(p: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """sum_k p_k T_k, in float64."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for p_k, tensor in zip(p, tensors, strict=True):
        total += tensor.double() * p_k
    return total


def pad(sent: Sequence[Adapter], n: Sequence[float], common: Adapter) -> Adapter:
    """HETLoRA: sum_k p_k A_k and sum_k p_k s_k B_k, all with zeros up to R."""
    p = normalize(n)
    missing = [common.rank - adapter.rank for adapter in sent]
    a = weighted_sum(p, [F.pad(one.a, (0, 0, 0, zeros)) for one, zeros in zip(sent, missing, strict=True)])
    b = weighted_sum(p, [F.pad(one.scaled_b, (0, zeros)) for one, zeros in zip(sent, missing, strict=True)])
    return Adapter(a.to(common.a.dtype), b.to(common.b.dtype))


def slices(sent: Sequence[Adapter], n: Sequence[float], common: Adapter) -> Adapter:
    """raFLoRA: component j of `pad`'s sums over the clients with r_k > j; the last one where there is none."""
    a = common.a.clone()
    b = common.b.clone()
    for j in range(common.rank):
        held = [k for k, adapter in enumerate(sent) if adapter.rank > j]
        if held:
            p = normalize([n[k] for k in held])
            a[j] = weighted_sum(p, [sent[k].a[j] for k in held])
            b[:, j] = weighted_sum(p, [sent[k].scaled_b[:, j] for k in held])
    return Adapter(a, b)


def svd(sent: Sequence[Adapter], n: Sequence[float], common: Adapter) -> Adapter:
    """FlexLoRA: V' and U D of the R largest singular values of sum_k p_k s_k B_k A_k."""
    update_OI = adapters.product(stack(sent, n))
    u, d, vt = torch.linalg.svd(update_OI.double(), full_matrices=False)
    r = common.rank
    return Adapter(vt[:r].to(update_OI.dtype), (u[:, :r] * d[:r]).to(update_OI.dtype))


def first_components(common: Adapter, rank: int, alpha: float) -> Adapter:
    """pad, slices, svd: a client's first r_k components, all where there are fewer; B over the s_k of its layers."""
    a = common.a[:rank]
    s = alpha / len(a)
    return Adapter(a, (common.b[:, :rank].double() / s).to(a.dtype), s)


def stack(sent: Sequence[Adapter], n: Sequence[float]) -> Adapter:
    """FLoRA: all A_k and all p_k s_k B_k beside each other, of rank sum_k r_k."""
    p = normalize(n)
    b = [p_k * adapter.scaled_b for p_k, adapter in zip(p, sent, strict=True)]
    return Adapter(torch.cat([adapter.a for adapter in sent]), torch.cat(b, dim=1).to(sent[0].b.dtype))


def add(offsets: Group, stacked: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """FLoRA: what is added to W of each layer, and B A of the stacks."""
    return {name: offsets[name] + adapters.product(adapter).to(offsets[name]) for name, adapter in stacked.items()}


def restart(layer: adapters.AdaptedLinear, draws: torch.Generator) -> Adapter:
    """FLoRA: A_k drawn anew, as it was at first, and B_k = 0."""
    return Adapter(adapters.draw_a(torch.empty(layer.lora_a.shape), draws), torch.zeros(layer.lora_b.shape))


# the method -------------------------------------------------------------------------------------------------------


@hyperparameters
class FedLoRA(Method):
    """Low-rank adapters of unequal rank on a frozen network."""

    ranks: Ranks = "2 4 8"  # ranks of the adapters, given to the clients in turn
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0  # an update is scaled by alpha / rank
    layers: str = ""  # last names of the linear layers with adapters, as in "qkv out"; "": all but the head
    # how the server joins adapters of unequal rank
    aggregation: Literal["stack", "svd", "slices", "pad"] = "stack"

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        uploads = dict(sorted(uploads.items()))
        n = [server.share(i, "samples") for i in uploads]
        server.state["head"] = weighted_mean([get_group(message, "head") for message in uploads.values()], n)
        sent = [adapters.adapters_of(get_group(message, "adapters"), self.alpha) for message in uploads.values()]
        by_layer = {name: [own[name] for own in sent] for name in sent[0]}
        updates = self._exchange.join(server, by_layer, n, uploads)
        beyond = [adapters.energy_beyond(update, self._ranks[0]) for update in updates.values()]
        server.log["energy_beyond_smallest_rank"] = statistics.fmean(beyond)

    # Nothing below changes an equation.
    # the client's network ------------------------------------------------------------------------------------
    @property
    def _ranks(self) -> list[int]:
        """All ranks, ascending."""
        return sorted(map(int, numbers_in(self.ranks)))

    def variant(self, server: Server, client_id: int) -> str:
        return in_turn(self.ranks, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        rank = int(variant or self._ranks[-1])
        return adapters.add_adapters(model, rank, self.alpha, self.layers, self._exchange.has_offset)

    # down and up -----------------------------------------------------------------------------------------------
    @property
    def _exchange(self) -> CommonAdapters | Stacks:
        return Stacks() if self.aggregation == "stack" else CommonAdapters(RULES[self.aggregation])

    def init_server(self, server: Server) -> None:
        (architecture,) = server.architectures
        largest = str(self._ranks[-1])
        network = server.model(architecture, server.initial_state(architecture, largest), largest)
        server.state["head"] = {name: t.cpu().clone() for name, t in adapters.head_state(network).items()}
        self._exchange.init(server, network)

    def broadcast(self, server: Server, client_id: int) -> Message:
        parts = self._exchange.broadcast(server, client_id, int(self.variant(server, client_id)), self.alpha)
        return {"head": get_group(server.state, "head"), **parts}

    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "head"))
        self._exchange.receive(client, message)
        return {}

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(training.local_epochs, trains=adapters.any_parameter),)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        own = {"adapters": adapters.adapter_state(client.model), "head": adapters.head_state(client.model)}
        return {**own, **self._exchange.upload(client)}

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(same_architecture=True, split_model=True)
    evaluation_stage = "received"
    upload_form = {
        "adapters": adapters.own_adapters,
        "head": as_sent,
        "stacks_added": Entry((), (torch.int64,), 0, lambda known: int(get_tensor(known.server.state, "stacks"))),
    }
    delta_entries = ("adapters", "head")
    common_start = "all"

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        drawn = "factors A that the client drew, and B beside them; use another method.aggregation, as 'slices'"
        return {"adapters": drawn} if self.aggregation == "stack" else {}


# what is kept, sent down and loaded, by layer -------------------------------------------------------------------------

Rule = Callable[[Sequence[Adapter], Sequence[float], Adapter], Adapter]
RULES: dict[str, Rule] = {"pad": pad, "slices": slices, "svd": svd}


class CommonAdapters:
    """A and B common to all, of which a client gets the components of its rank (pad, slices, svd)."""

    has_offset = False  # whether clients keep an update of W beside their adapters

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def init(self, server: Server, network: nn.Module) -> None:
        server.state["common"] = {name: t.cpu().clone() for name, t in adapters.adapter_state(network).items()}

    def broadcast(self, server: Server, client_id: int, rank: int, alpha: float) -> Message:
        common = adapters.adapters_of(get_group(server.state, "common"))
        parts = {name: first_components(adapter, rank, alpha) for name, adapter in common.items()}
        return {"adapters": adapters.group_of(parts)}

    def receive(self, client: Client, message: Message) -> None:
        load_state(client.model, get_group(message, "adapters"))

    def upload(self, client: Client) -> Message:
        return {}

    def join(
        self, server: Server, sent: Mapping[str, list[Adapter]], n: list[float], uploads: Mapping[int, Message]
    ) -> dict[str, Tensor]:
        """Join what the clients sent; the update B A of each layer."""
        last = adapters.adapters_of(get_group(server.state, "common"))
        common = {name: self.rule(sent[name], n, adapter) for name, adapter in last.items()}
        server.state["common"] = adapters.group_of(common)
        return {name: adapters.product(adapter) for name, adapter in common.items()}


class Stacks:
    """Updates of W, which clients keep as an "offset" of it; each gets those that it has not added yet (stack)."""

    has_offset = True

    def init(self, server: Server, network: nn.Module) -> None:
        layers = adapters.adapted_layers(network)
        server.state["sum_of_stacks"] = {name: torch.zeros_like(w.weight).cpu() for name, w in layers.items()}
        server.state["stacks"] = torch.tensor(0)

    def broadcast(self, server: Server, client_id: int, rank: int, alpha: float) -> Message:
        """The adapters of the last round, or, if the client lacks several rounds, all updates' sum."""
        stacks = get_tensor(server.state, "stacks")
        behind = int(stacks) - int(members(server.state, "stacks_added").get(str(client_id), torch.tensor(0)))
        if behind > 1:
            return {"stacks": stacks, "sum_of_stacks": get_group(server.state, "sum_of_stacks")}
        return {"stacks": stacks, **({"stack": get_group(server.state, "stack")} if behind else {})}

    def receive(self, client: Client, message: Message) -> None:
        """Add what is sent to W, unless it was added already; draw A anew, and set B to zero."""
        layers = adapters.adapted_layers(client.model)
        stacks = get_tensor(message, "stacks")
        before = get_tensor(client.state, "stacks_added") if "stacks_added" in client.state else torch.tensor(0)
        offsets: Group = {}
        if "sum_of_stacks" in message:
            offsets = get_group(message, "sum_of_stacks")
        elif "stack" in message and not torch.equal(before, stacks):  # else an upload was lost
            state = client.model.state_dict()
            own = {name: state[f"{name}.offset"].cpu() for name in layers}
            offsets = add(own, adapters.adapters_of(get_group(message, "stack")))
        draws = client.generator("adapters")
        fresh = {name: restart(layer, draws) for name, layer in layers.items()}
        load_state(client.model, {**{f"{name}.offset": t for name, t in offsets.items()}, **adapters.group_of(fresh)})
        client.state["stacks_added"] = stacks.clone()

    def upload(self, client: Client) -> Message:
        return {"stacks_added": get_tensor(client.state, "stacks_added")}

    def join(
        self, server: Server, sent: Mapping[str, list[Adapter]], n: list[float], uploads: Mapping[int, Message]
    ) -> dict[str, Tensor]:
        """Stack what the clients sent; the sum of all updates of each layer."""
        stacked = {name: stack(of_layer, n) for name, of_layer in sent.items()}
        updates = add(get_group(server.state, "sum_of_stacks"), stacked)
        added = {str(i): get_tensor(message, "stacks_added") for i, message in uploads.items()}
        server.state["sum_of_stacks"] = updates
        server.state["stack"] = adapters.group_of(stacked)
        server.state["stacks"] = get_tensor(server.state, "stacks") + 1
        server.state["stacks_added"] = {**members(server.state, "stacks_added"), **added}  # how many by each client
        return updates
