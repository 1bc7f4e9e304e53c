"""ClosedForm: one linear model on fixed features, solved from sums that every client sends once
(after GH-LDA of GH-OFL, ICLR 2026, and Fed3R, ICML 2024).

phi: a map that nobody trains, the same at every client and never sent (`functional.feature_maps`): of images by
     filters made of two photographs, else drawn from the run's seed.
client k, once:  n_k[c] = rows of class c,  M_k[c] = sum of phi(x) over them,                    `upload`
                 S_k = sum of phi(x) phi(x)' over all rows
server:          n, M, S = sums over the clients heard;  N = sum_c n_c,  mu_c = M_c / n_c        `solve`
                 Sigma = (S - sum_c n_c mu_c mu_c') / N,  A = (1 - s) Sigma + s tr(Sigma) / D I
                 W = A^-1 mu',  b_c = - mu_c' W_c / 2;  their means over classes are taken from both;  A = I if tr = 0
prediction:      softmax(t (phi(x)' W + b) + log pi),  pi: the client's own class shares, or the federation's, which
                 also stand for those of a client without rows of any class that the federation knows  `predict`
t:               of 1, 2^(-1/4), ..., 1/64 that with the largest likelihood of the client's validation rows, with its
                 own class shares, times exp(-log(2 t)^2 / 2); without any 1/2           `fit_temperature`

That is all where options have their defaults; who checks these may skip the others, whose equations stand where they
are solved, in `functional.closed_forms`:

what is predicted                     sent      solved by
classes                               n, M, S   `discriminant`: as above
 with `second_moments = "clients"`    n, M      `discriminant`, with Sigma of how clients' class means differ, I if each
                                                class is at one client alone
 with `classifier = "ridge"`          n, M, S   `one_hot_ridge`; its scores have the federation's shares in them:
                                                softmax(phi(x)' W) over the client's own classes, or over all, without t
 of texts                             n, M      `naive_bayes`; phi says which words occur
numbers y                             n, M, S   `ridge`, of (phi(x), y) as one class; y is in each client's own unit

Views:    with training.augmentation phi(x) and phi(x) phi(x)' of a row are means over its views: the image and four
          shifts of it, with crop-flip mirrored, too. n_k counts rows; a row still changes a sum by its norm at most.
Upload:   n_k, M_k / N_k, S_k / N_k, which do not grow with the rows. The server multiplies by N_k again, and leaves out
          sums that no rows can have; they are not sent again.
Private:  with `unit_features` rows of phi have norm 1; n_k, M_k and S_k go up as they are and, with [privacy], with
          Gaussian noise added once by the client. The server solves for the nearest sums that rows can have; of class
          means alone, for those with at least one row in a class.
No network is trained or sent. But for class means alone, any grouping of the rows gives the same W.

`tests/methods/test_closed_form_by_hand.py` recomputes predictions for classes, with either second moments, and for
numbers from stored inputs with NumPy alone; `tests/functional/test_closed_forms.py` has each function beside
scikit-learn. How phi is made, sums go up, a solution comes down and a client is forgotten is
`building_blocks.sums_sent_once`.

Shapes: D features, C classes, N rows, N_k of client k; ' transposes; a number in float64 counts as two.
Sent: down 2 (C D + 2 C), D features, whenever it changes; up once D (D + 1) + 2 (C D + C), D features (texts, and class
means alone: 2 (C D + C)). Kept: client: phi, W, b, t, n_k / N_k; server: n, M, S, W, b, with `keep_sums` n_k, M_k, S_k.
Deviations from the papers (GH-OFL, arXiv:2602.01186; Fed3R, arXiv:2406.01116; FedCOF, NeurIPS 2025, arXiv:2412.14326;
AFL, CVPR 2025, arXiv:2405.16240): (1) By default the map is random, or made of two photographs, and not pre-trained, so
that no other data are needed. (2) Each client has its own class shares in the place of the federation's. (3) Classes
without rows are left out. (4) FedCOF estimates a covariance for each class and fits one-hot classes by ridge
regression. Here all classes have one covariance, and the classifier is the same as with S. (5) AFL takes its
regularization away again in the end; "ridge" keeps it, as Fed3R does. (6) The penalty of "ridge" is relative to tr(S);
Fed3R and AFL have an absolute lambda.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group
from polyfed.core.method import Context, Method, Requirements, hyperparameters
from polyfed.core.server import Server
from polyfed.errors import ConfigError
from polyfed.functional import closed_forms, noisy_sums
from polyfed.functional.closed_forms import USUAL
from polyfed.functional.device_copies import in_float64
from polyfed.methods.building_blocks import solved_model
from polyfed.methods.building_blocks.sums_sent_once import SumsSentOnce
from polyfed.validation.effect import ActsWith


@hyperparameters
class ClosedForm(SumsSentOnce):
    """A linear model on fixed features, solved at the server from sums."""

    shrinkage: Annotated[float, Field(gt=0, lt=1)] = 0.1  # s, how far the covariance is shrunk towards a multiple of I
    # class shares of the client's own rows, or of the "federation"'s; the other one is evaluated, too
    prior: Literal["own", "federation"] = "own"
    # t, by which scores are multiplied before shares are added; not set: each client's validation rows choose, with
    # its own shares
    temperature: Annotated[Annotated[float, Field(gt=0, le=1)] | None, ActsWith("classifier", ("discriminant",))] = None
    # linear discriminant analysis, or AFL's "ridge" regression onto one-hot classes
    classifier: Literal["discriminant", "ridge"] = "discriminant"
    # S of all "rows"; or none is sent, and how rows vary is estimated from how the means of "clients" do
    second_moments: Annotated[Literal["rows", "clients"], ActsWith("classifier", ("discriminant",))] = "rows"

    # server: the model that the sums of all give -------------------------------------------------------------
    def solve(self, sums: Group, classes: int) -> dict[str, Tensor]:
        """W (D, C), b (C,) and, of classes, their shares n / N (C,), by the table above."""
        if self.unit_features and not self.sends_means:
            sums = noisy_sums.nearest_possible(sums)
        if not classes:
            weight, bias = closed_forms.ridge(sums, self.shrinkage)
            return {"weight": weight, "bias": bias}
        if self.classifier == "ridge":
            weight, bias = closed_forms.one_hot_ridge(sums, self.shrinkage)
        elif "products" in sums:
            weight, bias = closed_forms.discriminant(sums, self.shrinkage)
        else:
            weight, bias = closed_forms.naive_bayes(sums, self.shrinkage)
        return {"weight": weight, "bias": bias, "shares": solved_model.class_shares(sums["counts"])}

    # client: the model ----------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        self.phi_of(client)
        self.note_what_came(client, message)
        if "solution" in message:
            solution = get_group(message, "solution")
            has_temperature = self.temperature is None and self.classifier == "discriminant"
            solved_model.keep(client, solution, lambda x: self._scores(client.model, x, client.state), has_temperature)
        return {}

    def _temperature(self, context: Context, name: str = "temperature") -> float:
        return float(context.get(name, USUAL)) if self.temperature is None else self.temperature

    def _scores(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """phi(x)' W + b (N, C): scores without class shares, or numbers (N, 1); float64."""
        phi_ND = in_float64(self._phi(model, context["map"])(x))
        return solved_model.linear_scores(context["solution"], phi_ND)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities, or numbers; before anybody has sent anything what the network gives."""
        if "solution" not in context:
            scores: Tensor = model(x)
            return scores
        scores_NC = self._scores(model, x, context)
        if "shares" not in context["solution"]:  # numbers
            return scores_NC
        shares_C, prior_C = solved_model.shares_of(context, self.prior, scores_NC.device)
        if self.classifier == "ridge":  # which classes count, as scores have shares in them
            known_C, wanted_C = ((shares > 0).to(shares) for shares in (shares_C, prior_C))
            return closed_forms.log_posterior(scores_NC, known_C, wanted_C)
        return closed_forms.log_posterior(self._temperature(context) * scores_NC, shares_C, prior_C)

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        other: Literal["own", "federation"] = "own" if self.prior == "federation" else "federation"
        return {other: replace(self, prior=other)}

    # settings without effect ----------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        super().init_server(server)
        if self.temperature is not None and not server.classes:
            raise ConfigError(f"{self.name}: temperature does nothing where numbers are predicted")
        has_rows = self.auxiliary_model is not None or server.prepare(server.input_example).is_floating_point()
        if self.classifier == "ridge" and not (server.classes and has_rows):
            raise ConfigError(f"{self.name}: classifier = 'ridge' does nothing for numbers to predict and ids of words")
        if self.second_moments == "clients" and not has_rows:
            raise ConfigError(
                f"{self.name}: second_moments = 'clients' does nothing for ids of words, of which no S is sent; leave "
                "it at 'rows'"
            )

    # declared -------------------------------------------------------------------------------------------------
    name = "closed-form"

    @property
    def requirements(self) -> Requirements:
        classes = "means are of classes" if self.second_moments == "clients" else ""
        if self.unit_features:
            classes = "unit_features bound no number to predict"
        return Requirements(same_input_shape=True, classes=classes, shared_outputs="it adds up rows by class")

    @property
    def sends_means(self) -> bool:
        """Whether n and M are all that is sent. A client alone, which sends nothing, has the S of its rows."""
        return self.second_moments == "clients" and not self.is_alone
