"""Scores of a federation's clients at the stages that are asked for, taken anew only where they may have changed.

And what a round's record says of them: means, other figures, classes that clients lack, clients that are held out.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.randomness import generator
from polyfed.core.settings import Evaluation, Metric, Stage
from polyfed.data.samples import LabeledSamples, SelectedSamples
from polyfed.engine.executors.client_work import has_weights
from polyfed.engine.executors.jobs import EvalJob, make_job
from polyfed.engine.plugin import Setup
from polyfed.engine.scoring import COUNTS, ROWS, Measure, Score
from polyfed.errors import ConfigError, RunError
from polyfed.escaping import clients_text
from polyfed.records.fields import LARGEST_SCORE
from polyfed.records.main_score import ACCURACY, RMSE, MainScore


@dataclass(eq=False)
class ScoredClient:
    """A client as it is scored, and what its scores depend on.

    variant: of its network. message: what it receives before; None: nothing.
    """

    client: Client
    variant: str
    message: Message | None

    def __post_init__(self) -> None:
        self._facts = (self.client.version, self.variant)
        self._sent = flatten(self.message or {})

    def is_scored_like(self, other: ScoredClient) -> bool:
        """Whether nothing is another, the message's tensors being the very same, which nobody writes into."""
        if self is other:
            return True
        theirs = other._sent
        same = self._facts == other._facts and self._sent.keys() == theirs.keys()
        return same and all(tensor is theirs[name] for name, tensor in self._sent.items())


