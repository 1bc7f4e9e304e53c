"""OwnPlusCommon: every client's own network, plus a linear model on fixed random features that all have in common.

f_k(x): outputs of client k's own network, of any architecture; it is trained as in Local and never sent.
t_k(x) = log softmax(phi(x)' W + b + log pi_k): the common model, from sums that every client sends once, pi_k the class
         shares of its own rows (`methods.closed_form`, where the equations of phi, W and b stand).
prediction of client k:  (1 - v_k) log softmax f_k(x) + v_k t_k(x).   Numbers: (1 - v_k) f_k(x) + v_k t_k(x).
v_k:     4/5, unless another of 0, 1/5, 1/2 and 1 predicts the client's validation rows better, by more than one
         standard error of the difference per row. With much data of its own a client comes back to its network.
Inputs unlike a client's own (newcomers, classes it lacks): t alone, with the federation's class shares for pi.
Sent:    what ClosedForm sends. In a round after the last one all clients get W and choose v_k anew.
With v = 0 it is Local, with v = 1 ClosedForm, bit for bit.
Control: "permuted" shifts the classes of W and b by one at the server: a common model of other classes.

Not from a paper. Sums over clients in closed form: Fed3R (ICML 2024) and AFL (CVPR 2025), on a pre-trained extractor,
one model for all. A product of two models' probabilities: Hinton, "Products of experts" (ICANN 1999).
Shapes: D features, C classes, N rows.
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
from polyfed.core.message import Group, Message, get_tensor
from polyfed.core.method import Context, Exchange, Method, Requirements, hyperparameters
from polyfed.methods.closed_form import ClosedForm

_WEIGHT = 0.8  # v where nothing speaks for another
_OTHER_WEIGHTS = (0.0, 0.2, 0.5, 1.0)
_LAST = "last"
_VALIDATED = "scores of validation rows"  # the common model's, kept as long as it is the same


@hyperparameters
class OwnPlusCommon(ClosedForm):
    """Own networks of any architecture, each plus one common closed-form model."""

    card = replace(
        ClosedForm.card,
        name="own-plus-common",
        paper="Local plus a closed form after Fed3R, ICML 2024, and AFL, CVPR 2025",
        states=f"{ClosedForm.card.states}; client: v_k",
    )

    weight: Annotated[float, Field(ge=0, le=1)] | None = None  # v; None: each client's validation rows choose
    control: Literal["none", "permuted"] = "none"  # "permuted": the common model's classes are shifted by one

    @property
    def is_control(self) -> bool:
        return self.control != "none"

    @property
    def requirements(self) -> Requirements:
        base = super().requirements
        why = "it shifts classes" if self.control == "permuted" else base.classes
        return replace(base, classes=why)

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(),)

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange(_LAST, who="all", trains=False),)

    # server ------------------------------------------------------------------------------------------------
    def _solve(self, sums: Group, classes: int) -> dict[str, Tensor]:
        solution = super()._solve(sums, classes)
        if self.control == "none":
            return solution
        return {name: tensor.roll(1, dims=-1) for name, tensor in solution.items()}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        context = super().receive(client, message)
        if self.weight is None and "solution" in client.state and len(client.data.validation):
            if "solution" in message or _VALIDATED not in client.state:
                client.state[_VALIDATED] = self._scores_of_validation(client, lambda x: self._common(x, client.state))
            client.state["weight"] = torch.tensor(self._choose_weight(client), dtype=torch.float64)
        if client.exchange == _LAST:
            client.state.pop(_VALIDATED, None)  # models that are handed out have no need of it
        return context

    def _choose_weight(self, client: Client) -> float:
        """v_k by validation rows."""
        y = client.data.validation.y
        own = self._scores_of_validation(client, lambda x: _log_probabilities(client.model(x), client.classes))
        common = get_tensor(client.state, _VALIDATED)
        usual = _errors(_add(own, common, _WEIGHT), y)
        best, most = _WEIGHT, 0.0
        for weight in _OTHER_WEIGHTS:
            gained = usual - _errors(_add(own, common, weight), y)
            standard_error = float(gained.std()) / len(y) ** 0.5
            mean = float(gained.mean())
            if mean > max(standard_error, most):
                best, most = weight, mean
        return best

    def _scores_of_validation(self, client: Client, scores: Callable[[Tensor], Tensor]) -> Tensor:
        return inference.map_batches(scores, client.model, client.data.validation, client.prepare)

    def _common(self, x: Tensor, context: Context) -> Tensor:
        """t: log probabilities (N, C) of the common model, or numbers (N, 1); float64, on the CPU."""
        return ClosedForm.predict(self, None, x, context)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities, or numbers; before there is a common model, and with v = 0, what the network gives."""
        weight = float(context.get("weight", _WEIGHT)) if self.weight is None else self.weight
        if "solution" not in context or not weight:
            scores: Tensor = model(x)
            return scores
        common = self._common(x, context)
        if weight == 1 or self.prior == "federation":
            return common
        classes = common.shape[1] if "counts" in context["solution"] else 0
        return _add(_log_probabilities(model(x), classes), common, weight)

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        """By the network alone, by the common model alone, and by it with the federation's class shares."""
        return {
            "network": replace(self, weight=0.0),
            "common": replace(self, weight=1.0),
            **super().alternative_predictors,
        }


def _log_probabilities(scores: Tensor, classes: int) -> Tensor:
    """A network's scores as log probabilities of so many classes, as they are for numbers; float64, on the CPU."""
    exact = scores.cpu().double()
    return torch.log_softmax(exact[:, :classes], dim=1) if classes else exact


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
