"""FedGen: clients learn from features that a server-trained generator makes (Zhu, Hong and Zhou, ICML 2021).

G(z, y) makes what enters the head h from noise z and a class y; f is the whole network, of D features and C classes.
Client k:  w <- received;  E local epochs of SGD on  CE(f(x; w), y)
               + a_t CE(h(G(z', y')), y') + b_t KL(softmax h(G(z, y)) || softmax f(x)),
           y' drawn as often as the clients have it, as many as rows; a_t, b_t = (alpha, beta) * decay^(t - 1), at
           least 1e-4.
Server:    w <- sum_k p_k w_k;  G by Adam on  sum_k omega_ky CE(h_k(G(z, y)), y) + diversity * L_div, omega_ky = n_ky /
           sum_j n_jy, heads h_k as received, L_div = exp(-mean over pairs |z_a - z_b|^2 |G_a - G_b|).
Sent per round, P floats of weights and buffers, G's P_G: down 4 P, from round 2 on 4 (P + P_G + C); up 4 (P + C), the
counts n_ky (int32); P_G = (Z + C + 5) H + (H + 1) D with Z numbers of noise and H hidden units.
Deviations from the paper (arXiv:2105.10056): (1) the KL term and the decay are the authors' code's, where alpha and
beta are 10 on MNIST; the paper has the first term alone, of weight 1. So is the sum of the clients' losses; the paper
has the loss of their mean logits. (2) Noise is normal, in that code uniform. (3) Classes are drawn as often
as those who answered last have them, so counts go down, too; in that code all alike. A class with one sample in all is
not made. (4) Nothing is made in round 1, when G is untrained. (5) Architectures may differ: weights are averaged
layer-wise, or within each architecture, while G is of them all. (6) On clients G uses its running statistics; its
training is float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, group, tensor
from polyfed.core.method import Batch, Context, Needs, Trained, knobs
from polyfed.core.modules import split
from polyfed.core.server import Server
from polyfed.functional.losses import cross_entropy, divergence
from polyfed.functional.modes import untracked_statistics
from polyfed.methods.building_blocks import feature_generator, weight_averaging
from polyfed.methods.fedavg import FedAvg

_GENERATOR_LR_DECAY = 0.98  # per round


@knobs
class FedGen(FedAvg):
    """Averaging of weights, and features of all classes from a generator trained on the clients' heads."""

    name: ClassVar[str] = "fedgen"
    paper: ClassVar[str] = "Zhu et al., ICML 2021"
    differs: ClassVar[str] = "depth, one feature width (same-shape: anything before the head)"
    down: ClassVar[str] = "P + P_G + C"
    up: ClassVar[str] = "P + C"
    form: ClassVar[upload_forms.Form | None] = {"model": upload_forms.as_sent, "counts": upload_forms.BY_CLASS}
    states: ClassVar[str] = "server: w, G and its Adam, class counts"
    starts_blank: ClassVar[bool] = True

    alpha: Annotated[float, Field(ge=0)] = 1.0  # weight of the loss on features made for drawn classes; 0 is off
    beta: Annotated[float, Field(ge=0)] = 1.0  # weight of the KL towards features of the batch's classes; 0 is off
    decay: Annotated[float, Field(gt=0, le=1)] = 0.98  # of both weights, per round; 1 is off
    noise: Annotated[int, Field(ge=1)] = 32  # Z, numbers of noise that G takes
    hidden: Annotated[int, Field(ge=1)] = 256  # H, hidden units of G
    generator_steps: Annotated[int, Field(ge=1)] = 50  # steps of Adam per round
    generator_batch: Annotated[int, Field(ge=2)] = 128  # features made in each
    generator_lr: Annotated[float, Field(gt=0)] = 3e-4  # its learning rate in round 1
    diversity: Annotated[float, Field(ge=0)] = 1.0  # weight of L_div; 0 is off
    aggregation: weight_averaging.OfOneFamily = "layer-wise"  # or "same-shape": within each architecture

    @property
    def needs(self) -> Needs:
        nested = self.aggregation != "same-shape"
        instead = "use method.aggregation = 'same-shape'"
        return Needs(split_model=True, one_feature_dim=True, nested=nested, instead=instead)

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        super().start(server)
        features = split(server.model(server.architectures[0], {})).feature_dim
        draws = server.generator("generator")
        server.state["generator"] = feature_generator.fresh(self.noise, server.classes, self.hidden, features, draws)

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = super().broadcast(server, client_id)
        if "counts" not in server.state:  # nobody has trained the generator yet
            return message
        return {**message, "generator": server.state["generator"], "counts": server.state["counts"]}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        counts = {i: tensor(message, "counts") for i, message in uploads.items()}
        super().aggregate(server, {i: {**message, "n": counts[i].sum()} for i, message in uploads.items()})
        if uploads and (self.alpha or self.beta):
            self._train_generator(server, uploads, torch.stack([counts[i].long() for i in uploads]))

    def _train_generator(self, server: Server, uploads: Mapping[int, Message], counts_SC: Tensor) -> None:
        known = feature_generator.known_classes(counts_SC)
        if not known.any():
            return
        heads = []
        for i, message in uploads.items():
            model = server.model(server.clients[i].architecture, group(message, "model"))
            heads.append(feature_generator.frozen_head(model))
        how = feature_generator.Fitting(
            steps=self.generator_steps,
            batch=self.generator_batch,
            lr=self.generator_lr * _GENERATOR_LR_DECAY ** (server.round - 1),
            diversity=self.diversity,
        )
        generator = group(server.state, "generator")
        moments = group(server.state, "moments") if "moments" in server.state else {}
        draws = server.generator("features")
        generator, moments, loss = feature_generator.fit(generator, moments, heads, counts_SC, how, draws)
        server.log["generator_loss"] = loss
        server.state |= {"generator": dict(generator), "moments": dict(moments), "counts": known.int()}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        if "generator" not in message:
            return {}
        like = next(client.model.parameters())
        generator = {name: t.to(like, copy=True) for name, t in group(message, "generator").items()}
        a = feature_generator.decayed(self.alpha, self.decay, client.round)
        b = feature_generator.decayed(self.beta, self.decay, client.round)
        return {"generator": generator, "counts": tensor(message, "counts").clone(), "weights": like.new_tensor([a, b])}

    def inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if "generator" not in client.context:
            return {}
        device = client.context["weights"].device
        rows = client.training.batch_size
        y = torch.multinomial(client.context["counts"].double(), rows, replacement=True, generator=generator)
        z_y = torch.randn(rows, self.noise, generator=generator)
        z = torch.randn(rows, self.noise, generator=generator)
        return {"y": y.to(device), "z_y": z_y.to(device), "z": z.to(device)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        scores = model(batch.x)
        task = cross_entropy(scores, batch.y, batch.w)
        if "generator" not in context:
            return task
        a, b = context["weights"]
        drawn = feature_generator.generate(context["generator"], context["z_y"], context["y"])
        made = feature_generator.generate(context["generator"], context["z"][: len(batch.y)], batch.y)
        with untracked_statistics(model.head):
            of_drawn = model.head(drawn)
            teacher = model.head(made)
        invented = cross_entropy(of_drawn, context["y"], torch.ones_like(drawn[:, 0]))
        generated = a * invented + b * divergence(scores, teacher, batch.w)
        return task + generated, {"own_loss": task, "generated_loss": generated}

    def upload(self, client: Client, trained: Trained) -> Message:
        counts = torch.bincount(client.data.train.y, minlength=client.classes).int()
        return {"model": super().upload(client, trained)["model"], "counts": counts}

    def remark(self, record: Mapping[str, Any]) -> str:
        return feature_generator.outweighed(record["sums"])
