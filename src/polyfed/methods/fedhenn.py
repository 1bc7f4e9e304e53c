"""FedHeNN: representations aligned by their kernels (Makhija, Han, Ho and Ghosh, ICML 2022).

Everybody sees L unlabelled inputs (the RAD, X). A_k = Phi_k(X) is (L, d_k), K_k = A_k A_k^T, H centres.
Client k:  E epochs of SGD on CE(f(x; w_k), y) + eta(t) d_CKA(K_k, target),  d_CKA = 1 - CKA.
Heterogeneous (Algorithm 2): target K_bar = sum_j w_j K_j over the clients' latest weights; no weights are averaged.
Homogeneous (Algorithm 1):   target is the kernel of the weights received; these are averaged as in FedAvg.
Sent per round, P floats, inputs of s bytes, F (L, r) with F F^T ~ H K_bar H:
    heterogeneous  down L s + 4 L r,   up 4 P_k           homogeneous  down 4 P + L s,   up 4 P + 8 (n_k)
No RAD is sent while eta(t) = 0. The server keeps every client's last weights.
Deviations from the paper: (1) `rad_batch` rows of the RAD per step instead of all, every `rad_every`-th step with the
term as much heavier; L and 1 are the paper's. (2) K_bar travels as a factor, exact up to `exact_rank` columns, else of
rank `rank`. (3) The RAD is hold-out rows that no client has; the authors' code takes the clients' training data. (4)
The RAD pass runs in eval mode. (5) eta(t) = eta0 sqrt(t - 1), as in the authors' code; the paper leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import passes, shared_model
from polyfed.core.client import Client, as_floats
from polyfed.core.message import Message, group, tensor
from polyfed.core.method import Batch, Context, Method, Needs, Trained, knobs
from polyfed.core.networks import floats, load
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.functional.kernels import alignment, kernel_factor
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import evaluating


@knobs
class FedHeNN(Method):
    """Alignment of representations through centred kernel alignment on common unlabelled inputs."""

    name: ClassVar[str] = "fedhenn"
    paper: ClassVar[str] = "Makhija et al., ICML 2022"

    setting: Literal["heterogeneous", "homogeneous"] = "heterogeneous"
    eta0: Annotated[float, Field(ge=0)] = 0.001  # weight of the alignment; 0 is Local (homogeneous: FedAvg)
    eta_schedule: Literal["sqrt", "linear", "constant"] = "sqrt"  # eta0 times sqrt(t - 1), t - 1 or 1; rounds t from 1
    rad_size: Annotated[int, Field(ge=2)] = 5000  # L, drawn afresh in every round
    rad_batch: Annotated[int, Field(ge=2)] = 256  # RAD rows per step; L or more: all of them
    rad_every: Annotated[int, Field(ge=1)] = 1  # the term enters every so many steps
    kernel_pool: Literal["all", "selected", "seen"] = "all"  # whose kernels; selected: who uploaded last
    kernel_norm: Literal["none", "fro"] = "none"  # "fro": K_j / ||H K_j H||_F, so that no network's scale dominates
    exclude_self: bool = False  # leave K_k out of client k's K_bar
    rank: Annotated[int, Field(ge=1)] = 128  # columns of F, where the exact one would have more than `exact_rank`
    exact_rank: Annotated[int, Field(ge=0)] = 256

    @property
    def needs(self) -> Needs:
        one, rows = self.setting == "homogeneous", self.rad_size if self.eta0 else 0
        instead = "use method.setting = 'heterogeneous'"
        return Needs(split_model=True, one_architecture=one, public=rows, instead=instead)

    @property
    def scored(self) -> Stage:
        return "personal" if self.setting == "heterogeneous" else "received"

    def eta(self, round: int) -> float:
        """Weight of the alignment in a round, counted from 1."""
        return self.eta0 * math.pow(round - 1, {"constant": 0, "sqrt": 0.5, "linear": 1}[self.eta_schedule])

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        if self.setting == "homogeneous":
            shared_model.start(server, "same-shape")

    def plan(self, server: Server, selected: Sequence[int]) -> None:
        if self.eta(server.round) == 0 or server.public is None:
            return
        drawn = torch.randperm(len(server.public), generator=server.generator("rad"))[: self.rad_size]
        server.state["rad"] = server.public.samples.x[drawn]
        if self.setting == "heterogeneous":
            server.state["factors"] = self._factors(server, selected)

    def _factors(self, server: Server, selected: Sequence[int]) -> dict[str, Tensor]:
        """F for everybody, under "all", or one for each selected client where its own kernel is left out."""
        last = tensor(server.state, "last").tolist() if "last" in server.state else []
        pools = {"all": server.clients, "selected": last, "seen": filter(server.has_kept, server.clients)}
        pool = sorted(pools[self.kernel_pool])
        rad, prepare = tensor(server.state, "rad"), server.public.prepare if server.public else as_floats
        models = ((j, server.model(server.clients[j].architecture, server.weights(j))) for j in pool)
        kernels = {j: passes.represent(model, rad, prepare).cpu() for j, model in models}
        factors = {}
        for owner in selected if self.exclude_self else ["all"]:
            if members := [a for j, a in kernels.items() if j != owner]:
                sizes = self.rank, self.exact_rank, self.kernel_norm
                made = kernel_factor(members, [1.0] * len(members), *sizes, server.generator("factor"))
                factors[str(owner)] = made.matrix
                server.log["factor_tail"] = max(made.tail, server.log.get("factor_tail", 0.0))  # part of K_bar left out
        return factors

    def broadcast(self, server: Server, client_id: int) -> Message:
        if self.setting == "homogeneous":
            message = {"model": shared_model.read(server, "same-shape", server.clients[client_id].architecture)}
            return {**message, "rad": server.state["rad"]} if "rad" in server.state else message
        factors = group(server.state, "factors") if "factors" in server.state else {}
        factor = factors.get(str(client_id) if self.exclude_self else "all")
        return {} if factor is None else {"rad": server.state["rad"], "factor": factor}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state = {name: kept for name, kept in server.state.items() if name not in ("rad", "factors")}
        if self.setting == "homogeneous":
            counts = {i: float(tensor(message, "n")) for i, message in uploads.items()}
            shared_model.average(server, "same-shape", shared_model.uploaded(uploads), counts)
            return
        server.state |= {"last": torch.tensor(sorted(uploads))} if uploads else {}
        for client_id, message in uploads.items():
            server.keep(client_id, group(message, "model"))

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "model" in message:
            load(client.model, group(message, "model"))
        if "rad" not in message:
            return {}
        rad, own = tensor(message, "rad").clone(), self.setting == "homogeneous"
        target = passes.represent(client.model, rad, client.prepare).cpu() if own else tensor(message, "factor").clone()
        return {"rad": rad, "target": target}

    def inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if "rad" not in client.context or step % self.rad_every:
            return {}
        rad, target, device = client.context["rad"], client.context["target"], next(client.model.parameters()).device
        if self.rad_batch < len(rad):
            rows = torch.randperm(len(rad), generator=generator)[: self.rad_batch]
            rad, target = rad[rows], target[rows]
        eta = torch.tensor(self.eta(client.round) * self.rad_every, device=device)
        return {"rad_x": client.prepare(rad.to(device)), "rad_target": target.to(device), "eta": eta}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        task = cross_entropy(model(batch.x), batch.y, batch.w)
        if "rad_x" not in context:
            return task
        with evaluating(model):
            distance = alignment(model.represent(context["rad_x"]), context["rad_target"])
        return task + context["eta"] * distance, {"d_cka": distance, "d_cka_steps": torch.ones_like(distance)}

    def upload(self, client: Client, trained: Trained) -> Message:
        message = {"model": floats(client.model)}
        return message if self.setting == "heterogeneous" else {**message, "n": torch.tensor(client.n)}
