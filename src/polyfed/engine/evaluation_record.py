"""What a round's record says of the test data: the clients' scores summed up."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from polyfed.core.settings import Evaluation, Metric, Stage
from polyfed.engine.scoring import FROM_SCORES, ClientScore, Score
from polyfed.errors import ConfigError, RunError
from polyfed.results.main_score import ACCURACY, RMSE, MainScore

Measure = Callable[[Tensor], float]  # of a client's counts (C, C), int64, rows the true class; NaN: not defined


def summarize(
    scores: Iterable[Score], mean: str, figure: str | Callable[[Any], float] | None = None
) -> dict[str, float]:
    """Mean, standard deviation over clients (population), minimum and maximum of a figure; n clients.

    Of the main score also `bottom_decile`, the mean of the worst tenth of the clients, rounded up.

    Args:
        scores: one per client that has test data. Those for which the figure is not defined are left out.
        mean: "clients" (each counts once) or "samples" (each as often as it has samples; for the accuracy that is the
            accuracy over all samples, for the others the mean of the clients' own figures).
        figure: "balanced_accuracy", "f1", "auc", "calibration_error" or "r2", or a function of the score; None: the
            main score, the accuracy or the RMSE.
    """
    scores = list(scores)
    if not scores:
        return {}
    main = scores[0].main
    value_of = figure if callable(figure) else operator.attrgetter(figure or main.name)
    pairs = [(float(value_of(score)), score.total) for score in scores]
    pairs = [(value, total) for value, total in pairs if math.isfinite(value)]
    if not pairs:
        return {}
    values = sorted(value for value, _ in pairs)
    plain = math.fsum(values) / len(values)
    weighted = math.fsum(value * total for value, total in pairs) / sum(total for _, total in pairs)
    spread = math.sqrt(math.fsum((v - plain) ** 2 for v in values) / len(values))
    found = {"mean": weighted if mean == "samples" else plain, "std": spread, "min": values[0], "max": values[-1]}
    if figure in (None, main.name):
        worst = sorted(values, reverse=main.lower_is_better)[: -(-len(values) // 10)]
        found["bottom_decile"] = math.fsum(worst) / len(worst)
    return {**found, "n": len(values)}


def evaluation_record(
    stages: Mapping[Stage, Mapping[int, Score]],
    architectures: Sequence[str],
    evaluation: Evaluation,
    measures: Mapping[str, Measure] | None = None,
    score: MainScore = ACCURACY,
) -> dict[str, Any]:
    """A record's part about test data.

    Args:
        stages: stage -> client number -> score, the main stage first. Clients that were not scored are not in it.
        architectures: of all clients, in order. evaluation: what is asked for. measures: further figures, by name.
        score: the main score.

    Raises:
        RunError: one of the further figures fails, or is no number.
    """
    main = next(iter(stages.values()))
    by_architecture: dict[str, list[Score]] = {}
    for number, one in sorted(main.items()):
        by_architecture.setdefault(architectures[number], []).append(one)
    scored = {stage: list(scores.values()) for stage, scores in stages.items()}
    told = metrics_of(evaluation, score)
    asked: dict[str, str | Callable[[Any], float]] = {n: n for n in told if n != "confusion"}
    asked |= {name: functools.partial(_measured, name, measure) for name, measure in (measures or {}).items()}
    values = {number: float(getattr(one, score.name)) for number, one in main.items()}
    clients = [values.get(number, math.nan) for number in range(len(architectures))]
    return {
        score.name: _known({stage: summarize(scores, evaluation.weighting) for stage, scores in scored.items()}),
        f"{score.name}_by_predictor": _known(
            {
                stage: {name: summarize(found, evaluation.weighting) for name, found in _by_predictor(scores).items()}
                for stage, scores in scored.items()
            }
        ),
        f"{score.name}_per_client": [None if math.isnan(value) else value for value in clients],
        f"{score.name}_per_architecture": _known(
            {name: summarize(scores, evaluation.weighting) for name, scores in by_architecture.items()}
        ),
        "metrics": _known(
            {
                stage: _known({name: summarize(scores, evaluation.weighting, figure) for name, figure in asked.items()})
                for stage, scores in scored.items()
            }
        ),
        "confusion": _summed(main.values()).tolist() if "confusion" in told and main else None,
        **({"accuracy_by_classes": _by_classes(scored, evaluation.weighting)} if evaluation.missing_classes else {}),
    }


def not_evaluated(score: MainScore) -> dict[str, Any]:
    """What the record of a round has that was not evaluated."""
    return {
        score.name: {},
        f"{score.name}_by_predictor": {},
        f"{score.name}_per_client": [],
        f"{score.name}_per_architecture": {},
        "metrics": {},
        "confusion": None,
        "validation": None,
    }


def metrics_of(evaluation: Evaluation, score: MainScore) -> tuple[str, ...]:
    """What is recorded beside the main score: of classes what is asked for, of numbers R2."""
    return score.metrics if score is RMSE else tuple(evaluation.metrics)


def from_scores_of(evaluation: Evaluation) -> tuple[str, ...]:
    """The figures asked for that need the scores of all samples."""
    return tuple(name for name in evaluation.metrics if name in FROM_SCORES)


def validate_metrics(measures: Mapping[str, Measure]) -> dict[str, Measure]:
    """Figures of the user's own, by name.

    Raises:
        ConfigError: a name that is taken or has more than letters, digits, "_" and "-", or something that cannot be
            called.
    """
    taken = ("accuracy", *get_args(Metric))
    for name, measure in measures.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name) or name in taken:
            raise ConfigError(
                f"metrics: expected a name of letters, digits, '_' and '-', none of {', '.join(taken)}, got {name!r}"
            )
        if not callable(measure):
            raise ConfigError(f"metrics: expected a function of a client's counts as '{name}', got {measure!r}")
    return dict(measures)


def _by_classes(stages: Mapping[Stage, Sequence[Score]], weighting: str) -> dict[str, Mapping[str, Any]]:
    """Stage -> "own" and "missing" -> the accuracy on the classes that each client has, and on those that it lacks."""
    found: dict[str, Mapping[str, Any]] = {}
    for stage, told in stages.items():
        scores = [score for score in told if isinstance(score, ClientScore)]
        lacking = [score.missing for score in scores if score.missing is not None]
        parts = {"own": summarize([score.own for score in scores], weighting), "missing": summarize(lacking, weighting)}
        found[stage] = _known(parts)
    return _known(found)


def _by_predictor(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """The clients' scores by each of the other predictors."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        for name, other in score.others.items():
            found.setdefault(name, []).append(other)
    return found


def _measured(name: str, measure: Measure, score: ClientScore) -> float:
    try:
        return float(measure(score.confusion.clone()))
    except Exception as error:
        raise RunError(f"metric '{name}': {type(error).__name__}: {error}") from error


def _summed(scores: Iterable[Score]) -> Tensor:
    """The clients' counts together, as large as the largest."""
    counts = [score.confusion for score in scores if isinstance(score, ClientScore)]
    size = max(len(each) for each in counts)
    whole = torch.zeros((size, size), dtype=torch.int64)
    for each in counts:
        whole[: len(each), : len(each)] += each
    return whole


def _known(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: entry for name, entry in entries.items() if entry}
