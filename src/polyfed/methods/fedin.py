"""FedIN: training on each other's intermediate features (Chan et al., 2023, arXiv:2304.00759).

A network is extractor, intermediate layers, classifier, with weights w_e, w_in, w_c; a pair is what enters (s_in) and
leaves (s_out) the intermediate layers for one sample. Clients exchange weights, and a few pairs made after training.
Client k:  w <- received, w^{t-1};  in every step, on a batch of its own and one of others' pairs:
    eq. 3     l_local = CE(f(x; w), y) + (mu/2) ||w - w^{t-1}||^2  gives G_local, of all tensors `gradients`, `add_pull`
    eq. 4-6   f(x; w) = f(s_out; w_c),  s_out = f(s_in; w_in),  s_in = f(x; w_e)                  `loss`
              FedIN+Noise: s_in and s_out plus level std(s) z, z normal; so are pairs             `with_noise` (5, 8)
    eq. 7     l_IN = mean (f(s_in; w_in) - s_out)^2                gives G_IN, of w_in            `loss_in` (see 7)
    w_e and w_c move along G_local; w_in tensor by tensor                                         `direction` (see 10)
    eq. 13    "simple": along Z = G_IN + (lambda/2) G_local,  lambda = 1, as in the paper's experiments
    eq. 12    "project": along G_local + Z,  Z = G_IN + max(0, -b/a) G_local  (see 1),
              a = <G_local, G_local>,  b = <G_local, G_IN>                                        `minus_b_over_a`
    w/o Opt   "none": along G_local + G_IN
Server: averages weights                                                                          `aggregate`
    eq. 19    layer-wise, with equal weights ("layer-wise"), or
    eq. 21    within an architecture, by samples ("same-shape")
Scored:    f(x; w) with the weights received
`tests/methods/test_fedin.py` holds steps, also on projected pairs, and the noise against NumPy. The exchange of pairs
is `building_blocks.feature_pairs`, layer-wise means are `building_blocks.weight_averaging`; each has its test. n_S is
the number of pairs exchanged (the paper: one batch), P the numbers of w, q those of a pair.
Sent: down P + n_S q; up P + n_S q. Kept: server: w, this round's pairs.
Deviations from the paper: (1) Eq. 12 alone, Z, would never train the intermediate layers on private data where the two
gradients agree; `"project"` adds G_local to it. (2) Both gradients are taken at the same point, in one step. (3) The
samples to send and the pairs to return are drawn at random; the paper does not specify them. (4) BatchNorm normalizes
others' pairs by batch statistics and keeps its running ones, with which pairs are made. A single pair is skipped. (5)
`level std(s)` is the noise's standard deviation, as in the paper's main text; its appendix has `N(0, 0.8 sigma^2)`. (6)
If there are more pairs than a batch has rows (the paper's figure 6d), steps cycle through them in random order. (7)
Projections are the paper's future work, described only as linear. Ours are fixed and orthogonal, and depend on the
width instead of the client. (8) `feature_clip` bounds what is sent, and stands for std(s) in the noise on it; the
paper's features have no bound. (9) w^{t-1} in eq. 3 is "the weights of client k" one round before. It is read as the
received weights, as in FedProx. (10) Gradients are combined tensor by tensor, with an a and a b for each. (11)
BatchNorm's running statistics are sent and averaged with the weights, where the paper's section 4.3 does without. Its
batch counter stays with the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import (
    Batch,
    Context,
    Requirements,
    StepResult,
    TrainingResult,
    follows_device,
    hyperparameters,
)
from polyfed.core.modules import copy_parameters, float_state, load_state
from polyfed.core.server import Server
from polyfed.functional.centering import widened
from polyfed.functional.losses import task_loss
from polyfed.functional.modes import frozen_running_stats
from polyfed.methods.building_blocks import feature_pairs, weight_averaging
from polyfed.methods.building_blocks.proximal import add_pull


@hyperparameters
class FedIN(feature_pairs.PairExchange):
    """Intermediate layers that learn from other clients' features."""

    mu: Annotated[float, Field(ge=0)] = 0.1  # weight of the proximal term (paper: mu/2 = 0.05); 0: off
    # how the gradients of intermediate layers are combined: eq. 13; "project": G_local + eq. 12; "none": their sum
    combine: Annotated[Literal["simple", "project", "none"], feature_pairs.WITH_PAIRS] = "simple"
    # averages each tensor over all clients that have it; "same-shape": within each architecture
    aggregation: weight_averaging.Aggregation = "layer-wise"
    # equal weights layer-wise, by samples same-shape; or "samples" or "uniform" for both
    weighting: Literal["paper", "samples", "uniform"] = "paper"

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
            l_in = self.loss_in(model, context)
        g_in = dict(zip(w_in, torch.autograd.grad(l_in, list(w_in.values())), strict=True))
        along = {name: self.direction(g_local[name], g_in[name]) for name in g_local}
        sums = {"loss_in": l_in.detach(), "cosine": cosine(g_local, g_in), "in_steps": torch.ones_like(local.loss)}
        return StepResult({**local.grads, **along}, local.loss, {**local.sums, **sums})

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        """CE of eq. 3, by eq. 4 to 6."""
        s_in = self.with_noise(model.extract(batch.x), "z_in", context)
        s_out = self.with_noise(model.transform(s_in), "z_out", context)
        return task_loss(model.head(s_out), batch.y, batch.w)

    def loss_in(self, model: Any, context: Context) -> Tensor:
        """l_IN of eq. 7, on a step's pairs."""
        found = self.transform(model, context["s_in"], context)  # f(s_in; w_in)
        loss: Tensor = (found - context["s_out"]).square().mean()
        return loss

    def direction(self, g_local: Tensor, g_in: Tensor) -> Tensor:
        """What moves a tensor of w_in, of its two gradients; in the dtype of `g_in`.

        No branch looks at a tensor's value. Where a = 0, b/a counts as 0.
        """
        local, inner = widened(g_local), widened(g_in)
        if self.combine == "simple":
            along = torch.add(inner, local, alpha=0.5)  # eq. 13, lambda = 1
        elif self.combine == "project":
            c = self.minus_b_over_a(local, inner).clamp(min=0)  # max(0, -b/a)
            along = inner + (c + 1.0) * local  # G_local + Z, Z of eq. 12
        else:
            along = inner + local
        return along.to(g_in.dtype)

    def minus_b_over_a(self, g_local: Tensor, g_in: Tensor) -> Tensor:
        """-b/a (0-d), 0 where a is; G_local is first divided by its largest entry, so that a stays in range."""
        unit, largest = _scaled(g_local.reshape(-1))
        a = unit @ unit
        b = unit @ g_in.reshape(-1)
        one = torch.ones_like(a)
        of_unit = -b / torch.where(a > 0, a, one)
        return torch.where(a > 0, of_unit / torch.where(a > 0, largest, one), torch.zeros_like(b))

    # server ------------------------------------------------------------------------------------------------
    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        weighting = self.weighting
        if weighting == "paper":
            weighting = "samples" if self.aggregation == "same-shape" else "uniform"  # eq. 21, eq. 19
        shares = {i: server.share(i, weighting) for i in uploads}
        weight_averaging.average(server, self.aggregation, weight_averaging.client_weights(uploads), shares)
        feature_pairs.store(server, uploads)

    # Nothing below changes an equation: messages, what is declared.
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        weights = weight_averaging.broadcast(server, self.aggregation, client_id)
        return {**weights, **self.pairs_of_others(server, client_id)}

    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "model"))
        received = {"received": copy_parameters(client.model)} if self.mu else {}
        return {**received, **self.receive_pairs(client, message)}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"model": float_state(client.model), **self.own_pairs(client)}

    evaluation_stage = "received"
    upload_form = feature_pairs.FORM
    delta_entries = ("model",)
    trains_alone = "it takes the gradient of a second loss"

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.requirements(
            self.aggregation,
            split_model=True,
            hint="use method.aggregation = 'same-shape', with method.projection = 'fixed' if cuts differ, or fedhenn",
            same_cut_shapes=self.exchange_features and not self.is_projected,
            gridlike_cuts=self.is_projected,
        )

    @property
    def supports_dp_sgd(self) -> bool:
        return not self.mu and not self.training_level


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
