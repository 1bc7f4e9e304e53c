"""LocalMutual: two networks per client that teach each other, without communication; a control.

w is the own network, m the second one, H are representations; KL is of softmax(scores / T), with
T = 4. A teacher is a constant.
client k:  E epochs of SGD on L_w + L_m
L_w = CE(w) + mutual [T^2 KL(m || w) + MSE(H_w, H_m)]
            + mixed  [MSE(H_w, H_m) on x_1 + T^2 KL(m || w) on x_2]
L_m = CE(m) + mutual [T^2 KL(w || m) + MSE(H_m, H_w)]
            + mixed  [MSE(H_m, H_w) on x_1 + T^2 KL(w || m) on x_3]
x_1, x_2, x_3: the batch, mixed patch by patch with itself in another order
(`functional.patch_mixing`). Each mixture has its own alpha and number of patches: 0.1 and 16 at
first, and in every 30th round, before training, those among `CANDIDATES` on which the networks
differ most.
Those of FedKWAZ that concern local training: Deviations from the paper: (1) The loss has labels, KL(teacher || student)
and means of squares. (2) Teachers are constants. (3) Gradients are not clipped. (4) One optimizer steps both networks.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, Method, MethodCard, Requirements, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.errors import ConfigError
from polyfed.functional.losses import cross_entropy, kl_divergence, mse_loss
from polyfed.functional.patch_mixing import mix, mixing_map, partners
from polyfed.methods.building_blocks.auxiliary_model import JointModel

TEMPERATURE = 4.0  # T
FIRST = (0.1, 16)  # alpha and patches before the first search
SEARCH_EVERY = 30  # rounds
CANDIDATES = tuple(itertools.product((0.1, 0.5, 1.0), (4, 16, 64)))  # alpha, patches
_MIXTURES = 3  # for the representations, for w's scores, for m's


@hyperparameters
class LocalMutual(Method):
    """Local training of two networks that teach each other, without communication."""

    card = MethodCard(
        name="local-mutual",
        paper="none: the local stage of FedKWAZ, NeurIPS 2025",
        differs="anything; equal feature width",
        states="client: both networks, mixtures",
        form={},
    )

    # the second network: "smallest", "largest", a model's name, or "package.module:function"
    shared: Annotated[str, Field(min_length=1)] = "smallest"
    mutual: Annotated[float, Field(ge=0)] = 1.0  # weight of learning from each other on plain images; 0: off
    mixed: Annotated[float, Field(ge=0)] = 1.0  # the same on patch-mixed images; 0: off, and no images are mixed

    requirements = Requirements(
        split_model=True,
        same_feature_dim=True,
        images=True,
        classes="its networks teach each other by probabilities of classes",
        hint="set models.feature_dim to add a projection",
    )

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return AuxiliaryModel(self.shared)

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        """Pair both networks, which represent in one width."""
        if own.feature_dim != auxiliary.feature_dim:
            raise ConfigError(
                f"{self.name} needs one feature width for both networks of a client; '{own.architecture}' "
                f"gives {own.feature_dim}, the second network {auxiliary.feature_dim}; set models.feature_dim to add a "
                f"projection, or another network as method.shared"
            )
        return JointModel(own, auxiliary)

    def personal_model(self, module: Any) -> nn.Module:
        """The client's own network."""
        own: nn.Module = module.own
        return own

    def receive(self, client: Client, message: Message) -> Context:
        """Choose how images are mixed."""
        if self.mixed:
            client.state["mixtures"] = self._mixtures(client)
        return {}

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """Three maps of shares (3, H, W), and random numbers (3, B) by which rows find partners."""
        if not self.mixed:
            return {}
        height, width = client.prepare(client.data.train.x[:1]).shape[-2:]
        mixtures: list[tuple[float, float]] = get_tensor(client.state, "mixtures").tolist()
        maps = [mixing_map(height, width, int(patches), alpha, generator) for alpha, patches in mixtures]
        order = torch.rand(_MIXTURES, client.training.batch_size, generator=generator)
        return {"maps": torch.stack(maps), "order": order}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        """L_w + L_m."""
        own = model.own
        other = model.auxiliary_model
        z = own.represent(batch.x)
        z_m = other.represent(batch.x)
        scores = own.head(z)
        scores_m = other.head(z_m)
        loss = cross_entropy(scores, batch.y, batch.w) + cross_entropy(scores_m, batch.y, batch.w)
        if self.mutual:
            kl = _divergence(scores, scores_m, batch.w) + _divergence(scores_m, scores, batch.w)
            loss = loss + self.mutual * (kl + _apart(z, z_m, batch.w))
        if "maps" in context:
            loss = loss + self.mixed * self.loss_on_mixed(own, other, batch, context)
        return loss

    def loss_on_mixed(self, own: Any, other: Any, batch: Batch, context: Context) -> Tensor:
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

    # which mixtures ------------------------------------------------------------------------------------------
    def _mixtures(self, client: Client) -> Tensor:
        """Alpha and number of patches of each mixture, (3, 2)."""
        if client.round % SEARCH_EVERY == 0:
            return self._search(client)
        if "mixtures" in client.state:
            return get_tensor(client.state, "mixtures")
        return torch.tensor([FIRST] * _MIXTURES, dtype=torch.float64)

    def _search(self, client: Client) -> Tensor:
        """Those of the candidates on which the client's networks differ most: in H, by KL(m || w), by KL(w || m)."""
        draws = client.generator("mixtures")
        found = torch.stack([self._gaps(client, alpha, patches, draws) for alpha, patches in CANDIDATES])
        return torch.tensor(CANDIDATES, dtype=torch.float64)[found.argmax(dim=0)]

    def _gaps(self, client: Client, alpha: float, patches: int, draws: torch.Generator) -> Tensor:
        """How far the networks differ on training images mixed so, (3,), on the CPU."""
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


def _divergence(scores: Tensor, teacher: Tensor, w: Tensor) -> Tensor:
    return TEMPERATURE**2 * kl_divergence(scores / TEMPERATURE, teacher / TEMPERATURE, w)


def _apart(z: Tensor, z_m: Tensor, w: Tensor) -> Tensor:
    """MSE(H_w, H_m) for w, and MSE(H_m, H_w) for m."""
    return mse_loss(z, z_m, w) + mse_loss(z_m, z, w)


def _without_gradient(network: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = network(x)
    return scores