class Evaluator:
    """Scores a federation's clients; see `polyfed.core.settings.Evaluation` for the stages.

    Clients that are held out are in no round, and the server does not know of them: nothing of theirs is aggregated,
    and no draw of another client changes. Each is scored as if it joined now: with what it would receive ("received")
    and, with `held_out_epochs`, after training on its own rows ("after_training"). Nothing of that is kept.

    Attributes:
        silent: says who does not answer at the moment: nobody, where all clients are in one process.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.silent: Callable[[], Collection[int]] = tuple
        self._memory: dict[tuple[int, bool, str], tuple[ScoredClient, Score]] = {}  # by client, received or not, part
        self._newcomers = [one for one in setup.clients if one.id in setup.held_out and len(one.data.test)]
        epochs = setup.evaluation.held_out_epochs
        if epochs:
            for client in self._newcomers:
                client.training = client.training.model_copy(update={"local_epochs": epochs})

    def record(self, after_training: Mapping[int, Score]) -> dict[str, Any]:
        """The figures of all stages, and the validation score of the main one, for the round's record."""
        setup = self._setup
        main = setup.stages[0]
        validated = "personal" if main == "after_training" else main
        wanted = [(stage, "test") for stage in setup.stages if stage != "after_training"]
        wanted.append((validated, "validation"))
        found = self._scores(wanted)
        trained = {n: score for n, score in after_training.items() if n not in setup.unscored}
        scores = {stage: trained if stage == "after_training" else found[stage, "test"] for stage in setup.stages}
        names = [client.architecture for client in setup.clients]
        record = evaluation_record(scores, names, setup.evaluation, setup.metrics, setup.task.main_score)
        validation = found[validated, "validation"].values()
        mean = summarize(validation, setup.evaluation.weighting).get("mean")
        return {**record, "validation": mean, **(self._newcomers_record() if self._newcomers else {})}

    def _scores(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[int, Score]]:
        """The scores of those present by (stage, part of the data).

        Of whom nothing changed the last score is taken again, but not of those who do not answer: nobody knows what has
        become of them.
        """
        setup = self._setup
        silent = set(self.silent())
        self._memory = {place: known for place, known in self._memory.items() if place[0] not in silent}
        there = (setup.server.clients.keys() | setup.excluded.keys()) - silent - setup.unscored
        stages = [stage for stage, _ in wanted]
        views = {client.id: scored_views(setup, client, stages) for client in setup.clients if client.id in there}
        missing: dict[ScoredClient, list[str]] = {}
        for stage, part in wanted:
            for view in (of_stage[stage] for of_stage in views.values()):
                asked = missing.setdefault(view, [])
                if len(getattr(view.client.data, part)) and part not in asked and self._recall(view, part) is None:
                    asked.append(part)
        missing = {view: parts for view, parts in missing.items() if parts}
        taken = setup.executor.score([self._job(view, parts) for view, parts in missing.items()])
        for view, scores in zip(missing, taken, strict=True):
            for part, score in scores.items():
                self._memory[view.client.id, view.message is not None, part] = (view, score)
        found: dict[tuple[str, str], dict[int, Score]] = {}
        for stage, part in wanted:
            known = {number: self._recall(of_stage[stage], part) for number, of_stage in views.items()}
            found[stage, part] = {number: score for number, score in known.items() if score is not None}
        return found

    def _recall(self, view: ScoredClient, part: str) -> Score | None:
        known = self._memory.get((view.client.id, view.message is not None, part))
        return known[1] if known is not None and known[0].is_scored_like(view) else None

    def _job(self, view: ScoredClient, parts: Sequence[str]) -> EvalJob:
        shared = [part for part in parts if getattr(view.client.data, part) is self._setup.task.test]
        return EvalJob(view.client, view.variant, view.message, self._setup.server.round, parts, shared)

    def _newcomers_record(self) -> dict[str, Any]:
        setup = self._setup
        asked = [self._job(_newcomer(setup, client, "train"), ["test"]) for client in self._newcomers]
        taken = zip(asked, setup.executor.score(asked), strict=True)
        scores = {"received": {job.client.id: found["test"] for job, found in taken if "test" in found}}
        if setup.evaluation.held_out_epochs:
            scores["after_training"] = self._trained_newcomers()
        scores = {stage: found for stage, found in scores.items() if found}
        means = {stage: summarize(found.values(), setup.evaluation.weighting) for stage, found in scores.items()}
        each = {
            stage: {str(number): score.value for number, score in found.items() if _is_defined(score.value)}
            for stage, found in scores.items()
        }
        return {"held_out": means, "held_out_per_client": each}

    def _trained_newcomers(self) -> dict[int, Score]:
        """Each after local training on what it would receive now; nothing in a round in which nobody trains."""
        setup = self._setup
        number = setup.server.round
        training = [(place, one) for place, one in enumerate(setup.method.exchanges(number)) if one.trains]
        if not training:
            return {}
        place, exchange = training[0]
        jobs = [
            make_job(
                setup.method,
                view.client,
                view.message or {},
                variant=view.variant,
                round=number,
                scores=True,
                figures=figures_of(setup.evaluation, setup.metrics),
                exchange_index=place,
                uploads=False,
            )
            for view in (_newcomer(setup, client, exchange.name) for client in self._newcomers)
        ]
        outcomes = setup.executor.run(jobs, lambda done: None)
        return {outcome.client_id: outcome.score for outcome in outcomes if outcome.score is not None}


def scored_views(setup: Setup, client: Client, stages: Sequence[str]) -> dict[str, ScoredClient]:
    """What of the client is scored at each stage; what needs the same message is the same."""
    if client.id in setup.held_out:
        return dict.fromkeys(stages, _newcomer(setup, client, "train"))
    if client.id in setup.excluded:
        return dict.fromkeys(stages, ScoredClient(client, setup.excluded[client.id], None))
    variant = setup.method.variant(setup.server, client.id)
    own = has_weights(client, variant, setup.model_factory)
    receives = {stage: stage == "received" or not own for stage in stages}  # who never took part, say
    as_it_stands = received = ScoredClient(client, variant, None)
    if any(receives.values()):
        message = setup.method.broadcast(setup.server, client.id)
        received = ScoredClient(client, variant, message) if message else as_it_stands
    return {stage: received if asked else as_it_stands for stage, asked in receives.items()}


def _newcomer(setup: Setup, client: Client, exchange: str) -> ScoredClient:
    """A client that is held out, with what the server would send it in an exchange."""
    trial = copy.copy(setup.server)
    trial.state = dict(setup.server.state)
    trial.log = {}
    trial.exchange = exchange
    trial.set_available(sorted([*setup.server.clients, client.id]))
    message = setup.method.broadcast(trial, client.id)
    return ScoredClient(client, setup.method.variant(trial, client.id), message or None)


