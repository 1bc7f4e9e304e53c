"""FedFomo: clients mix others' models by validation loss (Zhang et al., ICLR 2021, arXiv:2012.08565).

L: mean cross entropy on the client's validation rows, which are never trained on (`data.split`, such as "8:1:1").
client k:  delta_n = (L(w_old) - L(w_n)) / ||w_n - w_old||,   omega_n = max(delta_n, 0) / sum_m max(delta_m, 0)
           w_k <- w_old + sum_n omega_n (w_n - w_old);   if no delta_n is positive, w_old
           E epochs of  w_k <- w_k - eta grad CE(f(x; w_k), y)
server:    A_kn <- A_kn + delta_n, not clipped
           the M others with the largest A_kn; each replaced by a random other with probability epsilon_t,
           epsilon_t = max(0, epsilon - (t - 1) epsilon_decay) in round t

Deviations from the paper: (1) w_old is the model before the last local training, so that local progress is weighted
like that of others, as in the authors' commands (`first_model`). (2) The distance covers parameters only. BatchNorm's
running statistics are mixed like weights. (3) Validation rows are those of the recipe; the paper sets aside a fifth
of the training rows ("8:2:0").
In the authors' code, M includes the client's own model (its 5 is 4 here), the distance is L1, affinities are
normalized, and candidates are the previous round's participants only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference, upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group, tensor
from polyfed.core.method import Context, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import floats, load
from polyfed.core.server import Server
from polyfed.functional.losses import cross_entropy
from polyfed.functional.mixing import distance, improvements, moved_towards, positive_shares
from polyfed.methods.building_blocks import weight_averaging


@hyperparameters
class FedFomo(Method):
    """A mixture of other clients' models for every client, weighted by validation loss."""

    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    differs: ClassVar[str] = "depth; same-named tensors need the same shape (same-shape: anything)"
    down: ClassVar[str] = "M P (M other clients' models)"
    up: ClassVar[str] = "P + M"
    states: ClassVar[str] = "client: w before training; server: initial w, all w_k, A (N x N)"
    form: ClassVar[upload_forms.Form | None] = {
        "model": upload_forms.own_network,
        "delta": upload_forms.Entry(
            (upload_forms.UpTo("M", lambda known: sum(n.startswith("candidate") for n in known.sent)),)
        ),
    }
    ignores_initial_weights: ClassVar[bool] = True

    models: Annotated[int, Field(ge=1)] = 5  # M, number of others' models sent to a client
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.3  # probability of a random model in round 1; 0: none
    epsilon_decay: Annotated[float, Field(ge=0)] = 0.05  # decrease of epsilon per round; 0: constant
    # or "same-shape": candidates of the same architecture
    aggregation: weight_averaging.Aggregation = "layer-wise"

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(weight_averaging.needs(self.aggregation), validation=True)

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return {"model": "whole weights, which others weigh up"}

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
                affinity[i, self._chosen(server, i)] += tensor(message, "delta").double()
        for i, message in uploads.items():
            server.store_weights(i, group(message, "model"))
        server.state["affinity"] = affinity

    def _affinity(self, server: Server) -> Tensor:
        """A copy of A with a row and a column for every available client; 0 for unknown entries."""
        known = tensor(server.state, "affinity") if "affinity" in server.state else torch.zeros(0, 0)
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
        chosen = ranked[: self.models]
        rest = ranked[self.models :]
        epsilon = self.epsilon - self.epsilon_decay * (server.round - 1)
        for slot, draw in enumerate(torch.rand(len(chosen), generator=draws).tolist()):
            if rest and draw < epsilon:
                other = int(torch.randint(len(rest), (), generator=draws))
                chosen[slot], rest[other] = rest[other], chosen[slot]
        return chosen

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if client.weights is None:
            load(client.model, group(message, "start"))
        own = {name: t.clone() for name, t in floats(client.model).items()}
        others = [group(message, name) for name in message if name != "start"]
        if "before" in client.state:
            old = group(client.state, "before")
            candidates = [own, *others]
        else:  # it has not trained yet
            old = own
            candidates = others
        delta = self._delta(client, old, candidates)
        mixed = moved_towards(old, candidates, positive_shares(delta).tolist())
        load(client.model, mixed)
        client.state["before"] = {name: t.cpu() for name, t in mixed.items()}
        return {"delta": delta[len(candidates) - len(others) :]}

    def _delta(self, client: Client, old: Group, candidates: list[Group]) -> Tensor:
        """Improvement of each candidate over `old` on the client's validation rows, per distance."""
        held = client.data.validation
        losses = []
        for candidate in (old, *candidates):
            load(client.model, {**old, **candidate})
            logits = inference.apply(client.model, client.model, held.x, client.prepare).cpu()
            losses.append(float(cross_entropy(logits, held.y, torch.ones(len(held)))))
        weights = {name: old[name] for name, _ in client.model.named_parameters()}
        return improvements(losses[0], losses[1:], [distance(weights, one) for one in candidates])

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        delta: Tensor = client.context["delta"]
        message: dict[str, Tensor | Group] = {"model": floats(client.model)}
        if len(delta):
            message["delta"] = delta
        return message
