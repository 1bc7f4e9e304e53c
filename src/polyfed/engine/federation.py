"""Clients, a server and a method: put together, checked, and run round by round."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder
from polyfed.core.server import ClientInfo, Server
from polyfed.core.settings import Evaluation, Training
from polyfed.data.classes import remarks
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, LabeledSamples, checksum_of
from polyfed.engine import checkpoint
from polyfed.engine.architectures import build_model_factory, first_by_architecture, trained_counts
from polyfed.engine.arguments import (
    builders_by_name,
    check_class_weights,
    check_client_weights,
    check_evaluation,
    check_texts,
    check_validation,
    clients_of,
    complete_task,
    execution_of,
    list_of,
    mapping_of,
    method_of,
    name_architectures,
    output_of,
    plugins_of,
    settings_of,
    task_of,
)
from polyfed.engine.checkpoint import Checkpointer
from polyfed.engine.compatibility import averaged, check_auxiliary_model, check_compatibility
from polyfed.engine.device import parse_device
from polyfed.engine.evaluation import (
    Evaluator,
    Measure,
    from_scores_of,
    held_out_of,
    remarks_on,
    select_missing,
    validate_metrics,
)
from polyfed.engine.executors.base import Executor, WorkerContext
from polyfed.engine.executors.process_pool import ProcessPool, make_executor
from polyfed.engine.model_export import ModelExport
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round import RoundRunner, draw_cohort
from polyfed.engine.round_state import Round
from polyfed.engine.run import History, PersonalModels, of_federation, summarize_run
from polyfed.engine.run import Run as Run
from polyfed.engine.run_facts import facts_of, settings_of_python
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.run_loop import RunLoop
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.transaction import Transaction
from polyfed.engine.unread_settings import unread_settings
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError, described
from polyfed.loggers.base import as_logger, notify
from polyfed.registry import LOGGERS, own_code
from polyfed.units import human_count


class Federation:
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
        metrics: figures of your own, name -> function of a client's counts (C, C), int64, rows the true class, columns
            the predicted one; NaN where it is not defined.

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
        self.method = method = method_of(method)
        self.loggers = [as_logger(given) for given in list_of("loggers", loggers)]
        self.metrics = validate_metrics(mapping_of("metrics", metrics))
        self.training = settings_of("training", training, Training)
        self.evaluation = settings_of("evaluation", evaluation, Evaluation)
        self.plugins: Sequence[Plugin] = plugins_of(plugins)
        self.execution = execution_of(executor)
        self.output = output_of(out)
        self.seed = check_integer("seed", seed, 0)
        self.stages = self.evaluation.stages(method.evaluation_stage)
        self.task = complete_task(task_of(task), self.clients)
        check_texts(self.task, self.output, self.metrics)
        check_evaluation(self.task, self.evaluation, self.metrics, self.clients)
        check_class_weights(self.training, self.clients, self.classes)
        check_client_weights(self.training, self.clients)
        self._shared_test = self.task.test if isinstance(self.task.test, LabeledSamples) else None
        self._number_clients()
        self._dealt = [client.data for client in self.clients]  # as plugins may put others in their places
        self.held_out = held_out_of(self.evaluation, self.clients, self.seed)
        if self.evaluation.missing_classes:
            select_missing(self.clients, self._shared_test)
        check_validation(self.clients, self.evaluation, self.output)
        self.server = self._build_server(mapping_of("builders", builders))
        self.history: list[dict[str, Any]] = []
        self.setup = self._validate_plugins()
        self.folder = None if self.output.path is None else RunFolder(self.output.path)
        self.store = self._make_store()
        self.executor = self._make_executor()
        self.facts = facts_of(self)
        self.settings = self.output.settings if self.output.settings is not None else settings_of_python(self)
        modules = self.settings.get("run", {}).get("modules", ())
        self._code = own_code(self.settings, modules)  # now, as files may change
        self.transaction = Transaction(
            self.server, self.clients, self.plugins, self.history, self.present, self.made_of
        )
        self.exporter = ModelExport(
            method, self.clients, self.server, self.model_factory, self.task, self.settings, self.facts, self._by_name
        )
        self.evaluator = Evaluator(
            method,
            self.task.main_score,
            self.clients,
            self.server,
            self.model_factory,
            self.executor,
            self.evaluation,
            self.stages,
            self.metrics,
            self._shared_test,
            self.setup.excluded,
            self.setup.unscored,
            self.held_out,
        )
        self.checkpointer = Checkpointer(
            self.transaction,
            self.history,
            self.folder,
            self.store,
            len(self.clients),
            self.evaluation,
            self.output.keep,
            self.settings,
            self.is_last,
            lambda records: summarize_run(records, self.facts, self._members(), self.model_factory.device),
        )
        self.runner = RoundRunner(
            method,
            self.server,
            self.clients,
            self.training,
            self.seed,
            self.plugins,
            self.executor,
            self.transaction,
            self.evaluator,
            self._aggregate,
            self._client_done,
        )

    def _number_clients(self) -> None:
        """Tell every client its number and what all of them share."""
        for number, client in enumerate(self.clients):
            if self._shared_test is not None:
                client.data = ClientData(client.data.train, client.data.validation, self._shared_test)
            client.id = number
            client.classes = len(client.class_names) or self.classes
            client.seed = self.seed
            client.training = self.training
            client.public = self.task.public
            client.plugins = self.plugins

    def _build_server(self, builders: dict[str, Builder]) -> Server:
        """The networks of clients and server, and the server."""
        method = self.method
        task = self.task
        self._by_name = builders_by_name(self.clients, builders, self.classes, task.vocabulary)
        named = name_architectures(self.clients, {**builders, **self._by_name})
        check_auxiliary_model(method, [*named, *builders])
        device = parse_device(str(self.execution.device))
        self.model_factory = build_model_factory(
            method, named, self.seed, device, others=builders, precision=self.execution.precision
        )
        check_compatibility(method, self.clients, self.model_factory, task.public)
        return Server(
            {client.id: ClientInfo(client.architecture, client.n) for client in self.clients},
            self.model_factory,
            rounds=self.training.rounds,
            classes=self.classes,
            seed=self.seed,
            training=self.training,
            public=task.public,
            initial={client.id: client.given for client in self.clients if client.given is not None},
            prepare=self.clients[0].prepare,
            example=self.clients[0].data.train.x[:0],
        )

    def _validate_plugins(self) -> Setup:
        """Have every plugin look at the federation."""
        setup = Setup(
            self.method,
            self.clients,
            self.server,
            self.model_factory,
            self.training,
            self.evaluation,
            self.seed,
            self.execution.precision,
            self.plugins,
            self.present,
            self.cohort,
            held_out=self.held_out,
        )
        for plugin in self.plugins:
            plugin.validate(setup)
        if not self.present(1):
            raise ConfigError("expected a client in round 1, got none: all are left out or join later")
        return setup

    def _make_store(self) -> WeightStore:
        """Where clients' weights are kept."""
        beside = None if self.folder is None else self.folder.path
        return WeightStore(self.model_factory, [client.architecture for client in self.clients], beside)

    def _make_executor(self) -> Executor:
        """What carries out the clients' work."""
        asked = self.execution
        scores = from_scores_of(self.evaluation)
        context = WorkerContext(self.method, self.model_factory, self.clients, self.store, scores)
        say = functools.partial(self.tell, "message")
        workers = None if asked.workers is None else check_integer("workers", asked.workers, 1)
        executor = make_executor(asked.executor, workers, context, self.training, say, asked.rebuild)
        self.server.run_passes = executor.run_passes if isinstance(executor, ProcessPool) else None
        return executor if asked.wrap is None else asked.wrap(executor)

    # what it is -----------------------------------------------------------------------------------------------

    @property
    def classes(self) -> int:
        """The number of classes of the task; 0: numbers are predicted."""
        assert self.task.classes is not None
        return self.task.classes

    @property
    def class_names(self) -> list[str]:
        """What the classes are called."""
        return list(self.task.class_names or ())

    def plugin(self, name: str) -> Any:
        """The plugin of that name.

        Raises:
            ConfigError: there is none.
        """
        for plugin in self.plugins:
            if plugin.name == name:
                return plugin
        raise ConfigError(f"expected one of the plugins {', '.join(p.name for p in self.plugins)}, got '{name}'")

    def present(self, number: int) -> list[int]:
        """Who is in the federation in round `number`, asked or not."""
        absent = {client for plugin in self.plugins for client in plugin.absent(number)}
        return [client.id for client in self.clients if client.id not in absent | self.held_out]

    def cohort(self, number: int) -> list[int]:
        """Who is to take part in a round, as far as nobody drops out."""
        present = self.present(number)
        everybody = any(exchange.who == "all" for exchange in self.method.exchanges(number))
        return present if everybody else draw_cohort(self.training, self.seed, number, present)

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

    # running ------------------------------------------------------------------------------------------------

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
            return self._finished(RunLoop(self).run())
        self.folder.validate(self.settings, resume, overwrite, self.method.planned)
        if resume:
            checkpoint.check_made_of(self.folder, self.data_checksum, self._code)
        result = self.folder.finished(self.settings) if resume else None
        if result is not None:
            return self._read(result)
        with self.folder.open(self.settings, resume, overwrite, self.method.planned):
            return self._finished(RunLoop(self).run())

    def made_of(self) -> dict[str, Any]:
        """Checksums of what the run is made of beside its settings, as its result has them."""
        data = self.data_checksum
        return ({} if data is None else {"data": data}) | ({"code": self._code} if self._code else {})

    @property
    def data_checksum(self) -> str | None:
        """Of all rows as they are dealt and of their names; None where they are elsewhere."""
        rows = [part for data in self._dealt for part in (data.train, data.validation, data.test)]
        task = self.task
        names = {
            "classes": self.class_names,
            "of_clients": [client.class_names for client in self.clients],
            "features": list(task.feature_names),
            "categories": task.columns.categories,
            "words": [] if task.vocabulary is None else task.vocabulary.words,
        }
        return checksum_of(rows if task.public is None else [*rows, task.public.samples], names)

    def write_result(self) -> dict[str, Any]:
        """The run's result, and what its folder then holds."""
        result = summarize_run(self.history, self.facts, self._members(), self.model_factory.device)
        wanted = self.checkpointer.show_wanted_round()
        keeps_weights = self.output.keep != "nothing"
        result |= {"made_of": self.made_of()}
        result |= {"models_of_round": wanted} if keeps_weights else {}
        if self.folder is not None:
            if keeps_weights:
                self.write_models(self.folder)
            self.folder.write_result(result, keeps_weights)
        return result

    def _aggregate(self, round: Round, uploads: Mapping[int, Message]) -> None:
        """Let the method aggregate what came up, as the plugins leave it."""
        for plugin in self.plugins:
            uploads = plugin.before_aggregate(round, uploads)
        self.method.aggregate(self.server, uploads)

    def is_last(self, number: int) -> bool:
        """Whether no regular round comes after this one, by what the settings and the records say before it."""
        return number == self.training.rounds or self.why_not([number, number + 1]) is not None

    def why_not(self, rounds: Sequence[int], final: bool = False) -> str | None:
        """What further rounds, taken together, would do, for which a plugin does not let them begin; None: they may."""
        for plugin in self.plugins:
            refusal = plugin.should_stop(self.history, rounds, final)
            if refusal is not None:
                return refusal
        return None

    # what comes of it -----------------------------------------------------------------------------------------

    def export(self, client_id: int) -> nn.Module:
        """A copy of the client's personal model; where it has none of this kind yet, what it would receive now.

        Raises:
            ConfigError: there is no such client, or it has not joined yet.
        """
        return self.exporter.export(client_id)

    def write_models(self, folder: RunFolder) -> None:
        self.exporter.write(folder)

    def _members(self) -> list[dict[str, Any]]:
        """Who the clients are, for the result."""
        members = []
        for client, seen in zip(self.clients, self._seen(), strict=True):
            member = {"id": client.id, "architecture": client.architecture, "samples": client.n}
            member |= {"test_samples": len(client.data.test), **seen}
            member |= {"held_out": True} if client.id in self.held_out else {}
            for plugin in self.plugins:
                member |= plugin.about_client(client.id)
            members.append(member)
        return members

    def remarks(self) -> list[str]:
        """What a user should know before round 1: who is averaged with whom, odd classes, settings not read."""
        averaging = [self.averaged] if len(first_by_architecture(self.clients)) > 1 and self.averaged else []
        return [*averaging, *self.held_out_remarks(), *self.class_remarks(), *unread_settings(self)]

    def held_out_remarks(self) -> list[str]:
        """Who is held out of training."""
        return remarks_on(self.held_out, [client.name for client in self.clients])

    def test_row_remarks(self) -> list[str]:
        """Who has so few test rows that a single one weighs much in the mean over clients."""
        if self._shared_test is not None or self.evaluation.weighting == "samples":
            return []
        unscored = self.held_out | self.setup.unscored
        rows = {client.id: len(client.data.test) for client in self.clients if client.id not in unscored}
        scored = {client: count for client, count in rows.items() if count}
        line = self.task.main_score.about_few_rows(scored, [client.name for client in self.clients])
        return [line] if line else []

    def class_remarks(self) -> list[str]:
        """What is odd about the clients' classes (`polyfed.data.classes.remarks`)."""
        trained = {label for client in self.clients for label in client.data.train.y.unique().tolist()}
        sides = {id(client.data.test): client.data.test for client in self.clients}  # a shared one is looked at once
        tested = {label for side in sides.values() for label in side.y.unique().tolist()}
        return remarks(self.class_names, trained, tested)

    def _seen(self) -> list[dict[str, Any]]:
        """Of each client what only whoever has its network and its data can tell."""
        parameters = trained_counts(self.model_factory, self.clients)
        return [{"parameters": parameters[client.architecture], **client.label_facts()} for client in self.clients]

    def _finished(self, result: Mapping[str, Any]) -> Run:
        path = None if self.folder is None else self.folder.path
        return Run(result, History(self.history), PersonalModels(self.export, list(self.server.clients)), path)

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
        models = PersonalModels(self._gone, self.present(last))
        return Run(result, History(self.history), models, self.folder.path)

    def _gone(self, client_id: int) -> nn.Module:
        raise ConfigError(f"the run's last checkpoint is gone; client {client_id}'s weights, if kept, are in models/")

    def _client_done(self, total: int, done: int) -> None:
        self.tell("client_done", done, total)

    def tell(self, event: str, *what: Any) -> None:
        notify(self.loggers, event, *what)
