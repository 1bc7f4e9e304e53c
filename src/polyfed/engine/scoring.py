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
from polyfed.data.samples import LabeledSamples, SelectedSamples
from polyfed.functional import metrics
from polyfed.functional.modes import eval_mode
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
    outputs: Mapping[str, Sequence[Tensor]] | None = None,
) -> Score:
    """Score the model that a working client holds; its BatchNorm statistics and modes stay as they are.

    Args:
        client: at work. method: whose `predict` gives the scores. samples: what to score on.
        from_scores: those of `FROM_SCORES` that are taken, too, for which the scores of all samples are kept.
        others: also by the other predictors that the method names, from the same weights and state; and on the classes
            that the client never had, where it has samples of them.
        outputs: what `predict` gives, `CHUNK` rows each on the CPU, by the names of `predictors`, where it is known; of
            all or of none.
    """
    known = outputs or {}
    named = predictors(method, others)
    found = {name: _score(client, one, samples, outputs=known.get(name)) for name, one in named.items() if name}
    score = replace(_score(client, method, samples, from_scores, known.get("")), others=found)
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


def _score(
    client: Client,
    method: Method,
    samples: LabeledSamples | SelectedSamples,
    from_scores: Collection[str] = (),
    outputs: Sequence[Tensor] | None = None,
) -> Score:
    if outputs is None:
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


class ScoreCache:
    """Scores of one evaluation.

    Where all clients share one test set, models that are equal bit for bit, and are given the same inputs, are scored
    once.
    """

    def __init__(self, from_scores: Collection[str] = ()) -> None:
        self.from_scores = from_scores  # taken with every score
        self._by_content: dict[object, Score] = {}

    def score(
        self,
        client: Client,
        method: Method,
        samples: LabeledSamples,
        shared: bool,
        others: bool = True,
    ) -> Score:
        """Score a working client; with `shared` samples, equal models once. others: see `evaluate_model`."""
        if not shared:
            return evaluate_model(client, method, samples, self.from_scores, others)
        model = method.personal_model(client.model)
        inputs = (id(samples), id(client.prepare), id(client.missing))
        content = (
            client.architecture,
            inputs,
            fingerprint({"weights": dict(model.state_dict()), **{f"state {n}": t for n, t in client.state.items()}}),
        )
        if content not in self._by_content:
            self._by_content[content] = evaluate_model(client, method, samples, self.from_scores, others)
        return self._by_content[content]


def fingerprint(message: Message) -> bytes:
    """A digest of names, shapes, types and bytes: equal only for equal messages."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(flatten(message).items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
