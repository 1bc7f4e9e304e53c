"""Ways to give a client's own network the common closed form: methods that `closed_form_candidates.py` compares.

All send the sums of `ClosedForm` once, before anybody trains. t(x) are the closed form's log probabilities, with the
client's own class shares; f(x) are the scores of the client's own network, which is what `predict` gives.

Shapes: N rows, D features, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import Batch, Context, Exchange, Phase, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional import class_statistics
from polyfed.functional.losses import task_loss, weighted_mean
from polyfed.functional.random_features import apply_map
from polyfed.methods.closed_form import ClosedForm

_CHUNK = 128  # inputs at a time
_LEAST = -1e4  # a log probability, in the place of minus infinity


def common_scores(drawn: Group, solution: Group, own_counts_C: Tensor, x: Tensor) -> Tensor:
    """t(x), (N, C), float64; -inf for classes that the client has no rows of."""
    phi_ND = torch.cat([apply_map(drawn, some) for some in x.split(_CHUNK)]).double()
    scores_NC = phi_ND @ solution["weight"] + solution["bias"]
    return class_statistics.log_posterior(scores_NC, solution["counts"], own_counts_C)


def scores_without_each(sums: Group, phi_ND: Tensor, y_N: Tensor, shrinkage: float) -> Tensor:
    """The scores (N, C) of rows among those summed, each by the solution without that row.

    A row x of class c with n_c rows takes k d d' from N Sigma, d = x - mu_c, k = n_c / (n_c - 1). The inverse follows
    by Sherman and Morrison, in the basis of N Sigma. The only row of its class is left in.
    """
    counts_C = sums["counts"].double()
    counts_N = counts_C[y_N]
    if "products" not in sums:
        return _bayes_without_each(sums, phi_ND, y_N, shrinkage)
    mu_CD = sums["sums"] / counts_C.clamp(min=1).unsqueeze(1)
    values_D, basis_DD = torch.linalg.eigh(class_statistics._within(sums))
    rows_ND, mu_CD = phi_ND @ basis_DD, mu_CD @ basis_DD
    has_others_N = counts_N > 1
    d_ND = (rows_ND - mu_CD[y_N]) * has_others_N.unsqueeze(1)
    fewer_N = (counts_N - 1).clamp(min=1)
    factor_N = counts_N / fewer_N
    total = counts_C.sum() - 1
    trace_N = values_D.sum() - factor_N * d_ND.square().sum(dim=1)
    ridge_N = shrinkage * trace_N / len(values_D)
    a_ND = ((1 - shrinkage) * values_D + ridge_N.unsqueeze(1)) / total
    mu_NCD = mu_CD.repeat(len(y_N), 1, 1)
    mu_NCD[torch.arange(len(y_N)), y_N] -= d_ND / fewer_N.unsqueeze(1)
    beta_N = (1 - shrinkage) * factor_N / total
    scaled_ND = d_ND / a_ND
    share_N = beta_N / (1 - beta_N * (d_ND * scaled_ND).sum(dim=1))
    along_NC = torch.einsum("ncd,nd->nc", mu_NCD, scaled_ND)
    w_NCD = mu_NCD / a_ND.unsqueeze(1) + (share_N.unsqueeze(1) * along_NC).unsqueeze(2) * scaled_ND.unsqueeze(1)
    return torch.einsum("ncd,nd->nc", w_NCD, rows_ND) - (w_NCD * mu_NCD).sum(dim=2) / 2


def _bayes_without_each(sums: Group, phi_NV: Tensor, y_N: Tensor, shrinkage: float) -> Tensor:
    """`scores_without_each` of counts of words."""
    weight_VC, _ = class_statistics.naive_bayes(sums, shrinkage)
    scores_NC = phi_NV @ weight_VC
    raised_NV = sums["sums"][y_N] - phi_NV + shrinkage / (1 - shrinkage)
    own_N = (phi_NV * (raised_NV / raised_NV.sum(dim=1, keepdim=True)).log()).sum(dim=1)
    return scores_NC.scatter(1, y_N.unsqueeze(1), own_N.unsqueeze(1))


@hyperparameters
class Beside(ClosedForm):
    """The client's own network, trained as with Local, beside the common closed form, solved before round 1."""

    card = replace(ClosedForm.card, name="beside-closed-form", form=None)

    evaluation_stage = "personal"

    def exchanges(self, round: int) -> Sequence[Exchange]:
        first = (Exchange("sums", trains=False),) if round == 1 else ()
        return (*first, Exchange())

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return super().upload(client, trained) if client.exchange == "sums" else {}

    def receive(self, client: Client, message: Message) -> Context:
        context = super().receive(client, message)
        return context if client.exchange == "sums" else {**context, **self.prepare(client, message)}

    def prepare(self, client: Client, message: Message) -> Context:
        """What the loss needs of the closed form in this round."""
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        scores: Tensor = model(x)
        return scores

    @property
    def alternative_predictors(self) -> Mapping[str, ClosedForm]:
        return {}


