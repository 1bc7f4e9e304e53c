"""ClosedForm: one linear model on fixed features, solved from sums that every client sends once
(after GH-LDA of GH-OFL, ICLR 2026, and Fed3R, ICML 2024).

phi: a map that nobody trains, the same at every client and never sent (`functional.feature_maps`): of images by
     filters made of two photographs, else drawn from the run's seed.
client k, once:  n_k[c] = rows of class c,  M_k[c] = sum of phi(x) over them,  S_k = sum of phi(x) phi(x)' over all rows
server:          n, M, S = sums over the clients heard;  N = sum_c n_c,  mu_c = M_c / n_c
                 Sigma = (S - sum_c n_c mu_c mu_c') / N,  A = (1 - s) Sigma + s tr(Sigma) / D I
                 W = A^-1 mu',  b_c = - mu_c' W_c / 2;  their means over classes are taken from both;  A = I if tr = 0
prediction:      softmax(t (phi(x)' W + b) + log pi),  pi: the client's own class shares, or the federation's, which
                 also stand for those of a client without rows of any class that the federation knows
t:               of 1, 2^(-1/4), ..., 1/64 that with the largest likelihood of the client's validation rows, with its
                 own class shares, times exp(-log(2 t)^2 / 2); without any 1/2
To read:         `sum_rows`, `times` (`building_blocks.sums_of_rows`), `discriminant` (`functional.closed_forms`),
                 `linear_scores` (`building_blocks.solved_model`), `log_posterior` (`functional.closed_forms`) and
                 `fit_temperature` (`functional.calibration`); all else here, as secure sums, forgetting and checks,
                 changes no equation

what is predicted             sent         solved by (`functional.closed_forms`)
classes                       n, M, S      `discriminant`: as above
 "second_moments = clients"   n, M         `discriminant`, of the K_c clients with rows of class c, mu_kc = M_kc / n_kc:
                                           Sigma = sum_c sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' / sum_c (K_c - 1)
 "classifier = ridge"         n, M, S      `one_hot_ridge`: W = (S / N + s / (1 - s) tr(S / N) / D I)^-1 M' / N,  b = 0;
                                           scores have the federation's shares in them: softmax(phi(x)' W) over the
                                           client's own classes, or over all, without t
 of texts                     n, M         `naive_bayes`: phi says which words occur;  W_vc = log p(v | c), with
                                           s / (1 - s) more of each word,  b = 0
numbers y                     n, M, S      `ridge`, of (phi(x), y) as one class:  b = mean y - mu' W,
                                           W = (Sigma + s / (1 - s) tr(Sigma) / D I)^-1 cov(phi, y);  y is in each
                                           client's own unit

Views:    with training.augmentation phi(x) and phi(x) phi(x)' of a row are means over its views: the image and four
          shifts of it, with crop-flip mirrored, too. n_k counts rows; a row still changes a sum by its norm at most.
Upload:   n_k, M_k / N_k, S_k / N_k, which do not grow with the rows. The server multiplies by N_k again, and leaves out
          sums that no rows can have; they are not sent again.
Private:  with `unit_features` rows of phi have norm 1; n_k, M_k and S_k go up as they are and, with [privacy], with
          Gaussian noise added once by the client. The server solves for the nearest sums that rows can have.
No network is trained or sent. But for class means alone, any grouping of the rows gives the same W.

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

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, get_group, members
from polyfed.core.method import Context, Exchange, Exposed, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Privacy
from polyfed.core.upload_forms import Entry
from polyfed.errors import ConfigError
from polyfed.functional import class_statistics, closed_forms, noisy_sums
from polyfed.functional.calibration import USUAL
from polyfed.functional.device_copies import in_float64
from polyfed.functional.feature_maps.feature_map import FeatureMap, draw_map
from polyfed.methods.building_blocks import network_map, solved_model, sums_of_rows
from polyfed.methods.building_blocks.network_map import NetworkMap
from polyfed.methods.building_blocks.sums_of_rows import times
from polyfed.validation.effect import ActsWith

_MAPS = ("default", "random", "photographs")


def _known_map(name: str) -> str:
    if name not in _MAPS and ":" not in name and "?" not in name:
        known = ", ".join(f"'{one}'" for one in _MAPS)
        raise ValueError(f"expected {known} or the name of a network ('timm:...', 'package.module:name'), got '{name}'")
    return name


@hyperparameters
class ClosedForm(Method):
    """A linear model on fixed features, solved at the server from sums."""

    # phi, from inputs to features: "random"; of images, filters made of two "photographs", the same for everybody;
    # "default": photographs for images, random for all else; or what a frozen network gives before its head:
    # "timm:NAME?pretrained", "torchvision:NAME?pretrained", "package.module:name"
    map: Annotated[str, AfterValidator(_known_map)] = "default"
    views: bool = True  # rows count with the views of training.augmentation, where it is set
    # D, numbers that an input becomes; of texts, all words count; a network has as many as it has
    features: Annotated[int, Field(ge=1), ActsWith("map", _MAPS)] = 576
    shrinkage: Annotated[float, Field(gt=0, lt=1)] = 0.1  # s, how far the covariance is shrunk towards a multiple of I
    # class shares of the client's own rows, or of the "federation"'s; the other one is evaluated, too
    prior: Literal["own", "federation"] = "own"
    # t, by which scores are multiplied before shares are added; not set: each client's validation rows choose
    temperature: Annotated[Annotated[float, Field(gt=0, le=1)] | None, ActsWith("classifier", ("discriminant",))] = None
    # linear discriminant analysis, or AFL's "ridge" regression onto one-hot classes
    classifier: Literal["discriminant", "ridge"] = "discriminant"
    keep_sums: bool = False  # the server keeps each client's sums, so that a client can be forgotten
    unit_features: bool = False  # rows of features have norm 1, as noise on the sums needs
    # S of all "rows"; or none is sent, and how rows vary is estimated from how the means of "clients" do
    second_moments: Annotated[Literal["rows", "clients"], ActsWith("classifier", ("discriminant",))] = "rows"

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(trains=False),)

    # client: sums of features, once --------------------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        version = client.state.get("version", torch.tensor(0))
        if client.state.get("heard"):
            return {"version": version}
        phi = self._phi_of(client)
        has_products = not self.sends_means and (not client.classes or "words" not in phi.tensors)
        sums = sums_of_rows.sum_rows(client, phi, self.views, has_products)  # n_k, M_k, S_k
        made: Message = {"version": version, "sums": self._as_sent(client, sums)}
        return {**made, "network": phi.tensors["digest"]} if isinstance(phi, NetworkMap) else made

    def _as_sent(self, client: Client, sums: Group) -> Group:
        """The sums per row; or such that a row changes them by little, with the client's noise."""
        if not self.unit_features:
            return times(sums, 1 / client.n)
        noise = self._noise(client.privacy)
        if not noise:
            return {**sums, "counts": sums["counts"].double()}
        return noisy_sums.add_noise(sums, noise, sums_of_rows.normals(client, noise, self.views, sorted(sums)))

    def _noise(self, privacy: Privacy) -> float:
        """z, of noise on the sums; 0: none."""
        return privacy.noise_multiplier if self.bounds_rows else 0.0

    # server: the sums of all, and the model that they give ---------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        new = [i for i, message in uploads.items() if "sums" in message and not solved_model.is_heard(server, i)]
        possible = [i for i in new if self._add_upload(server, i, uploads[i])]
        solved_model.note_versions(server, uploads)  # sums come but once
        if len(possible) < len(new):
            server.log["sums_left_out"] = len(new) - len(possible)
        if possible:
            solved_model.renew(server, self._solve(get_group(server.state, "sums"), server.classes))

    def _add_upload(self, server: Server, client_id: int, message: Message) -> bool:
        if self.auxiliary_model is not None and not network_map.is_ours(server, client_id, message):
            return False
        sent = get_group(message, "sums")
        sums = sent if self.unit_features else times(sent, server.clients[client_id].num_samples)
        return self._add(server, sums, [client_id])

    def _add(self, server: Server, sums: Group, senders: Collection[int]) -> bool:
        """Add sums of these clients to those of the others, if their rows can have them; whether they can."""
        rows = sum(server.clients[i].num_samples for i in senders)
        noise = self._noise(server.privacy) * math.sqrt(len(senders))
        if self.unit_features and not noisy_sums.are_within(sums, rows, noise):
            return False
        if self.sends_means:
            sums = class_statistics.from_class_means(sums)
        if not noise and not class_statistics.are_possible(sums, rows):
            return False
        sums_of_rows.collect(server, min(senders), sums, self.keep_sums)
        return True

    def _solve(self, sums: Group, classes: int) -> dict[str, Tensor]:
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

    def broadcast(self, server: Server, client_id: int) -> Message:
        return solved_model.broadcast(server, client_id)

    # client: the model ----------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        self._phi_of(client)
        solved_model.receive(client, message)
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
            return closed_forms.log_posterior(scores_NC, shares_C, (prior_C > 0).to(prior_C))
        return closed_forms.log_posterior(self._temperature(context) * scores_NC, shares_C, prior_C)

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        other: Literal["own", "federation"] = "own" if self.prior == "federation" else "federation"
        return {other: replace(self, prior=other)}

    # phi ----------------------------------------------------------------------------------------------------
    @property
    def auxiliary_model(self) -> AuxiliaryModel | None:
        return None if self.map in _MAPS else AuxiliaryModel(self.map, frozen=True)

    def _phi_of(self, client: Client) -> FeatureMap | NetworkMap:
        """phi, made the first time."""
        if self.auxiliary_model is not None:
            return network_map.map_of(client, self.unit_features)
        if "map" not in client.state:
            example = client.prepare(client.data.train.x[:1])
            draws = generator(client.seed, "random features")
            drawn = draw_map(
                example,
                self.features,
                draws,
                client.categories,
                client.words,
                unit=self.unit_features,
                photographs=self.uses_photographs,
            )
            client.state["map"] = dict(drawn.tensors)
        return FeatureMap(get_group(client.state, "map"))

    @property
    def uses_photographs(self) -> bool:
        """Whether filters of images are those of photographs."""
        return self.map in {"default", "photographs"}

    def _phi(self, model: Any, tensors: Group) -> FeatureMap | NetworkMap:
        return FeatureMap(tensors) if self.auxiliary_model is None else network_map.network_map(model, tensors)

    # the same, where the server sees sums alone: of n_k, M_k and S_k -----------------------------------------
    def check_addends(self, server: Server) -> None:
        for setting, is_set in (
            ("keep_sums = false, as no client's own sums are known", self.keep_sums),
            ("second_moments = 'rows', as squares of means do not add up", self.second_moments != "rows"),
        ):
            if is_set:
                raise ConfigError(f"secure_sums: expected {setting}, got another one")

    def sends_addends(self, server: Server, client_id: int) -> bool:
        return not solved_model.is_heard(server, client_id)

    def addends(self, client: Client, upload: Message) -> tuple[Group, Message]:
        others = {name: value for name, value in upload.items() if name != "sums"}
        if "sums" not in upload:
            return {}, others
        return {name: tensor.double() for name, tensor in self._sums_in(upload).items()}, others

    def aggregate_sum(
        self, server: Server, total: Group, summed: Collection[int], others: Mapping[int, Message]
    ) -> None:
        ours = self.auxiliary_model is None or all(network_map.is_ours(server, i, others[i]) for i in summed)
        sums = total if self.unit_features or not summed else {**total, "counts": total["counts"].round().long()}
        is_new = bool(summed) and ours and self._add(server, sums, summed)
        heard = [i for i in others if solved_model.is_heard(server, i) or (is_new and i in summed)]
        solved_model.note_versions(server, {i: others[i] for i in heard})
        if is_new:
            solved_model.renew(server, self._solve(get_group(server.state, "sums"), server.classes))
        elif summed:
            server.log["sums_left_out"] = len(summed)

    # a client can be forgotten --------------------------------------------------------------------------------
    def remembered(self, state: State) -> Collection[int]:
        if not self.keep_sums:
            raise ConfigError("expected method.keep_sums = true, so that a client's sums can be taken out, got false")
        return sums_of_rows.kept_clients(state)

    def forget(self, state: State, client_id: int) -> State:
        """Add up the others' sums anew and solve again.

        The client is among those who are heard, so that it does not send them again, and none are taken from it.
        """
        versions = members(state, "versions")
        if client_id not in sums_of_rows.kept_clients(state) and str(client_id) in versions:
            return state
        left = sums_of_rows.without_client(state, client_id)
        if "solution" in left:
            classes = len(get_group(left, "solution").get("shares", ()))
            del left["solution"]
            if "sums" in left:
                left["solution"] = self._solve(get_group(left, "sums"), classes)
        versions = {str(client_id): torch.tensor(0), **versions}
        return {**left, "versions": versions, "version": solved_model.next_version(state)}

    def forget_upload(self, message: Message) -> Message:
        return {name: value for name, value in message.items() if name != "sums"} if "sums" in message else message

    def forget_at_client(self, state: State, server: State) -> State:
        if "solution" not in state:
            return state
        left = {name: value for name, value in state.items() if name not in ("solution", "temperature")}
        return left | {"solution": dict(get_group(server, "solution"))} if "solution" in server else left

    # settings without effect ----------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        if self.uses_photographs:
            sums_of_rows.check_photographs(server, self.name, self.features, self.map == "photographs")
        if not self.views and server.training.augmentation == "none":
            raise ConfigError(
                f"{self.name}: views = false does nothing without training.augmentation; leave it at true"
            )
        if self.temperature is not None and not server.classes:
            raise ConfigError(f"{self.name}: temperature does nothing where numbers are predicted")
        has_floats = server.prepare(server.input_example).is_floating_point()
        if self.classifier == "ridge" and not (server.classes and (has_floats or self.auxiliary_model is not None)):
            raise ConfigError(f"{self.name}: classifier = 'ridge' does nothing for numbers to predict and ids of words")
        if has_floats:
            return
        if self.unit_features:
            raise ConfigError(f"{self.name}: expected inputs of floats with unit_features, got ids of words")
        if self.second_moments == "clients" and self.auxiliary_model is None:
            raise ConfigError(
                f"{self.name}: second_moments = 'clients' does nothing for ids of words, of which no S is sent; leave "
                "it at 'rows'"
            )

    # declared -------------------------------------------------------------------------------------------------
    name = "closed-form"
    evaluation_stage = "received"
    same_addends = True
    staleness_weighting = "alike"  # sums are the same in any round
    supports_dp_sgd = False
    upload_form = {
        "sums": sums_of_rows.form,
        "version": Entry(types=(torch.int64,), least=0),
        "network": network_map.DIGEST,
    }

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

    @property
    def bounds_rows(self) -> bool:
        return self.unit_features and not self.is_alone

    fixed_entries = {"sums": "sums of rows, which would be solved with all that was done to them; see unit_features"}

    @property
    def exposed(self) -> Exposed | None:
        return Exposed("sums", "sums", self._phi_of, sums=self._sums_in)

    def _sums_in(self, upload: Message) -> Group:
        sums = get_group(upload, "sums")
        return sums if self.unit_features else times(sums, int(sums["counts"].sum()))