def kept_stages(stages: Sequence[str]) -> list[str]:
    """The stages whose networks a run keeps: those that it scores, but for that in the middle of a round, and what
    clients keep; the main one first, unless it is that one.
    """
    return list(dict.fromkeys([*(stage for stage in stages if stage != "after_training"), "personal"]))


def held_out_of(evaluation: Evaluation, clients: Sequence[Client], seed: int) -> frozenset[int]:
    """The numbers of the clients that are held out.

    Args:
        evaluation: says how many, which are then drawn, or which. clients: all, by number. seed: of the draw.

    Raises:
        ConfigError: no such client, nobody left to train, or none of them has test rows.
    """
    asked = evaluation.held_out
    count = len(clients)
    if isinstance(asked, int):
        order = torch.randperm(count, generator=generator(seed, "held out"))
        numbers = frozenset(order[:asked].tolist())
    else:
        numbers = frozenset(_number(value, count) for value in asked)
    if numbers and (asked if isinstance(asked, int) else len(numbers)) >= count:
        raise ConfigError(
            f"evaluation.held_out: expected fewer than the {count} clients, as one at least trains, got {asked}"
        )
    if numbers and not any(len(clients[number].data.test) for number in numbers):
        who = clients_text(numbers, [client.name for client in clients])
        raise ConfigError(f"evaluation.held_out: expected clients with test rows, got clients {who} without any")
    return numbers


def _number(value: int | str, count: int) -> int:
    if isinstance(value, int) and 0 <= value < count:
        return value
    hint = "; groups go by name in a recipe with data.partition 'by_group'" if isinstance(value, str) else ""
    raise ConfigError(f"evaluation.held_out: expected numbers of clients from 0 to {count - 1}, got {value!r}{hint}")


def select_missing(clients: Sequence[Client], shared_test: LabeledSamples | None) -> None:
    """Give each client the test rows of the classes that it never had: of all clients, or of the shared test set.

    Clients that lack the same classes share one selection.

    Raises:
        ConfigError: no client lacks a class that there are test rows of, or inputs differ in shape or type.
    """
    whole = _all_test_rows(clients) if shared_test is None else shared_test
    tested = set(whole.y.unique().tolist())
    known: dict[tuple[int, ...], SelectedSamples] = {}
    for client in clients:
        own = client.data.train.y.unique().tolist() if client.own_classes is None else client.own_classes
        lacking = tuple(sorted(tested - set(own)))
        if lacking and lacking not in known:
            rows = torch.isin(whole.y, torch.tensor(lacking)).nonzero().flatten()
            known[lacking] = SelectedSamples(whole, rows)
        client.missing = known.get(lacking)
    if not known:
        raise ConfigError(
            "evaluation.missing_classes = true does nothing, as every client has training rows of all classes of the "
            "test rows; leave it at false"
        )


def _all_test_rows(clients: Sequence[Client]) -> LabeledSamples:
    sides = [client.data.test for client in clients if len(client.data.test)]
    kinds = {(side.x.shape[1:], side.x.dtype) for side in sides}
    if len(kinds) > 1:
        raise ConfigError(
            "evaluation.missing_classes: expected test inputs of one shape and type at all clients, got "
            f"{' and '.join(sorted(f'{tuple(shape)} of {kind}' for shape, kind in kinds))}"
        )
    if not sides:
        raise ConfigError("evaluation.missing_classes: expected test rows at some client, got none")
    return LabeledSamples(torch.cat([side.x for side in sides]), torch.cat([side.y for side in sides]))


