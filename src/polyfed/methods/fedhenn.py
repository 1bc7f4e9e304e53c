"""FedHeNN: representations aligned by their kernels (Makhija, Han, Ho and Ghosh, ICML 2022, arXiv:2202.07757).

X are L common unlabeled inputs (the RAD), and Phi_k is everything before the last layer of client k's network.
round t:   eta(t) = eta0 sqrt(t - 1), or eta0 (t - 1), or eta0;  rounds t from 1              `eta`
server:    draws X;  for every client j, by its latest weights, at first the initial ones
           A_j = Phi_j(X)  (L, d_j),  in eval mode;  K_j = A_j A_j^T
           K_bar = mean of K_j, with equal weights as in the paper;  no weights are averaged  `start_round`
           F = [H A_1 ... H A_N]  (L, sum_j d_j),  up to 256 columns, else its r = `kernel.rank` leading ones:
           F F^T = or ~ H K_bar H up to a factor, which CKA does not see                      `MeanKernelFactor`
           sends X and F                                                                      `broadcast`
client k:  E epochs of SGD on  CE(f(x; w_k), y) + eta(t) (1 - CKA(K_k, K_bar))  (eq. 6)       `loss`
           CKA(K, M) = tr(K H M H) / sqrt(tr(K H K H) tr(M H M H)),  H = I - 1 1^T / L centers  `cka`
up:        w_k, or A_k with uploads = "kernels"                                               `upload`
scored:    each client's own network, f(x; w_k)
`cka` and RBF kernels are in `functional.kernel_similarity`. The parts that both of the paper's algorithms have are
`building_blocks.kernel_alignment`: eta, the rows of X in a step, the loss's gradient in chunks. K_bar at the server is
`building_blocks.mean_kernel`, by `functional.mean_kernel_factor`, and X on its way `building_blocks.alignment_data`.
None of these needs to be read for the equations: `tests/functional/test_kernels.py` holds `cka`, its gradient and F to
K_bar, L x L and in NumPy, and `tests/methods/test_fedhenn.py` a round of the method.
Shapes: L rows of the RAD, B of them in a step, d_k feature width, r columns of the factor.
Sent: down L inputs + L r; up P (kernels: L d_k). Kept: client: a fixed RAD; server: latest w_k or A_k, a fixed RAD.
Deviations from the paper: (1) Each step uses `alignment_data.batch` rows of the RAD, drawn anew. The paper uses all L.
(2) K_k is computed in every step, as in the authors' code, or in every n-th (`alignment_data.every`), where the term
has n times the weight. Algorithms 1 and 2 compute it once per local epoch. (3) K_bar is sent as a factor. RBF kernels
enter it by Nystroem features. (4) The pass over the RAD runs in eval mode, without dropout and with BatchNorm's running
statistics. (5) The centering of CKA is that of the authors' code; eq. 4 leaves it out. (6) With kernel uploads, and
with `kernel.pool` "seen", K_bar is of those who have sent something, without initial weights. (7) Kernels with numbers
that are not finite are left out of K_bar. (8) Not in the paper: kernel uploads, transports, the gradient in chunks,
`kernel.norm` "fro" (each K_j over its norm).
The authors' code differs further: it draws the RAD from the clients' training images, and for images has cross entropy
of the last hidden layer and CKA of the log-softmax of the last one, after dropout; weight decay spares biases. eta(t) =
eta0 sqrt(t - 1) is theirs; the paper leaves eta(t) open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message
from polyfed.core.method import Batch, Context, TrainingResult, follows_device, hyperparameters, table
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.core.upload_forms import own_network
from polyfed.functional.kernel_similarity import kernel_distance
from polyfed.functional.losses import task_loss
from polyfed.functional.modes import eval_mode
from polyfed.methods.building_blocks.alignment_data import ACKNOWLEDGMENT
from polyfed.methods.building_blocks.kernel_alignment import KernelAlignment
from polyfed.methods.building_blocks.mean_kernel import REPRESENTATION, MeanKernel


@hyperparameters
class FedHeNN(KernelAlignment):
    """Personal networks, aligned to the mean kernel of all clients (Algorithm 2)."""

    kernel: Annotated[MeanKernel, table(MeanKernel)] = MeanKernel()
    uploads: Literal["weights", "kernels"] = "weights"  # "kernels": A_k of a fixed RAD instead of weights

    # server: X and K_bar of a round ------------------------------------------------------------------------
    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        """Draw X; the mean kernel of the clients' latest weights, or of the representations that they sent."""
        if self.uses_rad(server.round):
            self.alignment_data.draw(server)
        if self.eta(server.round) > 0:
            self.kernel.average(server, selected, of_weights=self.uploads == "weights")

    def broadcast(self, server: Server, client_id: int) -> Message:
        factor = self.kernel.broadcast(server, client_id)
        if not factor and self.uploads == "weights":
            return {}  # nobody to be aligned to yet
        return {**self.alignment_data.broadcast(server, client_id), **factor}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        rad = self.receive_rad(client, message)
        return {} if rad is None else {"rad": rad, **self.kernel.receive(message, rad)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        task = task_loss(model(batch.x), batch.y, batch.w)
        if "rad_x" not in context:  # eta(t) is 0, or another step has the term
            return task
        with eval_mode(model):
            a_Bd = model.represent(context["rad_x"])
        distance = self.distance(a_Bd, context)
        return task + context["eta"] * distance, {"d_cka": distance, "d_cka_steps": torch.ones_like(distance)}  # eq. 6

    def distance(self, a_Bd: Tensor, context: Context) -> Tensor:
        """d_CKA = 1 - CKA(K_k, K_bar), both of a step's rows of X; the kernel of the factor F is K_bar's."""
        kernel = self.kernel
        return kernel_distance(kernel.similarity, a_Bd, context["rad_target"], factor=True, width=kernel.width)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message: dict[str, Tensor | Group] = {**self.alignment_data.acknowledge(client)}
        if self.uploads == "weights":
            message["model"] = float_state(client.model)
        elif self.uses_rad(client.round + 1) and "rad" in client.context:
            message["kernel"] = self.kernel.upload(client, client.context["rad"])
        return message

    # server: what K_bar of the next round is made of -----------------------------------------------------------
    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        self.alignment_data.end_round(server, uploads)
        self.kernel.end_round(server, uploads)

    # rounds with X ------------------------------------------------------------------------------------------
    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.uploads == "kernels" and not self.alignment_data.fixed:
            raise ValueError("uploads 'kernels': expected alignment_data.fixed = true, got false")
        return self

    def uses_rad(self, round: int) -> bool:
        """Also in round 1 with kernel uploads, which round 2 needs."""
        return self.eta(round) > 0 or (self.uploads == "kernels" and self.eta(2) > 0)

    # declared -------------------------------------------------------------------------------------------------
    staleness_weighting = "alike"
    upload_form = {"model": own_network, "kernel": REPRESENTATION, "rad_draw": ACKNOWLEDGMENT}
    delta_entries = ("model",)

    @property
    def is_control(self) -> bool:
        return self.kernel.control != "none"

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        if self.uploads == "weights":
            return {"model": "whole weights, of which none are sent down"}
        return {}
