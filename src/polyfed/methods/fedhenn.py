"""FedHeNN: representations aligned by their kernels (Makhija, Han, Ho and Ghosh, ICML 2022).

Everybody sees L unlabeled inputs (the RAD, X). A_k = Phi_k(X) is (L, d_k), K_k its kernel (A_k A_k^T), H centers.
Client k:  E epochs of SGD on CE(f(x; w_k), y) + eta(t) d(K_k, target),  d = 1 - CKA    (eq. 5 and 6)
FedHeNN (Algorithm 2):             target K_bar = mean of K_j over the clients' latest weights; none are averaged.
HomogeneousFedHeNN (Algorithm 1):  target is the kernel of the weights received; these are averaged as in FedAvg.
Sent per round, P floats, a RAD of R bytes (L inputs, 4 L or 8), F (L, r) with F F^T ~ H K_bar H at b bytes a number:
    heterogeneous  down R + b L r,   up 4 P_k, or b L d_k with uploads = "kernels", which sends A_k
    homogeneous    down 4 P + R,     up 4 P + 8
Deviations from the paper, numbered as on the page: (1) `batch` of the L rows enter a step. (2) K_k is formed in each
step, or in every n-th with the term n times as heavy; its boxes do so once per epoch. (3) K_bar travels as a factor,
exact up to 256 columns; RBF by Nystroem rows. (4) Clients hold none of the RAD's rows: the server has them besides, as
in the paper; the authors' code draws them from the clients' training images. (5) The pass over the RAD is in eval mode.
(6) eta(t) is the authors' code's; where it is 0 there is no RAD. (7) Phi is everything before the last layer, and
d = 1 - CKA with centering, which eq. 4 leaves out. (8) Weight decay spares nothing. (9) Clients have equal weights
w_j = 1/N. (10) Kernel uploads, precisions and the chunked gradient are additions. (11) Algorithm 1's average after the
last round is off. (12) The Procrustes distance is free of scale.
Shapes: L rows of the RAD, B of them in a step, d_k feature width, r columns of the factor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed import profiling
from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Exchange,
    Method,
    MethodCard,
    Requirements,
    StepResult,
    TrainingResult,
    hyperparameters,
    table,
)
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.upload_forms import SAMPLES, own_network
from polyfed.functional.compression import dequantize_columns
from polyfed.functional.kernel_similarity import kernel_distance
from polyfed.functional.losses import task_loss
from polyfed.functional.modes import eval_mode
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.building_blocks.alignment_data import ACKNOWLEDGMENT, AlignmentData
from polyfed.methods.building_blocks.mean_kernel import KernelSimilarity, MeanKernel, representation_form

ROWS_AT_ONCE = 256  # of the RAD whose graph is kept at a time; costs memory, changes no result


@hyperparameters
class KernelAlignment(Method):
    """What both algorithms share: the settings of the alignment, and a client's step with rows of the RAD."""

    eta0: Annotated[float, Field(ge=0)] = 0.001  # weight of the alignment; 0: off
    eta_schedule: Literal["sqrt", "linear", "constant"] = "sqrt"  # eta0 times sqrt(t - 1), t - 1 or 1; rounds t from 1
    alignment_data: Annotated[AlignmentData, table(AlignmentData)] = AlignmentData()  # the RAD

    def eta(self, round: int) -> float:
        """Weight of the alignment in a round, counted from 1."""
        exponents = {"constant": 0, "sqrt": 0.5, "linear": 1}
        return self.eta0 * float((round - 1) ** exponents[self.eta_schedule])

    def uses_rad(self, round: int) -> bool:
        """Whether a round uses the RAD: if its term has weight."""
        return self.eta(round) > 0

    def distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        """d: distance of a step's representations from their target."""
        raise NotImplementedError

    @property
    def requirements(self) -> Requirements:
        uses_rad = self.uses_rad(2)
        return Requirements(
            split_model=True, public=self.alignment_data.size if uses_rad else 0, same_input_shape=uses_rad
        )

    def _received_rad(self, client: Client, message: Message) -> Tensor | None:
        """The RAD where the client's network computes, if there is one: steps draw their rows there."""
        rad = self.alignment_data.receive(client, message)
        return None if rad is None else rad.to(next(client.model.parameters()).device)

    @profiling.timed("align")
    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """Draw the RAD rows of one step, with their target."""
        if "target" not in client.context or step % self.alignment_data.every:
            return {}
        rad = client.context["rad"]
        target = client.context["target"]
        if self.alignment_data.batch < len(rad):
            rows = torch.randperm(len(rad), generator=generator)[: self.alignment_data.batch].to(rad.device)
            rad = rad[rows]
            target = target[rows]
        eta = torch.full((), self.eta(client.round) * self.alignment_data.every, device=rad.device)
        return {"rad_x": client.prepare(rad), "rad_target": target, "eta": eta}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        task = task_loss(model(batch.x), batch.y, batch.w)
        if "rad_x" not in context:
            return task
        with profiling.section("align"), eval_mode(model):
            d = self.distance(model.represent(context["rad_x"]), context)
        profiling.time_backward("align", d, task)
        return task + context["eta"] * d, {"d_cka": d, "d_cka_steps": torch.ones_like(d)}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        """The gradient of `loss`; a term with many rows is differentiated in chunks."""
        if "rad_x" not in context or len(context["rad_x"]) <= ROWS_AT_ONCE:
            with profiling.section("train"):
                return super().gradients(model, batch, context)
        task = super().gradients(model, batch, {name: value for name, value in context.items() if name != "rad_x"})
        with profiling.section("align"):
            d, term = inference.chunked_gradients(
                model, context["rad_x"], lambda z_Bd: self.distance(z_Bd, context), ROWS_AT_ONCE
            )
        grads = dict(task.grads)
        for name, grad in term.items():
            own = grads.get(name)
            if grad is not None:
                grads[name] = context["eta"] * grad + (0 if own is None else own)
        sums = {"d_cka": d, "d_cka_steps": torch.ones_like(d)}
        return StepResult(grads, task.loss + context["eta"] * d, {**task.sums, **sums})


