"""FedFomo: every client weighs others' models by what they gain on its own data (Zhang et al., ICLR 2021).

Client k:  delta_n = (L(w_old) - L(w_n)) / ||w_n - w_old||, L the mean cross entropy on its validation rows;
           w_k <- w_old + sum_n omega_n (w_n - w_old), omega_n = max(delta_n, 0) / their sum, w_n being the models sent
           and its own last one;  then E epochs of SGD on CE(f(x; w_k), y) on its training rows.
           All start from one model: what has grown from unlike weights cannot be mixed.
Server:    keeps every client's last model;  A_kn <- A_kn + delta_n;  sends client k the M others with the largest A_kn,
           each replaced by a random other with probability epsilon_t = max(0, epsilon - 0.05 (t - 1)).
Sent: down M P (M other clients' models); up P + M. Kept: client: w before training; server: initial w, all w_k, A (N x
N).
Deviations from the paper: (1) Architectures may differ; the paper has one. (2) w_old is the model before the last local
training, as in the authors' commands (`first_model`), so that a client's own training is weighted like others'. (3) The
client's own last model is a candidate beside the M models. (4) The distance is over parameters. BatchNorm's running
statistics are mixed like weights. (5) Validation rows are the recipe's; the paper sets aside a fifth of the training
rows ("8:2:0"). (6) In the authors' code, M counts the client's own model, the distance is L1, affinities add up
normalized deltas, and candidates are the last round's models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference, upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor, numbers_of
from polyfed.core.method import Context, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.functional.device_copies import in_float64, move_group
from polyfed.functional.losses import task_loss
from polyfed.methods.building_blocks import weight_averaging

_EPSILON_DECAY = 0.05  # per round
_SAME = 1e-12  # models nearer than this are one model


@hyperparameters
class FedFomo(Method):
    """A mixture of other clients' models for every client, weighted by validation loss."""

    num_models: Annotated[int, Field(ge=1)] = 5  # M, other clients' models sent to a client
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.3  # probability of a random model instead, in round 1; 0: none
    aggregation: weight_averaging.Aggregation = "layer-wise"  # candidates of all architectures; "same-shape": its own

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        start = weight_averaging.weights_for(server, self.aggregation, server.clients[client_id].architecture)
        message: dict[str, Group] = {} if server.has_weights(client_id) else {"start": start}
        for place, n in enumerate(self._chosen(server, client_id)):
            weights = server.client_weights(n)
            message[f"candidate {place}"] = {name: t for name, t in weights.items() if name in start}
        return message

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        affinity = self._affinity(server)
        for i, message in uploads.items():
            if "delta" in message:
                affinity[i, self._chosen(server, i)] += get_tensor(message, "delta").double()
        for i, message in uploads.items():
            server.store_weights(i, get_group(message, "model"))
        server.state["affinity"] = affinity

    def _affinity(self, server: Server) -> Tensor:
        """A copy of A with a row and a column for every available client; 0 for unknown entries."""
        known = get_tensor(server.state, "affinity") if "affinity" in server.state else torch.zeros(0, 0)
        size = max(len(known), 1 + max(server.clients))
        affinity = torch.zeros(size, size, dtype=torch.float64)
        affinity[: len(known), : len(known)] = known
        return affinity

    def _chosen(self, server: Server, client_id: int) -> list[int]:
        """Clients whose models this client is sent in this round; repeatable until the round is aggregated."""
        others = [n for n in server.clients if n != client_id and server.has_weights(n)]
        if self.aggregation == "same-shape":
            own = server.clients[client_id].architecture
            others = [n for n in others if server.clients[n].architecture == own]
        draws = server.generator("candidates", client_id)
        order = [others[place] for place in torch.randperm(len(others), generator=draws).tolist()]
        affinity = self._affinity(server)[client_id].tolist()
        ranked = sorted(order, key=lambda n: -affinity[n])  # equal ones stay in random order
        chosen = ranked[: self.num_models]
        rest = ranked[self.num_models :]
        epsilon = self.epsilon - _EPSILON_DECAY * (server.round - 1)
        for slot, draw in enumerate(torch.rand(len(chosen), generator=draws).tolist()):
            if rest and draw < epsilon:
                other = int(torch.randint(len(rest), (), generator=draws))
                chosen[slot], rest[other] = rest[other], chosen[slot]
        return chosen

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if client.weights is None:
            load_state(client.model, get_group(message, "start"))
        own = {name: t.clone() for name, t in float_state(client.model).items()}
        device = next(iter(own.values())).device
        others: list[Group] = [move_group(get_group(message, name), device) for name in message if name != "start"]
        if "before" in client.state:
            old: Group = move_group(get_group(client.state, "before"), device)
            candidates = [own, *others]
        else:  # it has not trained yet
            old = own
            candidates = others
        delta = self._delta(client, old, candidates)
        mixed = interpolate_towards(old, candidates, normalize_positive(delta).tolist())
        load_state(client.model, mixed)
        client.state["before"] = mixed
        return {"delta": delta[len(candidates) - len(others) :]}

    def _delta(self, client: Client, old: Group, candidates: list[Group]) -> Tensor:
        """Improvement of each candidate over `old` on the client's validation rows, per distance."""
        held = client.data.validation
        losses = []
        for candidate in (old, *candidates):
            load_state(client.model, {**old, **candidate})
            logits = inference.map_batches(client.model, client.model, held, client.prepare)
            y = held.at(logits.device).y.to(logits.device)
            losses.append(task_loss(logits, y, torch.ones_like(y, dtype=torch.float32)))
        weights = {name: old[name] for name, _ in client.model.named_parameters()}
        found = numbers_of([*losses, *(distance(weights, one) for one in candidates)])
        return model_gains(found[0], found[1 : len(losses)], found[len(losses) :])

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        delta: Tensor = client.context["delta"]
        message: dict[str, Tensor | Group] = {"model": float_state(client.model)}
        if len(delta):
            message["delta"] = delta
        return message

    # declared -------------------------------------------------------------------------------------------------
    upload_form = {
        "model": upload_forms.own_network,
        "delta": upload_forms.Entry(
            (upload_forms.UpTo("M", lambda known: sum(n.startswith("candidate") for n in known.sent)),)
        ),
    }
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(weight_averaging.requirements(self.aggregation), validation=True)

    fixed_entries = {"model": "whole weights, which others weigh up"}


