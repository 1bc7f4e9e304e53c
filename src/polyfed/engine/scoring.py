"""Scores of a client: how well the model it holds predicts given samples; and those already taken."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.core.modules import as_split_model
from polyfed.data.samples import LabeledSamples, SelectedSamples
from polyfed.functional import metrics
from polyfed.functional.modes import eval_mode
from polyfed.models.split import SplitModel
from polyfed.profiling import timed
from polyfed.results.main_score import ACCURACY, RMSE, MainScore

CHUNK = 128  # rows per forward pass: what goes in and out of a layer then fits the caches
# figures that need more than counts: the scores of all samples (N, C) and their labels (N,)
FROM_SCORES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "auc": metrics.auc,
    "calibration_error": metrics.calibration_error,
}


def uses_default_predict(method: Method) -> bool:
    """Whether the method uses `Method.predict`, the network's output."""
    return getattr(method.predict, "__func__", None) is Method.predict


def predictors(method: Method, others: bool) -> dict[str, Method]:
    """The methods whose `predict` scores a client: under "" its own, by name the others, where these are asked for."""
    return {"": method, **(method.alternative_predictors if others else {})}


@dataclass(frozen=True, eq=False)
class ClientScore:
    """A client's counts, from which every figure is made.

    confusion: (C, C) int64; rows the true class, columns the predicted one. auc, calibration_error: NaN where they were
    not asked for, or are not defined. others: by the other predictors that the method names
    (`alternative_predictors`). missing: on the classes that the client never had; None where these were not asked for.
    """

    main: ClassVar[MainScore] = ACCURACY

    confusion: Tensor
    auc: float = math.nan
    others: Mapping[str, Score] = field(default_factory=dict)
    calibration_error: float = math.nan
    missing: ClientScore | None = None

    @functools.cached_property
    def total(self) -> int:
        """Samples scored."""
        return int(self.confusion.sum())

    @functools.cached_property
    def accuracy(self) -> float:
        """In [0, 1]; NaN without samples, as are the other figures."""
        return metrics.accuracy(self.confusion)

    @functools.cached_property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that the client has test samples of."""
        return metrics.balanced_accuracy(self.confusion)

    @functools.cached_property
    def f1(self) -> float:
        """Macro F1 over the classes that the client has test samples of."""
        return metrics.f1(self.confusion)

    @functools.cached_property
    def own(self) -> ClientScore:
        """On the classes that the client has; `missing` has rows of all others that it has test samples of."""
        if self.missing is None:
            return self
        had = self.missing.confusion.sum(dim=1) == 0
        counts = self.confusion.clone()
        counts[: len(had)][~had[: len(counts)]] = 0
        return ClientScore(counts)


@dataclass(frozen=True, eq=False)
class RegressionScore:
    """How well a client's numbers are predicted.

    total: samples scored. rmse: in the unit of the numbers. r2: NaN where the client's numbers do not vary.
    others: by the other predictors that the method names.
    """

    main: ClassVar[MainScore] = RMSE
    missing: ClassVar[None] = None

    total: int
    rmse: float
    r2: float
    others: Mapping[str, Score] = field(default_factory=dict)


Score = ClientScore | RegressionScore


@timed("score")
def evaluate_model(
    client: Client,
    method: Method,
    samples: LabeledSamples,
    from_scores: Collection[str] = (),
    others: bool = True,
    represented: Sequence[Tensor] | None = None,
    outputs: Mapping[str, Sequence[Tensor]] | None = None,
) -> Score:
    """Score the model that a working client holds; its BatchNorm statistics and modes stay as they are.

    Args:
        client: at work. method: whose `predict` gives the scores. samples: what to score on.
        from_scores: those of `FROM_SCORES` that are taken, too, for which the scores of all samples are kept.
        others: also by the other predictors that the method names, from the same weights and state; and on the classes
            that the client never had, where it has samples of them.
        represented: of a split model's, the samples' representations, `CHUNK` rows each, where they are known.
        outputs: likewise what `predict` gives, on the CPU, by the names of `predictors`; of all or of none.
    """
    known = outputs or {}
    named = predictors(method, others)
    found = {name: _score(client, one, samples, outputs=known.get(name)) for name, one in named.items() if name}
    score = replace(_score(client, method, samples, from_scores, represented, known.get("")), others=found)
    if isinstance(score, RegressionScore) or client.missing is None or not others:
        return score
    missing = _score(client, method, client.missing)
    assert isinstance(missing, ClientScore)
    return replace(score, missing=missing)


def predict_samples(client: Client, method: Method, samples: LabeledSamples | SelectedSamples) -> list[Tensor]:
    """What `predict` gives for a client at work, `CHUNK` rows each, on the device of its network."""
    model = method.personal_model(client.model)
    device = next(iter(model.parameters())).device
    with torch.no_grad(), eval_mode(model):
        chunks = samples.chunks(CHUNK, device)
        return [method.predict(model, client.prepare(x.to(device)), client.state) for x in chunks]


def represent_samples(client: Client, samples: LabeledSamples, model: SplitModel) -> list[Tensor]:
    """What enters the head, `CHUNK` rows each."""
    device = next(iter(model.parameters())).device
    with torch.no_grad(), eval_mode(model):
        return [model.represent(client.prepare(x.to(device))) for x in samples.chunks(CHUNK, device)]


def _score(
    client: Client,
    method: Method,
    samples: LabeledSamples | SelectedSamples,
    from_scores: Collection[str] = (),
    represented: Sequence[Tensor] | None = None,
    outputs: Sequence[Tensor] | None = None,
) -> Score:
    if outputs is None and represented is not None:
        model = as_split_model(method.personal_model(client.model))
        with torch.no_grad(), eval_mode(model):
            outputs = [model.head(z) for z in represented]
    elif outputs is None:
        outputs = predict_samples(client, method, samples)
    predicted = [scores.argmax(dim=1) if client.classes else scores[:, 0] for scores in outputs]
    if not client.classes:
        return _regression_score(client, samples, torch.cat(predicted).cpu())
    y = samples.y
    counts = metrics.confusion_matrix(y, torch.cat(predicted).cpu(), client.classes)
    whole = torch.cat(list(outputs)).cpu() if from_scores else None
    taken = {name: FROM_SCORES[name](whole, y) for name in from_scores if whole is not None}
    return ClientScore(counts, taken.get("auc", math.nan), calibration_error=taken.get("calibration_error", math.nan))


def _regression_score(client: Client, samples: LabeledSamples | SelectedSamples, outputs: Tensor) -> RegressionScore:
    """Outputs are in the client's standardized unit, samples may be in another; both are taken back to their own."""
    predicted = client.data.train.scale.restored(outputs)
    y = samples.scale.restored(samples.y)
    return RegressionScore(len(y), metrics.rmse(predicted, y), metrics.r2(predicted, y))


