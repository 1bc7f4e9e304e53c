"""kNN-Per: the common network, mixed with each client's own nearest rows (Marfoq, Neglia, Kameni and Vidal, ICML 2022).

z(x) is the representation of the common network f, D its width; (x_n, y_n) are the client's training rows.
training:    FedAvg's
neighbors:   q(c | x) in proportion to the sum of exp(-||z(x) - z(x_n)||^2 / (D scale)) over those of the k nearest rows
             that are of class c
prediction:  (1 - v_k) softmax f(x) + v_k q(x)
v_k:         of 0, 0.1, ..., 1 the one that gets the fewest validation rows wrong, of equal ones the smallest; without
             validation rows 1/2
With v = 0 it is FedAvg, bit for bit.
Sent: down P; up P + 1. Kept: server: f.
Deviations from the paper (arXiv:2111.09360): (1) Distances are squared and divided by D, as in the authors' code; the
paper has exp(-||z(x) - z(x_n)||). (2) All training rows are kept; the paper also studies fewer. (3) The search is
exact; the authors' code uses an index. (4) Rows are looked up whenever a client is scored by what it receives, not only
after the last round; what it has trained itself is scored without them. (5) Different architectures are averaged as in
FedAvg.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Context, Requirements, TrainingResult, hyperparameters
from polyfed.functional.device_copies import in_float64
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg

_STEPS = 10  # v is a multiple of 1 / 10


@hyperparameters
class KNNPer(FedAvg):
    """Averaging of weights, mixed with each client's nearest rows."""

    k: Annotated[int, Field(ge=1)] = 10  # neighbors; all rows where a client has fewer
    scale: Annotated[float, Field(gt=0)] = 1.0  # of the distances; larger makes neighbors more alike
    # v, the neighbors' share; not set: each client's validation rows choose; 0: FedAvg
    weight: Annotated[float, Field(ge=0, le=1)] | None = None

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        if self.weight != 0:
            rows = client.data.train
            client.state["features"] = inference.representations(client.model, rows, client.prepare).cpu()
            client.state["labels"] = rows.y.cpu()
            client.state["weight"] = torch.tensor(self._weight(client), dtype=torch.float64)
        return {}

    def _weight(self, client: Client) -> float:
        """The neighbors' share v of a client at work."""
        if self.weight is not None:
            return self.weight
        rows = client.data.validation
        if not len(rows):
            return 0.5
        state = client.state

        def both(x: Tensor) -> Tensor:
            return torch.stack(self._probabilities(client.model, x, state), dim=1)

        found = inference.map_batches(both, client.model, rows, client.prepare).cpu()
        wrong = []
        for step in range(_STEPS + 1):
            mixed = torch.lerp(found[:, 0], found[:, 1], step / _STEPS)
            wrong.append(int((mixed.argmax(dim=1) != rows.y.cpu()).sum()))
        return wrong.index(min(wrong)) / _STEPS

    def _probabilities(self, model: Any, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Of each class (N, C), by the network and by the neighbors; float64."""
        z = model.represent(x)
        network = in_float64(model.head(z)).softmax(dim=1)
        rows = in_float64(context["features"]).to(network.device)
        labels = context["labels"].to(network.device)
        return network, neighbor_shares(in_float64(z), rows, labels, network.shape[1], self.k, self.scale)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities; what the network gives where no rows are kept."""
        if "features" not in context:
            return super().predict(model, x, context)
        network, neighbors = self._probabilities(model, x, context)
        mixed = torch.lerp(network, neighbors, float(context["weight"]))
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        for name in ("features", "labels", "weight"):  # they are of the network before it trained
            client.state.pop(name, None)
        return super().upload(client, trained)

    # declared -------------------------------------------------------------------------------------------------
    name = "knn-per"
    upload_form = FedAvg.upload_form
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        base = weight_averaging.requirements(self.aggregation, split_model=True)
        return dataclasses.replace(base, classes="its neighbors vote for classes")


def neighbor_shares(z_ND: Tensor, rows_MD: Tensor, labels_M: Tensor, classes: int, k: int, scale: float) -> Tensor:
    """Shares of the classes (N, C) among the k nearest rows, each weighted by exp(-distance^2 / (D scale)).

    Of the weights only their quotients count, so that far rows do not underflow.
    """
    exact = "donot_use_mm_for_euclid_dist"  # so that no row's distances depend on the others
    squares_NM = torch.cdist(z_ND, rows_MD, compute_mode=exact).square() / (z_ND.shape[1] * scale)
    nearest_NK, places_NK = squares_NM.topk(min(k, len(rows_MD)), dim=1, largest=False)
    shares_NC = z_ND.new_zeros(len(z_ND), classes)
    return shares_NC.scatter_add_(1, labels_M[places_NK], (-nearest_NK).softmax(dim=1))
