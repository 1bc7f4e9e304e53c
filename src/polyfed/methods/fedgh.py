"""FedGH: a global header trained on class means (Yi et al., ACM MM 2023, doi:10.1145/3581783.3611781).

S_k: classes of client k's training data; D_k^s: its samples of class s. A local average representation (LAR) is the
mean of one class.
client k:  theta_k <- theta;  E epochs of SGD on CE(H(theta_k; F_k(x)), y), over extractor and header
           Rbar_k^s = mean of F_k(x) over D_k^s, in eval mode, for each s in S_k        (a LAR; eq. 3)
server:    theta <- theta - eta_theta grad CE(H(theta; Rbar_k^s), s), pair by pair      (eq. 4)
Sent: down C D + C; up S D + S. Kept: server: the header.
Deviations from the paper: (1) Eq. 4 does not define one step. The default is one step per pair; `header_batch` has the
other readings. (2) The gradient of a header step is clipped at norm 50, as in the authors' code. With ReLU features
this norm is not reached. (3) In the authors' code, the server's optimizer does not contain the header, so that the
header keeps its initial value (`header_lr = 0`). The code also averages the means of minibatches, augments test images,
and sends no initial header. (4) Another public implementation trains the header for 100 epochs in shuffled batches:
`header_batch = 10, header_epochs = 100`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.inference import representations
from polyfed.core.message import Message, get_group, get_tensor, nbytes
from polyfed.core.method import Context, Exposed, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import as_split_model, load_state
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import class_means
from polyfed.functional.clipping import clip_factors

_MAX_GRAD_NORM = 50.0  # largest gradient norm of a header step


@hyperparameters
class FedGH(Method):
    """A global header, trained by the server on class means of representations."""

    header_lr: Annotated[float, Field(ge=0)] = 0.01  # eta_theta, learning rate of the header; 0: it stays random
    header_epochs: Annotated[int, Field(ge=1)] = 1  # passes over the received pairs per round
    # pairs per header step: "lar": one; "client": those of a client; "round": all; a number: so many, shuffled
    header_batch: Literal["lar", "client", "round"] | Annotated[int, Field(ge=1)] = "lar"
    control: Literal["none", "noise"] = "none"  # "noise": clients send noise with the mean and spread of their LARs

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        first = server.architectures[0]
        head = as_split_model(server.model(first, server.initial_state(first))).head
        server.state["header"] = {name: t.detach().cpu().clone() for name, t in head.state_dict().items()}

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"header": get_group(server.state, "header")}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        by_client = {i: m for i, m in uploads.items() if "lars" in m and len(get_tensor(m, "labels"))}
        if not by_client:
            return
        sent = list(by_client.values())
        lars_MD = torch.cat([get_tensor(message, "lars") for message in sent]).float()
        labels_M = torch.cat([get_tensor(message, "labels") for message in sent]).long()
        header = get_group(server.state, "header")
        theta = header["weight"]
        bias = header["bias"]
        sizes = [len(get_tensor(message, "labels")) for message in sent]
        shares = [server.upload_weight(i) for i in by_client]
        weights_M = torch.cat([torch.full((size,), share) for size, share in zip(sizes, shares, strict=True)])
        for rows in self._steps(sizes, server.generator("header")):
            lr = self.header_lr * float(weights_M[rows].mean())  # a step normalizes the weights of its pairs
            theta, bias = header_sgd_step(
                theta, bias, lars_MD[rows], labels_M[rows], weights_M[rows], lr, _MAX_GRAD_NORM
            )
        server.state["header"] = {"weight": theta, "bias": bias}

    def _steps(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Indices of the pairs of each header step, over all epochs."""
        count = sum(sizes)
        for _ in range(self.header_epochs):
            if self.header_batch == "lar":
                yield from torch.arange(count).split(1)
            elif self.header_batch == "client":
                yield from torch.arange(count).split(sizes)
            elif self.header_batch == "round":
                yield torch.arange(count)
            else:
                yield from torch.randperm(count, generator=generator).split(self.header_batch)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load_state(as_split_model(client.model).head, get_group(message, "header"))
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        train = client.data.train
        z_ND = representations(client.model, train, client.prepare)
        labels, lars, _ = class_means(z_ND, train.y, client.classes, train.at(z_ND.device).y)
        if self.control == "noise":
            noise = torch.randn(lars.shape, generator=client.generator("noise")).to(lars.device)
            lars = lars.mean() + lars.std(correction=0) * noise
        return {"labels": labels, "lars": lars}

    # accounting --------------------------------------------------------------------------------------------
    def nbytes_in_paper(self, message: Message) -> int:
        """Bytes without the header's bias, as in Table 3."""
        bias = get_group(message, "header")["bias"] if "header" in message else torch.empty(0)
        return nbytes(message) - nbytes({"bias": bias})

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(
        split_model=True,
        same_feature_dim=True,
        same_head=True,
        linear_head=True,
        classes="the server trains the header on means of classes",
        hint="set models.feature_dim to add a projection, or use fedhenn, which compares kernels",
    )
    staleness_weighting = "uploads"
    upload_form = {"labels": upload_forms.LABELS, "lars": upload_forms.rows_of("D")}
    unaligned_entries = ("lars",)

    exposed = Exposed("prototypes", "lars", lambda client: as_split_model(client.model).represent)


def header_sgd_step(
    weight_CD: Tensor, bias_C: Tensor, z_MD: Tensor, y_M: Tensor, w_M: Tensor, lr: float, clip: float
) -> tuple[Tensor, Tensor]:
    """One SGD step of a linear header on the weighted mean cross entropy over M pairs, by its closed form.

    With p_m = softmax(theta z_m + b) and v_m = w_m / sum w:
    grad theta = sum_m v_m (p_m - onehot(y_m)) z_m^T,  grad b = sum_m v_m (p_m - onehot(y_m)).

    Only the ratios of the weights count, so a weight has no effect on a single pair. If all are 0 nothing moves.

    clip is the largest norm of (grad theta, grad b) taken together; 0: no limit.

    Source: eq. 4; Jensen's inequality makes this a lower bound of the loss on all representations.
    """
    w_M = w_M.to(weight_CD.dtype)
    total = w_M.sum()
    v_M = w_M / torch.where(total > 0, total, torch.ones_like(total))
    p_MC = torch.log_softmax(z_MD @ weight_CD.T + bias_C, dim=1).exp()
    onehot_MC = F.one_hot(y_M.long(), len(weight_CD)).to(p_MC.dtype)
    residual_MC = v_M.unsqueeze(1) * (p_MC - onehot_MC)
    grad_weight_CD = residual_MC.T @ z_MD
    grad_bias_C = residual_MC.sum(dim=0)
    if clip:
        norm = (grad_weight_CD.square().sum() + grad_bias_C.square().sum()).sqrt()
        shrink = clip_factors(norm, clip)
        grad_weight_CD = shrink * grad_weight_CD
        grad_bias_C = shrink * grad_bias_C
    return weight_CD - lr * grad_weight_CD, bias_C - lr * grad_bias_C
