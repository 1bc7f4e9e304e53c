"""What a federation is made of, and how it is put together, step by step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Method, server_follows_device
from polyfed.core.model_factory import Builder, ModelFactory
from polyfed.core.server import ClientInfo, Server
from polyfed.core.settings import Evaluation, Training
from polyfed.data.classes import remarks as remarks_on_classes
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, LabeledSamples, checksum_of
from polyfed.engine.architectures import build_model_factory, builders_by_name, name_architectures, trained_counts
from polyfed.engine.checkpoint import Checkpointer
from polyfed.engine.compatibility import check_auxiliary_model, check_compatibility
from polyfed.engine.device import parse_device
from polyfed.engine.evaluation import Evaluator, Measure, figures_of, held_out_of, select_missing
from polyfed.engine.executors.choice import make_executor
from polyfed.engine.executors.client_work import Executor, Serial, WorkerContext
from polyfed.engine.executors.vectorized import VectorizedExecutor, clients_per_batch
from polyfed.engine.executors.worker_pool import WorkerPool
from polyfed.engine.model_export import ModelExport
from polyfed.engine.plugin import Plugin, Setup, reads_uploads
from polyfed.engine.round import RoundRunner, draw_cohort
from polyfed.engine.round_state import Round
from polyfed.engine.run import is_best_wanted, summarize_run
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.transaction import Transaction
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError
from polyfed.functional.device_copies import with_number
from polyfed.loggers.base import notify
from polyfed.places import without_places
from polyfed.registry import is_own, own_code
from polyfed.results.main_score import ACCURACY
from polyfed.results.schema import RunResult, in_order

_LOOKED_AT = 64  # rows of a client, to know how large its inputs are
_LARGE = 100  # where inputs that are standardized, or in [0, 1], are about 1


class FederationParts:
    """A federation before it runs; `polyfed.engine.federation.Federation` explains what it is given.

    Attributes:
        stages: at which clients are scored, the main one first. shared_test: the samples all are tested on, if so.
        held_out: clients that never train. history: the records of the rounds so far. setup: what plugins have seen.
        store: of the clients' weights. facts: what loggers, results and tables know of the run. settings: what the
        run folder records. transaction, evaluator, checkpointer, runner, exporter: see these classes.
    """

    clients: list[Client]
    method: Method
    loggers: list[Any]
    metrics: dict[str, Measure]
    training: Training
    evaluation: Evaluation
    plugins: Sequence[Plugin]
    execution: Execution
    output: Output
    seed: int
    task: Task

    def _put_together(self, builders: dict[str, Builder]) -> None:
        """From what was given, which is checked by then, to what can run."""
        self.history: list[dict[str, Any]] = []
        self.stages = self.evaluation.stages(self.method.evaluation_stage)
        self.shared_test = self.task.test if isinstance(self.task.test, LabeledSamples) else None
        self._number_clients()
        self._given_data = [client.data for client in self.clients]  # plugins may put others in their places
        self.held_out = held_out_of(self.evaluation, self.clients, self.seed)
        if self.evaluation.missing_classes:
            select_missing(self.clients, self.shared_test)
        self.model_factory = self._make_networks(builders)
        check_compatibility(self.method, self.clients, self.model_factory, self.task.public)
        self.server = self._make_server()
        self.setup = self._validate_plugins()
        self.folder = None if self.output.path is None else RunFolder(self.output.path)
        self.store = self._make_store()
        self.executor = self._make_executor()
        self.facts = self._make_facts()
        self.settings = self._settings_of_python() if self.output.settings is None else self.output.settings
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

    def _make_facts(self) -> dict[str, Any]:
        """What loggers, the result and tables know of the run."""
        evaluation: dict[str, Any] = {
            "stage": self.stages[0],
            "weighting": self.evaluation.weighting,
            "test": "client" if self.task.test is None else "global",
            "every_n_rounds": self.evaluation.every_n_rounds,
            "stages": self.stages,
            "patience": self.evaluation.patience,
            "min_delta": self.evaluation.min_delta,
            "round": "best" if is_best_wanted(self.output.keep, self.evaluation.patience) else "last",
        }
        if self.held_out:
            evaluation["held_out"] = sorted(self.held_out)
            evaluation["held_out_epochs"] = self.evaluation.held_out_epochs
        if self.setup.unscored:
            evaluation["clients"] = "honest"
        asked = (self.output.settings or {}).get("method", {}).get("name", "")
        facts: dict[str, Any] = {
            "method": asked if is_own(asked) else self.method.name,  # by which it can be made again
            "hyperparameters": dataclasses.asdict(self.method) if dataclasses.is_dataclass(self.method) else {},
            "label": self.output.label,
            "dataset": without_places(self.task.dataset),
            "class_names": self.class_names,
            "clients": len(self.clients),
            **self._client_names(),
            "rounds": self.training.rounds,
            "seed": self.seed,
            "workers": self.executor.workers,
            "precision": self.execution.precision,
            "evaluation": evaluation,
        }
        if self.task.main_score is not ACCURACY:
            facts["score"] = self.task.main_score.name
        for plugin in self.plugins:
            facts |= plugin.facts()
        return in_order(facts, RunResult)

    def _client_names(self) -> dict[str, list[str]]:
        """What the clients are called, by number; nothing where none has a name."""
        names = [client.name for client in self.clients]
        return {"client_names": names} if any(names) else {}

    def _settings_of_python(self) -> dict[str, Any]:
        """What a run folder records of a federation that was made in Python."""
        hyperparameters = {k: v for k, v in self.facts["hyperparameters"].items() if v is not None}
        if self.method.card.alone:
            hyperparameters["alone"] = True
        if self.method.card.personalize:
            hyperparameters["personalize"] = self.method.card.personalize
        if self.method.card.adapters is not None:
            hyperparameters["adapters"] = self.method.card.adapters.model_dump()
        run: dict[str, Any] = {"seed": self.seed, "precision": self.facts["precision"]}
        size = clients_per_batch(self.execution.executor, str(self.execution.device), self.execution.workers)
        if size > 1:
            run |= {"executor": "vectorized", "workers": size}
        if self.output.keep != "last":
            run["keep"] = self.output.keep
        return {
            "method": {"name": self.facts["method"], **hyperparameters},
            "training": self.training.effective(),
            "evaluation": self.evaluation.effective(),
            **{plugin.name: self.facts[plugin.name] for plugin in self.plugins if plugin.name in self.facts},
            "run": {**run, **self._client_names()},
            "federation": {
                "dataset": self.facts["dataset"],
                "architectures": [client.architecture for client in self.clients],
                "samples": [client.n for client in self.clients],
                **({"metrics": list(self.metrics)} if self.metrics else {}),
            },
        }

    # what it is -------------------------------------------------------------------------------------------------------

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

    def class_remarks(self) -> list[str]:
        """What is odd about the clients' classes (`polyfed.data.classes.remarks`), and about the size of inputs."""
        trained = {label for client in self.clients for label in client.data.train.y.unique().tolist()}
        sides = {id(client.data.test): client.data.test for client in self.clients}  # a shared one is looked at once
        tested = {label for side in sides.values() for label in side.y.unique().tolist()}
        lines = remarks_on_classes(self.class_names, trained, tested)
        return [*lines, *_about_large_inputs(self.clients)]

    # what it does -----------------------------------------------------------------------------------------------------

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


def _about_large_inputs(clients: Sequence[Client]) -> list[str]:
    """A line on clients whose networks get numbers that are far from 0, by some of their rows."""
    sizes = {}
    for client in clients:
        x = client.prepare(client.data.train.x[:_LOOKED_AT])
        if x.is_floating_point() and (size := float(x.abs().median())) > _LARGE:
            sizes[client.id] = size
    if not sizes:
        return []
    first, size = next(iter(sizes.items()))
    more = f" (of {len(sizes)} such clients)" if len(sizes) > 1 else ""
    return [
        f"inputs are far from 0: those of {clients[first].title}{more} have a median size of {size:.4g}; networks "
        "learn best from inputs standardized to a mean of 0 and a deviation of 1"
    ]
