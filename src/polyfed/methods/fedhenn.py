"""FedHeNN: representations aligned by their kernels (Makhija, Han, Ho and Ghosh, ICML 2022, arXiv:2202.07757).

X are L common unlabeled inputs (the RAD), and Phi_k is everything before the last layer of client k's network.
client k:  A_k = Phi_k(X)  (L, d_k),  in eval mode;  K_k = A_k A_k^T
           E epochs of SGD on  CE(f(x; w_k), y) + eta(t) (1 - CKA(K_k, K_bar))        (eq. 5, 6)
           CKA(K, M) = tr(K H M H) / sqrt(tr(K H K H) tr(M H M H)),  H = I - 1 1^T / L centers
           eta(t) = eta0 sqrt(t - 1), or eta0 (t - 1), or eta0;  rounds t from 1
server:    K_bar = mean of K_j over the clients' latest uploads;  no weights are averaged
           sends F (L, r),  F F^T ~ H K_bar H
up:        w_k, or A_k with uploads = "kernels"
Shapes: L rows of the RAD, B of them in a step, d_k feature width, r columns of the factor.
Deviations from the paper: (1) Each step uses `alignment_data.batch` rows of the RAD, drawn anew. The paper uses all L.
(2) K_k is computed in every step, as in the authors' code, or in every n-th (`alignment_data.every`), where the term
has n times the weight. Algorithms 1 and 2 compute it once per local epoch. (3) K_bar is sent as a factor. RBF kernels
enter it by Nystroem features. (4) The RAD is data of the server (`data.holdout` or `data.public_dataset`), as in the
paper, and clients hold none of it. The authors' code draws it from the clients' training images. (5) The pass over the
RAD runs in eval mode, without dropout and with BatchNorm's running statistics. (6) eta(t) = eta0 sqrt(t - 1), as in the
authors' code; the paper leaves it open. (7) Phi is everything before the last layer, as in the paper. In the authors'
code for images, cross entropy uses the last hidden layer, and CKA the log-softmax of the last one, after dropout. The
distance is 1 - CKA, as there, with the centering that eq. 4 leaves out. (8) Weight decay applies to all weights; the
authors' code spares biases. (9) Clients have equal weights w_j = 1 / N. (10) Kernel uploads, precisions, transports and
the gradient in chunks are not in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.inference import public_outputs
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
    follows_device,
    hyperparameters,
    table,
)
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.upload_forms import SAMPLES, Entry, Members, UploadContext, own_network
from polyfed.errors import RunError
from polyfed.functional.compression import Precision, dequantize_columns, quantize_columns
from polyfed.functional.device_copies import move_group, move_together
from polyfed.functional.kernel_similarity import Similarity, kernel_distance, nystroem_features
from polyfed.functional.kernels import MeanKernelFactor
from polyfed.functional.losses import task_loss
from polyfed.functional.modes import eval_mode
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.building_blocks.alignment_data import ACKNOWLEDGMENT, AlignmentData
from polyfed.validation.effect import ActsWith

ROWS_AT_ONCE = 256  # rows of the RAD whose graph is kept at a time: more take more memory and change no result

# the mean kernel -----------------------------------------------------------------------------------------------------

NETWORKS_AT_ONCE = 16  # clients whose representations are in memory at the same time
EXACT_RANK = 256  # columns up to which the factor is exact
LANDMARKS = 256  # RBF: Nystroem rows per client in the factor; with L or more it is exact


def representation_form(known: UploadContext, name: str) -> Members:
    """A_k on the RAD as an upload may hold it: what `quantize_columns` writes."""
    rows = len(get_tensor(known.server.state, "rad"))
    types = (torch.float32, torch.float16, torch.int8)
    return Members({"values": (Entry((rows, "D"), types),), "scale": (Entry(), Entry(("D",)))}, whole=False)


@hyperparameters
class KernelSimilarity:
    """How representations of the same inputs are compared."""

    similarity: Similarity = "linear"  # kernel: of inner products; "rbf": of distances; or "procrustes", free of scale
    width: Annotated[float, Field(gt=0), ActsWith("similarity", ("rbf",))] = 0.5  # RBF: width over the median distance


@hyperparameters
class MeanKernel(KernelSimilarity):
    """K_bar, the mean of the kernels K_j over `pool` (Algorithm 2), sent as a factor F.

    In the server's state: "kernel 7" (a representation of the RAD that client 7 uploaded) or, by
    `Server.store_weights`, its weights; "factor all" or "factor 7", what is sent in this round. Nothing here asks for a
    model where clients upload representations.
    """

    similarity: Literal["linear", "rbf"] = "linear"  # kernel: of inner products; "rbf": of distances
    pool: Literal["all", "seen"] = "all"  # clients whose kernels are averaged; "seen": those that ever uploaded
    # "fro": each kernel is divided by its centered Frobenius norm, so that no scale dominates
    norm: Literal["none", "fro"] = "none"
    # target of a control: the client's "own" kernel, or the mean one with its rows "permuted" anew in each round
    control: Literal["none", "own", "permuted"] = "none"
    rank: Annotated[int, Field(ge=1)] = 128  # columns of F, if the exact factor has more than 256
    precision: Precision = "float32"  # numbers of F, and of A_k with uploads = "kernels"

    # server ------------------------------------------------------------------------------------------------

    def average(self, server: Server, selected: Sequence[int], of_weights: bool) -> None:
        """The factor for everybody; for the control "own" one for each selected client.

        Args:
            of_weights: whether it is weights that clients upload; those of clients that never did are the seeded ones.
        """
        self.clear(server)
        members = self._members(server, of_weights)
        if self.control == "own":
            owners = {str(i): [j for j in members if j == i] for i in selected}
        else:
            owners = {"all": members}
        # one mean over all members; for the control one of each client's own
        streams = {owner: MeanKernelFactor(self.rank, EXACT_RANK, self.norm) for owner in owners}
        left_out = 0  # networks with inf or nan on the RAD, as those of finite weights may have
        for j, a_LD in representations(server, members):
            if not bool(a_LD.isfinite().all()):
                left_out += 1
                continue
            features_LD = self._features(server, j, a_LD)
            for owner, stream in streams.items():
                if j in owners[owner]:
                    stream.add(features_LD)
        if left_out:
            server.log["kernels_left_out"] = left_out
        for owner, stream in streams.items():
            if stream.count:
                factor = stream.result()
                matrix = factor.matrix
                if self.control == "permuted":
                    matrix = matrix[torch.randperm(len(matrix), generator=server.generator("permuted"))]
                server.state[f"factor {owner}"] = quantize_columns(matrix, self.precision)
                # part of K_bar that is left out
                server.log["factor_tail"] = max(factor.truncation_error, server.log.get("factor_tail", 0.0))

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Down: the client's factor, packed; nothing where there is none."""
        name = f"factor {client_id}" if self.control == "own" else "factor all"
        return {"factor": get_group(server.state, name)} if name in server.state else {}

    def clear(self, server: Server) -> None:
        """Drop the present factors."""
        server.state = {name: kept for name, kept in server.state.items() if not name.startswith("factor ")}

    def update(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Keep the weights or representations that were uploaded."""
        for client_id, message in uploads.items():
            if "model" in message:
                server.store_weights(client_id, get_group(message, "model"))
            elif "kernel" in message:
                packed = get_group(message, "kernel")
                rows = len(dequantize_columns(packed))
                expected = len(get_tensor(server.state, "rad"))
                if rows != expected:
                    raise RunError(f"expected {expected} rows in the kernel of client {client_id}, got {rows}")
                server.state[f"kernel {client_id}"] = dict(packed)

    def _members(self, server: Server, of_weights: bool) -> list[int]:
        """Whose kernels are averaged."""
        if self.pool == "all" and of_weights:
            return sorted(server.clients)
        return sorted(j for j in server.clients if f"kernel {j}" in server.state or server.has_weights(j))

    def _features(self, server: Server, client_id: int, a_LD: Tensor) -> Tensor:
        """A_j, or another matrix with the kernel of client j."""
        draws = server.generator("landmarks", client_id)
        return a_LD if self.similarity == "linear" else nystroem_features(a_LD, self.width, LANDMARKS, draws)

    # client ------------------------------------------------------------------------------------------------

    def upload(self, client: Client, rad: Tensor) -> Group:
        """Up, where kernels are uploaded: the representation of the RAD, packed."""
        a_LD = inference.representations(client.model, rad, client.prepare).cpu()
        if not bool(a_LD.isfinite().all()):
            return {"values": a_LD}  # as it is, for the engine to refuse
        return quantize_columns(a_LD, self.precision)


def representations(server: Server, members: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """A_j of all members in their order, as it was uploaded, or by a pass of the network."""
    rows = get_tensor(server.state, "rad_rows")
    for start in range(0, len(members), NETWORKS_AT_ONCE):
        block = members[start : start + NETWORKS_AT_ONCE]
        weights = {j: server.client_weights(j) for j in block if f"kernel {j}" not in server.state}
        passed = dict(zip(weights, public_outputs(server, weights, "representations", rows), strict=True))
        for j in block:
            if j in passed:
                yield j, passed[j]
            else:
                yield j, dequantize_columns(move_group(get_group(server.state, f"kernel {j}"), server.device))


# the methods ---------------------------------------------------------------------------------------------------------


@hyperparameters
class KernelAlignment(Method):
    """What both algorithms share: the settings of the alignment, and a client's step with rows of the RAD."""

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
        return None if rad is None else move_together([rad], [next(client.model.parameters()).device])[0]

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

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        task = task_loss(model(batch.x), batch.y, batch.w)
        if "rad_x" not in context:
            return task
        with eval_mode(model):
            d = self.distance(model.represent(context["rad_x"]), context)
        return task + context["eta"] * d, {"d_cka": d, "d_cka_steps": torch.ones_like(d)}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        """The gradient of `loss`; a term with many rows is differentiated in chunks."""
        if "rad_x" not in context or len(context["rad_x"]) <= ROWS_AT_ONCE:
            return super().gradients(model, batch, context)
        task = super().gradients(model, batch, {name: value for name, value in context.items() if name != "rad_x"})
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
    uploads: Literal["weights", "kernels"] = "weights"  # "kernels": A_k of a fixed RAD instead of weights

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.uploads == "kernels" and not self.alignment_data.fixed:
            raise ValueError("uploads 'kernels': expected alignment_data.fixed = true, got false")
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

    staleness_weighting = "alike"

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

    @follows_device
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
        return {"rad": rad, "target": dequantize_columns(move_group(get_group(message, "factor"), rad.device))}

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
    """One architecture, averaged as in FedAvg; clients are aligned to the received weights (Algorithm 1).

    client k:  w_k <- w;  E epochs of SGD on  CE(f(x; w_k), y) + eta(t) d(K_k, K(w))
               K_k: the kernel of its representations of the L common inputs (RAD)
               K(w): that of the weights received
               d = 1 - CKA, or with "procrustes" the distance up to a rotation and a scale
               eta(t) = eta0 sqrt(t - 1)     or eta0 (t - 1), or eta0;  rounds t from 1
    server:    w <- sum over responding clients of n_k w_k / sum n_j
    Deviations from the paper: (1) The average over all clients at the end of Algorithm 1 is off by default
    (`final_average`), as in the authors' code, and on in the recipes for Table 1. (2) The Procrustes distance is free
    of scale. (3) FedHeNN's deviations concerning the RAD and the steps apply here, too.
    """

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
    final_average: bool = False  # average all clients' latest weights after the last round

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

    @follows_device
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
