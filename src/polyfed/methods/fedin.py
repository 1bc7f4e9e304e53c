"""FedIN: training on each other's intermediate features (Chan et al., arXiv:2304.00759).

Every network is extractor, intermediate layers, classifier; what enters (s_in) and leaves (s_out) the intermediate
part is shaped alike everywhere. Beside weights, clients exchange a few such pairs (n_S; the paper: one batch, B).
Client k:  w <- received;  per step  l_local = CE + (mu/2) ||w - w^{t-1}||^2 (eq. 3)
           and  l_IN = mean (f(s_in; w_in) - s_out)^2 on B of others' pairs (eq. 7);
           the intermediate tensors move along combine(G_local, G_IN), the others along G_local.
Server:    averages weights layer-wise (eq. 19) or within an architecture (eq. 21); keeps this round's pairs.
Sent per round, P floats of weights and buffers, n_S pairs of q floats: up 4 (P + n_S q); down alike, from round 2 on.
Noise (eq. 5, 6): s + level * std(s) * z at both cuts, z standard normal.
Deviations from the paper: (1) eq. 12 alone would never train the intermediate layers on private data where the
gradients agree; "project" adds G_local to it, "literal" is the paper's; "adaptive" takes lambda = max(1, -2b/a) in
eq. 13. (2) Both gradients are taken at the same point, in one step. (3) Which batch is sent and which pairs come back
is not said: both are random, the latter from all others' (`pool = "one"`: one other's). (4) BatchNorm takes the pairs'
own statistics and keeps its running ones. (5) level * std(s) is the noise's standard deviation, not its variance.
(6) More than B pairs (figure 6d) are walked through B at a time, round and round, in the random order they came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import feature_pool, passes, proximal, shared_model
from polyfed.core.client import Client
from polyfed.core.message import Message, group
from polyfed.core.method import Batch, Context, Gradients, Method, Needs, Trained, knobs
from polyfed.core.networks import floats, load, split
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import has_batchnorm, untracked_statistics
from polyfed.functional.noise import add_noise
from polyfed.functional.surgery import combine, cosine


@knobs
class FedIN(Method):
    """Intermediate layers learning."""

    name: ClassVar[str] = "fedin"
    paper: ClassVar[str] = "Chan et al., arXiv:2304.00759"
    differs: ClassVar[str] = "depth between equal cuts: tensors of one name have one shape (same-shape: anything)"
    down, up, changes = "P + n_S q", "P + n_S q", ("model",)
    states: ClassVar[str] = "server: w, this round's pairs"

    aggregation: shared_model.Aggregation = "layer-wise"  # or "same-shape": within each architecture
    weighting: Literal["paper", "samples", "uniform"] = "paper"  # uniform layer-wise, by samples same-shape
    mu: Annotated[float, Field(ge=0)] = 0.1  # proximal weight (the paper gives mu/2 = 0.05); 0 is off
    combine: Literal["simple", "project", "literal", "adaptive", "none"] = "simple"  # "none" adds them
    lambda_: Annotated[float, Field(ge=0)] = 1.0  # of "simple": Z = G_IN + lambda/2 G_local (eq. 13)
    granularity: Literal["tensor", "block"] = "tensor"  # combine tensor by tensor, or all intermediate ones as one
    train_in: bool = True  # False: no pairs are exchanged, FedProx (with mu = 0 FedAvg)
    noise: Annotated[float, Field(ge=0)] = 0.0  # level; 0 draws nothing; the paper's FedIN+Noise is 0.8
    noise_where: Literal["both", "message", "forward"] = "both"  # in the training pass, in the pairs sent, or both
    pool: feature_pool.Mixing = "mix"  # pairs from all other clients, or from "one" of them
    pairs: Annotated[int, Field(ge=1)] | None = None  # n_S, each way; None: the batch size
    in_every: Annotated[int, Field(ge=1)] = 1  # steps from one pass over pairs to the next; 1: one in each step
    feature_dtype: Literal["float32", "float16"] = "float32"  # of the pairs on their way
    bn_buffers: Literal["aggregate", "local"] = "aggregate"  # "local": BatchNorm's statistics never leave a client

    @property
    def needs(self) -> Needs:
        layered, instead = self.aggregation == "layer-wise", "use method.aggregation = 'same-shape', or fedhenn"
        return Needs(split_model=True, equal_cuts=self.train_in, nested=layered, instead=instead)

    @property
    def scored(self) -> Stage:
        return "received" if self.bn_buffers == "aggregate" else "personal"

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        shared_model.start(server, self.aggregation, self.bn_buffers == "aggregate")

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = {"model": shared_model.read(server, self.aggregation, server.clients[client_id].architecture)}
        pool = group(server.state, "pool") if "pool" in server.state else {}
        count, draws = self.pairs or server.training.batch_size, server.generator("pool", client_id)
        features = feature_pool.draw(pool, client_id, count, self.pool, draws)
        return {**message, "features": features} if features else message

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        uniform = self.weighting == "uniform" or (self.weighting == "paper" and self.aggregation == "layer-wise")
        weights = {i: 1.0 if uniform else float(server.clients[i].n) for i in uploads}
        shared_model.average(server, self.aggregation, shared_model.uploaded(uploads), weights)
        server.state.pop("pool", None)
        if pool := feature_pool.gather(uploads):
            server.state["pool"] = pool

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load(model := split(client.model), group(message, "model"))
        context = proximal.reference(model, self.mu)
        features = group(message, "features") if "features" in message else {}
        if features and len(features["s_in"]) > has_batchnorm(model):  # BatchNorm takes no single row
            like = next(model.parameters())
            context["pairs"] = {name: t.to(like, copy=True) for name, t in features.items()}
        if self.noise and self.noise_where != "message":
            one = client.data.train.x[:1]
            context["cuts"] = [passes.apply(f, model, one, client.prepare) for f in (model.extract, model.represent)]
        return context

    def inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        size, cuts, pairs = client.training.batch_size, client.context.get("cuts", ()), client.context.get("pairs")
        noise = [torch.randn((size, *cut.shape[1:]), generator=generator).to(cut.device) for cut in cuts]
        given = dict(zip(("z_in", "z_out"), noise, strict=True)) if noise else {}
        visit, rest = divmod(step, self.in_every)
        return given if pairs is None or rest else {**given, **feature_pool.minibatch(pairs, visit, size)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        z, rows = model.extract(batch.x), len(batch.x)
        if "z_in" in context:
            z = add_noise(z, self.noise, context["z_in"][:rows])
        z = model.transform(z)
        if "z_out" in context:
            z = add_noise(z, self.noise, context["z_out"][:rows])
        return proximal.added(cross_entropy(model.head(z), batch.y, batch.w), model, context, self.mu)

    def gradients(self, model: Any, batch: Batch, context: Context) -> Gradients:
        local = super().gradients(model, batch, context)
        g_local = {n: g for n, g in local.grads.items() if g is not None and model.part_of(n) == "intermediate"}
        if "s_in" not in context or not g_local:
            return local
        inner = [p for n, p in model.named_parameters() if n in g_local]
        with untracked_statistics(model):
            loss_in = (model.transform(context["s_in"]) - context["s_out"]).square().mean()
        g_in = dict(zip(g_local, torch.autograd.grad(loss_in, inner), strict=True))
        mixed = combine(g_local, g_in, self.combine, self.lambda_, self.granularity)
        sums = {"loss_in": loss_in.detach(), "cosine": cosine(g_local, g_in), "in_steps": torch.ones_like(local.loss)}
        return Gradients({**local.grads, **mixed}, local.loss, sums)

    def upload(self, client: Client, trained: Trained) -> Message:
        model, draws = split(client.model), client.generator("features")
        weights = floats(model, buffers=self.bn_buffers == "aggregate")
        if not self.train_in:
            return {"model": weights}
        x = client.data.train.x[torch.randperm(client.n, generator=draws)[: self.pairs or client.training.batch_size]]
        s_in = self._noisy(passes.apply(model.extract, model, x, client.prepare).cpu(), draws)
        s_out = self._noisy(passes.apply(model.transform, model, s_in, lambda rows: rows).cpu(), draws)
        dtype = getattr(torch, self.feature_dtype)
        return {"model": weights, "features": {"s_in": s_in.to(dtype), "s_out": s_out.to(dtype)}}

    def _noisy(self, s: Tensor, draws: torch.Generator) -> Tensor:
        send = self.noise and self.noise_where != "forward"
        return add_noise(s, self.noise, torch.randn(s.shape, generator=draws)) if send else s