REMEMBERED_BYTES = 256 * 2**20  # bytes of representations that are kept at most
_Place = tuple[int, str, int]  # client, variant, identity of the samples


class ScoreCache:
    """Scores already taken. A client is scored again only when its weights, its state or what it is sent changed.

    Where all clients share one test set, models that are equal bit for bit, and are given the same inputs, are scored
    once. Where all but the head is as the client keeps it, its representations are taken once.
    """

    def __init__(self, from_scores: Collection[str] = ()) -> None:
        self.from_scores = from_scores  # taken with every score
        self._by_client: dict[tuple[int, bool, str], tuple[object, Score]] = {}
        self._by_content: dict[object, Score] = {}
        self._represented: dict[_Place, tuple[int, list[Tensor]]] = {}
        self._held = 0  # bytes of representations
        self.scored = 0  # forward passes over a test set that were really made

    def recall(self, client_id: int, received: bool, part: str, key: object) -> Score | None:
        """The score under this key, if the client was scored under it last time."""
        known = self._by_client.get((client_id, received, part))
        return known[1] if known is not None and known[0] == key else None

    def keep(self, client_id: int, received: bool, part: str, key: object, score: Score) -> None:
        """Remember it until the key changes."""
        self._by_client[client_id, received, part] = (key, score)

    def forget(self, client_id: int) -> None:
        """Take a client's scores anew."""
        self._by_client = {place: known for place, known in self._by_client.items() if place[0] != client_id}

    def score(
        self,
        client: Client,
        method: Method,
        samples: LabeledSamples,
        shared: bool,
        others: bool = True,
        own_body: str | None = None,
    ) -> Score:
        """Score a working client; with `shared` samples, equal models once.

        others: see `evaluate_model`. own_body: the network's variant, where all of it but the head is as in the
        client's own weights.
        """
        if not shared:
            return self._take(client, method, samples, others, own_body)
        model = method.personal_model(client.model)
        inputs = (id(samples), id(client.prepare), id(client.missing))
        content = (
            client.architecture,
            inputs,
            fingerprint({"weights": dict(model.state_dict()), **{f"state {n}": t for n, t in client.state.items()}}),
        )
        if content not in self._by_content:
            self._by_content[content] = self._take(client, method, samples, others, own_body)
        return self._by_content[content]

    def _take(
        self, client: Client, method: Method, samples: LabeledSamples, others: bool, own_body: str | None
    ) -> Score:
        model = method.personal_model(client.model)
        known = None
        if own_body is not None and uses_default_predict(method) and isinstance(model, SplitModel):
            known = self._representations(client, own_body, samples, model)
        else:
            self.scored += 1
        return evaluate_model(client, method, samples, self.from_scores, others, known)

    def _representations(
        self, client: Client, variant: str, samples: LabeledSamples, model: SplitModel
    ) -> list[Tensor]:
        """Those by the client's own weights, anew if these have changed."""
        place = (client.id, variant, id(samples))
        version, known = self._represented.get(place, (-1, []))
        if version != client.version:
            self.scored += 1
            self._drop(place)  # the last to have changed are the last to go
            known = represent_samples(client, samples, model)
            self._represented[place] = (client.version, known)
            self._held += sum(z.nbytes for z in known)
            while self._held > REMEMBERED_BYTES and len(self._represented) > 1:
                self._drop(next(iter(self._represented)))
        return known

    def _drop(self, place: _Place) -> None:
        _, known = self._represented.pop(place, (-1, []))
        self._held -= sum(z.nbytes for z in known)

    def forget_content(self) -> None:
        """At the end of an evaluation: models will have changed by the next."""
        self._by_content.clear()


def fingerprint(message: Message) -> bytes:
    """A digest of names, shapes, types and bytes: equal only for equal messages."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(flatten(message).items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
