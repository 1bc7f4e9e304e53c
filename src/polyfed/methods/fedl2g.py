"""FedL2G: guiding vectors that learn to help the clients' own tasks (Zhang et al., 2024, arXiv:2410.06490).

g_c in R^q is the guiding vector of class c, o(x) what is guided: the logits (q = C) or the representation (q = D).
A client's training rows are a fixed small quiz and, the rest, the study set.
Client k:  E epochs of SGD over the study set on CE(f(x; w), y) + weight * mean over q of (o(x) - g_y)^2, not in the
           first `warmup` rounds, in which nobody trains;  then, in all rounds, the meta step with one study batch:
           w' = w - lr grad_w of that loss;  sends grad_g CE(f(x; w'), y) on the quiz, rows of classes in the batch.
Server:    g <- g - eta_s * (per class the mean of the rows that came; 0 where none did), g ~ N(0, 1) at first.
Sent per round, S classes in the study batch: down 4 C q bytes; up 4 S q + 4 S (labels, int32).
Deviations from the paper: (1) `warmup` is 1; the paper's is 50, with which runs of fewer rounds could not begin, and
short ones would hardly train. (2) The meta step is taken in train mode as to BatchNorm, whose running statistics stay
as they are, and without dropout. (3) The quiz has half of a client's samples at most; who has one sends nothing.
From the authors' code: the step sizes eta_s, and the server's gradient clipped at norm 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, tensor
from polyfed.core.method import Batch, Context, Exchange, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import split
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional.class_targets import merge
from polyfed.functional.clipping import clipped
from polyfed.functional.guiding_vectors import guided_loss, meta_gradient
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import evaluating, has_batchnorm, untracked_statistics
from polyfed.methods.building_blocks import prototypes

_SERVER_LR = {"logits": 0.1, "representation": 100.0}
_CLIP = 100.0  # largest norm of the server's gradient


@hyperparameters
class FedL2G(Method):
    """One vector per class that local training is drawn to, trained by how much that helps on held-back samples."""

    name: ClassVar[str] = "fedl2g"
    paper: ClassVar[str] = "Zhang et al., 2024"
    differs: ClassVar[str] = "anything (representation: anything before equally many features)"
    down: ClassVar[str] = "C q, q = C or D"
    up: ClassVar[str] = "S q + S"
    form: ClassVar[upload_forms.Form | None] = {
        "labels": upload_forms.LABELS,
        "gradients": upload_forms.rows_of(upload_forms.width_of("guides")),
    }
    states: ClassVar[str] = "server: g"

    guide: Literal["logits", "representation"] = "logits"  # what is drawn to g
    weight: Annotated[float, Field(ge=0)] = 1.0  # of the squared distance to g; 0 is Local, no sample is held back
    warmup: Annotated[int, Field(ge=0)] = 1  # first rounds, in which g learns and no client trains; 0 is off
    server_lr: Annotated[float, Field(ge=0)] | None = None  # eta_s; None: 0.1 for logits, 100 for the representation

    @property
    def requirements(self) -> Requirements:
        if not self.weight:
            return Requirements()
        features = self.guide == "representation"
        instead = "fd, which takes first derivatives alone"
        if features:
            instead = f"models.feature_dim, which adds a projection, method.guide = 'logits', or {instead}"
        return Requirements(
            split_model=features,
            same_feature_dim=features,
            twice_differentiable=True,
            warmup=self.warmup,
            hint=f"use {instead}",
        )

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(trains=not self.weight or round > self.warmup),)

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        if not self.weight:
            return
        entries = server.classes
        if self.guide == "representation":
            entries = split(server.model(server.architectures[0], {})).feature_dim
        server.state["guides"] = torch.randn(server.classes, entries, generator=server.generator("guides"))

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"guides": tensor(server.state, "guides")} if self.weight else {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.gather(uploads, "gradients")
        if sent is None:
            return
        labels, rows = merge(sent.rows, sent.labels, sent.counts)
        guides = tensor(server.state, "guides")
        gradient = torch.zeros_like(guides)
        gradient[labels.long()] = rows
        server.log["guide_gradient"] = float(gradient.norm())
        step = _SERVER_LR[self.guide] if self.server_lr is None else self.server_lr
        clipped_gradient = clipped({"g": gradient}, _CLIP)["g"]
        assert clipped_gradient is not None
        server.state["guides"] = guides - step * clipped_gradient

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        order = torch.randperm(client.n, generator=generator(client.seed, "quiz", client.id))
        size = min(client.training.batch_size, client.n // 2) if "guides" in message else 0
        context = {"quiz": order[:size].sort().values, "study": order[size:].sort().values}
        if "guides" in message:
            like = next(client.model.parameters())
            context["guides"] = tensor(message, "guides").to(like, copy=True)
        return context

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(training.local_epochs, rows="study"),)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        if "guides" not in context:
            return cross_entropy(model(batch.x), batch.y, batch.w)
        scores, found = self.outputs(model, batch.x, context["guides"].shape[1])
        return guided_loss(scores, found, batch.y, batch.w, context["guides"], self.weight)

    def outputs(self, model: Any, x: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Scores, and what is guided, (N, q)."""
        if self.guide == "logits":
            scores: Tensor = model(x)
            return scores, scores[:, :entries]
        z = model.represent(x)
        return model.head(z), z

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if "guides" not in client.context:
            return {}
        guides = client.context["guides"]
        quiz = client.context["quiz"]
        study = client.context["study"]
        order = torch.randperm(len(study), generator=client.generator("meta"))
        study = study[order[: client.training.batch_size]]
        least = 2 if has_batchnorm(client.model) else 1  # which takes no single row
        if min(len(quiz), len(study)) < least:
            return {}
        train = client.data.train

        def part(rows: Tensor) -> tuple[Tensor, Tensor]:
            return client.prepare(train.x[rows].to(guides.device)), train.y[rows].to(guides.device)

        whole = _Guided(self, client.model, guides.shape[1])
        with evaluating(whole), untracked_statistics(whole):
            gradient = meta_gradient(whole, guides, part(study), part(quiz), client.lr, self.weight)
        labels = train.y[study].unique()
        return {"labels": labels.int(), "gradients": gradient[labels.to(gradient.device)]}


class _Guided(nn.Module):
    """A network that gives scores and what is guided."""

    def __init__(self, method: FedL2G, model: nn.Module, entries: int) -> None:
        super().__init__()
        self.method = method
        self.model = model
        self.entries = entries

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.method.outputs(self.model, x, self.entries)
