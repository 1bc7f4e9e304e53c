"""What is written of a run: the facts of its result, checksums, and settings where there is no recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.client import Client
from polyfed.data.samples import checksum_of
from polyfed.engine.executors.choice import clients_per_batch
from polyfed.engine.plugin import Setup
from polyfed.engine.run import is_best_wanted, summarize_run
from polyfed.places import without_places
from polyfed.records.main_score import ACCURACY
from polyfed.records.schema import RunResult, in_order
from polyfed.registry import is_own


def facts_of(setup: Setup) -> dict[str, Any]:
    """What loggers, the result and tables know of a run."""
    task, output = setup.task, setup.output
    evaluation: dict[str, Any] = {
        "stage": setup.stages[0],
        "weighting": setup.evaluation.weighting,
        "test": "client" if task.test is None else "global",
        "every_n_rounds": setup.evaluation.every_n_rounds,
        "stages": setup.stages,
        "patience": setup.evaluation.patience,
        "min_delta": setup.evaluation.min_delta,
        "round": "best" if is_best_wanted(output.keep, setup.evaluation.patience) else "last",
    }
    if setup.held_out:
        evaluation["held_out"] = sorted(setup.held_out)
        evaluation["held_out_epochs"] = setup.evaluation.held_out_epochs
    if setup.unscored:
        evaluation["clients"] = "honest"
    asked = (output.settings or {}).get("method", {}).get("name", "")
    facts: dict[str, Any] = {
        "method": asked if is_own(asked) else setup.method.name,  # by which it can be made again
        "hyperparameters": dataclasses.asdict(setup.method) if dataclasses.is_dataclass(setup.method) else {},
        "label": output.label,
        "dataset": without_places(task.dataset),
        "class_names": list(task.class_names or ()),
        "clients": len(setup.clients),
        **_client_names(setup.clients),
        "rounds": setup.training.rounds,
        "seed": setup.seed,
        "workers": setup.executor.workers,
        "evaluation": evaluation,
    }
    if task.main_score is not ACCURACY:
        facts["score"] = task.main_score.name
    for plugin in setup.plugins:
        facts |= plugin.facts()
    return in_order(facts, RunResult)


def _client_names(clients: Sequence[Client]) -> dict[str, list[str]]:
    """What the clients are called, by number; nothing where none has a name."""
    names = [client.name for client in clients]
    return {"client_names": names} if any(names) else {}


def recorded_settings(setup: Setup) -> dict[str, Any]:
    """What a run folder records of a federation that was made in Python."""
    facts, execution = setup.facts, setup.execution
    hyperparameters = {k: v for k, v in facts["hyperparameters"].items() if v is not None}
    if setup.method.is_alone:
        hyperparameters["alone"] = True
    if setup.method.personalize:
        hyperparameters["personalize"] = setup.method.personalize
    if setup.method.adapters is not None:
        hyperparameters["adapters"] = setup.method.adapters.model_dump()
    run: dict[str, Any] = {"seed": setup.seed}
    size = clients_per_batch(execution.executor, str(execution.device), execution.workers)
    if size > 1:
        run |= {"executor": "vectorized", "workers": size}
    if setup.output.keep != "last":
        run["keep"] = setup.output.keep
    return {
        "method": {"name": facts["method"], **hyperparameters},
        "training": setup.training.effective(),
        "evaluation": setup.evaluation.effective(),
        **{plugin.name: facts[plugin.name] for plugin in setup.plugins if plugin.name in facts},
        "run": {**run, **_client_names(setup.clients)},
        "federation": {
            "dataset": facts["dataset"],
            "architectures": [client.architecture for client in setup.clients],
            "samples": [client.n for client in setup.clients],
            **({"metrics": list(setup.metrics)} if setup.metrics else {}),
        },
    }


def made_of(setup: Setup) -> dict[str, Any]:
    """Checksums of what a run is made of beside its settings, as its result has them."""
    data = data_checksum(setup)
    return ({} if data is None else {"data": data}) | ({"code": setup.code} if setup.code else {})


def data_checksum(setup: Setup) -> str | None:
    """Of all rows as they were given and of their names; None where they are elsewhere."""
    if setup.clients_are_elsewhere:
        return None
    rows = [part for data in setup.given_data for part in (data.train, data.validation, data.test)]
    task = setup.task
    names = {
        "classes": list(task.class_names or ()),
        "of_clients": [client.class_names for client in setup.clients],
        "features": list(task.feature_names),
        "categories": task.columns.categories,
        "words": [] if task.vocabulary is None else task.vocabulary.words,
    }
    return checksum_of(rows if task.public is None else [*rows, task.public.samples], names)


def result_of(setup: Setup, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a run with these records."""
    members = []
    trained: dict[str, int] = {}  # by architecture
    for name in () if setup.clients_are_elsewhere else setup.first_of_each_architecture():
        trained[name] = sum(p.numel() for p in setup.model_factory.build_raw(name).parameters() if p.requires_grad)
    for client in setup.clients:
        member = {"id": client.id, "architecture": client.architecture, "samples": client.n}
        member |= {"validation_samples": len(client.data.validation), "test_samples": len(client.data.test)}
        if not setup.clients_are_elsewhere:
            member |= {"parameters": trained[client.architecture], "labels": client.data.train.counts()}
            member |= {"class_names": list(client.class_names)} if client.class_names else {}
        member |= {"held_out": True} if client.id in setup.held_out else {}
        for plugin in setup.plugins:
            member |= plugin.about_client(client.id)
        members.append(member)
    return summarize_run(records, setup.facts, members, setup.model_factory.device)