def summarize(
    scores: Iterable[Score], mean: str, figure: str | Callable[[Any], float] | None = None
) -> dict[str, float]:
    """Mean, standard deviation over clients (population), minimum and maximum of a figure; n clients.

    Of the main score also `bottom_decile`, the mean of the worst tenth of the clients, rounded up.

    Args:
        scores: one per client that has test data. Those for which the figure is not defined are left out.
        mean: "clients" (each counts once) or "samples" (each as often as it has samples; for the accuracy that is the
            accuracy over all samples, for the others the mean of the clients' own figures).
        figure: the name of one that was asked for, or a function of the score; None: the main score, the accuracy or
            the RMSE.
    """
    scores = list(scores)
    if not scores:
        return {}
    main = scores[0].main
    name = figure or main.name
    pairs = [(name(score) if callable(name) else score.figures[name], score.total) for score in scores]
    pairs = [(value, total) for value, total in pairs if _is_defined(value)]
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
    wanted = score.metrics if score is RMSE else evaluation.metrics  # of numbers always MAE and R2
    asked: dict[str, str | Callable[[Any], float]] = {n: n for n in wanted if n != COUNTS}
    asked |= {name: functools.partial(_measured, name, measure) for name, measure in (measures or {}).items()}
    values = {number: one.value for number, one in main.items() if _is_defined(one.value)}
    means = functools.partial(_means, weighting=evaluation.weighting)
    found = {
        score.name: means(scored),
        f"{score.name}_by_predictor": _known({stage: means(_by_predictor(each)) for stage, each in scored.items()}),
        f"{score.name}_per_client": [values.get(number) for number in range(len(architectures))],
        f"{score.name}_per_architecture": means(by_architecture),
        "metrics": _known(
            {
                stage: _known({name: summarize(each, evaluation.weighting, figure) for name, figure in asked.items()})
                for stage, each in scored.items()
            }
        ),
        "confusion": _summed(main.values()).tolist() if COUNTS in wanted and main else None,
    }
    if evaluation.missing_classes:
        found["accuracy_by_classes"] = _known({stage: means(_by_classes(each)) for stage, each in scored.items()})
    return found


def _is_defined(value: float) -> bool:
    """Not where there are no samples, nor where predictions are beyond all bounds."""
    return abs(value) < LARGEST_SCORE


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


def figures_of(evaluation: Evaluation, measures: Mapping[str, Measure]) -> tuple[str, ...]:
    """What every score has beside the main one; figures of the user's own need all rows."""
    return (*evaluation.metrics, *([ROWS] if measures else []))


def validate_metrics(measures: Mapping[str, Measure]) -> dict[str, Measure]:
    """Figures of the user's own, by name.

    Raises:
        ConfigError: a name that is taken or has more than letters, digits, "_" and "-", or something that is
            no function.
    """
    taken = (ACCURACY.name, RMSE.name, *get_args(Metric))
    for name, measure in measures.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name) or name in taken:
            raise ConfigError(
                f"metrics: expected a name of letters, digits, '_' and '-', none of polyfed's own "
                f"({', '.join(taken)}), got {name!r}"
            )
        if not callable(measure):
            raise ConfigError(
                f"metrics: expected a function of a client's predictions and labels as '{name}', got {measure!r}"
            )
    return dict(measures)


def _means(groups: Mapping[Any, Sequence[Score]], weighting: str) -> dict[Any, Mapping[str, Any]]:
    return _known({name: summarize(scores, weighting) for name, scores in groups.items()})


def _by_classes(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """On the classes that each client has, and on those that it lacks."""
    missing = [score.missing for score in scores if score.missing is not None]
    return {"own": [score.own or score for score in scores], "missing": missing}


def _by_predictor(scores: Iterable[Score]) -> dict[str, list[Score]]:
    found: dict[str, list[Score]] = {}
    for score in scores:
        for name, other in score.others.items():
            found.setdefault(name, []).append(other)
    return found


def _measured(name: str, measure: Measure, score: Score) -> float:
    try:
        assert score.rows is not None  # see `figures_of`
        predicted, y = score.rows
        return float(measure(predicted.clone(), y.clone()))
    except Exception as error:
        raise RunError(f"metric '{name}': {type(error).__name__}: {error}") from error


def _summed(scores: Collection[Score]) -> Tensor:
    """The clients' counts together, as large as the largest."""
    whole = torch.zeros((0, 0), dtype=torch.int64)
    for score in scores:
        each = score.confusion()
        if len(each) > len(whole):
            whole, each = each, whole
        whole[: len(each), : len(each)] += each
    return whole


def _known(entries: Mapping[Any, Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    return {name: entry for name, entry in entries.items() if entry}
