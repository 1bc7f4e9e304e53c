"""FedKWAZ: two networks per client, which learn from all clients' class means and then from each other (NeurIPS 2025).

w is the client's own network, m the second one, H are representations and f scores. Z_w[c] and
F_w[c] are the server's means of H_w and f_w for class c.
client k:  1. global_epochs epochs of SGD on L_w + L_m,
              L_w = CE(w) + CE(f_w, softmax(F_m[y])) + MSE(H_w, Z_m[y])
              L_m = CE(m) + CE(f_m, softmax(F_w[y])) + MSE(H_m, Z_w[y])
           2. E epochs of SGD on L_w + L_m,  KL of softmax(scores / T), T = 4; a teacher is a constant
              L_w = CE(w) + mutual [T^2 KL(m || w) + MSE(H_w, H_m)]
                          + mixed  [MSE(H_w, H_m) on x_1 + T^2 KL(m || w) on x_2]
              L_m = CE(m) + mutual [T^2 KL(w || m) + MSE(H_m, H_w)]
                          + mixed  [MSE(H_m, H_w) on x_1 + T^2 KL(w || m) on x_3]
           3. class means of H_w, f_w, H_m, f_m over its samples, in eval mode
server:    plain means over the clients that sent a class
x_1, x_2, x_3: the batch, mixed patch by patch with itself in another order
(`functional.patch_mixing`). Each mixture has its own alpha and number of patches: 0.1 and 16 at
first, and in every 30th round, before training, those among `CANDIDATES` on which the networks
differ most. A sample of a class without means counts in the cross entropy alone.
Of the paper (openreview.net/forum?id=G8wWeZVmla), the text and Algorithm 1 were available. Deviations from it or from
its authors' code (ysml666/FedKWAZ): (1) Stage 2 has labels, KL(teacher || student) and means of squares, as in the
code; Algorithm 1 has no labels, KL(student || teacher) and sums. (2) Teachers are constants; the code lets gradients
pass into the teacher on plain images. (3) Class means are computed after training, as in Algorithm 1; in the code
during stage 2. (4) Gradients are not clipped; the code clips them at norm 10. (5) The search tests mixtures on the same
images for all purposes. (6) A class that no client sends keeps its means. (7) One optimizer steps both networks. (8)
Patches are shifted evenly to both sides. (9) Candidates have 4, 16 and 64 patches; for 28 x 28 pixels the paper has 49
instead of 64.
Sent: down 2 C D + 2 C C + C; up 2 S D + 2 S C + S. Kept: client: both networks, mixtures; server: class means of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.core.upload_forms import LABELS, rows_of
from polyfed.errors import ConfigError
from polyfed.functional.class_prototypes import (
    class_means,
    merge,
    prototype_distance,
    soft_cross_entropy,
    to_dense,
    update_rows,
)
from polyfed.functional.losses import cross_entropy, kl_divergence, mse_loss
from polyfed.functional.patch_mixing import mix, mixing_map, partners
from polyfed.methods.building_blocks.auxiliary_model import JointModel

_MEANS = ("own_features", "own_scores", "auxiliary_features", "auxiliary_scores")  # Z_w, F_w, Z_m, F_m
TEMPERATURE = 4.0  # T
_FIRST = (0.1, 16)  # alpha and patches before the first search
SEARCH_EVERY = 30  # rounds
CANDIDATES = tuple(itertools.product((0.1, 0.5, 1.0), (4, 16, 64)))  # alpha, patches
_MIXTURES = 3  # for the representations, for w's scores, for m's


@hyperparameters
class FedKWAZ(Method):
    """Class means of two networks per client, which also teach each other."""

    # the second network: "smallest", "largest", a model's name, or "package.module:function"
    shared: Annotated[str, Field(min_length=1)] = "smallest"
    mutual: Annotated[float, Field(ge=0)] = 1.0  # weight of learning from each other on plain images; 0: off
    mixed: Annotated[float, Field(ge=0)] = 1.0  # the same on patch-mixed images; 0: off, and no images are mixed
    # epochs of stage 1; not set: training.local_epochs; 0: the clients learn nothing from each other
    global_epochs: Annotated[int, Field(ge=0)] | None = None

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.shared)

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        if own.feature_dim != auxiliary.feature_dim:
            raise ConfigError(
                f"{self.name} needs one feature width for both networks of a client; '{own.architecture}' "
                f"gives {own.feature_dim}, the second network {auxiliary.feature_dim}; set models.feature_dim to add a "
                f"projection, or another network as method.shared"
            )
        return JointModel(own, auxiliary)

    def personal_model(self, module: Any) -> nn.Module:
        own: nn.Module = module.own
        return own

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        return {name: server.state[name] for name in ("labels", *_MEANS) if name in server.state}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        before = dict(server.state)
        sent = torch.cat([get_tensor(message, "labels") for message in uploads.values()])
        for name in _MEANS:
            rows = torch.cat([get_tensor(message, name) for message in uploads.values()])
            labels, means = merge(rows, sent, torch.ones(len(sent)))
            if name in before:
                labels, means = update_rows(get_tensor(before, name), get_tensor(before, "labels"), means, labels)
            server.state |= {"labels": labels, name: means}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if self.mixed:
            client.state["mixtures"] = self._mixtures(client)
        if "labels" not in message or self.global_epochs == 0:
            return {}
        dtype = next(client.model.parameters()).dtype
        labels = get_tensor(message, "labels")
        found = {name: to_dense(get_tensor(message, name).to(dtype), labels, client.classes) for name in _MEANS}
        context = {name: rows for name, (rows, _) in found.items()}
        context |= {name: context[name].softmax(dim=1) for name in _MEANS if name.endswith("scores")}
        return {**context, "known": found["own_scores"][1]}

    def phases(self, training: Training) -> Sequence[Phase]:
        epochs = training.local_epochs if self.global_epochs is None else self.global_epochs
        first = [Phase(epochs, name="global")] if epochs else []
        return (*first, Phase(training.local_epochs, name="mutual"))

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if client.phase == "global":
            return {"global stage": True}
        if not self.mixed:
            return {"global stage": False}
        height, width = client.prepare(client.data.train.x[:1]).shape[-2:]
        mixtures: list[tuple[float, float]] = get_tensor(client.state, "mixtures").tolist()
        maps = [mixing_map(height, width, int(patches), alpha, generator) for alpha, patches in mixtures]
        order = torch.rand(_MIXTURES, client.training.batch_size, generator=generator)
        return {"global stage": False, "maps": torch.stack(maps), "order": order}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        own = model.own
        other = model.auxiliary_model
        if context["global stage"]:
            taught = _taught_by_means(own, batch, context, "auxiliary")
            return taught + _taught_by_means(other, batch, context, "own")
        z = own.represent(batch.x)
        z_m = other.represent(batch.x)
        scores = own.head(z)
        scores_m = other.head(z_m)
        loss = cross_entropy(scores, batch.y, batch.w) + cross_entropy(scores_m, batch.y, batch.w)
        if self.mutual:
            kl = _divergence(scores, scores_m, batch.w) + _divergence(scores_m, scores, batch.w)
            loss = loss + self.mutual * (kl + _apart(z, z_m, batch.w))
        if "maps" in context:
            loss = loss + self.mixed * self._loss_on_mixed(own, other, batch, context)
        return loss

    def _loss_on_mixed(self, own: Any, other: Any, batch: Batch, context: Context) -> Tensor:
        """The terms of patch-mixed images."""
        rows = len(batch.y)
        x_1, x_2, x_3 = [
            mix(batch.x, partners(order[:rows], batch.w), share)
            for order, share in zip(context["order"], context["maps"], strict=True)
        ]
        apart = _apart(own.represent(x_1), other.represent(x_1), batch.w)
        of_own = _divergence(own(x_2), _without_gradient(other, x_2), batch.w)
        of_other = _divergence(other(x_3), _without_gradient(own, x_3), batch.w)
        return apart + of_own + of_other

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        model: Any = client.model

        def outputs(x: Tensor) -> Tensor:
            parts = []
            for network in (model.own, model.auxiliary_model):
                z = network.represent(x)
                parts += [z, network.head(z)[:, : client.classes]]
            return torch.cat(parts, dim=1)

        rows = inference.map_batches(outputs, model, client.data.train, client.prepare)
        train = client.data.train
        labels, means, _ = class_means(rows, train.y, client.classes, train.at(rows.device).y)
        parts = means.split([model.own.feature_dim, client.classes] * 2, dim=1)
        return {"labels": labels, **{name: part.contiguous() for name, part in zip(_MEANS, parts, strict=True)}}

    def _mixtures(self, client: Client) -> Tensor:
        """Alpha and number of patches of each mixture, (3, 2)."""
        if client.round % SEARCH_EVERY == 0:
            draws = client.generator("mixtures")
            gaps = torch.stack([self._gaps(client, alpha, patches, draws) for alpha, patches in CANDIDATES])
            return torch.tensor(CANDIDATES, dtype=torch.float64)[gaps.argmax(dim=0)]
        if "mixtures" in client.state:
            return get_tensor(client.state, "mixtures")
        return torch.tensor([_FIRST] * _MIXTURES, dtype=torch.float64)

    def _gaps(self, client: Client, alpha: float, patches: int, draws: torch.Generator) -> Tensor:
        """How far the networks differ on images mixed so: in H, by KL(m || w), by KL(w || m); (3,), on the CPU."""
        model: Any = client.model

        def by_row(x: Tensor) -> Tensor:
            height, width = x.shape[-2:]
            share = mixing_map(height, width, patches, alpha, draws).to(x)
            mixed = mix(x, torch.randperm(len(x), generator=draws).to(x.device), share)
            z = model.own.represent(mixed)
            z_m = model.auxiliary_model.represent(mixed)
            log_p = F.log_softmax(model.own.head(z) / TEMPERATURE, dim=1)
            log_q = F.log_softmax(model.auxiliary_model.head(z_m) / TEMPERATURE, dim=1)
            gaps = [
                (z - z_m).square().mean(dim=1),
                (log_q.exp() * (log_q - log_p)).sum(dim=1),
                (log_p.exp() * (log_p - log_q)).sum(dim=1),
            ]
            return torch.stack(gaps, dim=1)

        return inference.map_batches(by_row, model, client.data.train, client.prepare).double().mean(dim=0).cpu()

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(
        split_model=True,
        same_feature_dim=True,
        images=True,
        classes="its networks teach each other by probabilities of classes",
        hint="set models.feature_dim to add a projection",
    )
    upload_form = {"labels": LABELS, **{name: rows_of("D" if name.endswith("features") else "C") for name in _MEANS}}
    unaligned_entries = ("own_features", "auxiliary_features")


def _taught_by_means(network: Any, batch: Batch, context: Context, teacher: str) -> Tensor:
    """Stage 1's loss of a network; teacher: "own" or "auxiliary", the network whose means it learns."""
    z = network.represent(batch.x)
    scores = network.head(z)
    task = cross_entropy(scores, batch.y, batch.w)
    if "known" not in context:
        return task
    targets = context[f"{teacher}_scores"]
    taught = soft_cross_entropy(scores[:, : targets.shape[1]], batch.y, batch.w, targets, context["known"])
    return task + taught + prototype_distance(z, batch.y, batch.w, context[f"{teacher}_features"], context["known"])


def _divergence(scores: Tensor, teacher: Tensor, w: Tensor) -> Tensor:
    return TEMPERATURE**2 * kl_divergence(scores / TEMPERATURE, teacher / TEMPERATURE, w)


def _apart(z: Tensor, z_m: Tensor, w: Tensor) -> Tensor:
    """MSE(H_w, H_m) for w, and MSE(H_m, H_w) for m."""
    return mse_loss(z, z_m, w) + mse_loss(z_m, z, w)


def _without_gradient(network: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = network(x)
    return scores
