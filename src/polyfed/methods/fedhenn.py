"""FedHeNN: representations aligned by their kernels (Makhija, Han, Ho and Ghosh, ICML 2022).

Everybody sees L unlabeled inputs (the RAD, X). A_k = Phi_k(X) is (L, d_k), K_k its kernel (A_k A_k^T), H centers.
Client k:  E epochs of SGD on CE(f(x; w_k), y) + eta(t) d(K_k, target),  d = 1 - CKA.
Heterogeneous (Algorithm 2): target K_bar = mean of K_j over the clients' latest weights; no weights are averaged.
Homogeneous (Algorithm 1):   target is the kernel of the weights received; these are averaged as in FedAvg.
Sent per round, P floats, a RAD of R bytes (L inputs, 4 L or 8), F (L, r) with F F^T ~ H K_bar H at b bytes a number:
    heterogeneous  down R + b L r,   up 4 P_k, or in kernel uploads b L d_k      homogeneous  down 4 P + R,  up 4 P + 8
Deviations from the paper: (1) `batch` of the L rows enter a step. (2) K_k is formed in each step, or `every`-th with
the term as much heavier; its boxes do so once per epoch. (3) K_bar travels as a factor, exact up to 256 columns; RBF by
Nystroem rows. (4) None of the RAD: rows that the server has besides, held out or of another data set, as in the
paper; the authors' code draws the clients' training images. (5) Its pass is in eval mode. (6) eta(t) is the authors'
code's; at 0 no RAD. (7) Algorithm 1's last average is off. (8) Procrustes is scale-free. The page has (9) to (12).
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
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import SAMPLES, Form, own_network
from polyfed.functional.compression import dequantize_columns
from polyfed.functional.kernel_similarity import kernel_distance
from polyfed.functional.losses import task_loss
from polyfed.functional.modes import eval_mode
from polyfed.methods.building_blocks import kernel_alignment, weight_averaging
from polyfed.methods.building_blocks.kernel_alignment import AlignmentData, MeanKernel

ROWS_AT_ONCE = 256  # of the RAD whose graph is kept at a time; costs memory, changes no result


_FORM: Form = {"model": own_network, "n": SAMPLES, **kernel_alignment.FORM}


@hyperparameters
class FedHeNN(Method):
    """Alignment of representations by centered kernel alignment on common unlabeled inputs."""

    # `setting` says which of the two algorithms below an object is. Here is what they have in common: the settings, and
    # what a client does with the RAD while it trains.

    card = MethodCard(
        name="fedhenn",
        paper="Makhija et al., ICML 2022",
        down="L inputs + L r (homogeneous: P)",
        up="P (kernels: L D)",
        states="server: the RAD, latest w_k or A_k",
        form=_FORM,
        delta_entries=("model",),
    )

    setting: Literal["heterogeneous", "homogeneous"] = "heterogeneous"  # Algorithm 2, or 1: one architecture
    eta0: Annotated[float, Field(ge=0)] = 0.001  # weight of the alignment; 0: Local (homogeneous: FedAvg)
    eta_schedule: Literal["sqrt", "linear", "constant"] = "sqrt"  # eta0 times sqrt(t - 1), t - 1 or 1; rounds t from 1
    alignment_data: Annotated[AlignmentData, table(AlignmentData)] = AlignmentData()  # the RAD
    kernel: Annotated[MeanKernel, table(MeanKernel)] = MeanKernel()
    uploads: Literal["weights", "kernels"] = "weights"  # "kernels": A_k on a fixed RAD instead of weights
    final_average: bool = False  # homogeneous: average all latest weights after the last round

    def __new__(cls, *given: Any, **settings: Any) -> Self:
        """Create an object of the class for this `setting`."""
        kind: Any = cls
        setting = settings.get("setting", "heterogeneous")
        if cls is FedHeNN and setting == "heterogeneous":
            kind = HeterogeneousFedHeNN
        elif cls is FedHeNN and setting == "homogeneous":
            kind = HomogeneousFedHeNN
        made: Self = super().__new__(kind)
        return made

    def __repr__(self) -> str:
        """Hyperparameters that differ from FedHeNN's defaults, including the setting."""
        given = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(FedHeNN)]
        told = [f"{name}={value!r}" for name, value, default in given if value != default]
        return f"FedHeNN({', '.join(told)})"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Reject incompatible settings; raises ValueError."""

    def eta(self, round: int) -> float:
        """Weight of the alignment in a round, counted from 1."""
        exponents = {"constant": 0, "sqrt": 0.5, "linear": 1}
        return self.eta0 * float((round - 1) ** exponents[self.eta_schedule])

    def uses_rad(self, round: int) -> bool:
        """Whether a round uses the RAD: if its term has weight."""
        return self.eta(round) > 0

    @property
    def is_control(self) -> bool:
        return self.kernel.control != "none"

    @property
    def requirements(self) -> Requirements:
        uses_rad = self.uses_rad(2)
        return Requirements(
            split_model=True,
            same_architecture=self.setting == "homogeneous",
            hint="use method.setting = 'heterogeneous'",
            public=self.alignment_data.size if uses_rad else 0,
            same_input_shape=uses_rad,
            shared_outputs="it averages networks" if self.setting == "homogeneous" else "",
        )

    # client: a step ----------------------------------------------------------------------------------------
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
            d = self._distance(model.represent(context["rad_x"]), context)
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
                model, context["rad_x"], lambda z_Bd: self._distance(z_Bd, context), ROWS_AT_ONCE
            )
        grads = dict(task.grads)
        for name, grad in term.items():
            own = grads.get(name)
            if grad is not None:
                grads[name] = context["eta"] * grad + (0 if own is None else own)
        sums = {"d_cka": d, "d_cka_steps": torch.ones_like(d)}
        return StepResult(grads, task.loss + context["eta"] * d, {**task.sums, **sums})

    def _distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        """Distance of a step's representations from their target."""
        kernel = self.kernel
        is_factor = self.setting == "heterogeneous"
        return kernel_distance(kernel.similarity, a_Bd, context["rad_target"], factor=is_factor, width=kernel.width)