@hyperparameters
class Residual(Beside):
    """CE(f(x) + scale t(x), y): the network learns what the common model lacks."""

    card = replace(Beside.card, name="residual")

    scale: Annotated[float, Field(gt=0)] = 1.0
    leaves_out: Literal["nothing", "client", "row"] = "client"  # whose sums t on own rows is solved without

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = super().broadcast(server, client_id)
        if "solution" not in message:
            return message
        total = get_group(server.state, "sums")
        if self.leaves_out == "client":
            own = get_group(server.state, f"sums of {client_id}")
            return {**message, "others": class_statistics.subtract(total, own)}
        return {**message, "others": dict(total)}

    def _add(self, server: Server, client_id: int, per_row: Group) -> bool:
        rows = server.clients[client_id].num_samples
        server.state[f"sums of {client_id}"] = {
            name: one if name == "counts" else one * rows for name, one in per_row.items()
        }
        return super()._add(server, client_id, per_row)

    def prepare(self, client: Client, message: Message) -> Context:
        if "others" in message:
            client.state["row scores"] = self._row_scores(client, get_group(message, "others"))
        return {"t": get_tensor(client.state, "row scores")}

    def _row_scores(self, client: Client, sums: Group) -> Tensor:
        """The client's own rows' scale t, (N, C)."""
        train = client.data.train
        drawn = get_group(client.state, "map")
        phi_ND = torch.cat([apply_map(drawn, client.prepare(some)) for some in train.x.split(_CHUNK)]).double()
        if self.leaves_out == "row":
            scores_NC = scores_without_each(sums, phi_ND, train.y, self.shrinkage)
        else:
            solve = class_statistics.discriminant if "products" in sums else class_statistics.naive_bayes
            weight_DC, bias_C = solve(sums, self.shrinkage)
            scores_NC = phi_ND @ weight_DC + bias_C
        t_NC = class_statistics.log_posterior(scores_NC, sums["counts"], client.state["own counts"])
        return (self.scale * t_NC.clamp(min=_LEAST)).float()

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return task_loss(model(batch.x) + context["t"][batch.rows], batch.y, batch.w)


