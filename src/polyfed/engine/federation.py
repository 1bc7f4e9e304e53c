"""Clients, a server and a method: given by the user, checked, and run round by round."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder
from polyfed.core.settings import Evaluation, Training
from polyfed.data.partition import check_integer
from polyfed.engine.architectures import first_by_architecture, trained_counts
from polyfed.engine.arguments import (
    check_settings,
    clients_of,
    complete_task,
    execution_of,
    functions_of,
    list_of,
    method_of,
    output_of,
    plugins_of,
    settings_of,
)
from polyfed.engine.checkpoint import check_made_of
from polyfed.engine.compatibility import averaged
from polyfed.engine.evaluation import Measure, validate_metrics
from polyfed.engine.federation_parts import FederationParts
from polyfed.engine.run import ClientModels, History, of_federation
from polyfed.engine.run import Run as Run
from polyfed.engine.run_loop import RunLoop
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.unread_settings import unread_settings
from polyfed.errors import ConfigError, described
from polyfed.escaping import clients_text
from polyfed.loggers.base import as_logger
from polyfed.registry import LOGGERS
from polyfed.units import human_count


class Federation(FederationParts):
    """Clients, a server and a method.

    Args:
        clients: in order; their numbers are their places.
        method: e.g. ``polyfed.methods.FedGH()``.
        training, evaluation: settings; see there.
        plugins: what else is done: settings such as ``polyfed.Availability(dropout_rate=0.2)``,
            ``polyfed.Privacy(...)``, ``polyfed.Compression(...)``, ``polyfed.Devices(...)``,
            ``polyfed.RobustAggregation(...)``, ``polyfed.Adversaries(...)``, and plugins of your own
            (`polyfed.Plugin`).
        task: what is predicted: classes, data that are public, a shared test set; see `polyfed.Task`.
        executor: the name of one ("serial", "processes", ...), or all of how work is done; see `polyfed.Execution`.
        out: the run folder, or all of what is written; see `polyfed.Output`. None writes nothing.
        seed: every random draw of the run is derived from it.
        builders: architecture name -> function that makes the network, for clients given by a name of your own, and for
            a network that the method names. Names that a recipe takes ("digits-cnn1", "timm:resnet10t") need none.
        loggers: functions of a round's record, and objects with any of `Logger`'s methods.
        metrics: figures of your own, name -> function of a client's predictions and labels, (N,) each: classes, int64,
            or numbers, float64, in their own unit; NaN where it is not defined.

    Raises:
        ConfigError: models or data do not fit the method or the settings, or a simulated device's memory; a device is
            not there, the executor is not possible here, or an argument is of another type.
    """

    def __init__(  # noqa: PLR0913 - what a user may choose, each by its name
        self,
        clients: Sequence[Client],
        method: Method,
        training: Training | None = None,
        evaluation: Evaluation | None = None,
        *,
        plugins: Sequence[object] = (),
        task: Task | None = None,
        executor: str | Execution = "auto",
        out: Path | str | Output | None = None,
        seed: int = 0,
        builders: Mapping[str, Builder] | None = None,
        loggers: Sequence[object] = (),
        metrics: Mapping[str, Measure] | None = None,
    ) -> None:
        self.clients = clients_of(clients)
        self.method = method_of(method)
        self.loggers = [as_logger(given) for given in list_of("loggers", loggers)]
        self.metrics = validate_metrics(functions_of("metrics", metrics))
        self.training = settings_of("training", training, Training)
        self.evaluation = settings_of("evaluation", evaluation, Evaluation)
        self.plugins = plugins_of(plugins)
        self.execution = execution_of(executor)
        self.output = output_of(out)
        self.seed = check_integer("seed", seed, 0)
        self.task = complete_task(task, self.clients)
        check_settings(self.task, self.training, self.evaluation, self.metrics, self.output, self.clients)
        self._put_together(functions_of("builders", builders))

    def __repr__(self) -> str:
        facts = self.facts
        kinds = human_count(len(first_by_architecture(self.clients)), "architecture")
        who = f"{human_count(len(self.clients), 'client')} with {kinds}"
        what = f"{human_count(facts['rounds'], 'round')}, seed {self.seed}"
        return f"Federation({facts['method']}, {who}, {facts['dataset']}, {what})"

    def _repr_html_(self) -> str:
        return of_federation(self.facts, self.clients, trained_counts(self.model_factory, self.clients))

    @property
    def averaged(self) -> str:
        """What the method averages with whom, in a line; "" where it averages no networks."""
        if self.method.card.alone or not hasattr(self.method, "aggregation"):
            return ""
        owners = [client.architecture for client in self.clients]
        templates = {name: self.model_factory.module(name, alone=True) for name in first_by_architecture(self.clients)}
        return averaged(self.method, owners, {name: self.method.personal_model(one) for name, one in templates.items()})

    def run(self, resume: bool = False, overwrite: bool = False, progress: bool = False) -> Run:
        """Run all rounds.

        Args:
            resume: those after the last checkpoint of the run folder; a finished run is only read.
            overwrite: replace the run that the folder holds.
            progress: show how it gets on, on standard error.

        A finished run goes on, too, where more rounds are planned now than it had: it ends as if they had been from the
        start.

        Raises:
            ConfigError: the run folder is taken, or holds another recipe's run; nothing has been written then.
            RunError: a client or the server failed; says which, when and where.
            RunInterrupted: Ctrl-C; a checkpoint of the last whole round has been written.
        """
        for name, value in (("resume", resume), ("overwrite", overwrite), ("progress", progress)):
            if not isinstance(value, bool):
                raise ConfigError(f"run: expected {name} to be True or False, got {described(value)}")
        given = self.loggers
        if progress:
            self.loggers = [LOGGERS["console"](), *given]
        try:
            return self._run(resume, overwrite)
        finally:
            self.loggers = given

    def _run(self, resume: bool, overwrite: bool) -> Run:
        if self.folder is None:
            return self._finished(RunLoop(self, self.remarks()).run())
        self.folder.validate(self.settings, resume, overwrite, self.method.planned)
        _ = self.checkpointer.forgotten  # the method can take them out
        if resume:
            check_made_of(self.folder, self.data_checksum, self._code)
        result = self.folder.finished(self.settings) if resume else None
        if result is not None:
            return self._read(result)
        with self.folder.open(self.settings, resume, overwrite, self.method.planned):
            return self._finished(RunLoop(self, self.remarks()).run())

    def _finished(self, result: Mapping[str, Any]) -> Run:
        path = None if self.folder is None else self.folder.path
        numbers = [client.id for client in self.exporter.present()]
        models = ClientModels(self.export, numbers)
        personal = ClientModels(functools.partial(self.export, stage="personal"), numbers)
        return Run(result, History(self.history), models, path, personal)

    def _read(self, result: Mapping[str, Any]) -> Run:
        """A finished run, from its folder, which stays as it is; its models need the last checkpoint."""
        assert self.folder is not None
        snapshot = self.checkpointer.latest(self.folder)
        final = result.get("final_round", bool(self.method.final_exchanges()))
        last = (result.get("stopped_after") or self.training.rounds) + final
        records = self.folder.rounds(last)
        if snapshot is not None and snapshot.round == last:
            self.checkpointer.go_back(snapshot, records)
            self.checkpointer.show_wanted_round()
            return self._finished(result)
        self.history[:] = records
        models = ClientModels(self._gone, self.present(last))
        return Run(result, History(self.history), models, self.folder.path, models)

    def _gone(self, client_id: int) -> nn.Module:
        raise ConfigError(f"the run's last checkpoint is gone; client {client_id}'s weights, if kept, are in models/")

    def remarks(self) -> list[str]:
        """What a user should know before round 1: who is averaged with whom, odd classes, settings not read."""
        averaging = [self.averaged] if len(first_by_architecture(self.clients)) > 1 and self.averaged else []
        return [*averaging, *self.held_out_remarks(), *self.class_remarks(), *unread_settings(self)]

    def held_out_remarks(self) -> list[str]:
        """Who is held out of training."""
        names = [client.name for client in self.clients]
        return [f"held out of training: clients {clients_text(self.held_out, names)}"] if self.held_out else []

    def test_row_remarks(self) -> list[str]:
        """Who has so few test rows that a single one weighs much in the mean over clients."""
        if self.shared_test is not None or self.evaluation.weighting == "samples":
            return []
        unscored = self.held_out | self.setup.unscored
        rows = {client.id: len(client.data.test) for client in self.clients if client.id not in unscored}
        scored = {client: count for client, count in rows.items() if count}
        line = self.task.main_score.about_few_rows(scored, [client.name for client in self.clients])
        return [line] if line else []
