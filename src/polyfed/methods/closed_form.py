"""ClosedForm: one linear model on fixed random features, solved from sums that every client sends once.

phi: a map drawn from the run's seed, the same at every client and never sent (`functional.random_features`).
client k, once:  n_k[c] = rows of class c,  M_k[c] = sum of phi(x) over them,  S_k = sum of phi(x) phi(x)' over all rows
server:          n, M, S = sums over the clients heard;  mu_c = M_c / n_c
                 Sigma = (S - sum_c n_c mu_c mu_c') / N,  A = (1 - s) Sigma + s tr(Sigma) / D I
                 W = A^-1 mu',  b_c = - mu_c' W_c / 2
prediction:      softmax(phi(x)' W + b + log pi),  pi: the client's own class shares, or the federation's
Texts:           phi counts words, no S is sent, W_vc = log p(v | c) with a = s / (1 - s) more of each word, b = 0.
Numbers:         ridge regression of y on phi(x), from the same sums of (phi(x), y); y is in each client's own unit.
No network is trained or sent. It is a control: what are the others' rows worth to a linear model, together and alone?
W of any grouping of the rows is the same, and a client's rows can be subtracted again.

After closed forms on a pre-trained extractor: Fed3R (Fani et al., ICML 2024, arXiv:2406.01116) and AFL (He et al., CVPR
2025, arXiv:2405.16240). The classifier is Friedman's regularized discriminant analysis (JASA 1989). Maps: random
kitchen sinks (Rahimi and Recht, NeurIPS 2007), random patches (Coates and Ng, NeurIPS 2011), ROCKET (Dempster et al.,
DMKD 2020).
Deviations from Fed3R and AFL: (1) phi is random instead of pre-trained, so that no other data are needed. (2) A
discriminant analysis with class shares of the client's own, where they have one ridge regression onto one-hot classes.
(3) No fine-tuning follows.
Shapes: D features, C classes, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, get_group, get_tensor, members
from polyfed.core.method import (
    Context,
    Exchange,
    Method,
    MethodCard,
    Requirements,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, UploadContext, UpTo
from polyfed.functional import class_statistics
from polyfed.functional.random_features import apply_map, draw_map

_MOST_FEATURES = 2**20
_SUMS = ("counts", "sums", "products")


def _classes(known: UploadContext) -> int:
    """C; where numbers are predicted all rows are one class."""
    return known.server.classes or 1


@hyperparameters
class ClosedForm(Method):
    """A linear model on fixed random features, solved at the server from sums of rows."""

    card = MethodCard(
        name="closed-form",
        paper="after Fed3R, ICML 2024, and AFL, CVPR 2025",
        down="2 (C D + 2 C), D features, whenever it changes",
        up="once D (D + 1) + 2 (C D + C), D features (texts: 2 (C D + C))",
        states="client: phi, W, b, n_k; server: n, M, S, W, b",
        form={
            "counts": Entry((_classes,), (torch.int64,), 0, "N"),
            "sums": Entry((_classes, UpTo("D", _MOST_FEATURES)), (torch.float64,)),
            "products": Entry((UpTo("D (D + 1) / 2", _MOST_FEATURES**2),), (torch.float64,)),
            "holds": Entry(types=(torch.int64,), least=0),
        },
    )

    features: Annotated[int, Field(ge=1)] = 576  # D, numbers that an input becomes; of texts the words are counted
    shrinkage: Annotated[float, Field(gt=0, lt=1)] = 0.1  # s, the covariance's towards a multiple of I
    prior: Literal["own", "federation"] = "own"  # pi: class shares of the client's own rows, or of all that were sent

    requirements = Requirements(shared_outputs="it adds up rows by class")
    evaluation_stage = "received"
    accepts_stale_uploads = True  # sums are the same in any round
    supports_dp_sgd = False

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return dict.fromkeys(_SUMS, "exact sums of rows, which would be solved with all that was done to them")

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(trains=False),)

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        held = members(server.state, "held").get(str(client_id))
        message: State = {} if held is None else {"heard": torch.ones((), dtype=torch.uint8)}
        if "solution" not in server.state:
            return message
        solved = get_tensor(server.state, "solved")
        if held is None or int(held) != int(solved):
            message |= {"solved": solved, "solution": dict(get_group(server.state, "solution"))}
        return message

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        held = members(server.state, "held")
        new = [message for i, message in uploads.items() if "sums" in message and str(i) not in held]
        if uploads:
            server.state["held"] = {**held, **{str(i): get_tensor(m, "holds") for i, m in uploads.items()}}
        for message in new:
            sums = {name: get_tensor(message, name) for name in _SUMS if name in message}
            before = members(server.state, "sums")
            server.state["sums"] = class_statistics.add(before, sums) if before else sums
        if not new:
            return
        server.state["solution"] = self._solve(server)
        server.state["solved"] = torch.tensor(server.round)

    def _solve(self, server: Server) -> dict[str, Tensor]:
        """W (D, C), b (C,) and, of classes, n (C,)."""
        sums = get_group(server.state, "sums")
        if not server.classes:
            weight, bias = class_statistics.ridge(sums, self.shrinkage)
            return {"weight": weight, "bias": bias}
        solve = class_statistics.discriminant if "products" in sums else class_statistics.naive_bayes
        weight, bias = solve(sums, self.shrinkage)
        return {"weight": weight, "bias": bias, "counts": sums["counts"].clone()}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "map" not in client.state:
            example = client.prepare(client.data.train.x[:1])
            draws = generator(client.seed, "random features")
            client.state["map"] = draw_map(example, self.features, draws, client.categories, client.words)
        if "solution" in message:
            client.state["solved"] = get_tensor(message, "solved").clone()
            solution = get_group(message, "solution")
            client.state["solution"] = {name: tensor.clone() for name, tensor in solution.items()}
            if client.classes:
                client.state["own counts"] = client.data.train.y.bincount(minlength=client.classes)
        return {"heard": "heard" in message}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        holds = get_tensor(client.state, "solved") if "solved" in client.state else torch.tensor(0)
        if client.context["heard"]:
            return {"holds": holds}
        drawn = get_group(client.state, "map")
        train = client.data.train
        phi_ND = inference.map_batches(lambda x: apply_map(drawn, x), client.model, train, client.prepare).cpu()
        is_second_order = not client.classes or "words" not in drawn
        return {"holds": holds, **class_statistics.sum_rows(phi_ND, train.y, client.classes, is_second_order)}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities, or numbers; before anybody has sent anything what the network gives."""
        if "solution" not in context:
            scores: Tensor = model(x)
            return scores
        solution: Group = context["solution"]
        phi_ND = apply_map(context["map"], x).cpu().double()  # not every device has float64
        scores_NC = phi_ND @ solution["weight"].cpu() + solution["bias"].cpu()
        if "counts" not in solution:
            return scores_NC
        counts_C = solution["counts"].cpu()
        prior_C = counts_C if self.prior == "federation" else context["own counts"].cpu()
        return class_statistics.log_posterior(scores_NC, counts_C, prior_C)

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        other: Literal["own", "federation"] = "own" if self.prior == "federation" else "federation"
        return {other: replace(self, prior=other)}