@hyperparameters
class HeterogeneousFedHeNN(FedHeNN):
    """Algorithm 2: personal networks of any architecture, aligned to the mean kernel of all clients."""

    card = FedHeNN.card

    setting: Literal["heterogeneous"] = "heterogeneous"

    def _check(self) -> None:
        if self.final_average:
            raise ValueError("final_average: expected setting 'homogeneous', as no weights are averaged in the other")
        if self.kernel.similarity == "procrustes":
            raise ValueError("procrustes: expected the representation of one model to turn to, got the mean of kernels")
        refresh = self.alignment_data.refresh
        if self.uploads == "kernels" and refresh:
            raise ValueError(f"uploads 'kernels': expected alignment_data.refresh 0, a fixed RAD, got {refresh}")

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        if self.uploads == "weights":
            return {"model": "whole weights, of which nothing came down"}
        precision = self.kernel.precision
        if precision != "float32":
            return {"kernel": f"numbers packed as {precision}; use method.kernel.precision = 'float32'"}
        return {}

    @property
    def evaluation_stage(self) -> Stage:
        return "personal"

    @property
    def accepts_stale_uploads(self) -> bool:
        return True

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


@hyperparameters
class HomogeneousFedHeNN(FedHeNN):
    """Algorithm 1: one architecture, averaged as in FedAvg; clients are aligned to the received weights."""

    card = FedHeNN.card

    setting: Literal["homogeneous"] = "homogeneous"

    def _check(self) -> None:
        if self.uploads == "kernels":
            raise ValueError("uploads 'kernels': expected setting 'heterogeneous', as the other one averages weights")
        if self.kernel.control != "none":
            raise ValueError("kernel.control: expected setting 'heterogeneous', as the other has no mean kernel")

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return {"model": "whole weights, of which nothing came down"} if self.final_average else {}

    @property
    def evaluation_stage(self) -> Stage:
        return "received"

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
