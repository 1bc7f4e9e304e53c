"""Scores of clients: how well the model that each holds predicts given samples; and those already taken.

Of a client's predictions only the figures asked for are kept, so that memory does not grow with the square of the
classes. Where several clients hold the same model, their rows go through it together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.inference import rows_at_once
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.data.samples import LabeledSamples, SelectedSamples, TargetScale
from polyfed.functional import metrics
from polyfed.functional.device_copies import move_mappings, move_together
from polyfed.functional.modes import eval_mode, represented_once
from polyfed.records.main_score import ACCURACY, RMSE, MainScore

LEAST = 4  # rows per forward pass: products of fewer rows have other last bits than those of many
COUNTS = "confusion"  # asked for as a figure: the counts of all pairs of classes are kept
ROWS = "rows"  # likewise: what is predicted for every row, and its label; of nodes never
# a figure from a client's predictions and labels, (N,) each: classes, int64, or numbers, float64; NaN: not defined
Measure = Callable[[Tensor, Tensor], float]
FROM_COUNTS: Mapping[str, Callable[[metrics.ClassCounts], Tensor]] = {
    ACCURACY.name: metrics.accuracy,
    "balanced_accuracy": metrics.balanced_accuracy,
    "f1": metrics.f1,
}
# figures that need more than counts: the scores of all samples (N, C) and their labels (N,)
FROM_SCORES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "auc": metrics.auc,
    "calibration_error": metrics.calibration_error,
}

_OF_NUMBERS: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    RMSE.name: metrics.rmse,
    "mae": metrics.mae,
    "r2": metrics.r2,
}

Samples = LabeledSamples | SelectedSamples


def uses_default_predict(method: Method) -> bool:
    """Whether the method uses `Method.predict`, the network's output."""
    return getattr(method.predict, "__func__", None) is Method.predict


@dataclass(frozen=True, eq=False)
class Score:
    """What is kept of a client's predictions.

    total: samples scored. figures: by name, the main score among them, which an RMSE is where numbers are predicted;
    NaN: not defined. others: the main score by the other predictors that the method names (`alternative_predictors`).
    own, missing: on the classes that the client has, and on those that it never had; None where these were not asked
    for. pairs: how often each class was taken for each, of so many `classes` (`functional.metrics.class_pairs`); empty
    where nobody asks. rows: predictions and labels, (N,) each, classes or numbers in their own unit; None where nobody
    asks.
    """

    total: int
    figures: Mapping[str, float]
    others: Mapping[str, Score] = field(default_factory=dict)
    own: Score | None = None
    missing: Score | None = None
    pairs: Tensor = metrics.NO_PAIRS
    classes: int = 0
    rows: tuple[Tensor, Tensor] | None = None

    def confusion(self) -> Tensor:
        """The counts (C, C) int64, where they were asked for; rows the true class, columns the predicted one."""
        return metrics.confusion_matrix(self.pairs, self.classes)

    @property
    def main(self) -> MainScore:
        """The main score."""
        return RMSE if RMSE.name in self.figures else ACCURACY

    @property
    def value(self) -> float:
        """The main score's value; NaN without samples."""
        return self.figures[self.main.name]


class Part(NamedTuple):
    """Samples that a client is scored on, and what of it is wanted.

    scale: of the client's own numbers to predict, whose unit its predictions are in; the model may be another's, too.
    is_test: all figures, and the other predictors that the method names, count, too; else the main score alone.
    missing: test samples of classes that the client never had, where these are scored, too.
    """

    samples: Samples
    scale: TargetScale
    is_test: bool = True
    missing: SelectedSamples | None = None


def part_of(client: Client, part: str) -> Part:
    """What of a client's data is scored how: validation rows, which choose rounds, by the main score alone."""
    is_test = part == "test"
    return Part(getattr(client.data, part), client.data.train.scale, is_test, client.missing if is_test else None)


# by predictor, "" the method's own, and id of the samples: (N,) classes, or numbers; and under `SCORES` the scores
# (N, C) of the classes by the method's own predictor, where a figure is made of them
Outputs = Mapping[str, Mapping[int, Tensor]]
SCORES = "scores"


