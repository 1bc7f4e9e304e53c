"""FedL2G: guiding vectors, meta-learned on held-back samples (Zhang et al., 2024, arXiv:2410.06490).

The output o(x) has q entries: the C logits (`guide = "logits"`) or the D features of the
representation. The vectors g start from N(0, 1). A client's quiz is one batch of its training
rows, at most half of them; the rest is its study set.
L(w, g) = CE(f(x; w), y) + guide_weight mean over the q entries of (o(x) - g_y)^2
client k:  E epochs of SGD over the study set on L(w, g)
           w' = w - lr grad_w L(w, g)  on one study batch;  w' is discarded
           sends  grad_g CE(f(x; w'), y)  on the quiz, the rows of the classes of that batch
server:    G_c = mean of the received rows of class c, or 0;  G clipped to norm 100
           g <- g - eta_s G
In the first `warmup_rounds` rounds clients do not train, and g is learned on the initial
networks.
Sent: down C q, q = C or D; up S q + S. Kept: server: g.
Deviations from the paper: (1) One warm-up round is the default, for short runs; the paper has 50. (2) The meta step
uses batch statistics in BatchNorm, without changing the running ones, and no dropout. (3) A client with a single
sample, or whose batches are too small for its BatchNorm, trains and sends nothing. (4) The server's mean counts rows
equally, as in the authors' code, from which its clipping and step sizes are taken. The code also clips the clients'
gradients at norm 100; here they are not clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, Exchange, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import as_split_model
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional.class_prototypes import merge
from polyfed.functional.clipping import clip_by_global_norm
from polyfed.functional.losses import cross_entropy, task_loss, weighted_mean
from polyfed.functional.modes import eval_mode, frozen_running_stats, has_batchnorm
from polyfed.functional.tied_tensors import call_with
from polyfed.methods.building_blocks import prototypes

_SERVER_LR = {"logits": 0.1, "representation": 100.0}
MAX_GRADIENT_NORM = 100.0  # largest norm of the server's gradient


@hyperparameters
class FedL2G(Method):
    """One guiding vector per class, meta-learned on held-back samples."""

    guide: Literal["logits", "representation"] = "logits"  # what is guided; representations must have one width
    # weight of the mean squared distance to g; 0: Local, without held-back samples and uploads
    guide_weight: Annotated[float, Field(ge=0)] = 1.0
    # first rounds, which train g and no networks; 0: none; the paper: 50
    warmup_rounds: Annotated[int, Field(ge=0)] = 1
    server_lr: Annotated[float, Field(ge=0)] | None = None  # eta_s; not set: 0.1 for logits, 100 for the representation

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(trains=not self.guide_weight or round > self.warmup_rounds),)

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        if not self.guide_weight:
            return
        entries = server.classes
        if self.guide == "representation":
            entries = as_split_model(server.model(server.architectures[0], {})).feature_dim
        server.state["guides"] = torch.randn(server.classes, entries, generator=server.generator("guides"))

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"guides": get_tensor(server.state, "guides")} if self.guide_weight else {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "gradients")
        if sent is None:
            return
        labels, rows = merge(sent.rows, sent.labels, sent.counts)
        guides = get_tensor(server.state, "guides")
        gradient = torch.zeros_like(guides)
        gradient[labels.long()] = rows
        server.log["guide_gradient"] = float(gradient.norm())
        step = _SERVER_LR[self.guide] if self.server_lr is None else self.server_lr
        clipped_gradient = clip_by_global_norm({"g": gradient}, MAX_GRADIENT_NORM)["g"]
        assert clipped_gradient is not None
        server.state["guides"] = guides - step * clipped_gradient

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "guides" not in message:
            return {"study": torch.arange(client.n)}
        dtype = next(client.model.parameters()).dtype
        return {"study": _split(client)[1], "guides": get_tensor(message, "guides").to(dtype, copy=True)}

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(training.local_epochs, rows="study"),)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        if "guides" not in context:
            return task_loss(model(batch.x), batch.y, batch.w)
        scores, found = self.outputs(model, batch.x, context["guides"].shape[1])
        return guided_loss(scores, found, batch.y, batch.w, context["guides"], self.guide_weight)

    def outputs(self, model: Any, x: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Scores, and the guided outputs (N, q)."""
        if self.guide == "logits":
            scores: Tensor = model(x)
            return scores, scores[:, :entries]
        z = model.represent(x)
        return model.head(z), z

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if "guides" not in client.context:
            return {}
        guides = client.context["guides"]
        quiz, study = _split(client)
        order = torch.randperm(len(study), generator=client.generator("meta"))
        study = study[order[: client.training.batch_size]]
        least = 2 if has_batchnorm(client.model) else 1  # BatchNorm takes no single row
        if min(len(quiz), len(study)) < least:
            return {}
        train = client.data.train
        x, y = train.at(guides.device)

        def part(rows: Tensor) -> tuple[Tensor, Tensor]:
            there = rows.to(x.device)
            return client.prepare(x[there].to(guides.device)), y[there].to(guides.device)

        whole = _Guided(self, client.model, guides.shape[1])
        with eval_mode(whole), frozen_running_stats(whole):
            gradient = meta_gradient(whole, guides, part(study), part(quiz), client.lr, self.guide_weight)
        labels = train.y[study].unique()
        return {"labels": labels.int(), "gradients": gradient[labels.to(gradient.device)]}

    # declared -------------------------------------------------------------------------------------------------
    upload_form = {"labels": upload_forms.LABELS, "gradients": upload_forms.rows_of(upload_forms.width_of("guides"))}

    @property
    def requirements(self) -> Requirements:
        if not self.guide_weight:
            return Requirements()
        features = self.guide == "representation"
        instead = "fd, which takes first derivatives alone"
        if features:
            instead = f"models.feature_dim, which adds a projection, method.guide = 'logits', or {instead}"
        return Requirements(
            split_model=features,
            same_feature_dim=features,
            twice_differentiable=True,
            classes="its guiding vectors belong to classes",
            warmup=self.warmup_rounds,
            hint=f"use {instead}",
        )


