"""Small methods written for the tests, right as far as they go; the mutants break them. Later methods in miniature.

They are no reference: the library's own versions come with their papers' details.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.inference import representations
from polyfed.core.message import Message, clone, get_group, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Method,
    MethodCard,
    Requirements,
    StepResult,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.modules import float_state, load_state, trainable_parameters
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.class_prototypes import class_means
from polyfed.functional.losses import cross_entropy, squared_distance
from polyfed.methods.fedavg import FedAvg
from polyfed.testing.fixtures import tiny_model


@hyperparameters
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    card = replace(FedAvg.card, name="toy-fedprox", ignores_initial_weights=False)
    mu: float = 0.5  # 0 is FedAvg

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        return {"reference": {name: p.detach().clone() for name, p in client.model.named_parameters()}}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        task = cross_entropy(model(batch.x), batch.y, batch.w)
        return task + self.mu / 2 * squared_distance(dict(model.named_parameters()), context["reference"])


@hyperparameters
class FedProto(Method):
    """Class means of representations as targets, and the nearest one as prediction."""

    card = MethodCard(name="toy-fedproto", paper="Tan et al., AAAI 2022")
    strength: float = 1.0  # lambda; 0 is Local
    predicts: Literal["prototype", "head"] = "prototype"

    @property
    def requirements(self) -> Requirements:
        return Requirements(split_model=True, same_feature_dim=True)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {name: server.state[name] for name in ("labels", "means") if name in server.state}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sums: dict[int, Tensor] = {}
        counts: dict[int, Tensor] = {}
        for message in uploads.values():
            for label, mean, count in zip(*(message[n] for n in ("labels", "means", "counts")), strict=True):
                c = int(label)
                sums[c] = sums.get(c, 0.0) + mean.double() * count
                counts[c] = counts.get(c, 0) + count
        known = (
            dict(zip(server.state["labels"].tolist(), server.state["means"], strict=True)) if self.has(server) else {}
        )
        known |= {c: (sums[c] / counts[c]).float() for c in sums}
        if known:
            server.state["labels"] = torch.tensor(sorted(known), dtype=torch.int32)
            server.state["means"] = torch.stack([known[c] for c in sorted(known)])

    @staticmethod
    def has(server: Server) -> bool:
        return "means" in server.state

    def receive(self, client: Client, message: Message) -> Context:
        if "means" in message:
            client.state = clone(message)
        width, shown = client.model.feature_dim, torch.zeros(client.classes)
        target = torch.zeros(client.classes, width)
        if "means" in client.state:
            rows = get_tensor(client.state, "labels").long()
            target = target.index_copy(0, rows, get_tensor(client.state, "means"))
            shown = shown.index_fill(0, rows, 1.0)
        return {"target": target, "shown": shown}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        z = model.represent(batch.x)
        distance = (z - context["target"][batch.y]).square().mean(dim=1) * context["shown"][batch.y]
        return cross_entropy(model.head(z), batch.y, batch.w) + self.strength * distance.mean()

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        train = client.data.train
        labels, means, counts = class_means(
            representations(client.model, train.x, client.prepare), train.y, client.classes
        )
        return {"labels": labels, "means": means, "counts": counts}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        if self.predicts == "head" or "means" not in context:
            return model(x)
        scores = x.new_full((len(x), 3), -torch.inf)
        rows = context["labels"].long()
        return scores.index_copy(1, rows, -torch.cdist(model.represent(x), context["means"]))


class Both(nn.Module):
    """A client's own network and the small shared one."""

    def __init__(self, private: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.private, self.shared = private, shared

    def forward(self, x: Tensor) -> Tensor:
        return self.private(x)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student), summed over classes, averaged over the batch."""
    log_s, log_t = F.log_softmax(student, 1), F.log_softmax(teacher, 1)  # F.kl_div has no batching rule (torch.func)
    return (log_t.exp() * (log_t - log_s)).sum(dim=1).mean()


@hyperparameters
class FML(Method):
    """Mutual learning of a private and a shared network."""

    card = MethodCard(name="toy-fml", paper="Shen et al., 2020")
    alpha: float = 0.5  # 1: the private network learns alone
    beta: float = 0.5  # 1: the shared one does

    def init_server(self, server: Server) -> None:
        weights = server.initial_state(server.architectures[0])
        server.state["shared"] = part(weights, "shared.")

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"shared": get_group(server.state, "shared")}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if uploads:
            models = [get_group(message, "shared") for message in uploads.values()]
            server.state["shared"] = weighted_mean(models, [float(m["n"]) for m in uploads.values()])

    def build(self, model: Any, variant: str) -> nn.Module:
        return Both(model, tiny_model(0, 4, 6))

    def personal_model(self, module: Any) -> nn.Module:
        return module.private

    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model.shared, get_group(message, "shared"))
        return {}

    def loss(self, model: Any, batch: Batch, context: Context) -> tuple[Tensor, Mapping[str, Tensor]]:
        p, m = model.private(batch.x), model.shared(batch.x)
        private = cross_entropy(p, batch.y, batch.w), divergence(p, m.detach())
        shared = cross_entropy(m, batch.y, batch.w), divergence(m, p.detach())
        total = self.alpha * private[0] + (1 - self.alpha) * private[1]
        return total + self.beta * shared[0] + (1 - self.beta) * shared[1], {"kl": private[1]}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"shared": float_state(client.model.shared), "n": torch.tensor(client.n)}


def part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The float tensors under a prefix, without it."""
    return {n[len(prefix) :]: t for n, t in weights.items() if n.startswith(prefix) and t.is_floating_point()}