def evaluate_model(
    client: Client,
    method: Method,
    parts: Sequence[Part],
    figures: Collection[str] = (),
) -> list[Score]:
    """Score the model that a working client holds; its BatchNorm statistics and modes stay as they are.

    Args:
        client: at work. method: whose `predict` gives the scores.
        parts: what to score on; of several clients where these hold the same model.
        figures: those wanted beside the main score.
    """
    made = predictions(client, method, parts, figures)
    tensors = [tensor for by_samples in made.values() for tensor in by_samples.values()]
    here = iter(move_together(tensors, [torch.device("cpu")] * len(tensors)))  # in one copy, as each makes a GPU wait
    outputs = {name: {place: next(here) for place in by_samples} for name, by_samples in made.items()}
    if not client.classes:
        return [_regression_score(part, outputs, figures) for part in parts]
    tests = _distinct(part.samples for part in parts if part.is_test)
    rest = _distinct(samples for part in parts for samples in _beside(part))
    found = _judged(client, tests, outputs[""], figures, outputs.get(SCORES, {}))
    beside = _judged(client, rest, outputs[""])
    others = {name: _judged(client, tests, outputs[name]) for name in outputs if name not in ("", SCORES)}
    scores = []
    for part in parts:
        place = id(part.samples)
        score = found[place] if part.is_test else beside[place]
        if part.is_test and others:
            score = replace(score, others={name: by_name[place] for name, by_name in others.items()})
        if part.missing is not None:
            own = _on_own_classes(part.samples.y, outputs[""][place], part.missing.y)
            score = replace(score, own=own, missing=beside[id(part.missing)])
        scores.append(score)
    return scores


def predictions(client: Client, method: Method, parts: Sequence[Part], figures: Collection[str] = ()) -> Outputs:
    """What is predicted for all samples of the parts, on the device of the client's network. figures: those wanted."""
    tests = _distinct(part.samples for part in parts if part.is_test)
    rest = _distinct(samples for part in parts for samples in _beside(part))
    rest = {place: one for place, one in rest.items() if place not in tests}
    methods = {"": method, **(method.alternative_predictors if tests else {})}
    made = _predictions(client, methods, tests, with_scores=not FROM_SCORES.keys().isdisjoint(figures))
    made[""] |= _predictions(client, {"": method}, rest)[""]
    return made


def _distinct(samples: Iterable[Samples]) -> dict[int, Samples]:
    return {id(one): one for one in samples}


def _beside(part: Part) -> list[Samples]:
    """The samples of which the main score alone is wanted."""
    missing: list[Samples] = [] if part.missing is None else [part.missing]
    return missing if part.is_test else [part.samples, *missing]


def _predictions(
    client: Client, methods: Mapping[str, Method], samples: Mapping[int, Samples], with_scores: bool = False
) -> dict[str, dict[int, Tensor]]:
    """What each method predicts for each of the samples; they share the network's representations.

    Of a batch's outputs only the predictions are kept, and the scores where these are asked for. They are written where
    they stay: lists of small tensors, joined in the end, would break up the memory that batches need again.
    """
    if not samples:
        return {name: {} for name in methods}
    model = methods[""].personal_model(client.model)
    device = next(iter(model.parameters())).device
    sizes = [len(one) for one in samples.values()]
    size = rows_at_once(next(iter(samples.values())).whole.x, device)
    state: Mapping[str, Any] = client.state
    if not all(map(uses_default_predict, methods.values())):
        (state,) = move_mappings([state], device, lambda tensor: tensor.dim() > 0)
    kept: dict[str, Tensor] = {}
    done = 0
    with torch.no_grad(), eval_mode(model), represented_once(model):
        for x in _batches(samples.values(), size, device):
            filled = torch.cat([x, x[-1:].expand(LEAST - len(x), *x.shape[1:])]) if len(x) < LEAST else x
            prepared = client.prepare(filled.to(device))
            for name, method in methods.items():
                output = method.predict(model, prepared, state)[: len(x)]
                made = {name: output.argmax(dim=1) if client.classes else output[:, 0]}
                if with_scores and not name:
                    made[SCORES] = output
                for key, values in made.items():
                    whole = kept.setdefault(key, values.new_empty(0))
                    if not done:
                        whole.resize_((sum(sizes), *values.shape[1:]))
                    whole[done : done + len(x)] = values
            done += len(x)
    return {name: dict(zip(samples, each.split(sizes), strict=True)) for name, each in kept.items()}


