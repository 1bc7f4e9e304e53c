"""Clients, a server and a method: `Federation` is what was given, completed and checked; `RunLoop` runs its rounds."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import contiguous
from polyfed.core.method import Exchange, Method, server_follows_device
from polyfed.core.model_factory import Builder, ModelFactory
from polyfed.core.server import ClientInfo, Server
from polyfed.core.settings import Evaluation, Training
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.engine.architectures import (
    build_model_factory,
    builders_by_name,
    map_builder,
    name_architectures,
)
from polyfed.engine.arguments import (
    check_settings,
    clients_of,
    complete_task,
    expect,
    list_of,
    method_of,
    plugins_of,
)
from polyfed.engine.checkpoint import Checkpointer, check_made_of
from polyfed.engine.compatibility import check_auxiliary_model, check_compatibility
from polyfed.engine.device import parse_device, processor_seconds, single_threaded
from polyfed.engine.evaluation import Evaluator, figures_of, held_out_of, select_missing, validate_metrics
from polyfed.engine.executors.choice import make_executor
from polyfed.engine.executors.executor import Executor, ExecutorSetup
from polyfed.engine.model_export import clients_with_models, export, write_models
from polyfed.engine.plugin import Setup, reads_uploads
from polyfed.engine.remarks import all_remarks
from polyfed.engine.round import run_round, start
from polyfed.engine.round_state import Round
from polyfed.engine.run import ClientModels, History
from polyfed.engine.run import Run as Run
from polyfed.engine.run_facts import data_checksum, facts_of, made_of, recorded_settings, result_of
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.scoring import Measure
from polyfed.engine.snapshot import restore, take_snapshot
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError, RunInterrupted, described
from polyfed.functional.device_copies import with_number
from polyfed.loggers.base import as_logger
from polyfed.records.main_score import main_score_of
from polyfed.registry import LOGGERS, own_code
from polyfed.signals import raise_if_lost
from polyfed.units import human_count

_RECENT = 20  # rounds whose mean says how long the others will take


class Federation(Setup):
    """Clients, a server and a method.

    Args:
        clients: in order; their numbers are their places.
        method: e.g. ``polyfed.methods.FedGH()``.
        training, evaluation: settings; see there.
        plugins: what else is done: settings such as ``polyfed.Availability(dropout_rate=0.2)``,
            ``polyfed.Privacy(...)``, ``polyfed.Devices(...)``,
            ``polyfed.RobustAggregation(...)``, ``polyfed.Adversaries(...)``, and plugins of your own
            (`polyfed.Plugin`).
        task: what is predicted: classes, data that are public, a shared test set; see `polyfed.Task`.
        executor: the name of one ("serial", "processes", ...) or the class of your own, or all of how work is done; see
            `polyfed.Execution`.
        out: the run folder, or all of what is written; see `polyfed.Output`. None writes nothing.
        seed: every random draw of the run is derived from it.
        builders: architecture name -> function that makes the network, for clients given by a name of your own, and for
            a network that the method names. Names that a recipe takes ("digits-cnn1", "timm:resnet10t") need none.
        loggers: functions of a round's record, and objects with any of `Logger`'s methods.
        metrics: figures of your own, name -> function of a client's predictions and labels, (N,) each: classes, int64,
            or numbers, float64, in their own unit; NaN where it is not defined.

    Attributes:
        evaluator: scores the clients. checkpointer: keeps the states. Others: see `Setup`.

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
        executor: str | type[Executor] | Execution = "auto",
        out: Path | str | Output | None = None,
        seed: int = 0,
        builders: Mapping[str, Builder] | None = None,
        loggers: Sequence[object] = (),
        metrics: Mapping[str, Measure] | None = None,
    ) -> None:
        self.clients = clients_of(clients)
        self.method = method_of(method)
        self.loggers = [as_logger(given) for given in list_of("loggers", loggers)]
        self.metrics = validate_metrics(expect("metrics", metrics, dict))
        self.training = expect("training", training, Training)
        self.evaluation = expect("evaluation", evaluation, Evaluation)
        self.plugins = plugins_of(plugins)
        execution = Execution(executor=executor) if isinstance(executor, str | type) else executor
        self.execution = expect("executor", execution, Execution)
        self.output = out if isinstance(out, Output) else Output(path=out)
        self.seed = check_integer("seed", seed, 0)
        self.task = complete_task(task, self.clients)
        check_settings(self.task, self.evaluation, self.metrics, self.output, self.clients)
        self.history = []
        self.excluded, self.unscored = {}, set()
        self.stages = self.evaluation.stages(self.method.evaluation_stage)
        self._number_clients()
        self.given_data = [client.data for client in self.clients]
        self.held_out = held_out_of(self.evaluation, self.clients, self.seed)
        if self.evaluation.missing_classes:
            select_missing(self.clients, self._shared_test)
        self.model_factory = self._make_networks(expect("builders", builders, dict))
        check_compatibility(self.method, self.clients, self.model_factory, self.task.public)
        self.server = self._make_server()
        for plugin in self.plugins:
            plugin.validate(self)
        if not self.present(1):
            raise ConfigError("expected a client in round 1, got none: all are left out or join later")
        self.folder = None if self.output.path is None else RunFolder(self.output.path)
        self.store = self._make_store()
        self.executor = self._make_executor()
        self.facts = facts_of(self)
        self.settings = self.output.settings or recorded_settings(self)
        self.code = own_code(self.settings, self.settings.get("run", {}).get("modules", ()))  # now: files may change
        self.evaluator = Evaluator(self)
        self.checkpointer = Checkpointer(self)

    @property
    def _shared_test(self) -> LabeledSamples | None:
        """The samples that all clients are tested on, if so."""
        return self.task.test if isinstance(self.task.test, LabeledSamples) else None

    def _number_clients(self) -> None:
        """Tell every client its number and what all of them share."""
        for number, client in enumerate(self.clients):
            if self._shared_test is not None:
                client.data = ClientData(client.data.train, client.data.validation, self._shared_test)
            self.task.assign(client, number, self.seed, self.training, self.plugins)

    def _make_networks(self, builders: dict[str, Builder]) -> ModelFactory:
        self.by_name = builders_by_name(self.clients, builders, self.classes, self.task.vocabulary)
        named = name_architectures(self.clients, {**builders, **self.by_name})
        builders |= map_builder(self.method, self.clients[0], builders, self.classes, self.task.vocabulary)
        check_auxiliary_model(self.method, [*named, *builders])
        device = parse_device(str(self.execution.device))
        return build_model_factory(self.method, named, self.seed, device, others=builders)

    def _make_server(self) -> Server:
        tables = {client.id: client.columns for client in self.clients if client.columns is not None}
        places = {number: own.places for number, own in tables.items()}
        server = Server(
            {c.id: ClientInfo(c.architecture, c.n, places.get(c.id, ())) for c in self.clients},
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
        server.column_widths = next((own.widths for own in tables.values()), ())
        return server

    def _make_store(self) -> WeightStore:
        return WeightStore(self.model_factory, [client.architecture for client in self.clients])

    def _make_executor(self) -> Executor:
        asked = self.execution
        setup = ExecutorSetup(
            self.method,
            self.model_factory,
            self.clients,
            self.store,
            figures=figures_of(self.evaluation, self.metrics),
            training=self.training,
            workers=asked.workers,
            say=functools.partial(self.tell, "message"),
            rebuild=asked.rebuild,
        )
        executor = make_executor(asked.executor, setup)
        if asked.wrap is not None:
            executor.run = asked.wrap(executor.run)  # type: ignore[method-assign]
        self.server.run_passes = executor.run_passes
        # uploads and the server's state stay on the GPU where clients' weights are kept, unless somebody reads them
        follows = executor.in_process and self.store.on_device and server_follows_device(self.method)
        if follows and asked.wrap is None and not any(map(reads_uploads, self.plugins)):
            self.server.device = with_number(self.model_factory.device)
        return executor

    def __repr__(self) -> str:
        facts = self.facts
        kinds = human_count(len(self.first_of_each_architecture()), "architecture")
        who = f"{human_count(len(self.clients), 'client')} with {kinds}"
        what = f"{human_count(facts['rounds'], 'round')}, seed {self.seed}"
        return f"Federation({facts['method']}, {who}, {facts['dataset']}, {what})"

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

    @property
    def data_checksum(self) -> str | None:
        """Of all rows as they were given and of their names; None where they are elsewhere."""
        return data_checksum(self)

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
        _ = self.checkpointer.forget  # the method can take clients out, where some are forgotten
        if resume:
            check_made_of(self.folder, self.data_checksum, self.code)
        result = self.folder.finished(self.settings) if resume else None
        if result is not None:
            return self._read(result)
        with self.folder.open(self.settings, resume, overwrite, self.method.planned):
            return self._finished(RunLoop(self).run())

    def _finished(self, result: Mapping[str, Any]) -> Run:
        path = None if self.folder is None else self.folder.path
        numbers = [client.id for client in clients_with_models(self)]
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
        return all_remarks(self)

    def export(self, client_id: int, stage: str = "") -> nn.Module:
        """A copy of the client's network as it is scored; see `polyfed.engine.model_export.export`."""
        return export(self, client_id, stage)

    def write_models(self, folder: RunFolder) -> None:
        """Write the models of everybody present."""
        write_models(self, folder)


class RunLoop:
    """Runs the rounds of a federation that are still to come."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._remarks = federation.remarks()
        self._seconds: list[float] = []  # of the rounds, with the checkpoints between them
        self._is_within_round = False
        self._told = 0.0  # when the last round was, by the clock of `time.perf_counter`

    def run(self) -> dict[str, Any]:
        """The rounds after the last checkpoint, and then the result.

        Raises:
            RunError: a client or the server failed. RunInterrupted: Ctrl-C; whole rounds are kept.
        """
        federation = self._federation
        with single_threaded(), contextlib.closing(federation.executor):
            self._begin()
            try:
                self._run_rounds()
                self._run_final()
                result = self._write_result()
                federation.server.state = contiguous(federation.server.state)
            except KeyboardInterrupt:
                kept = self._keep()  # before others are told, which may take a tracker a while
                federation.tell("end", None)
                raise RunInterrupted(kept) from None
            except BaseException:
                federation.tell("end", None)
                raise
        federation.tell("end", result)
        return result

    def _begin(self) -> None:
        """Be where the last checkpoint is, or at the start; tell who watches."""
        federation = self._federation
        done = federation.checkpointer.restore()
        if done == 0:
            self._begin_excluded()
            start(federation, federation.present(1))
        folder = federation.folder
        info = {**federation.facts, "start_round": done + 1, "out": None if folder is None else str(folder.path)}
        for way in ("bytes_up", "bytes_down"):
            info[way] = sum(record[way] for record in federation.history)
        federation.tell("start", info)
        for remark in self._remarks:
            federation.tell("message", remark)
        self._told = time.perf_counter()

    def _begin_excluded(self) -> None:
        """Who takes no part keeps the network that it begins with, and is scored with it."""
        federation = self._federation
        for number, variant in federation.excluded.items():
            client = federation.clients[number]
            begun = federation.model_factory.initial_state(client.architecture, variant, number, client.given)
            client.weights = federation.store.keep(client.architecture, variant, begun)
            client.version += 1

    def _run_rounds(self) -> None:
        checkpointer, every = self._federation.checkpointer, self._federation.output.checkpoint_every
        while not self._is_over():
            raise_if_lost()
            number = len(self._federation.history) + 1
            self._round_or_undo(number)
            if number % every == 0 or self._is_over() or checkpointer.best_round(number) == number:
                checkpointer.save()

    def _run_final(self) -> None:
        federation = self._federation
        done = len(federation.history)
        if self._is_final_done():
            return
        if done < federation.training.rounds:
            score = main_score_of(federation.history[-1]).title
            federation.tell("message", f"round {done}: stopped, as the validation {score} has not become better")
        final = federation.method.final_exchanges()
        if not final:
            return
        federation.checkpointer.show_wanted_round()
        self._round_or_undo(done + 1, final)
        federation.checkpointer.save()

    def _round_or_undo(self, number: int, final: Sequence[Exchange] = ()) -> None:
        """A whole round or nothing: what is interrupted or fails leaves the federation as it was before."""
        federation = self._federation
        before = take_snapshot(federation)
        self._is_within_round = True
        try:
            record = self._timed_round(number, final)
            if federation.folder is not None:
                federation.folder.append(record)
            federation.history.append(record)
            self._is_within_round = False
        except BaseException:
            if self._is_within_round:
                restore(federation, before)
                self._is_within_round = False
            raise
        now = time.perf_counter()
        self._seconds.append(now - self._told)
        self._told = now
        recent = self._seconds[-max(_RECENT, federation.evaluation.every_n_rounds) :]
        left = max(0, federation.training.rounds - number) * fmean(recent)
        federation.tell("round", record, left)

    def _timed_round(self, number: int, final: Sequence[Exchange]) -> dict[str, Any]:
        """Run a round; its record with the seconds that it took, on the clock and of processors."""
        federation = self._federation
        began = time.perf_counter()
        used = processor_seconds()
        round = Round(
            number,
            final=bool(final),
            method=federation.method,
            server=federation.server,
            history=federation.history,
            present=federation.present(number),
            evaluated=federation.evaluation.is_due(number, federation.training.rounds, bool(final)),
        )
        record = run_round(federation, round, final or federation.method.exchanges(number), federation.evaluator)
        record["seconds"] = time.perf_counter() - began
        record["processor_seconds"] = processor_seconds() - used
        return record

    def _write_result(self) -> dict[str, Any]:
        """The run's result, and what its folder then holds."""
        federation = self._federation
        result = result_of(federation, federation.history)
        result |= {"made_of": made_of(federation), "models_of_round": federation.checkpointer.show_wanted_round()}
        if federation.folder is not None:
            keeps_weights = federation.output.keep != "nothing"
            if keeps_weights:
                federation.write_models(federation.folder)
            federation.folder.write_result(result, keeps_weights)
        return result

    def _keep(self) -> str:
        """Keep the whole rounds of an interrupted run; says so."""
        federation = self._federation
        done = human_count(len(federation.history), "whole round")
        if federation.folder is None:
            return f"interrupted; {done} done, of which nothing is kept without a run folder"
        if federation.history and not self._is_within_round:  # a second Ctrl-C may have stopped the undoing
            federation.tell("message", f"interrupted; writing a checkpoint of {done}")
            federation.checkpointer.save()
        return f"interrupted; {done} kept in {federation.folder.path}"

    def _is_over(self) -> bool:
        """Whether the last regular round is done; by the records, so that a resumed run stops alike."""
        federation = self._federation
        done = len(federation.history) >= federation.training.rounds
        return done or self._is_final_done() or federation.checkpointer.has_stopped()

    def _is_final_done(self) -> bool:
        history = self._federation.history
        return bool(history) and bool(history[-1]["final_round"])
