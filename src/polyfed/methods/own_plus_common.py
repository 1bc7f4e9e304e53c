"""OwnPlusCommon: every client's own network, plus a linear model on fixed random features that all have in common
(after Fed3R, ICML 2024, and AFL, CVPR 2025).

phi(x) are fixed random features, pi_k the class shares of client k. f_k is trained as in Local.
client k:    sends n_k, M_k, S_k, the sums of ClosedForm, once
server:      W, b solved from the sums over clients
common:      t_k = log softmax(phi(x)' W + b + log pi_k)
prediction:  (1 - v_k) log softmax f_k(x) + v_k t_k(x);    numbers: (1 - v_k) f_k(x) + v_k t_k(x)
v_k:         4/5; or of 0, 1/5, 1/2 and 1 the best, if it gets fewer validation rows wrong
             by more than one standard error
Classes of which no rows have been sent yet, the client's own included, are judged by the network
alone. In a round after the last one all clients get W and choose v_k anew. With v = 0 it is Local,
with v = 1 ClosedForm, bit for bit.
Control: "permuted" shifts the classes of W and b by one at the server: a common model of other
classes.
The method is not from a paper. Deviations from its sources: (1) Fed3R (ICML 2024) and AFL (CVPR 2025) solve one model
for all from clients' sums, on a pre-trained extractor. GH-OFL (ICLR 2026, arXiv:2602.01186) has discriminant analysis
on pre-trained features. (2) APFL (arXiv:2003.13461) mixes a global and a local model of equal architecture. Products of
two models' probabilities are Hinton's *Products of Experts*, ICANN 1999.
Sent: down 2 (C D + 2 C), D features, whenever it changes; up once D (D + 1) + 2 (C D + C), D features (texts: 2 (C D +
C)). Kept: client: phi, W, b, n_k / N_k; server: n, M, S, W, b, with `keep_sums` n_k, M_k, S_k; client: v_k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State
from polyfed.core.method import Context, Exchange, Method, Requirements, TrainingResult, hyperparameters
from polyfed.functional.device_copies import in_float64
from polyfed.methods.closed_form import ClosedForm

_WEIGHT = 0.8  # v where nothing speaks for another
_OTHER_WEIGHTS = (0.0, 0.2, 0.5, 1.0)
_FEWEST = 2  # validation rows by which a standard error is known
_LAST = "last"


@hyperparameters
class OwnPlusCommon(ClosedForm):
    """Own networks, each plus one common closed-form model."""

    # v, the common model's share; not set: each client's validation rows choose
    weight: Annotated[float, Field(ge=0, le=1)] | None = None
    control: Literal["none", "permuted"] = "none"  # "permuted": the common model's classes are shifted by one

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (*self._map_exchanges(round), Exchange())

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange(_LAST, who="all", trains=False),)

    # server ------------------------------------------------------------------------------------------------
    def _solve(self, sums: Group, classes: int) -> dict[str, Tensor]:
        solution = super()._solve(sums, classes)
        if self.control == "none":
            return solution
        return {name: tensor if name == "shares" else tensor.roll(1, dims=-1) for name, tensor in solution.items()}

    # client ------------------------------------------------------------------------------------------------
    def forget_at_client(self, state: State, server: State) -> State:
        new = super().forget_at_client(state, server)
        if new is state:
            return state
        return {name: value for name, value in new.items() if name != "weight"}  # chosen again with the next solution

    def receive(self, client: Client, message: Message) -> Context:
        context = super().receive(client, message)
        if "solution" in message:
            self._choose_weight(client)
        return context

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        self._choose_weight(client)
        return super().upload(client, trained)

    def _choose_weight(self, client: Client) -> None:
        """v_k for the network and the common model of now, by validation rows, where there are enough."""
        rows = client.data.validation
        is_fixed = self.weight is not None or self.prior == "federation"
        if is_fixed or "solution" not in client.state or len(rows) < _FEWEST:
            return
        own = self._scores_of(client, lambda x: self._own(client.model, x, client.state))
        common = self._scores_of(client, lambda x: self._common(client.model, x, client.state))
        common = _known_or_own(own, common, client.state)
        chosen = _best_weight(own, common, rows.y)
        client.state["weight"] = torch.tensor(chosen, dtype=torch.float64)

    def _scores_of(self, client: Client, scores: Callable[[Tensor], Tensor]) -> Tensor:
        return inference.map_batches(scores, client.model, client.data.validation, client.prepare).cpu()

    def _common(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """t: log probabilities (N, C) of the common model, or numbers (N, 1); float64."""
        return ClosedForm.predict(self, model, x, context)

    def _own(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities (N, C) of the network, or numbers (N, 1); float64."""
        scores = in_float64(model(x))
        shares = context["solution"].get("shares")
        return scores if shares is None else torch.log_softmax(scores[:, : len(shares)], dim=1)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities, or numbers; before there is a common model, and with v = 0, what the network gives."""
        has_common = "solution" in context
        if has_common and self.prior == "federation":
            return self._common(model, x, context)
        weight = float(context.get("weight", _WEIGHT)) if self.weight is None else self.weight
        if not has_common or not weight:
            scores: Tensor = model(x)
            return scores
        common = self._common(model, x, context)
        if weight == 1:
            return common
        own = self._own(model, x, context)
        return _add(own, _known_or_own(own, common, context), weight)

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        """By the network alone, by the common model alone, and by it with the federation's class shares."""
        return {
            "network": replace(self, weight=0.0),
            "common": replace(self, weight=1.0),
            **super().alternative_predictors,
        }

    # declared -------------------------------------------------------------------------------------------------
    name = "own-plus-common"
    upload_form = ClosedForm.upload_form

    @property
    def requirements(self) -> Requirements:
        base = super().requirements
        why = "it shifts classes" if self.control == "permuted" else base.classes
        return replace(base, classes=why)


def _known_or_own(own: Tensor, common: Tensor, context: Context) -> Tensor:
    """The common model's scores; of a client's classes that no rows have been sent of yet, its network's."""
    shares = context["solution"].get("shares")
    if shares is None:
        return common
    is_unknown = (shares.to(own.device) == 0) & (context["own shares"].to(own.device) > 0)
    return torch.where(is_unknown, own, common)


def _best_weight(own: Tensor, common: Tensor, y: Tensor) -> float:
    """The usual weight, or the best of those by which more than one standard error fewer rows are wrong."""
    usual = _errors(_add(own, common, _WEIGHT), y)
    best, most = _WEIGHT, 0.0
    for weight in _OTHER_WEIGHTS:
        gained = usual - _errors(_add(own, common, weight), y)
        standard_error = float(gained.std()) / len(y) ** 0.5
        mean = float(gained.mean())
        # a single row gained is one standard error: not more, however it is rounded
        if mean > max((1 + 1e-9) * standard_error, most):
            best, most = weight, mean
    return best


def _add(own: Tensor, common: Tensor, weight: float) -> Tensor:
    """(1 - v) own + v common, where a log probability may be -inf."""
    if weight in {0, 1}:
        return common if weight else own
    return (1 - weight) * own + weight * common


def _errors(scores: Tensor, y: Tensor) -> Tensor:
    """Of each row, whether it is misclassified, or its squared error; (N,)."""
    if y.is_floating_point():
        return (scores[:, 0] - y.double()) ** 2
    return (scores.argmax(dim=1) != y).double()