def _split(client: Client) -> tuple[Tensor, Tensor]:
    """The client's rows for the quiz, the same in every round, and those for study."""
    order = torch.randperm(client.n, generator=generator(client.seed, "quiz", client.id))
    size = min(client.training.batch_size, client.n // 2)
    return order[:size].sort().values, order[size:].sort().values


class _Guided(nn.Module):
    """A network that returns scores and the guided outputs."""

    def __init__(self, method: FedL2G, model: nn.Module, entries: int) -> None:
        super().__init__()
        self.method = method
        self.model = model
        self.entries = entries

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.method.outputs(self.model, x, self.entries)


def guided_loss(
    scores_NC: Tensor, found_NQ: Tensor, y_N: Tensor, w_N: Tensor, guides_CQ: Tensor, weight: float
) -> Tensor:
    """CE(scores, y) + weight * mean_q (found - guide of y)^2, both weighted means over the rows.

    Differentiable in the guides, too; row weights are those of `losses.cross_entropy`.

    N samples, C classes, Q entries of a guiding vector: as many as scores, or as features.
    """
    squared_N = (found_NQ - guides_CQ[y_N]).square().mean(dim=1)
    return cross_entropy(scores_NC, y_N, w_N) + weight * weighted_mean(squared_N, w_N)


def meta_gradient(
    module: nn.Module,
    guides_CQ: Tensor,
    study: tuple[Tensor, Tensor],
    quiz: tuple[Tensor, Tensor],
    lr: float,
    weight: float,
) -> Tensor:
    """Gradient in the guides g of CE on the quiz after one step of SGD on the study batch, which g has guided.

    w' = w - lr grad_w [CE + weight * distance to g] on the study batch;  then grad_g CE(w') on the quiz. Rows of
    classes that the study batch lacks are 0. By two derivatives, the second through the step.

    Args:
        module: gives (scores (N, C), what is guided (N, Q)), twice differentiable; its parameters are left alone.
        study, quiz: (x, y).
    """
    w = {name: p.detach().requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    g = guides_CQ.detach().requires_grad_()
    x, y = study
    scores, found = call_with(module, w, (x,))
    loss = guided_loss(scores, found, y, torch.ones_like(scores[:, 0]), g, weight)
    grads = torch.autograd.grad(loss, tuple(w.values()), create_graph=True, allow_unused=True)
    moved = {name: p if d is None else p - lr * d for (name, p), d in zip(w.items(), grads, strict=True)}
    x, y = quiz
    scores, _ = call_with(module, moved, (x,))
    missed = cross_entropy(scores, y, torch.ones_like(scores[:, 0]))
    (gradient,) = torch.autograd.grad(missed, g, materialize_grads=True)
    return gradient
