"""Training with rows of common inputs, the RAD, and their target: what both algorithms of FedHeNN share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, Requirements, StepResult, hyperparameters, table
from polyfed.functional.device_copies import move_together
from polyfed.methods.building_blocks.alignment_data import AlignmentData

ROWS_AT_ONCE = 256  # rows of the RAD whose graph is kept at a time: more take more memory and change no result


@hyperparameters
class KernelAlignment(Method):
    """A method whose loss has the term eta(t) times the distance of representations of the RAD from a target.

    In the context: "rad", X (L, ...), and "target", a factor (L, r) or representations (L, d); in a step that has the
    term "rad_x", B rows of X as the network takes them, "rad_target", their rows of the target, and "eta", the term's
    weight.
    """

    eta0: Annotated[float, Field(ge=0)] = 0.001  # weight of the alignment; 0: off
    # eta0 times sqrt(t - 1); "linear": t - 1; "constant": 1; rounds t from 1
    eta_schedule: Literal["sqrt", "linear", "constant"] = "sqrt"
    alignment_data: Annotated[AlignmentData, table(AlignmentData)] = AlignmentData()  # the RAD

    def eta(self, round: int) -> float:
        """Weight of the alignment in a round, counted from 1."""
        exponents = {"constant": 0, "sqrt": 0.5, "linear": 1}
        return self.eta0 * float((round - 1) ** exponents[self.eta_schedule])

    def uses_rad(self, round: int) -> bool:
        """Whether a round uses the RAD: if its term has weight."""
        return self.eta(round) > 0

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """Draw the RAD rows of one step, with their target."""
        if "target" not in client.context or step % self.alignment_data.every:
            return {}
        rad = client.context["rad"]
        target = client.context["target"]
        if self.alignment_data.batch < len(rad):
            order = torch.randperm(len(rad), generator=generator)[: self.alignment_data.batch]
            (rows,) = move_together([order], [rad.device])
            rad = rad[rows]
            target = target[rows]
        eta = torch.full((), self.eta(client.round) * self.alignment_data.every, device=rad.device)
        return {"rad_x": client.prepare(rad), "rad_target": target, "eta": eta}

    def distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        """The distance (0-d) of a step's representations (B, d) from "rad_target" in the context."""
        raise NotImplementedError

    def receive_rad(self, client: Client, message: Message) -> Tensor | None:
        """The RAD where the client's network computes, if there is one: steps draw their rows there."""
        rad = self.alignment_data.receive(client, message)
        return None if rad is None else move_together([rad], [next(client.model.parameters()).device])[0]

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        """The gradient of `loss`; a term with many rows is differentiated in chunks."""
        if "rad_x" not in context or len(context["rad_x"]) <= ROWS_AT_ONCE:
            return super().gradients(model, batch, context)
        task = super().gradients(model, batch, {name: value for name, value in context.items() if name != "rad_x"})
        distance, term = inference.chunked_gradients(
            model, context["rad_x"], lambda z_Bd: self.distance(z_Bd, context), ROWS_AT_ONCE
        )
        grads = dict(task.grads)
        for name, grad in term.items():
            own = grads.get(name)
            if grad is not None:
                grads[name] = context["eta"] * grad + (0 if own is None else own)
        sums = {"d_cka": distance, "d_cka_steps": torch.ones_like(distance)}
        return StepResult(grads, task.loss + context["eta"] * distance, {**task.sums, **sums})

    @property
    def requirements(self) -> Requirements:
        uses_rad = self.uses_rad(2)
        return Requirements(
            split_model=True, public=self.alignment_data.size if uses_rad else 0, same_input_shape=uses_rad
        )
