"""pFedFDA: a head made of the classes' Gaussians, those of all clients mixed with the client's own (McLaughlin and Su,
NeurIPS 2024).

f is the common extractor, z = f(x); mu (C, D) and Sigma (D, D) are the federation's class means and covariance;
pi_k are client k's class shares, each raised by 1e-4 and divided by their sum.
head of (m, V):  A = (1 - 1e-4) V + 1e-4 tr(V) / D I;  W = A^-1 m'                            `Gaussians.head`
                 b_c = - m_c' W_c / 2 + log pi_kc;  the means over classes of W and of m_c' W_c / 2 are taken off
client k:   f_k <- f;  E epochs of SGD on CE(f_k(x)' W + b, y), the head of (mu, Sigma) being fixed  `loss`
            m_k[c]: mean of f_k(x) over its rows of class c, mu[c] without any                       `estimate`
            V_k = sum over its n_k rows of (z - m_k[y]) (z - m_k[y])' / (n_k - 1) + ridge I
            beta_k, in [0, 1]^2, or equal with beta = "one":                                         `choose_beta`
                minimizes the sum over two folds of CE on the fold, by the head of
                m = beta_1 m_k + (1 - beta_1) mu,  V = beta_2 V_k + (1 - beta_2) Sigma,  m_k, V_k being the other fold's
            mu_k, Sigma_k: m and V for this beta_k, m_k and V_k being those of all its rows          `own_and_common`
server:     f, mu, Sigma <- sum over responding clients of p_k (f_k, mu_k, Sigma_k)                  `aggregate`
            p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
prediction: f(x)' W + b, by the head of the client's mixture for f as it was received                `receive`
The head is solved in `functional.closed_forms.discriminant_of`. mu and Sigma are the "common" Gaussians, m_k and V_k
the "own" ones. mu starts uniform in [0, 1), Sigma at I. Folds are stratified; classes of one row are left out of them,
and without any other class beta_k = 0. beta_k is found by L-BFGS from 1/2, in ten steps at most.
Sent: down P_f + C D + D (D + 1) / 2; up as many + 1. Kept: server: f, mu, Sigma.
Deviations from the paper (arXiv:2411.00329) and the authors' code, all but the last from the code: (1) Statistics are
of one pass after training, in eval mode; the code collects those of all training passes. (2) The code adds I to V_k,
and 1e-4 to all of its entries; here it is `ridge` I. With 1e-4 I and fewer rows than features training diverged. (3)
beta_k is bounded by L-BFGS-B; the code clips it. (4) In the code m_k[c] is mu[c] also for classes of one or two rows:
in the folds, in the centering of V_k and in the mixture. (5) BatchNorm's statistics of f are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import Batch, Context, Method, Phase, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import BODY, as_split_model, float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.core.upload_forms import SAMPLES, Entry, as_sent
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.class_statistics import pack, unpack
from polyfed.functional.closed_forms import discriminant_of
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import weight_averaging

_SMALL = 1e-4  # epsilon: of shares, and of the covariance's shrinkage
_STEPS = 10  # of L-BFGS


class Gaussians(NamedTuple):
    """Class means (C, D) and their common covariance (D, D); float64."""

    means: Tensor
    covariance: Tensor

    def mixed(self, common: Gaussians, beta: Tensor) -> Gaussians:
        """Beta times these and 1 - beta times the common ones; beta (1,), or (2,), of means and of covariances."""
        means = torch.lerp(common.means, self.means, beta[0])
        return Gaussians(means, torch.lerp(common.covariance, self.covariance, beta[-1]))

    def head(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """W (D, C) and b (C,) of the linear discriminant with these class shares, less their means over classes."""
        every = torch.ones(len(self.means), dtype=torch.bool)
        weight, bias = discriminant_of(self.means, self.covariance, every, _SMALL)
        return weight, bias + shares.log()


def estimate(z_ND: Tensor, y_N: Tensor, common: Gaussians, ridge: float) -> Gaussians:
    """m_k and V_k of rows; a class without any has the common mean."""
    counts = y_N.bincount(minlength=len(common.means)).unsqueeze(1)
    sums = torch.zeros_like(common.means).index_add_(0, y_N, z_ND)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), common.means)
    centered = z_ND - means[y_N]
    width = z_ND.shape[1]
    covariance = centered.T @ centered / max(len(z_ND) - 1, 1) + ridge * torch.eye(width, dtype=torch.float64)
    return Gaussians(means, covariance)


def choose_beta(z_ND: Tensor, y_N: Tensor, common: Gaussians, shares: Tensor, ridge: float, size: int) -> Tensor:
    """How much the rows' own Gaussians count (size,), by two folds of the rows."""
    from scipy.optimize import minimize  # comes with scikit-learn
    from sklearn.model_selection import StratifiedKFold

    several = y_N.bincount()[y_N] > 1
    if not several.any():
        return torch.zeros(size, dtype=torch.float64)
    z, y = z_ND[several], y_N[several]
    folds = list(StratifiedKFold(2, shuffle=True, random_state=0).split(z, y))
    own = [estimate(z[fit], y[fit], common, ridge) for fit, _ in folds]

    def badness(beta: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            at = torch.tensor(beta, requires_grad=True)
            heads = [one.mixed(common, at).head(shares) for one in own]
            losses = [F.cross_entropy(z[rows] @ w + b, y[rows]) for (w, b), (_, rows) in zip(heads, folds, strict=True)]
            total = torch.stack(losses).sum()
            (slope,) = torch.autograd.grad(total, at)
        return total.item(), slope.numpy()

    start = np.full(size, 0.5)
    options = {"maxiter": _STEPS, "gtol": 1e-3}
    found = minimize(badness, start, jac=True, method="L-BFGS-B", bounds=[(0, 1)] * size, options=options)
    return torch.tensor(found.x)


@hyperparameters
class PFedFDA(Method):
    """A common extractor, and heads made of Gaussians of all clients and of one's own."""

    weighting: weight_averaging.Weighting = "samples"  # clients count by their samples; "uniform": equally
    beta: Literal["one", "two"] = "two"  # "one" for class means and covariance, or one for each
    ridge: Annotated[float, Field(gt=0)] = 1.0  # added to the diagonal of a client's own covariance

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "model"))
        for name in ("means", "covariance"):
            client.state[name] = get_tensor(message, name).clone()
        client.state["weight"], client.state["bias"] = self.own_and_common(client).head(_shares(client))
        weight, bias = _common(client).head(_shares(client))
        return {"common_weight": weight.float(), "common_bias": bias.float()}

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(training.local_epochs, BODY),)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        scores = model.represent(batch.x) @ context["common_weight"] + context["common_bias"]
        return cross_entropy(scores, batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        mixed = self.own_and_common(client)
        body = float_state(client.model, parts=BODY)
        covariance = pack(mixed.covariance).float()
        return {"model": body, "means": mixed.means.float(), "covariance": covariance, "n": torch.tensor(client.n)}

    def own_and_common(self, client: Client) -> Gaussians:
        """mu_k and Sigma_k, for the extractor as it is."""
        rows = client.data.train
        z_ND = inference.representations(client.model, rows, client.prepare).cpu().double()
        y_N = rows.y.cpu()
        common = _common(client)
        beta = choose_beta(z_ND, y_N, common, _shares(client), self.ridge, 1 if self.beta == "one" else 2)
        return estimate(z_ND, y_N, common, self.ridge).mixed(common, beta)

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Scores by the client's own head; what the network gives before anything was received."""
        if "weight" not in context:
            return super().predict(model, x, context)
        z_ND = model.represent(x)
        scores: Tensor = z_ND @ context["weight"].to(z_ND) + context["bias"].to(z_ND)
        return scores

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, "layer-wise", parts=BODY)
        width = as_split_model(server.model(server.architectures[0], {})).feature_dim
        server.state["means"] = torch.rand(server.classes, width, generator=server.generator("means"))
        server.state["covariance"] = pack(torch.eye(width))

    def broadcast(self, server: Server, client_id: int) -> Message:
        sent = weight_averaging.broadcast(server, "layer-wise", client_id)
        return {**sent, "means": server.state["means"], "covariance": server.state["covariance"]}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        weight_averaging.average(server, "layer-wise", models, shares)
        names = ("means", "covariance")
        theirs = [{name: get_tensor(message, name) for name in names} for message in uploads.values()]
        server.state.update(weighted_mean(theirs, [shares[i] for i in uploads]))

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(
        split_model=True,
        same_architecture=True,
        classes="its head is made of Gaussians of classes",
        hint="closed-form makes a linear discriminant of features that all clients have",
    )
    upload_form = {
        "model": as_sent,
        "means": Entry(("C", "D")),
        "covariance": Entry((lambda known: known.size("D") * (known.size("D") + 1) // 2,)),
        "n": SAMPLES,
    }
    delta_entries = ("model",)
    fixed_entries = {
        "means": "means of rows by class, of which heads are made with all that was done to them",
        "covariance": "a covariance of rows, which could not be inverted with noise in it",
    }
    entries_of_rows = ("means", "covariance")
    evaluation_stage = "received"


def _common(client: Client) -> Gaussians:
    """Mu and Sigma, as the client has received them."""
    means = get_tensor(client.state, "means").cpu().double()
    return Gaussians(means, unpack(get_tensor(client.state, "covariance").cpu().double(), means.shape[1]))


def _shares(client: Client) -> Tensor:
    """pi_k (C,), none of them 0."""
    counts = client.data.train.y.cpu().bincount(minlength=client.classes).double()
    raised = counts / counts.sum() + _SMALL
    return raised / raised.sum()
