"""What loggers, results and run folders are told of a federation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.engine.executors.vectorized import clients_per_batch
from polyfed.engine.federation_parts import FederationParts
from polyfed.places import without_places
from polyfed.registry import is_own
from polyfed.results.main_score import ACCURACY
from polyfed.results.schema import RunResult, in_order


def facts_of(federation: FederationParts) -> dict[str, Any]:
    """What loggers, the result and tables are told of the run."""
    evaluation: dict[str, Any] = {
        "stage": federation.stages[0],
        "weighting": federation.evaluation.weighting,
        "test": "client" if federation.task.test is None else "global",
        "every_n_rounds": federation.evaluation.every_n_rounds,
        "stages": federation.stages,
        "patience": federation.evaluation.patience,
        "min_delta": federation.evaluation.min_delta,
    }
    if federation.setup.held_out:
        evaluation["held_out"] = sorted(federation.setup.held_out)
        evaluation["held_out_epochs"] = federation.evaluation.held_out_epochs
    if federation.setup.unscored:
        evaluation["clients"] = "honest"
    facts: dict[str, Any] = {
        "method": _called(federation.method, federation.output.settings),
        "hyperparameters": dataclasses.asdict(federation.method) if dataclasses.is_dataclass(federation.method) else {},
        "label": federation.output.label,
        "dataset": without_places(federation.task.dataset),
        "class_names": federation.class_names,
        "clients": len(federation.clients),
        **named(federation.clients),
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


def named(clients: Sequence[Client]) -> dict[str, list[str]]:
    """What the clients are called, by number; nothing where none has a name."""
    names = [client.name for client in clients]
    return {"client_names": names} if any(names) else {}


def settings_of_python(federation: FederationParts) -> dict[str, Any]:
    """What a run folder records of a federation that was made in Python."""
    hyperparameters = {k: v for k, v in federation.facts["hyperparameters"].items() if v is not None}
    kept = {} if federation.output.keep == "last" else {"keep": federation.output.keep}
    size = clients_per_batch(
        federation.execution.executor, str(federation.execution.device), federation.execution.workers
    )
    names = named(federation.clients)
    stacked = {"executor": "vectorized", "workers": size} if size > 1 else {}
    sections = {p.name: federation.facts[p.name] for p in federation.plugins if p.name in federation.facts}
    if federation.method.card.alone:
        hyperparameters["alone"] = True
    if federation.method.card.adapters is not None:
        hyperparameters["adapters"] = federation.method.card.adapters.model_dump()
    return {
        "method": {"name": federation.facts["method"], **hyperparameters},
        "training": federation.training.effective(),
        "evaluation": federation.evaluation.effective(),
        **sections,
        "run": {"seed": federation.seed, "precision": federation.facts["precision"], **stacked, **kept, **names},
        "federation": {
            "dataset": federation.facts["dataset"],
            "architectures": [client.architecture for client in federation.clients],
            "samples": [client.n for client in federation.clients],
            **({"metrics": list(federation.metrics)} if federation.metrics else {}),
        },
    }


def _called(method: Method, settings: Mapping[str, Any] | None) -> str:
    """A method's name, by which it can be made again; one of the user's own goes by that of the recipe."""
    asked = (settings or {}).get("method", {}).get("name", "")
    return asked if is_own(asked) else method.name