@hyperparameters
class FedHeNN(KernelAlignment):
    """Personal networks of any architecture, aligned to the mean kernel of all clients (Algorithm 2)."""

    card = MethodCard(
        name="fedhenn",
        paper="Makhija et al., ICML 2022",
        down="L inputs + L r",
        up="P (kernels: L D)",
        states="server: the RAD, latest w_k or A_k",
        form={"model": own_network, "kernel": representation_form, "rad_draw": ACKNOWLEDGMENT},
        delta_entries=("model",),
    )

    kernel: Annotated[MeanKernel, table(MeanKernel)] = MeanKernel()
    uploads: Literal["weights", "kernels"] = "weights"  # "kernels": A_k on a fixed RAD instead of weights

    @model_validator(mode="after")
    def _fits(self) -> Self:
        refresh = self.alignment_data.refresh
        if self.uploads == "kernels" and refresh:
            raise ValueError(f"uploads 'kernels': expected alignment_data.refresh 0, a fixed RAD, got {refresh}")
        return self

    @property
    def is_control(self) -> bool:
        return self.kernel.control != "none"

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        if self.uploads == "weights":
            return {"model": "whole weights, of which none are sent down"}
        precision = self.kernel.precision
        if precision != "float32":
            return {"kernel": f"numbers packed as {precision}; use method.kernel.precision = 'float32'"}
        return {}

    accepts_stale_uploads = True

    def uses_rad(self, round: int) -> bool:
        """Also in round 1 with kernel uploads, which round 2 needs."""
        return self.eta(round) > 0 or (self.uploads == "kernels" and self.eta(2) > 0)

    # server ------------------------------------------------------------------------------------------------
    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        if not self.uses_rad(server.round):
            return
        self.alignment_data.draw(server)
        if self.eta(server.round) > 0:
            self.kernel.average(server, selected, of_weights=self.uploads == "weights")

    def broadcast(self, server: Server, client_id: int) -> Message:
        factor = self.kernel.broadcast(server, client_id)
        if not factor and self.uploads == "weights":
            return {}  # nobody to be aligned to yet
        return {**self.alignment_data.broadcast(server, client_id), **factor}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        self.alignment_data.end_round(server, uploads)
        self.kernel.clear(server)
        self.kernel.update(server, uploads)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        rad = self._received_rad(client, message)
        if rad is None:
            return {}
        if "factor" not in message:
            return {"rad": rad}
        return {"rad": rad, "target": dequantize_columns(get_group(message, "factor")).to(rad.device, copy=True)}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message: dict[str, Tensor | Group] = {**self.alignment_data.acknowledge(client)}
        if self.uploads == "weights":
            message["model"] = float_state(client.model)
        elif self.uses_rad(client.round + 1) and "rad" in client.context:
            message["kernel"] = self.kernel.upload(client, client.context["rad"])
        return message

    def distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        kernel = self.kernel
        return kernel_distance(kernel.similarity, a_Bd, context["rad_target"], factor=True, width=kernel.width)


@hyperparameters
class HomogeneousFedHeNN(KernelAlignment):
    """One architecture, averaged as in FedAvg; clients are aligned to the received weights (Algorithm 1)."""

    card = MethodCard(
        name="fedhenn-homogeneous",
        paper="Makhija et al., ICML 2022",
        differs="nothing",
        down="P + L inputs",
        up="P + 1",
        states="server: the RAD, w",
        form={"model": own_network, "n": SAMPLES, "rad_draw": ACKNOWLEDGMENT},
        delta_entries=("model",),
    )

    kernel: Annotated[KernelSimilarity, table(KernelSimilarity)] = KernelSimilarity()
    final_average: bool = False  # average all latest weights after the last round

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(
            super().requirements, same_architecture=True, hint="use fedhenn", shared_outputs="it averages networks"
        )

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return {"model": "whole weights, of which none are sent down"} if self.final_average else {}

    evaluation_stage = "received"

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange("average", who="all", trains=False),) if self.final_average else ()

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, "same-shape")

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        if self.uses_rad(server.round):
            self.alignment_data.draw(server)

    def broadcast(self, server: Server, client_id: int) -> Message:
        if server.exchange == "average":
            return {}
        weights = weight_averaging.broadcast(server, "same-shape", client_id)
        return {**self.alignment_data.broadcast(server, client_id), **weights}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        self.alignment_data.end_round(server, uploads)
        counts = {i: float(get_tensor(message, "n")) for i, message in uploads.items() if "n" in message}
        # in the last average the weights that all have stand for who never trained
        average = weight_averaging.weights_for(server, "same-shape", server.architectures[0])
        models = {i: get_group({"model": average, **uploads[i]}, "model") for i in counts}
        weight_averaging.average(server, "same-shape", models, counts)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "model" in message:
            load_state(client.model, get_group(message, "model"))
        rad = self._received_rad(client, message)
        if rad is None:
            return {}
        return {"rad": rad, "target": inference.representations(client.model, rad, client.prepare)}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        n = torch.tensor(client.n)
        if client.exchange == "average" and client.weights is None:  # it never trained
            return {"n": n}
        acknowledged = self.alignment_data.acknowledge(client) if client.exchange == "train" else {}
        return {**acknowledged, "model": float_state(client.model), "n": n}

    def distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        kernel = self.kernel
        return kernel_distance(kernel.similarity, a_Bd, context["rad_target"], factor=False, width=kernel.width)