def _batches(samples: Iterable[Samples], size: int, device: torch.device) -> Iterator[Tensor]:
    """The inputs of all, one after the other, `size` rows at a time."""
    waiting: list[Tensor] = []
    rows = 0
    for x in (x for one in samples for x in one.chunks(size, device)):
        if waiting and _kind(x) != _kind(waiting[0]):
            yield torch.cat(waiting)
            waiting = []
            rows = 0
        waiting.append(x)
        rows += len(x)
        if rows >= size:
            batch, rest = torch.cat(waiting).split([size, rows - size])
            yield batch
            waiting = [rest]
            rows = len(rest)
    if rows:
        yield torch.cat(waiting)


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Inputs of one kind can stand in one batch."""
    return x.shape[1:], x.dtype, x.device


def _judged(
    client: Client,
    samples: Mapping[int, Samples],
    predicted_of: Mapping[int, Tensor],
    figures: Collection[str] = (),
    scores_of: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[int, Score]:
    """The score of each, by the classes predicted and, where a figure is made of them, the scores of the classes."""
    if not samples:
        return {}
    sizes = [len(one) for one in samples.values()]
    y = torch.cat([one.y for one in samples.values()])
    predicted = torch.cat([predicted_of[place] for place in samples])
    counts = metrics.class_counts(y, predicted, client.classes, sizes)
    wanted = [name for name in FROM_COUNTS if name in figures or name == ACCURACY.name]
    columns = {name: FROM_COUNTS[name](counts).tolist() for name in wanted}
    for name in [name for name in FROM_SCORES if name in figures]:
        columns[name] = [FROM_SCORES[name](scores_of[place], one.y) for place, one in samples.items()]
    found: dict[int, Score] = {}
    rows = zip(*columns.values(), strict=True)
    each = zip(samples, sizes, rows, predicted.split(sizes), y.split(sizes), strict=True)
    for place, size, row, taken, true in each:
        score = Score(size, dict(zip(columns, row, strict=True)))
        if COUNTS in figures:
            score = replace(score, pairs=metrics.class_pairs(true, taken), classes=counts.true.shape[1])
        found[place] = replace(score, rows=(taken, true)) if ROWS in figures else score
    return found


def _on_own_classes(y: Tensor, predicted: Tensor, missing: Tensor) -> Score:
    """The main score on the samples of classes that the client has; `missing` has labels of all others."""
    mine = ~torch.isin(y, missing.unique())
    right = int((y == predicted)[mine].sum())
    total = int(mine.sum())
    return Score(total, {ACCURACY.name: right / total if total else math.nan})


def _regression_score(part: Part, outputs: Outputs, figures: Collection[str]) -> Score:
    """Outputs are in the client's standardized unit, samples may be in another; both are taken back to their own."""
    y = part.samples.scale.restored(part.samples.y)
    found = {}
    names = list(outputs) if part.is_test else [""]
    for name in names:
        predicted = part.scale.restored(outputs[name][id(part.samples)])
        values = {key: measure(predicted, y) for key, measure in _OF_NUMBERS.items()}
        rows = (predicted, y) if ROWS in figures and part.is_test and not name else None
        found[name] = Score(len(y), values, rows=rows)
    return replace(found.pop(""), others=found)


def score_to_json(score: Score, with_rows: bool = False) -> dict[str, Any]:
    """A score in what JSON has; what is not defined is None. with_rows: whether single rows may be in it."""
    beside = {name: getattr(score, name) for name in ("own", "missing")}
    return {
        "total": score.total,
        "figures": {name: None if math.isnan(value) else value for name, value in score.figures.items()},
        "others": {name: score_to_json(other) for name, other in score.others.items()},
        **{name: score_to_json(other) for name, other in beside.items() if other is not None},
        "classes": score.classes,
        "pairs": score.pairs.tolist(),
        **({"rows": [part.tolist() for part in score.rows]} if with_rows and score.rows is not None else {}),
    }


def score_from_json(facts: Mapping[str, Any]) -> Score:
    """The inverse of `score_to_json`."""
    beside: dict[str, Any] = {name: score_from_json(facts[name]) for name in ("own", "missing") if name in facts}
    if "rows" in facts:
        kind = torch.float64 if RMSE.name in facts["figures"] else torch.int64
        predicted, y = (torch.tensor(part, dtype=kind) for part in facts["rows"])
        beside["rows"] = (predicted, y)
    return Score(
        int(facts["total"]),
        {name: math.nan if value is None else float(value) for name, value in facts["figures"].items()},
        {name: score_from_json(other) for name, other in facts["others"].items()},
        pairs=torch.tensor(facts["pairs"], dtype=torch.int32).view(-1, 3),
        classes=int(facts["classes"]),
        **beside,
    )


class ScoreCache:
    """Scores of one evaluation.

    Where all clients share one test set, models that are equal bit for bit, and are given the same inputs, are scored
    once for each unit of numbers to predict.
    """

    def __init__(self, figures: Collection[str] = ()) -> None:
        self.figures = figures  # taken with every score
        self._by_content: dict[object, Score] = {}

    def scores(self, client: Client, method: Method, parts: Sequence[Part], shared: Sequence[bool]) -> list[Score]:
        """See `evaluate_model`; parts that are `shared` once for equal models."""
        if not any(shared):
            return evaluate_model(client, method, parts, self.figures)
        model = method.personal_model(client.model)
        held = {"weights": dict(model.state_dict()), **{f"state {name}": t for name, t in client.state.items()}}
        content = (client.architecture, id(client.prepare), fingerprint(held))
        keys = [
            (content if is_shared else "own", id(part.samples), id(part.missing), part.scale)
            for part, is_shared in zip(parts, shared, strict=True)
        ]
        asked = dict(zip(keys, parts, strict=True))
        asked = {key: part for key, part in asked.items() if key not in self._by_content}
        fresh = dict(zip(asked, evaluate_model(client, method, list(asked.values()), self.figures), strict=True))
        self._by_content |= {key: score for key, score in fresh.items() if key[0] != "own"}
        return [fresh[key] if key in fresh else self._by_content[key] for key in keys]


def fingerprint(message: Message) -> bytes:
    """A digest of names, shapes, types and bytes: equal only for equal messages."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(flatten(message).items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
