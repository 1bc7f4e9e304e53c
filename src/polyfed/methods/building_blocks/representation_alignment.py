"""Aligning representations of common inputs during local training: FedHeNN's term, from the draw to the gradient.

What it is aligned to is the mean kernel of all clients (`kernels`), or the kernel of the weights that came (None).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from polyfed.core import inference, profiling
from polyfed.core.client import Client
from polyfed.core.message import Message, group, tensor
from polyfed.core.method import Context, Exchange, Gradients
from polyfed.core.server import Server
from polyfed.core.upload_forms import NUMBER, SAMPLES, Entry, Form, Known, Members, own_network
from polyfed.functional.kernel_similarity import Similarity, distance
from polyfed.functional.modes import evaluating
from polyfed.functional.quantization import unpack
from polyfed.methods.building_blocks.alignment_dataset import EXCHANGE, Rad
from polyfed.methods.building_blocks.mean_kernel import MeanKernel


def _representation(known: Known, name: str) -> Members:
    """A_k on the RAD, as `functional.quantization.pack` writes it."""
    rows, types = len(tensor(known.server.state, "rad")), (torch.float32, torch.float16, torch.int8)
    return Members({"values": (Entry((rows, "D"), types),), "scale": (Entry(), Entry(("D",)))}, whole=False)


def _inputs(known: Known) -> int:
    """How many of its inputs the client was asked for."""
    return int(tensor(known.sent, "rad_asked")) if "rad_asked" in known.sent else 0


FORM: Form = {
    "model": own_network,
    "n": SAMPLES,
    "kernel": _representation,
    "strength": NUMBER,
    "rad": Entry(None, (torch.float32, torch.uint8, torch.int64), rows=_inputs),
    "rad_draw": Entry((), (torch.int32,), 0, lambda known: known.server.round),
}


@dataclass(frozen=True)
class Alignment:
    """The term eta(t) d(K_k, target) on a RAD.

    Attributes:
        rad: the inputs. kernels: the mean kernel, or None. similarity, width: see `functional.kernel_similarity`.
        eta: weight by round, counted from 1. batch: rows per step. every: the term enters so many steps apart, as much
            heavier. chunk: rows whose graph is kept at a time.
    """

    rad: Rad
    kernels: MeanKernel | None
    similarity: Similarity
    width: float
    eta: Callable[[int], float]
    batch: int
    every: int
    chunk: int

    @classmethod
    def of(cls, knobs: Any, mean: bool) -> Alignment:
        """From a method's knobs of the same names. mean: whether the target is the mean kernel."""
        if knobs.uploads == "kernels" and not mean:
            raise ValueError("uploads 'kernels': expected setting 'heterogeneous', as the other one averages weights")
        if knobs.control != "none" and not mean:
            raise ValueError("control: expected setting 'heterogeneous', as there is no mean kernel in the other")
        kernels = MeanKernel(**{field.name: getattr(knobs, field.name) for field in fields(MeanKernel)})
        source = Rad(knobs.rad_size, knobs.rad_source, knobs.rad_transport, knobs.rad_refresh)
        steps = knobs.rad_batch, knobs.rad_every, knobs.rad_chunk
        return cls(source, kernels if mean else None, knobs.similarity, knobs.width, knobs.eta, *steps)

    def check(self, final_average: bool) -> None:
        """Refuse knobs that cannot go together. final_average: weights are averaged a last time.

        Raises:
            ValueError: says which.
        """
        if final_average and self.kernels is not None:
            raise ValueError("final_average: expected setting 'homogeneous', as no weights are averaged in the other")
        if self.similarity == "procrustes" and self.kernels is not None:
            raise ValueError(
                "procrustes: expected the representation of one model to turn to, came the mean of kernels"
            )
        if self.kernels is not None and self.kernels.uploads == "kernels" and self.rad.refresh:
            raise ValueError(f"uploads 'kernels': expected rad_refresh 0, a fixed RAD, came {self.rad.refresh}")
        problem = self.rad.problem or (None if self.kernels is None else self.kernels.problem)
        if problem is not None:
            raise ValueError(problem)

    @property
    def needs(self) -> dict[str, Any]:
        """What must be there, as entries of `Needs`."""
        if not self.uses_rad(2):
            return {}
        drawn, noise = self.rad.origin in ("holdout", "other"), self.rad.origin == "noise"
        public = {"public": self.rad.size, "public_origin": self.rad.origin} if drawn else {}
        validation = self.kernels is not None and self.kernels.kernel_weights == "validation"
        return {**public, "one_input": True, "makes_inputs": noise, "validation": validation}

    def rigid(self, final_average: bool) -> dict[str, str]:
        """What of an upload cannot be clipped, noised or thinned out. final_average: weights go up a last time."""
        kernels = self.kernels is not None and self.kernels.uploads == "kernels"
        found = {"rad": "inputs that it trains on"} if self.rad.origin == "train" and self.uses_rad(2) else {}
        if final_average or (self.kernels is not None and not kernels):
            found["model"] = "whole weights, of which nothing came down"
        if self.kernels is not None and kernels and self.kernels.precision != "float32":
            found["kernel"] = f"numbers packed as {self.kernels.precision}; use method.precision = 'float32'"
        return found

    def uses_rad(self, round: int) -> bool:
        """Whether the RAD is seen in a round: where it has weight, and always where its kernels are uploaded."""
        uploads = self.kernels is not None and self.kernels.uploads == "kernels"
        return self.eta(round) > 0 or (uploads and self.eta(2) > 0)

    # server ------------------------------------------------------------------------------------------------

    def exchanges(self, round: int) -> list[Exchange]:
        """The passage before the training, where the RAD comes from the clients."""
        asks = self.rad.origin == "train" and self.uses_rad(round)
        return [Exchange(EXCHANGE, who="all", trains=False)] if asks else []

    def plan(self, server: Server, selected: Sequence[int]) -> None:
        """Once per round: the RAD, and the mean kernel on it."""
        if not self.uses_rad(server.round):
            return
        server.state["selected"] = torch.tensor(selected)
        if self.rad.plan(server):
            self._average(server)

    def _average(self, server: Server) -> None:
        if self.kernels is not None and self.eta(server.round) > 0 and "rad" in server.state:
            self.kernels.plan(server, tensor(server.state, "selected").tolist())

    def collect(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """After the passage `EXCHANGE`: what the clients handed over is the RAD."""
        self.rad.collect(server, uploads)
        self._average(server)

    def message(self, server: Server, client_id: int) -> dict[str, Any]:
        """Down: how many inputs to hand over; or the RAD, and the factor of the mean kernel."""
        if server.exchange == EXCHANGE:
            return dict(self.rad.request(server, client_id))
        if self.kernels is None:
            return dict(self.rad.message(server, client_id))
        factor = self.kernels.message(server, client_id)
        if not factor and self.kernels.uploads == "weights":
            return {}  # nobody to be aligned to yet
        return {**self.rad.message(server, client_id), **factor}

    def settle(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """After a round: what belonged to it alone is dropped."""
        self.rad.settle(server, uploads)
        if self.kernels is not None:
            self.kernels.forget(server)
        server.state.pop("selected", None)

    # client ------------------------------------------------------------------------------------------------

    def receive(self, client: Client, message: Message) -> dict[str, Any]:
        """The RAD and its target, after the weights have been loaded; empty where the round has no alignment."""
        if client.exchange == EXCHANGE:
            return {name: value.clone() for name, value in message.items() if isinstance(value, Tensor)}
        inputs = self.rad.received(client, message)
        context = {} if inputs is None else {"rad": inputs}
        if inputs is not None and self.kernels is None:
            context["target"] = inference.represent(client.model, inputs, client.prepare).cpu()
        elif inputs is not None and "factor" in message:
            context["target"] = unpack(group(message, "factor")).clone()
        return context

    @profiling.timed("align")
    def inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """The rows of one step."""
        if "target" not in client.context or step % self.every:
            return {}
        rad, target, device = client.context["rad"], client.context["target"], next(client.model.parameters()).device
        if self.batch < len(rad):
            rows = torch.randperm(len(rad), generator=generator)[: self.batch]
            rad, target = rad[rows], target[rows]
        eta = torch.tensor(self.eta(client.round) * self.every, device=device)
        return {"rad_x": client.prepare(rad.to(device)), "rad_target": target.to(device), "eta": eta}

    def distance(self, z_LD: Tensor, context: Context) -> Tensor:
        """The distance of a representation of the step's rows."""
        target, factor = context["rad_target"], self.kernels is not None
        return distance(self.similarity, z_LD, target, factor=factor, width=self.width)

    def added(self, task: Tensor, model: Any, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The task's loss and the term."""
        if "rad_x" not in context:
            return task
        with profiling.section("align"), evaluating(model):
            apart = self.distance(model.represent(context["rad_x"]), context)
        profiling.backward("align", apart, task)
        return task + context["eta"] * apart, {"d_cka": apart, "d_cka_steps": torch.ones_like(apart)}

    def gradients(self, plain: Callable[[Context], Gradients], model: Any, context: Context) -> Gradients:
        """The gradient of `added`. `plain(context)` takes it in one pass; of many rows it is given the task alone."""
        if "rad_x" not in context or len(context["rad_x"]) <= self.chunk:
            with profiling.section("train"):
                return plain(context)
        task = plain({name: value for name, value in context.items() if name != "rad_x"})
        with profiling.section("align"):
            apart, term = inference.represent_gradients(
                model, context["rad_x"], lambda z: self.distance(z, context), self.chunk
            )
        grads = dict(task.grads)
        for name, grad in term.items():
            own = grads.get(name)
            grads[name] = own if grad is None else context["eta"] * grad + (0 if own is None else own)
        sums = {"d_cka": apart, "d_cka_steps": torch.ones_like(apart)}
        return Gradients(grads, task.loss + context["eta"] * apart, {**task.sums, **sums})

    def upload(self, client: Client) -> dict[str, Any]:
        """Up: the inputs that were asked for; or what the mean kernel wants besides, or instead of, weights."""
        if client.exchange == EXCHANGE:
            return dict(self.rad.hand_over(client))
        if client.exchange != "train":
            return {}
        said = dict(self.rad.used(client))
        if self.kernels is not None and self.uses_rad(client.round + 1):
            said |= self.kernels.upload(client, client.context.get("rad"))
        return said