@hyperparameters
class Scaffold(FedAvg):
    """Control variates: every step's gradient plus c - c_i; c_i is then the mean of the round's own gradients."""

    card = replace(FedAvg.card, name="toy-scaffold", form=None, ignores_initial_weights=False)
    weighting: Literal["samples", "uniform"] = "uniform"

    @property
    def requirements(self) -> Requirements:
        return Requirements(same_architecture=True)

    def init_server(self, server: Server) -> None:
        super().init_server(server)
        model = server.model(server.architectures[0], server.initial_state(server.architectures[0]))
        server.state["control"] = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {**super().broadcast(server, client_id), "control": get_group(server.state, "control")}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        control = dict(get_group(server.state, "control"))
        for message in uploads.values():
            for name, change in get_group(message, "change").items():
                control[name] = control[name] + change / len(server.clients)
        server.state["control"] = control

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        own = client.state.setdefault(
            "control", {n: torch.zeros_like(t) for n, t in get_group(message, "control").items()}
        )
        return {"shift": {name: c - own[name] for name, c in get_group(message, "control").items()}}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        raw = super().gradients(model, batch, context)
        grads = {name: g if g is None else g + context["shift"][name] for name, g in raw.grads.items()}
        return StepResult(grads, raw.loss, raw.sums, {name: g for name, g in raw.grads.items() if g is not None})

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        names, _ = trainable_parameters(client.model)
        new = {name: trained.raw[name] / trained.steps for name in names}
        change = {name: c - get_group(client.state, "control")[name] for name, c in new.items()}
        client.state["control"] = new
        return {**super().upload(client, trained), "change": change}


@hyperparameters
class Drift(Method):
    """Every client moves along a random direction beside its loss: a method that draws, in the allowed way."""

    card = MethodCard(name="toy-drift", paper="none")
    size: float = 0.1

    @property
    def evaluation_stage(self) -> Stage:
        return "personal"

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        shape = (client.training.batch_size, *client.data.train.x.shape[1:])
        return {"noise": torch.randn(shape, generator=generator)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        x = batch.x + self.size * context["noise"][: len(batch.x)]
        return cross_entropy(model(x), batch.y, batch.w)
