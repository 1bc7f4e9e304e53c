"""FedRE: a global header trained on one random mixture of class means per client (Yao et al., CVPR 2026; a reading).

client k:  theta_k <- theta;  E epochs of SGD on CE(H(theta_k; F_k(x)), y), over F_k and header H
           Rbar_k^s = mean of F_k(x) over its samples of class s, in eval mode
           a_s = u_s / sum u,  u_s uniform in (0, 1]
           r_k = sum_s a_s Rbar_k^s;  q_k = sum_s a_s onehot(s)
server:    theta <- theta - eta grad sum_k sum_c q_kc CE(H(theta; r_k), c)
           in shuffled batches of 32 clients
This is a reading: from the abstract and the authors' code; the paper's equations were not at
hand.
Sent: down C D + C; up D + C. Kept: server: the header.
Deviations from the paper (arXiv:2511.22265): (1) Class means are mixed, as in the authors' code; the abstract mixes
"local representations". (2) The loss is summed over a batch, as in that code. (3) An encoding has C numbers; that code
uploads pairs of weight and label. (4) What the paper's tables score is not known. One of two versions of that code
sends the newest header to all clients before each round, which is the stage scored here; the other sends none. (5)
Class means are over all training samples; that code leaves out a last, ragged batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.inference import representations
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import class_means
from polyfed.methods.building_blocks.trained_header import TrainedHeader

HEADER_BATCH = 32  # mixtures per step; their losses are summed


@hyperparameters
class FedRE(TrainedHeader):
    """A global header, trained by the server on one random mixture of class means per client."""

    header_lr: Annotated[float, Field(ge=0)] = 0.01  # eta, learning rate of the header; 0: it stays as drawn
    header_epochs: Annotated[int, Field(ge=1)] = 1  # passes over the received mixtures per round

    # server ------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = [message for message in uploads.values() if "encoding" in message]
        if not sent:
            return
        mixtures_MD = torch.stack([get_tensor(message, "representation") for message in sent]).float()
        encodings_MC = torch.stack([get_tensor(message, "encoding") for message in sent]).float()
        header = get_group(server.state, "header")
        theta = header["weight"]
        bias = header["bias"]
        beyond = len(bias) - encodings_MC.shape[1]  # outputs of the header that are no classes
        encodings_MC = torch.nn.functional.pad(encodings_MC, (0, beyond))
        draws = server.generator("header")
        for _ in range(self.header_epochs):
            for some in torch.randperm(len(sent), generator=draws).split(HEADER_BATCH):
                theta, bias = soft_header_sgd_step(theta, bias, mixtures_MD[some], encodings_MC[some], self.header_lr)
        server.state["header"] = {"weight": theta, "bias": bias}

    # client ------------------------------------------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        train = client.data.train
        z_ND = representations(client.model, train, client.prepare)
        labels_S, means_SD, _ = class_means(z_ND, train.y, client.classes, train.at(z_ND.device).y)
        weights_S = 1 - torch.rand(len(labels_S), generator=client.generator("entangle"))
        representation, encoding = entangle(means_SD, labels_S, weights_S, client.classes)
        return {"representation": representation, "encoding": encoding}

    # declared -------------------------------------------------------------------------------------------------
    evaluation_stage = "received"
    upload_form = {
        "representation": upload_forms.Entry(("D",)),
        "encoding": upload_forms.Entry(("C",), least=0, most=1),
    }

    entries_of_rows = ("representation",)

    fixed_entries = {"encoding": "the mixture's weights, which noise would leave none"}


def entangle(rows_SD: Tensor, labels_S: Tensor, weights_S: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mixture of the rows, and that of their one-hot labels, by the same weights, which are divided by their sum.

    Args:
        rows_SD: one row per class. labels_S: these classes, each once. weights_S: positive.

    Returns:
        The representation (D,), as `rows_SD`, and the label encoding (C,), which sums to 1, where the labels lie.

    Source: Yao et al. (FedRE), CVPR 2026, the entangled representation and the entangled-label encoding.

    >>> entangle(torch.tensor([[4.0, 0.0], [0.0, 8.0]]), torch.tensor([2, 0]), torch.tensor([1.0, 3.0]), classes=3)
    (tensor([1., 6.]), tensor([0.7500, 0.0000, 0.2500]))
    """
    shares_S = (weights_S / weights_S.sum()).to(rows_SD.dtype)
    encoding_C = shares_S.new_zeros(classes)
    encoding_C[labels_S.long()] = shares_S
    return shares_S.to(rows_SD.device) @ rows_SD, encoding_C


def soft_header_sgd_step(
    weight_CD: Tensor, bias_C: Tensor, z_MD: Tensor, encodings_MC: Tensor, lr: float
) -> tuple[Tensor, Tensor]:
    """One SGD step of a linear header on the cross entropy to label encodings, summed over M mixtures, in closed form.

    With p_m = softmax(theta z_m + b) and q_m the encoding:
    grad theta = sum_m (p_m - q_m) z_m^T,  grad b = sum_m (p_m - q_m).

    Source: FedRE, the loss of the global classifier.
    """
    residual_MC = torch.softmax(z_MD @ weight_CD.T + bias_C, dim=1) - encodings_MC
    return weight_CD - lr * residual_MC.T @ z_MD, bias_C - lr * residual_MC.sum(dim=0)
