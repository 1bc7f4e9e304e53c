"""FedIN: training on each other's intermediate features (Chan et al., 2023, arXiv:2304.00759).

Every network is extractor, intermediate layers, classifier; what enters (s_in) and leaves (s_out) the intermediate
part is shaped alike everywhere. Beside weights, clients exchange a few such pairs (n_S; the paper: one batch, B), which
they make after training, in eval mode (`sample_pairs`). FedIN+Noise adds level std(s) e to both, e normal: by default
in these pairs and in each training pass.
Client k:  w <- received; in every step (`gradients`)
    eq. 3     l_local = CE + (mu/2) ||w - w^{t-1}||^2 on the batch gives G_local, for all tensors           `add_pull`
    eq. 7     l_IN = mean (f(s_in; w_in) - s_out)^2 on B of others' pairs gives G_IN, intermediate tensors  `loss_in`
    extractor and classifier move along G_local; each intermediate tensor, with a = <G_local, G_local> and
    b = <G_local, G_IN>, moves along                                                                        `direction`
    eq. 13    Z,            Z = G_IN + (lambda/2) G_local          ("simple": the paper's experiments, lambda = 1)
    eq. 12    G_local + Z,  Z = G_IN + max(0, -b/a) G_local        ("project", see 1)
    w/o Opt   G_local + G_IN                                       ("none")
Server:    averages weights layer-wise (eq. 19: equal weights) or within an architecture (eq. 21: by samples)  `average`
           keeps this round's pairs, of which each client draws n_S of others           `store`, `draw_pairs`
Pairs, their noise and common shapes are `building_blocks.feature_pairs`, the means of weights
`building_blocks.weight_averaging`. P is the numbers of w, q those of a pair.
Sent: down P + n_S q; up P + n_S q. Kept: server: w, this round's pairs.
Deviations from the paper: (1) Eq. 12 alone, Z, would never train the intermediate layers on private data where the two
gradients agree; `"project"` adds G_local to it. (2) Both gradients are taken at the same point, in one step. (3) The
samples to send and the pairs to return are drawn at random; the paper does not specify them. (4) BatchNorm normalizes
others' pairs by batch statistics and keeps its running ones, with which pairs are made. A single pair is skipped. (5)
`level std(s)` is the noise's standard deviation, as in the paper's main text; its appendix has `N(0, 0.8 sigma^2)`. (6)
If there are more pairs than a batch has rows (the paper's figure 6d), steps cycle through them in random order. (7)
Projections are the paper's future work, described only as linear. Ours are fixed and orthogonal, and depend on the
width instead of the client. (8) `feature_clip` bounds what is sent; the paper's features have no bound. (9) w^{t-1} in
eq. 3 is "the weights of client k" one round before. It is read as the received weights, as in FedProx. (10) Gradients
are combined tensor by tensor, with an a and a b for each. (11) BatchNorm's running statistics are sent and averaged
with the weights, where the paper's section 4.3 does without. Its batch counter stays with the client.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, members
from polyfed.core.method import (
    Batch,
    Context,
    Exposed,
    Method,
    Requirements,
    StepResult,
    TrainingResult,
    follows_device,
    hyperparameters,
)
from polyfed.core.modules import copy_parameters, float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional.centering import widened
from polyfed.functional.feature_pooling import from_common
from polyfed.functional.losses import task_loss
from polyfed.functional.modes import frozen_running_stats
from polyfed.methods.building_blocks import feature_pairs, weight_averaging
from polyfed.methods.building_blocks.proximal import add_pull


@hyperparameters
class FedIN(Method):
    """Intermediate layers that learn from other clients' features."""

    # a client's step ---------------------------------------------------------------------------------------
    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        local = super().gradients(model, batch, context)  # of `loss`
        if self.mu:
            local = add_pull(local, model, context["received"], self.mu)  # eq. 3
        g_local = {n: g for n, g in local.grads.items() if g is not None and model.part_of(n) == "intermediate"}
        if "s_in" not in context or not g_local:
            return local
        w_in = {name: p for name, p in model.named_parameters() if name in g_local}
        with frozen_running_stats(model):
            loss_in = self.loss_in(model, context)
        g_in = dict(zip(w_in, torch.autograd.grad(loss_in, list(w_in.values())), strict=True))
        along = {name: self.direction(g_local[name], g_in[name]) for name in g_local}
        sums = {"loss_in": loss_in.detach(), "cosine": cosine(g_local, g_in), "in_steps": torch.ones_like(local.loss)}
        return StepResult({**local.grads, **along}, local.loss, {**local.sums, **sums})

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        """CE on the batch (eq. 4 to 6); FedIN+Noise adds noise to what enters and leaves the intermediate part."""
        s_in = feature_pairs.add_drawn_noise(model.extract(batch.x), self.noise_level, "z_in", context)
        s_out = feature_pairs.add_drawn_noise(model.transform(s_in), self.noise_level, "z_out", context)
        return task_loss(model.head(s_out), batch.y, batch.w)

    def loss_in(self, model: Any, context: Context) -> Tensor:
        """l_IN (eq. 7) on a context's pairs; of projected ones mean (P_out f(P_in' s_in; w_in) - s_out)^2."""
        s_in, s_out = context["s_in"], context["s_out"]
        if self.common is None:
            found = model.transform(s_in)
        else:
            own_s_in = from_common(s_in, context["p_in"], context["cut"].shape[1:])
            found = model.transform(own_s_in) @ context["p_out"].T
        loss: Tensor = (found - s_out).square().mean()
        return loss

    def direction(self, g_local: Tensor, g_in: Tensor) -> Tensor:
        """What moves an intermediate tensor, of its two gradients; in the dtype of `g_in`.

        No branch looks at a tensor's value. Where a = 0, b/a counts as 0.
        """
        local, inner = widened(g_local), widened(g_in)
        if self.combine == "simple":
            along = torch.add(inner, local, alpha=0.5)  # Z of eq. 13, lambda = 1
        elif self.combine == "project":
            along = inner + (minus_b_over_a(local, inner).clamp(min=0) + 1.0) * local  # G_local + Z of eq. 12
        else:
            along = inner + local
        return along.to(g_in.dtype)

    # settings ----------------------------------------------------------------------------------------------
    # averages each tensor over all clients that have it; "same-shape": within each architecture
    aggregation: weight_averaging.Aggregation = "layer-wise"
    # equal weights layer-wise, by samples same-shape; or "samples" or "uniform" for both
    weighting: Literal["paper", "samples", "uniform"] = "paper"
    mu: Annotated[float, Field(ge=0)] = 0.1  # weight of the proximal term (paper: mu/2 = 0.05); 0: off
    # how the gradients of intermediate layers are combined: eq. 13; "project": G_local + eq. 12; "none": their sum
    combine: Annotated[Literal["simple", "project", "none"], feature_pairs.WITH_PAIRS] = "simple"
    exchange_features: bool = True  # exchange pairs and train on them; false: FedProx, with mu = 0 FedAvg
    noise_level: Annotated[float, Field(ge=0)] = 0.0  # noise over std(s); FedIN+Noise has 0.8; 0: off
    noise_where: feature_pairs.Where = "both"  # "message": on pairs sent; "forward": in the training pass; or both
    # bound on the L2 norm of each row sent; noise on pairs is then noise_level times this bound; 0: off
    feature_clip: Annotated[float, Field(ge=0), feature_pairs.WITH_PAIRS] = 0.0
    # n_S, pairs that a client sends and receives; not set: the batch size
    num_pairs: Annotated[Annotated[int, Field(ge=1)] | None, feature_pairs.WITH_PAIRS] = None
    # "fixed": send pairs in one common shape, for any cuts
    projection: Annotated[feature_pairs.Projection, feature_pairs.WITH_PAIRS] = "none"
    projection_channels: feature_pairs.Size = 64  # C, channels of the common shape
    projection_grid: feature_pairs.Size = 8  # g, positions per side
    projection_features: feature_pairs.Size = 512  # F, numbers that s_out becomes

    @property
    def common(self) -> feature_pairs.CommonSpace | None:
        """The common shape of pairs; None without projections."""
        if self.projection == "none":
            return None
        return feature_pairs.CommonSpace(
            channels=self.projection_channels,
            grid=self.projection_grid,
            features=self.projection_features,
        )

    @property
    def _training_level(self) -> float:
        """Noise level in training passes."""
        return 0.0 if self.noise_where == "message" else self.noise_level

    @property
    def _message_level(self) -> float:
        """Noise level on uploaded pairs."""
        return self.noise_level if self.exchange_features and self.noise_where != "forward" else 0.0

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "model"))
        context: dict[str, Any] = {}
        if self.mu:
            context["received"] = copy_parameters(client.model)
        pairs = feature_pairs.receive(client.model, message)
        if pairs:
            context["pairs"] = pairs
            if self.common is not None:
                context |= self.common.matrices(client)
        if self._training_level:
            context["cuts"] = feature_pairs.cut_shapes(client)
        return context

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        size = client.training.batch_size
        inputs = feature_pairs.draw_noise(client.context.get("cuts", {}), size, generator)
        if "pairs" in client.context:
            inputs |= feature_pairs.minibatch(client.context["pairs"], step, size)
        return inputs

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message: dict[str, Tensor | Group] = {"model": float_state(client.model)}
        if not self.exchange_features:
            return message
        count = self.num_pairs or client.training.batch_size
        draws = client.generator("features")
        pairs = feature_pairs.sample_pairs(client, count, self._message_level, draws, self.feature_clip)
        message["features"] = pairs if self.common is None else self.common.project(pairs, self.common.matrices(client))
        return message

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = weight_averaging.broadcast(server, self.aggregation, client_id)
        count = self.num_pairs or server.training.batch_size
        draws = server.generator("pool", client_id)
        pairs = feature_pairs.draw_pairs(members(server.state, "pool"), client_id, count, draws)
        return {**message, "features": pairs} if pairs else message

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        weighting = self.weighting
        if weighting == "paper":
            weighting = "samples" if self.aggregation == "same-shape" else "uniform"
        shares = {i: server.share(i, weighting) for i in uploads}  # eq. 19 or 21
        weight_averaging.average(server, self.aggregation, weight_averaging.client_weights(uploads), shares)
        feature_pairs.store(server, uploads)

    def privacy_releases(self, training: Training, rows: int) -> feature_pairs.Releases:
        count = self.num_pairs or training.batch_size
        return feature_pairs.releases(self.feature_clip, self._message_level, count, rows)

    # declared -------------------------------------------------------------------------------------------------
    evaluation_stage = "received"
    upload_form = feature_pairs.FORM
    delta_entries = ("model",)
    trains_alone = "it takes the gradient of a second loss"

    @property
    def requirements(self) -> Requirements:
        is_projected = self.exchange_features and self.common is not None
        return weight_averaging.requirements(
            self.aggregation,
            split_model=True,
            hint="use method.aggregation = 'same-shape', with method.projection = 'fixed' if cuts differ, or fedhenn",
            same_cut_shapes=self.exchange_features and not is_projected,
            gridlike_cuts=is_projected,
        )

    @property
    def supports_dp_sgd(self) -> bool:
        return not self.mu and not self._training_level

    @property
    def entries_of_rows(self) -> Sequence[str]:
        return ("features",) if self.exchange_features else ()

    @property
    def exposed(self) -> Exposed | None:
        if not self.exchange_features:
            return None
        plain = dataclasses.replace(self, noise_level=0.0, noise_where="both") if self._message_level else None
        return Exposed("features", "features", functools.partial(feature_pairs.features_of, self.common), plain)