@hyperparameters
class Taught(Beside):
    """CE(f(x), y) + weight CE(f(x'), q'): the network also learns the closed form's answers q' to other inputs x'.

    x' are made anew for every pass. q' = softmax(t(x') / temperature), or a control's.
    """

    card = replace(Beside.card, name="taught")

    weight: Annotated[float, Field(ge=0)] = 1.0  # lambda
    temperature: Annotated[float, Field(gt=0)] = 1.0  # T
    # own rows; convex mixtures of two; one with a part of another in it; rows with noise; public inputs; or drawn from
    # the classes' means and covariance of the inputs themselves, which are summed and sent as the features' are
    inputs: Literal["rows", "mixtures", "cuts", "noise", "public", "drawn"] = "mixtures"
    # or the closed form's with classes permuted; both rows' labels; own class shares
    targets: Literal["common", "permuted", "labels", "shares"] = "common"
    copies: Annotated[int, Field(ge=1)] = 1  # x' for each own row in a step
    pretraining: Annotated[int, Field(ge=0)] = 0  # passes on x' alone before round 1; then no x' any more

    def phases(self, training: Training) -> Sequence[Phase]:
        before = Phase(self.pretraining, rows="before", name="before")
        return (*((before,) if self.pretraining else ()), Phase(training.local_epochs))

    def prepare(self, client: Client, message: Message) -> Context:
        if "inputs" in message:
            client.state["inputs"] = normal_inputs(get_group(message, "inputs"))
        rows = torch.arange(client.n)
        passes = self.copies
        if self.pretraining:
            passes = self.pretraining if client.round == 1 else 0
        context = {"before": rows if passes else rows[:0], "passes": passes}
        if not self.weight or not passes:
            return context
        draws = client.generator("other inputs")
        many = [self._inputs(client, draws) for _ in range(passes)]
        x = torch.cat([one for one, _ in many])
        labels_NC = torch.cat([one for _, one in many])
        return {**context, "x": x, "q": self._targets(client, x, labels_NC)}

    # sums of inputs -----------------------------------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = super().upload(client, trained)
        if self.inputs != "drawn" or client.exchange != "sums" or client.words:
            return message
        train = client.data.train
        small = small_inputs(client.prepare(train.x[:])).flatten(1)
        return {**message, "inputs": class_statistics.sum_rows(small, train.y, client.classes)}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        told = [get_group(message, "inputs") for message in uploads.values() if "inputs" in message]
        if told:
            server.state["inputs"] = functools.reduce(class_statistics.add, told)

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = super().broadcast(server, client_id)
        if "inputs" in server.state and "solution" in message:
            return {**message, "inputs": dict(get_group(server.state, "inputs"))}
        return message

    def _drawn(self, client: Client, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs around the classes' means, classes by own shares; of large images the coarse part alone is drawn."""
        x = client.prepare(client.data.train.x[:])
        counts_C = client.state["own counts"].double()
        y = torch.multinomial(counts_C, client.n, replacement=True, generator=draws)
        labels_NC = F.one_hot(y, client.classes).float()
        if client.words:
            chances_CV = get_group(client.state, "solution")["weight"].T.exp()
            chances_CV[:, 0] = 0  # padding
            ids = torch.multinomial(chances_CV[y], x.shape[1], replacement=True, generator=draws).to(x.dtype)
            return torch.where(x != 0, ids, x), labels_NC
        inputs = get_group(client.state, "inputs")
        noise_ND = torch.randn(client.n, len(inputs["factor"]), generator=draws, dtype=torch.float64)
        flat_ND = inputs["means"][y] + noise_ND @ inputs["factor"].T
        small = small_inputs(x)
        made = flat_ND.float().view(small.shape)
        if small.shape != x.shape:
            made = x + F.interpolate(made - small, size=x.shape[-2:], mode="bilinear")
        for place, count in enumerate(client.categories):
            if count:
                made[:, place] = made[:, place].round().clamp(0, count - 1)
        return made, labels_NC

    # inputs and targets -------------------------------------------------------------------------------------
    def _inputs(self, client: Client, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """As many x' as the client has rows, and mixed labels (N, C)."""
        if self.inputs == "drawn":
            return self._drawn(client, draws)
        if self.inputs == "public":
            assert client.public is not None
            chosen = torch.randint(len(client.public), (client.n,), generator=draws)
            return client.public.prepare(client.public.samples.x[chosen]), torch.zeros(client.n, client.classes)
        x = client.prepare(client.data.train.x[:])
        y = F.one_hot(client.data.train.y, client.classes).float()
        other = torch.randperm(client.n, generator=draws)
        if self.inputs == "rows":
            return x, y
        if self.inputs == "noise":
            return noised(x, client.categories, draws), y
        make = mixed if self.inputs == "mixtures" else cut
        made, share_N = make(x, x[other], client.categories, draws)
        return made, share_N.unsqueeze(1) * y + (1 - share_N).unsqueeze(1) * y[other]

    def _targets(self, client: Client, x: Tensor, labels_NC: Tensor) -> Tensor:
        """What is learnt of x': q', (N, C)."""
        counts_C = client.state["own counts"]
        if self.targets == "labels":
            return labels_NC
        if self.targets == "shares":
            return (counts_C / counts_C.sum()).float().expand(len(x), -1)
        solution = get_group(client.state, "solution")
        if self.targets == "permuted":
            solution = {**solution, "weight": solution["weight"].roll(1, 1), "bias": solution["bias"].roll(1)}
        t_NC = common_scores(get_group(client.state, "map"), solution, counts_C, x)
        return (t_NC.clamp(min=_LEAST) / self.temperature).softmax(dim=1).float()

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        chosen = torch.randperm(max(client.context["passes"], 1), generator=generator)[: self.copies]
        return {"starts": chosen * client.n, "is before": client.phase == "before"}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        own = 0.0 if context["is before"] else task_loss(model(batch.x), batch.y, batch.w)
        if "x" not in context or (self.pretraining and not context["is before"]):
            return own
        places = (context["starts"].unsqueeze(1) + batch.rows).flatten()
        log_p = model(context["x"][places]).log_softmax(dim=1)
        w = batch.w.repeat(len(context["starts"]))
        return own + self.weight * weighted_mean(-(context["q"][places] * log_p).sum(dim=1), w)


def small_inputs(x: Tensor) -> Tensor:
    """Images at 8 x 8; other inputs as they are."""
    return F.adaptive_avg_pool2d(x, 8) if x.dim() == 4 and x.shape[-1] > 8 else x


def normal_inputs(sums: Group) -> dict[str, Tensor]:
    """The classes' means (C, P) and a factor (P, P) of their common covariance."""
    counts_C = sums["counts"].clamp(min=1).double()
    covariance = class_statistics._within(sums) / counts_C.sum()
    values, basis = torch.linalg.eigh(covariance)
    return {"means": sums["sums"] / counts_C.unsqueeze(1), "factor": basis * values.clamp(min=0).sqrt()}


# inputs unlike own rows ----------------------------------------------------------------------------------------------


def mixed(x: Tensor, other: Tensor, categories: Sequence[int], draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Convex mixtures, and the share of the first (N,); whole numbers, ids and categories, are taken of either."""
    share_N = torch.rand(len(x), generator=draws)
    share = share_N.view(-1, *[1] * (x.dim() - 1))
    takes_first = torch.rand(x.shape, generator=draws) < share
    if not x.is_floating_point():
        return torch.where(takes_first, x, other), share_N
    made = share * x + (1 - share) * other
    if any(categories):
        made = torch.where(torch.tensor(categories) > 0, torch.where(takes_first, x, other), made)
    return made, share_N


def cut(x: Tensor, other: Tensor, categories: Sequence[int], draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first with a quarter, half the time or half the columns of the other; and the share of the first (N,)."""
    if x.dim() == 2 and x.is_floating_point():
        takes_first = torch.rand(x.shape, generator=draws) < 0.5
        return torch.where(takes_first, x, other), takes_first.float().mean(dim=1)
    side = x.shape[-1]
    start_N = torch.randint(side, (len(x),), generator=draws)
    is_cut = ((torch.arange(side) - start_N.unsqueeze(1)) % side) < side // 2  # half, going round
    if x.dim() == 4:
        high_N = torch.randint(x.shape[-2], (len(x),), generator=draws)
        rows = ((torch.arange(x.shape[-2]) - high_N.unsqueeze(1)) % x.shape[-2]) < x.shape[-2] // 2
        place = rows[:, None, :, None] & is_cut[:, None, None, :]
    else:
        place = is_cut.view(len(x), *[1] * (x.dim() - 2), side)
    share_N = 1 - place.float().flatten(1).mean(dim=1)
    return torch.where(place, other, x), share_N


def noised(x: Tensor, categories: Sequence[int], draws: torch.Generator) -> Tensor:
    """Rows with normal noise of half their numbers' deviation; a third of words are left out."""
    if not x.is_floating_point():
        return x * (torch.rand(x.shape, generator=draws) > 1 / 3)
    noise = torch.randn(x.shape, generator=draws) * x.std() / 2
    if any(categories):
        noise = noise * (torch.tensor(categories) == 0)
    return x + noise
