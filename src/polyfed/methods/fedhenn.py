"""FedHeNN: representations aligned by their kernels (Makhija, Han, Ho and Ghosh, ICML 2022).

Everybody sees L unlabelled inputs (the RAD, X). A_k = Phi_k(X) is (L, d_k), K_k its kernel (A_k A_k^T), H centres.
Client k:  E epochs of SGD on CE(f(x; w_k), y) + eta(t) d(K_k, target),  d = 1 - CKA.
Heterogeneous (Algorithm 2): target K_bar = sum_j w_j K_j over the clients' latest weights; no weights are averaged.
Homogeneous (Algorithm 1):   target is the kernel of the weights received; these are averaged as in FedAvg.
Sent per round, P floats, a RAD of R bytes (L inputs, 4 L or 8), F (L, r) with F F^T ~ H K_bar H at b bytes a number:
    heterogeneous  down R + b L r,   up 4 P_k, or in kernel uploads b L d_k      homogeneous  down 4 P + R,  up 4 P + 8
Deviations from the paper: (1) `rad_batch` of the L rows enter a step. (2) K_k is formed in each step, or `rad_every`-th
with the term as much heavier; its boxes do so once per epoch. (3) K_bar travels as a factor, exact up to `exact_rank`
columns; RBF by Nystroem rows. (4) The RAD is rows held out for the server. (5) Its pass is in eval mode. (6) eta(t) is
the authors' code's; at 0 no RAD. (7) Algorithm 1's last average is off. (8) Procrustes is scale-free. See the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, group, tensor
from polyfed.core.method import Batch, Context, Exchange, Gradients, Method, Needs, Phase, Trained, knobs
from polyfed.core.modules import floats, load
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.functional.kernel_similarity import Similarity
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import alignment_dataset, mean_kernel, representation_alignment, weight_averaging


@knobs
class FedHeNN(Method):
    """Alignment of representations through centred kernel alignment on common unlabelled inputs."""

    name, paper, changes, form = "fedhenn", "Makhija et al., ICML 2022", ("model",), representation_alignment.FORM
    down, up, states = "L inputs + L r (homogeneous: P)", "P (kernels: L D)", "server: the RAD, latest w_k or A_k"

    setting: Literal["heterogeneous", "homogeneous"] = "heterogeneous"  # Algorithm 2, or 1: one architecture
    similarity: Similarity = "linear"  # kernel, or "procrustes" (homogeneous only, in its scale-free form)
    width: mean_kernel.Width = 0.5  # RBF: kernel width over the median distance
    landmarks: mean_kernel.Landmarks = 256  # RBF: Nystroem rows per client in the factor of K_bar
    eta0: Annotated[float, Field(ge=0)] = 0.001  # weight of the alignment; 0 is Local (homogeneous: FedAvg)
    eta_schedule: Literal["sqrt", "linear", "constant"] = "sqrt"  # eta0 times sqrt(t - 1), t - 1 or 1; rounds t from 1
    rad_size: Annotated[int, Field(ge=2)] = 5000  # L
    rad_source: alignment_dataset.Origin = "holdout"  # or another data set, the clients' training inputs, noise
    rad_transport: alignment_dataset.Transport = (
        "data"  # or where its rows stand in public data, or the seed of the draw
    )
    rad_refresh: Annotated[int, Field(ge=0)] = 1  # rounds until a new draw; 0: never
    rad_batch: Annotated[int, Field(ge=2)] = 256  # RAD rows per step; L or more: all of them
    rad_every: Annotated[int, Field(ge=1)] = 1  # the term enters every so many steps
    rad_chunk: Annotated[int, Field(ge=1)] = 256  # rows whose graph is kept at a time; memory, no other effect
    uploads: Literal["weights", "kernels"] = "weights"  # "kernels": A_k on a fixed RAD instead of weights
    kernel_pool: mean_kernel.Pool = "all"  # whose kernels; selected: who uploaded last; seen: who ever did
    kernel_weights: mean_kernel.Strength = "uniform"  # w_j by n_j, number of parameters or validation accuracy
    kernel_norm: mean_kernel.Norm = "none"  # "fro": K_j / ||H K_j H||_F, so that no network's scale dominates
    exclude_self: mean_kernel.Excludes = False  # leave K_k out of client k's K_bar
    control: mean_kernel.Control = "none"  # a target that should not help: "own" K_k, or K_bar with rows "permuted"
    rank: mean_kernel.Rank = 128  # columns of F, where the exact one would have more than `exact_rank`
    exact_rank: mean_kernel.ExactRank = 256  # up to so many columns K_bar is sent exactly
    precision: mean_kernel.Packed = "float32"  # of F, and of A_k in kernel uploads
    final_average: bool = False  # homogeneous: after the last round the mean of all clients' latest weights
    final_finetune_epochs: Annotated[int, Field(ge=0)] = 0  # all train so long after the last round, and keep it

    @model_validator(mode="after")
    def _fits(self) -> FedHeNN:
        self._alignment.check(self.final_average)
        return self

    @property
    def _alignment(self) -> representation_alignment.Alignment:
        return representation_alignment.Alignment.of(self, mean=self.setting == "heterogeneous")

    @property
    def needs(self) -> Needs:
        one, instead = self.setting == "homogeneous", "use method.setting = 'heterogeneous'"
        return Needs(split_model=True, one_architecture=one, instead=instead, **self._alignment.needs)

    @property
    def rigid(self) -> Mapping[str, str]:
        return self._alignment.rigid(self.final_average)

    @property
    def scored(self) -> Stage:
        return "personal" if self.setting == "heterogeneous" else "received"

    @property
    def accepts_late(self) -> bool:
        return self.setting == "heterogeneous"

    def eta(self, round: int) -> float:
        """Weight of the alignment in a round, counted from 1."""
        return self.eta0 * float((round - 1) ** {"constant": 0, "sqrt": 0.5, "linear": 1}[self.eta_schedule])

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (*self._alignment.exchanges(round), Exchange())

    def closing(self) -> Sequence[Exchange]:
        finetune = Exchange("finetune", who="all", phases=(Phase(self.final_finetune_epochs),))
        tuned = (*self._alignment.exchanges(2), finetune) if self.final_finetune_epochs else ()
        return (*[Exchange("average", who="all", trains=False)] * self.final_average, *tuned)

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        if self.setting == "homogeneous":
            weight_averaging.init(server, "same-shape")

    def plan(self, server: Server, selected: Sequence[int]) -> None:
        self._alignment.plan(server, selected)

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = {} if server.exchange == "average" else self._alignment.message(server, client_id)
        shares = self.setting == "homogeneous" and server.exchange in ("train", "finetune")
        return {**message, **(weight_averaging.broadcast(server, "same-shape", client_id) if shares else {})}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == alignment_dataset.EXCHANGE:
            return self._alignment.collect(server, uploads)
        if server.exchange != "average" or not self.final_finetune_epochs:
            self._alignment.settle(server, uploads)
        if kernels := self._alignment.kernels:
            return kernels.collect(server, uploads)
        counts = {i: float(tensor(message, "n")) for i, message in uploads.items() if "n" in message}
        # stands for who never trained
        average = weight_averaging.weights_for(server, "same-shape", server.architectures[0])
        models = {i: group({"model": average, **uploads[i]}, "model") for i in counts}
        return weight_averaging.average(server, "same-shape", models, counts)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "model" in message:
            load(client.model, group(message, "model"))
        return self._alignment.receive(client, message)

    def inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return self._alignment.inputs(client, step, generator)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        return self._alignment.added(cross_entropy(model(batch.x), batch.y, batch.w), model, context)

    def gradients(self, model: Any, batch: Batch, context: Context) -> Gradients:
        return self._alignment.gradients(lambda c: super(FedHeNN, self).gradients(model, batch, c), model, context)

    def upload(self, client: Client, trained: Trained) -> Message:
        sends = {"train": self.uploads == "weights", "average": client.weights is not None}  # None: it never trained
        model = {"model": floats(client.model)} if sends.get(client.exchange) else {}
        n = {"n": torch.tensor(client.n)} if self.setting == "homogeneous" and client.exchange in sends else {}
        return {**self._alignment.upload(client), **model, **n}
