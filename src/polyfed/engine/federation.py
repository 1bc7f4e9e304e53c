"""Clients, a server and a method: given by the user, checked, and run round by round."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Method, server_follows_device
from polyfed.core.model_factory import Builder, ModelFactory
from polyfed.core.server import ClientInfo, Server
from polyfed.core.settings import Evaluation, Training
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, LabeledSamples, checksum_of
from polyfed.engine.architectures import (
    build_model_factory,
    builders_by_name,
    first_by_architecture,
    name_architectures,
    trained_counts,
)
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
from polyfed.engine.checkpoint import Checkpointer, check_made_of
from polyfed.engine.compatibility import averaged, check_auxiliary_model, check_compatibility
from polyfed.engine.device import parse_device
from polyfed.engine.evaluation import Evaluator, Measure, figures_of, held_out_of, select_missing, validate_metrics
from polyfed.engine.executors.choice import make_executor
from polyfed.engine.executors.client_work import Executor, Serial, WorkerContext
from polyfed.engine.executors.vectorized import VectorizedExecutor
from polyfed.engine.executors.worker_pool import WorkerPool
from polyfed.engine.model_export import ModelExport
from polyfed.engine.plugin import Setup, reads_uploads
from polyfed.engine.remarks import class_remarks, remarks
from polyfed.engine.round import RoundRunner, draw_cohort
from polyfed.engine.round_state import Round
from polyfed.engine.run import ClientModels, History, of_federation, summarize_run
from polyfed.engine.run import Run as Run
from polyfed.engine.run_facts import facts_of, recorded_settings
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.run_loop import RunLoop
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.transaction import Transaction
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError, described
from polyfed.functional.device_copies import with_number
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
        metrics: figures of your own, name -> function of a client's predictions and labels, (N,) each: classes, int64,
            or numbers, float64, in their own unit; NaN where it is not defined.

    Attributes:
        stages: at which clients are scored, the main one first. shared_test: the samples all are tested on, if so.
        held_out: clients that never train. history: the records of the rounds so far. setup: what plugins have seen.
        store: of the clients' weights. facts: what loggers, results and tables know of the run. settings: what the
        run folder records. transaction, evaluator, checkpointer, runner, exporter: see these classes.

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
        self.history: list[dict[str, Any]] = []
        self.stages = self.evaluation.stages(self.method.evaluation_stage)
        self.shared_test = self.task.test if isinstance(self.task.test, LabeledSamples) else None
        self._number_clients()
        self._given_data = [client.data for client in self.clients]  # plugins may put others in their places
        self.held_out = held_out_of(self.evaluation, self.clients, self.seed)
        if self.evaluation.missing_classes:
            select_missing(self.clients, self.shared_test)
        self.model_factory = self._make_networks(functions_of("builders", builders))
        check_compatibility(self.method, self.clients, self.model_factory, self.task.public)
        self.server = self._make_server()
        self.setup = self._validate_plugins()
        self.folder = None if self.output.path is None else RunFolder(self.output.path)
        self.store = self._make_store()
        self.executor = self._make_executor()
        self.facts = facts_of(self)
        self.settings = recorded_settings(self) if self.output.settings is None else self.output.settings
        self._code = own_code(self.settings, self.settings.get("run", {}).get("modules", ()))  # as files may change
        self.transaction = Transaction(
            server=self.server,
            clients=self.clients,
            plugins=self.plugins,
            history=self.history,
            present=self.present,
            made_of=self.made_of,
        )
        self.evaluator = Evaluator(
            method=self.method,
            main_score=self.task.main_score,
            clients=self.clients,
            server=self.server,
            model_factory=self.model_factory,
            executor=self.executor,
            evaluation=self.evaluation,
            stages=self.stages,
            metrics=self.metrics,
            shared_test=self.shared_test,
            excluded=self.setup.excluded,
            unscored=self.setup.unscored,
            held_out=self.held_out,
        )
        self.exporter = ModelExport(
            method=self.method,
            clients=self.clients,
            server=self.server,
            model_factory=self.model_factory,
            task=self.task,
            settings=self.settings,
            facts=self.facts,
            by_name=self._by_name,
            evaluator=self.evaluator,
        )
        self.checkpointer = Checkpointer(
            method=self.method,
            transaction=self.transaction,
            history=self.history,
            folder=self.folder,
            store=self.store,
            clients=len(self.clients),
            evaluation=self.evaluation,
            keep=self.output.keep,
            settings=self.settings,
            summarize=self.summarize,
        )
        self.runner = RoundRunner(
            method=self.method,
            server=self.server,
            clients=self.clients,
            training=self.training,
            seed=self.seed,
            plugins=self.plugins,
            executor=self.executor,
            transaction=self.transaction,
            evaluator=self.evaluator,
            aggregate=self._aggregate,
            progress=lambda total, done: self.tell("client_done", done, total),
        )

    def _number_clients(self) -> None:
        """Tell every client its number and what all of them share."""
        for number, client in enumerate(self.clients):
            if self.shared_test is not None:
                client.data = ClientData(client.data.train, client.data.validation, self.shared_test)
            self.task.assign(client, number, self.seed, self.training, self.plugins)

    def _make_networks(self, builders: dict[str, Builder]) -> ModelFactory:
        """The networks of clients and server."""
        self._by_name = builders_by_name(self.clients, builders, self.classes, self.task.vocabulary)
        named = name_architectures(self.clients, {**builders, **self._by_name})
        check_auxiliary_model(self.method, [*named, *builders])
        return build_model_factory(
            self.method,
            named,
            self.seed,
            parse_device(str(self.execution.device)),
            others=builders,
            precision=self.execution.precision,
        )

    def _make_server(self) -> Server:
        return Server(
            {client.id: ClientInfo(client.architecture, client.n) for client in self.clients},
            self.model_factory,
            rounds=self.training.rounds,
            classes=self.classes,
            seed=self.seed,
            training=self.training,
            public=self.task.public,
            initial={client.id: client.given for client in self.clients if client.given is not None},
            prepare=self.clients[0].prepare,
            example=self.clients[0].data.train.x[:0],
        )

    def _validate_plugins(self) -> Setup:
        """Have every plugin look at the federation."""
        setup = Setup(
            method=self.method,
            clients=self.clients,
            server=self.server,
            model_factory=self.model_factory,
            training=self.training,
            evaluation=self.evaluation,
            seed=self.seed,
            precision=self.execution.precision,
            plugins=self.plugins,
            present=self.present,
            cohort=self.cohort,
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
        figures = figures_of(self.evaluation, self.metrics)
        context = WorkerContext(self.method, self.model_factory, self.clients, self.store, figures)
        say = functools.partial(self.tell, "message")
        workers = None if asked.workers is None else check_integer("workers", asked.workers, 1)
        executor = make_executor(asked.executor, workers, context, self.training, say, asked.rebuild)
        self.server.run_passes = executor.run_passes if isinstance(executor, WorkerPool) else None
        if self._stays_on_device(executor):
            self.server.device = with_number(self.model_factory.device)
        return executor if asked.wrap is None else asked.wrap(executor)

    def _stays_on_device(self, executor: Executor) -> bool:
        """Whether uploads and the server's state stay on the GPU where clients' weights are kept."""
        if not isinstance(executor, Serial | VectorizedExecutor) or self.execution.wrap is not None:
            return False
        return self.store.on_device and server_follows_device(self.method) and not any(map(reads_uploads, self.plugins))

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

    def made_of(self) -> dict[str, Any]:
        """Checksums of what the run is made of beside its settings, as its result has them."""
        data = self.data_checksum
        return ({} if data is None else {"data": data}) | ({"code": self._code} if self._code else {})

    @property
    def data_checksum(self) -> str | None:
        """Of all rows as they were given and of their names; None where they are elsewhere."""
        rows = [part for data in self._given_data for part in (data.train, data.validation, data.test)]
        task = self.task
        names = {
            "classes": self.class_names,
            "of_clients": [client.class_names for client in self.clients],
            "features": list(task.feature_names),
            "categories": task.columns.categories,
            "words": [] if task.vocabulary is None else task.vocabulary.words,
        }
        return checksum_of(rows if task.public is None else [*rows, task.public.samples], names)

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
        """What a user should know before round 1; see `polyfed.engine.remarks`."""
        return remarks(self)

    def class_remarks(self) -> list[str]:
        """What is odd about the clients' classes and inputs; see `polyfed.engine.remarks`."""
        return class_remarks(self)

    # what a run does with it ------------------------------------------------------------------------------------------

    def tell(self, event: str, *what: Any) -> None:
        """Call a method of all loggers that have it."""
        notify(self.loggers, event, *what)

    def _aggregate(self, round: Round, uploads: Mapping[int, Message]) -> None:
        """Let the method aggregate what was uploaded, as the plugins leave it."""
        for plugin in self.plugins:
            uploads = plugin.before_aggregate(round, uploads)
        self.method.aggregate(self.server, uploads)

    def export(self, client_id: int, stage: str = "") -> nn.Module:
        """A copy of the client's network as it is scored; see `ModelExport.export`."""
        return self.exporter.export(client_id, stage)

    def write_models(self, folder: RunFolder) -> None:
        """Write the models of everybody present."""
        self.exporter.write(folder)

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The result of a run with these records."""
        members = []
        for client, seen in zip(self.clients, self._seen(), strict=True):
            member = {"id": client.id, "architecture": client.architecture, "samples": client.n}
            member |= {"test_samples": len(client.data.test), **seen}
            member |= {"held_out": True} if client.id in self.held_out else {}
            for plugin in self.plugins:
                member |= plugin.about_client(client.id)
            members.append(member)
        return summarize_run(records, self.facts, members, self.model_factory.device)

    def _seen(self) -> list[dict[str, Any]]:
        """Of each client what only its network and its data tell."""
        parameters = trained_counts(self.model_factory, self.clients)
        return [{"parameters": parameters[client.architecture], **client.label_facts()} for client in self.clients]

    def write_result(self) -> dict[str, Any]:
        """The run's result, and what its folder then holds."""
        result = self.summarize(self.history)
        wanted = self.checkpointer.show_wanted_round()
        keeps_weights = self.output.keep != "nothing"
        result |= {"made_of": self.made_of()}
        result |= {"models_of_round": wanted}
        if self.folder is not None:
            if keeps_weights:
                self.write_models(self.folder)
            self.folder.write_result(result, keeps_weights)
        return result