def minus_b_over_a(g_local: Tensor, g_in: Tensor) -> Tensor:
    """-b/a, 0 where a is; G_local is first divided by its largest entry, so that a stays in range."""
    unit, largest = _scaled(g_local.reshape(-1))
    a = unit @ unit
    b = unit @ g_in.reshape(-1)
    one = torch.ones_like(a)
    return torch.where(a > 0, -b / torch.where(a > 0, a, one) / torch.where(a > 0, largest, one), torch.zeros_like(b))


def cosine(g_local: Mapping[str, Tensor], g_in: Mapping[str, Tensor]) -> Tensor:
    """Cosine of the angle between the gradients, all tensors taken as one vector (0-d); 0 where one of them is 0."""
    left, _ = _scaled(torch.cat([widened(g).reshape(-1) for g in g_local.values()]))
    right, _ = _scaled(torch.cat([widened(g_in[name]).reshape(-1) for name in g_local]))
    aa = left @ left
    bb = right @ right
    ab = left @ right
    defined = (aa > 0) & (bb > 0)
    return torch.where(defined, ab / torch.where(defined, aa * bb, torch.ones_like(aa)).sqrt(), torch.zeros_like(ab))


def _scaled(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The vector over its largest entry, and this."""
    low, high = flat.aminmax()  # one pass without a copy, as abs().amax() is not
    largest = torch.maximum(-low, high)
    return flat / torch.where(largest > 0, largest, torch.ones_like(largest)), largest
