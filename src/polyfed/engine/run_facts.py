"""What is written of a run beside its numbers: the facts of its result, and settings where there is no recipe."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from polyfed.engine.executors.vectorized import clients_per_batch
from polyfed.engine.run import is_best_wanted
from polyfed.places import without_places
from polyfed.registry import is_own
from polyfed.results.main_score import ACCURACY
from polyfed.results.schema import RunResult, in_order

if TYPE_CHECKING:
    from polyfed.engine.federation import Federation


def facts_of(federation: Federation) -> dict[str, Any]:
    """What loggers, the result and tables know of a run."""
    evaluation: dict[str, Any] = {
        "stage": federation.stages[0],
        "weighting": federation.evaluation.weighting,
        "test": "client" if federation.task.test is None else "global",
        "every_n_rounds": federation.evaluation.every_n_rounds,
        "stages": federation.stages,
        "patience": federation.evaluation.patience,
        "min_delta": federation.evaluation.min_delta,
        "round": "best" if is_best_wanted(federation.output.keep, federation.evaluation.patience) else "last",
    }
    if federation.held_out:
        evaluation["held_out"] = sorted(federation.held_out)
        evaluation["held_out_epochs"] = federation.evaluation.held_out_epochs
    if federation.setup.unscored:
        evaluation["clients"] = "honest"
    asked = (federation.output.settings or {}).get("method", {}).get("name", "")
    facts: dict[str, Any] = {
        "method": asked if is_own(asked) else federation.method.name,  # by which it can be made again
        "hyperparameters": dataclasses.asdict(federation.method) if dataclasses.is_dataclass(federation.method) else {},
        "label": federation.output.label,
        "dataset": without_places(federation.task.dataset),
        "class_names": federation.class_names,
        "clients": len(federation.clients),
        **_client_names(federation),
        "rounds": federation.training.rounds,
        "seed": federation.seed,
        "workers": federation.executor.workers,
        "precision": federation.execution.precision,
        "evaluation": evaluation,
    }
    if federation.task.main_score is not ACCURACY:
        facts["score"] = federation.task.main_score.name
    for plugin in federation.plugins:
        facts |= plugin.facts()
    return in_order(facts, RunResult)


def _client_names(federation: Federation) -> dict[str, list[str]]:
    """What the clients are called, by number; nothing where none has a name."""
    names = [client.name for client in federation.clients]
    return {"client_names": names} if any(names) else {}


def recorded_settings(federation: Federation) -> dict[str, Any]:
    """What a run folder records of a federation that was made in Python."""
    hyperparameters = {k: v for k, v in federation.facts["hyperparameters"].items() if v is not None}
    if federation.method.card.alone:
        hyperparameters["alone"] = True
    if federation.method.card.personalize:
        hyperparameters["personalize"] = federation.method.card.personalize
    if federation.method.card.adapters is not None:
        hyperparameters["adapters"] = federation.method.card.adapters.model_dump()
    execution = federation.execution
    facts = federation.facts
    run: dict[str, Any] = {"seed": federation.seed, "precision": facts["precision"]}
    size = clients_per_batch(execution.executor, str(execution.device), execution.workers)
    if size > 1:
        run |= {"executor": "vectorized", "workers": size}
    if federation.output.keep != "last":
        run["keep"] = federation.output.keep
    return {
        "method": {"name": facts["method"], **hyperparameters},
        "training": federation.training.effective(),
        "evaluation": federation.evaluation.effective(),
        **{plugin.name: facts[plugin.name] for plugin in federation.plugins if plugin.name in facts},
        "run": {**run, **_client_names(federation)},
        "federation": {
            "dataset": facts["dataset"],
            "architectures": [client.architecture for client in federation.clients],
            "samples": [client.n for client in federation.clients],
            **({"metrics": list(federation.metrics)} if federation.metrics else {}),
        },
    }
