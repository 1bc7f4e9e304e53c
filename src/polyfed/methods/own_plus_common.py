"""OwnPlusCommon: every client's own network, plus the linear model of ClosedForm that all have in common
(after Fed3R, ICML 2024, and AFL, CVPR 2025).

phi(x) are the fixed features of ClosedForm, pi_k the class shares of client k. f_k is trained as in Local.
client k:    sends n_k, M_k, S_k, the sums of ClosedForm, once
server:      W, b solved from the sums over clients
common:      t_k = log softmax(tau_k (phi(x)' W + b) + log pi_k)
own:         o_k = log softmax(u_k f_k(x))
prediction:  (1 - v) o_k(x) + v t_k(x), v = 4/5;    numbers: (1 - v) f_k(x) + v t_k(x)
tau_k, u_k:  temperatures, each chosen by the client's validation rows as in ClosedForm; without any 1/2
In a round after the last one all clients get the newest W.
With v = 0 it is Local, with v = 1 ClosedForm, bit for bit.
Control: "permuted" shifts the classes of W and b by one at the server: a common model of other
classes.
The method is not from a paper. Deviations from its sources: (1) Fed3R (ICML 2024) and AFL (CVPR 2025) solve one model
for all from clients' sums, on a pre-trained extractor. GH-OFL (ICLR 2026, arXiv:2602.01186) has discriminant analysis
on pre-trained features. (2) Fan et al. (2025, arXiv:2508.10732) and FedHiP (arXiv:2508.04470) add to such a model a
personal closed form on the same features; here it is a network that each client trains. (3) Federated residual learning
(arXiv:2003.12880) adds the outputs of a common and an own model and trains both. APFL (arXiv:2003.13461) mixes those of
a global and a local network of one architecture, with a weight that is learnt; kNN-Per (Marfoq et al., ICML 2022) those
of a global network and of a client's nearest rows, with one chosen by validation rows. Here v is fixed: chosen by a
client's few validation rows it was worse on other rows. Products of two models' probabilities are Hinton's *Products of
Experts*, ICANN 1999.
Sent: down 2 (C D + 2 C), D features, whenever it changes; up once D (D + 1) + 2 (C D + C), D features (texts: 2 (C D +
C)). Kept: client: phi, W, b, n_k / N_k; server: n, M, S, W, b, with `keep_sums` n_k, M_k, S_k; client: tau_k, u_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message
from polyfed.core.method import Context, Exchange, Method, Requirements, TrainingResult, hyperparameters
from polyfed.functional.device_copies import in_float64
from polyfed.methods.building_blocks import solved_model
from polyfed.methods.closed_form import ClosedForm


@hyperparameters
class OwnPlusCommon(ClosedForm):
    """Own networks, each plus one common closed-form model."""

    weight: Annotated[float, Field(ge=0, le=1)] = 0.8  # v, the common model's share
    control: Literal["none", "permuted"] = "none"  # "permuted": the common model's classes are shifted by one

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(),)

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange("last", who="all", trains=False),)

    # server ------------------------------------------------------------------------------------------------
    def solve(self, sums: Group, classes: int) -> dict[str, Tensor]:
        solution = super().solve(sums, classes)
        if self.control == "none":
            return solution
        return {name: tensor if name == "shares" else tensor.roll(1, dims=-1) for name, tensor in solution.items()}

    # client ------------------------------------------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if trained.steps and client.classes and 0 < self.weight < 1 and self.temperature is None:
            alike = torch.ones(client.classes)  # what the network gives has the client's shares in it

            def scores(x: Tensor) -> Tensor:
                return in_float64(client.model(x))[:, : client.classes]

            solved_model.choose_temperature(client, "own temperature", scores, alike, alike)
        return super().upload(client, trained)

    def _own(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """o: log probabilities (N, C) of the network, or numbers (N, 1); float64."""
        temperature = self._temperature(context, "own temperature")
        scores = in_float64(model(x))
        shares = context["solution"].get("shares")
        return scores if shares is None else torch.log_softmax(temperature * scores[:, : len(shares)], dim=1)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities, or numbers; before there is a common model, and with v = 0, what the network gives."""
        if "solution" not in context or not self.weight:
            scores: Tensor = model(x)
            return scores
        if self.weight == 1 or self.prior == "federation":
            return super().predict(model, x, context)
        common = super().predict(model, x, context)
        return (1 - self.weight) * self._own(model, x, context) + self.weight * common

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        """By what is own alone, by the common model alone, and by it with the federation's class shares."""
        return {
            "network": replace(self, weight=0.0),
            "common": replace(self, weight=1.0),
            **super().alternative_predictors,
        }

    # declared -------------------------------------------------------------------------------------------------
    name = "own-plus-common"
    upload_form = ClosedForm.upload_form
    addends = ClosedForm.addends  # what goes up is the same

    @property
    def requirements(self) -> Requirements:
        base = super().requirements
        why = "it shifts classes" if self.control == "permuted" else base.classes
        return replace(base, classes=why)