# equations of section 3 ---------------------------------------------------------------------------------------------


def model_gains(loss: float, losses: Sequence[float], distances: Sequence[float]) -> Tensor:
    """delta_n = (L(w) - L(w_n)) / ||w_n - w||: how much a model gains for every step in a candidate's direction.

    (M,) float32; 0 for a candidate that is the model itself, and where a loss is not finite.
    """
    gain = loss - torch.tensor(losses, dtype=torch.float64)
    away = torch.tensor(distances, dtype=torch.float64)
    known = (away >= _SAME) & torch.isfinite(gain)
    return torch.where(known, gain / away.clamp(min=_SAME), torch.zeros_like(gain)).float()


def normalize_positive(delta: Tensor) -> Tensor:
    """omega_n = max(delta_n, 0), divided by their sum; all 0 where none is positive. (M,) to (M,)."""
    positive = delta.clamp(min=0)
    total = positive.sum()
    return positive / total if float(total) > 0 else positive


def interpolate_towards(
    model: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """W + sum_n omega_n (W_n - W), name by name; of a tensor that W_n does not have, W_n counts as W.

    New tensors; sums are float64, so that a share of 1 gives W_n itself.
    """
    mixed = {}
    for name, tensor in model.items():
        total = here = in_float64(tensor.detach())
        for other, share in zip(others, shares, strict=True):
            if share and name in other:
                total = total + share * (other[name].to(here) - here)
        mixed[name] = total.to(tensor.dtype, copy=True)
    return mixed


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """||a - b||, the Euclidean norm over the entries of all tensors that both have, 0-d float64."""
    gaps = [(in_float64(a[name]) - in_float64(b[name])).flatten() for name in a if name in b]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(gaps or [torch.zeros(0, dtype=torch.float64)]))
    return norm
