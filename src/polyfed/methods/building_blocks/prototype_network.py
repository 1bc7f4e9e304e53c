"""A network at the server whose outputs are the prototypes, fitted to the clients' class means (FedTGP).

P = W_2 relu(W_1 E + b_1) + b_2, row by row; E has one row per class and is trained, too. Its weights are "network" in
the server's state.

Shapes: C classes, D features, H hidden units, M rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.core.message import get_group, get_tensor
from polyfed.core.modules import as_split_model
from polyfed.core.server import Server
from polyfed.methods.building_blocks import prototypes

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # prototypes (C, D), rows (M, D), labels (M,) int64 -> 0-d


def init(server: Server) -> None:
    """Draw the network; its hidden layer is as wide as the representations."""
    features = as_split_model(server.model(server.architectures[0], {})).feature_dim
    draws = server.generator("prototypes")
    server.state["network"] = init_network(server.classes, features, features, draws)


def fit(server: Server, sent: prototypes.ClassRows, loss: Loss, epochs: int, lr: float) -> None:
    """Train the network on the class means that were sent; the prototypes of all classes ever sent are its outputs."""
    network, server.log["prototype_loss"] = train_network(
        get_group(server.state, "network"),
        sent.rows,
        sent.labels,
        loss,
        epochs,
        server.training.batch_size,
        lr,
        server.generator("means"),
    )
    before = [get_tensor(server.state, "labels")] if "labels" in server.state else []
    labels = torch.cat([*before, sent.labels]).unique()
    server.state |= {"network": network, "labels": labels, "prototypes": outputs(network)[labels.long()]}


def init_network(classes: int, hidden: int, features: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Initial weights, drawn from `draws`: E standard normal, layers uniform within 1 / sqrt(inputs)."""
    made = {"embedding": torch.randn(classes, features, generator=draws)}
    for layer, inputs, outputs in (("hidden", features, hidden), ("output", hidden, features)):
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
            made[f"{layer}.{name}"] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draws)
    return made


def outputs(weights: Mapping[str, Tensor]) -> Tensor:
    """P (C, D)."""
    return F.linear(_hidden(weights), weights["output.weight"], weights["output.bias"])


def _hidden(weights: Mapping[str, Tensor]) -> Tensor:
    return F.relu(F.linear(weights["embedding"], weights["hidden.weight"], weights["hidden.bias"]))


def train_network(
    weights: Mapping[str, Tensor],
    rows_MD: Tensor,
    labels_M: Tensor,
    loss: Loss,
    epochs: int,
    batch: int,
    lr: float,
    draws: torch.Generator,
) -> tuple[dict[str, Tensor], float]:
    """SGD on a loss of the prototypes, in shuffled batches of the rows.

    The new weights, and the loss of the last epoch, a mean over its batches by their sizes.
    """
    now = {name: t.detach().clone() for name, t in weights.items()}
    labels_M = labels_M.long()
    losses: list[tuple[Tensor, int]] = []  # losses of an epoch's batches, and the rows of each
    for _ in range(epochs):
        order = torch.randperm(len(labels_M), generator=draws)
        losses.clear()
        for some_BD, own_B in zip(rows_MD[order].split(batch), labels_M[order].split(batch), strict=True):
            hidden_CH = _hidden(now)
            p_CD = F.linear(hidden_CH, now["output.weight"], now["output.bias"]).requires_grad_()
            value = loss(p_CD, some_BD, own_B)
            (of_p_CD,) = torch.autograd.grad(value, [p_CD])
            _step(now, hidden_CH, of_p_CD, lr)
            losses.append((value.detach(), len(own_B)))
    return now, sum(float(value) * count for value, count in losses) / len(labels_M)


def _step(weights: dict[str, Tensor], hidden_CH: Tensor, of_p_CD: Tensor, lr: float) -> None:
    """One step down the loss's gradient in P, by the chain rule through H = relu(E W_1' + b_1) and P = H W_2' + b_2.

    dW_2 = dP' H;  dH = (dP W_2) [H > 0],  dW_1 = dH' E;  dE = dH W_1;  db_2, db_1 are the sums of dP's and dH's rows.
    Products are subtracted from the weights as they are taken: autograd, with which `test_fedtgp.py` compares a step,
    writes each gradient out first.
    """
    of_hidden_CH = (of_p_CD @ weights["output.weight"]) * (hidden_CH > 0)
    of_embedding = of_hidden_CH @ weights["hidden.weight"]
    weights["output.weight"].addmm_(of_p_CD.T, hidden_CH, alpha=-lr)
    weights["output.bias"].sub_(of_p_CD.sum(dim=0), alpha=lr)
    weights["hidden.weight"].addmm_(of_hidden_CH.T, weights["embedding"], alpha=-lr)
    weights["hidden.bias"].sub_(of_hidden_CH.sum(dim=0), alpha=lr)
    weights["embedding"].sub_(of_embedding, alpha=lr)
