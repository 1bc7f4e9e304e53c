"""The server of a deployed federation: the engine's own round loop, with nodes for workers.

Clients' weights, states and data are with their nodes; the server holds rows and samples that say how many and of what
kind they are, and nothing else. What a node last had that counts is a mark in the client's state here, so that undoing
a round, checkpoints and resuming work as ever.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.model_factory import BY_SIZE, Builder
from polyfed.core.modules import as_split_model, export_state
from polyfed.data.transforms import Prepare
from polyfed.deploy.node_executor import DeployedParts, NodeExecutor
from polyfed.deploy.node_registry import EVENT_LOG, EventLog, NodePresence, NodeRegistry, RequestBroker, Transport
from polyfed.deploy.placeholders import (
    UNSEEN,
    RemoteStore,
    can_build,
    check_size,
    placeholder_builder,
    placeholder_samples,
)
from polyfed.deploy.protocol import ClientHello
from polyfed.engine.executors.base import Executor
from polyfed.engine.executors.client_work import has_weights
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.federation import Run
from polyfed.engine.method_wrappers import preview
from polyfed.engine.model_export import ModelReadme
from polyfed.engine.plugin import decoded
from polyfed.engine.round_state import Round
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError
from polyfed.experiments.build import assign_architectures, auxiliary_candidates
from polyfed.experiments.data_cache import DataCache
from polyfed.functional.tied_tensors import without_ties
from polyfed.loggers.base import notify
from polyfed.models.zoo import build
from polyfed.places import make_private, private_files

LIMIT = 2_048_000_000  # bytes that a node's answer may have


class ClientJoined(Exception):
    """Somebody has come; the federation has to be made anew, with them."""


# the federation -----------------------------------------------------------------------------------------------------


class DeployedFederation(DeployedParts):
    """A federation whose clients are nodes.

    Args:
        recipe: the experiment. registry: who the clients are. broker: reaches them. event_log: where troubles are told.
        data: for rows that everybody may see. out: run folder. loggers: who watches. limit: bytes of an answer.
        known: the clients it is made with; default: all that the registry knows.

    Raises:
        ConfigError: as `Federation`; or the method needs a network that only a node has.
    """

    def __init__(
        self,
        recipe: Recipe,
        registry: NodeRegistry,
        broker: RequestBroker,
        event_log: EventLog,
        data: DataCache,
        out: Path,
        loggers: Sequence[object] = (),
        limit: int = LIMIT,
        known: Mapping[int, ClientHello] | None = None,
    ) -> None:
        check_recipe(recipe)
        method = recipe.chosen_method
        if known is None:
            known = registry.known
        known = dict(sorted(known.items()))
        usual = Counter(map(kind, known.values())).most_common(1)[0][0]
        first = next(said for said in known.values() if kind(said) == usual)
        count = registry.count
        names = list(registry.class_names or first.class_names)
        if recipe.data.test == "global" and (odd := [i for i, said in known.items() if said.test != first.test]):
            raise ConfigError(
                f"client {odd[0]}: expected the {first.test} test rows of everybody, got {known[odd[0]].test}"
            )
        expected = [
            known.get(i, first.model_copy(update={"architecture": name}))
            for i, name in enumerate(assign_architectures(recipe, count))
        ]
        self.unseen = {said.architecture for said in expected if not can_build(said, recipe)}
        builders: dict[str, Builder] = {
            name: functools.partial(
                build,
                name,
                tuple(first.shape),
                len(names),
                recipe.models.feature_dim,
                max(first.words, 0) or None,
                beside=recipe.beside,
                categories=first.categories,
            )
            for name in auxiliary_candidates(method)
        }
        for said in reversed(expected):  # of two of one name, the first counts
            builders[said.architecture] = placeholder_builder(said, recipe, len(names))
        for said in {(kind(said), said.architecture): said for said in reversed(known.values())}.values():
            check_size(said, first, recipe, len(names))
        self._broker = broker
        self._registry = registry
        self._event_log = event_log
        self._limit = limit
        super().__init__(
            [
                Client(
                    said.architecture,
                    placeholder_samples(said.train, said),
                    placeholder_samples(said.test, said),
                    placeholder_samples(said.validation, said),
                    prepare=Prepare(tuple(said.mean), tuple(said.std), table=said.table),
                )
                for said in expected
            ],
            method,
            recipe.training,
            recipe.evaluation,
            plugins=[*recipe.build_plugins(), NodePresence(known, self._look)],
            task=Task(
                classes=len(names),
                class_names=names,
                public=data.public(recipe),
                test=placeholder_samples(first.test, first) if recipe.data.test == "global" else None,
                dataset=first.dataset if all(said.dataset == first.dataset for said in expected) else "own data",
                feature_names=first.feature_names,
                label_column=recipe.data.label_column,
            ),
            executor=Execution("serial", device=recipe.run.device, precision=recipe.run.precision),
            # nodes keep their last two states, no more
            out=Output(out, checkpoint_every=1, label=recipe.run.label, settings=recipe.to_dict()),
            seed=recipe.run.seed,
            builders=builders,
            loggers=[_Opens(event_log), *loggers],
        )
        self.evaluator.silent = self._nodes.silent
        _check_hellos(self, {i: said for i, said in enumerate(expected) if i in known})

    def _make_store(self) -> WeightStore:
        """Rows that say how large a client's weights are; these are with its node."""
        return RemoteStore(self.model_factory, [client.architecture for client in self.clients])

    def _make_executor(self) -> Executor:
        """The nodes."""
        auxiliary = self.model_factory.chosen
        told = {**self._registry.task_facts(), "auxiliary_model": "" if auxiliary is None else auxiliary.network}
        self._nodes = NodeExecutor(self, told, self._broker, self._registry, self._event_log, self._limit)
        return self._nodes

    def _look(self) -> None:
        if self._registry.poll():
            raise ClientJoined

    def export(self, client_id: int) -> nn.Module:
        """Not to be had here."""
        raise ConfigError(f"client {client_id}'s model is with its node, in its state-dir")

    def write_models(self, folder: RunFolder) -> None:
        """Have every node write its client's personal model; those that are shared come into the run folder."""
        guide = ModelReadme(self.model_factory)
        with folder.models() as write:
            for client, (weights, state) in self._nodes.save_models(self.exporter.present()):
                about = self.exporter.about(client, None)
                write(client.id, weights, state, about)
                guide.add(client.id, weights, about)
        folder.write_readme(guide.text())

    @property
    def data_checksum(self) -> None:
        """None: rows are with the nodes."""
        return None

    def class_remarks(self) -> list[str]:
        """None: labels are with the nodes."""
        return []

    def _seen(self) -> list[dict[str, Any]]:
        """Nothing: networks and labels are with the nodes."""
        return [{} for _ in self.clients]

    def _aggregate(self, round: Round, uploads: Mapping[int, Message]) -> None:
        """As any federation, without those of whom it fails."""
        self._nodes.taken_in(uploads, lambda fit: super(DeployedFederation, self)._aggregate(round, fit))

    def personal_tensors(self, client: Client) -> Mapping[str, Tensor] | None:
        """What a client's personal model is made of; None where its network is its own."""
        if client.architecture in self.unseen:
            return None
        variant = self.method.variant(self.server, client.id)
        return export_state(self.method.personal_model(self.model_factory.module(client.architecture, variant)))

    def arrived(self, job: TrainJob, outcome: JobResult) -> JobResult:
        """An outcome as the method gets it: restored from compression, and rejected where the server objects."""
        for plugin in reversed(self.plugins):
            outcome = decoded(plugin, job, outcome, self.method)
        return outcome

    def say(self, text: str) -> None:
        """Tell whoever watches."""
        self.tell("message", text)

    def model_request(self, client: Client) -> tuple[str, Message | None, dict[str, Any]]:
        """For a client's personal model: its variant, what it receives if it has none yet, and what the model is."""
        variant = self.method.variant(self.server, client.id)
        own = has_weights(client, variant, self.model_factory)
        return (
            variant,
            None if own else self.method.broadcast(self.server, client.id),
            self.exporter.about(client, None),
        )


class _Opens:
    """A logger that opens the event log when the run folder is there."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log

    def start(self, info: Mapping[str, Any]) -> None:
        """See `Logger`."""
        self._event_log.open()


def check_recipe(recipe: Recipe) -> None:
    """Refuse what nodes cannot do."""
    if recipe.devices.enabled:
        raise ConfigError("[devices]: expected none, as nodes are devices of their own, got a section that deals some")
    if recipe.pretraining.epochs:
        raise ConfigError("[pretraining]: expected none, as nodes begin with weights as drawn, got some epochs")
    if recipe.run.keep != "last":
        raise ConfigError(
            f"run.keep: expected 'last', as nodes keep their last two states and no more, got '{recipe.run.keep}'"
        )
    if recipe.privacy.target_epsilon:
        raise ConfigError(
            f"privacy.target_epsilon: expected noise in numbers, which every node reads in its own recipe, got "
            f"{recipe.privacy.target_epsilon:g}"
        )
    if recipe.method.alone or recipe.run.control:
        raise ConfigError("expected a federation's own method in a deployment, got a control: run it at one place")
    if recipe.evaluation.missing_classes:
        raise ConfigError(
            "evaluation.missing_classes: expected false, as nodes do not have each other's test rows, got true"
        )
    if recipe.evaluation.held_out:
        raise ConfigError("evaluation.held_out: expected none, as all nodes train, got some")


def kind(said: ClientHello) -> tuple[object, ...]:
    """What clients of one federation have alike more often than not."""
    alike = (said.shape, said.dtype, said.table, said.feature_names, said.words, said.categories, said.class_names)
    return tuple(repr(value) for value in alike)


def unfit(
    make: Callable[[Mapping[int, ClientHello]], object], known: Mapping[int, ClientHello], settled: Collection[int]
) -> dict[int, str]:
    """Of clients with whom there can be no federation, who is to go and why; those of the most common kind are kept.

    Args:
        make: a federation of some of them, or an error. settled: those with whom there has been one.

    Returns:
        {} where it is for none of them, or where nobody would be left.
    """
    common = Counter(kind(said) for said in known.values())
    fit = {i: known[i] for i in settled}
    found = dict[int, str]()
    for i in sorted({*known} - {*settled}, key=lambda i: (-common[kind(known[i])], i)):
        try:
            make({**fit, i: known[i]})
        except Exception as problem:  # whatever its introduction has led to
            found[i] = next(iter(str(problem).splitlines()), type(problem).__name__)
        else:
            fit[i] = known[i]
    return found if fit else {}


def _check_hellos(federation: DeployedFederation, told: Mapping[int, ClientHello]) -> None:
    """Whether networks are what nodes say they are, and the method can do without those that only nodes have.

    Raises:
        ConfigError: they are not, or it cannot.
    """
    method = federation.method
    server = federation.server
    seen = federation.model_factory
    for number, said in told.items():
        model = as_split_model(seen.build_raw(said.architecture))
        here = {name: list(tensor.shape) for name, tensor in without_ties(model.head.state_dict()).items()}
        if (model.feature_dim, here) != (said.feature_dim, said.head):
            raise ConfigError(
                f"client {number}: expected '{said.architecture}' with {model.feature_dim} features and the head "
                f"{here}, got {said.feature_dim} features and {said.head}"
            )
    if not federation.unseen:
        return
    unseen = [i for i, said in told.items() if said.architecture in federation.unseen]
    lack = f"which the server does not have; {method.name} needs it there: name it in models.architectures"
    beside = method.auxiliary_model
    if beside is not None and (beside.network in BY_SIZE or any(said.words < 0 for said in told.values())):
        raise ConfigError(f"client {unseen[0]} has the network '{told[unseen[0]].architecture}', {lack}")
    trial = preview(method, server, told)
    for number in unseen:
        sent = flatten(method.broadcast(trial, number))
        if any(name.rpartition("/")[2].endswith(UNSEEN) for name in sent):
            raise ConfigError(f"client {number} has the network '{told[number].architecture}', {lack}")


# the whole run ------------------------------------------------------------------------------------------------------


@private_files()
def serve(
    recipe: Recipe,
    wire: Transport,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    min_nodes: int | None = None,
    deadline: float = 600.0,
    max_megabytes: float = LIMIT / 1e6,
    loggers: Sequence[object] = (),
) -> Run:
    """Run a recipe with nodes for clients; the run folder is that of any run, with `nodes.jsonl` beside.

    Args:
        recipe: the experiment, the same as the nodes'. wire: reaches them. out: run folder; default: the recipe's own.
        resume: go on where the run folder's last round ends. overwrite: replace the run that it holds.
        min_nodes: begin when so many clients are there; default: all. Those that come later join.
        deadline: seconds that a node has for an answer; then it has dropped out of the round.
        max_megabytes: of a node's answer; a larger one counts for nothing.
        loggers: who watches; see `Logger`.

    Raises:
        ConfigError: the request is wrong, or nodes, method and settings do not fit. RunError: the run failed.
    """
    count = _check_request(recipe, min_nodes, deadline, max_megabytes)
    path = Path(out or recipe.folder)
    folder = RunFolder(path)
    folder.validate(recipe.to_dict(), resume, overwrite, recipe.planned)
    if path.exists():
        make_private(path)

    say = functools.partial(notify, loggers, "message")
    event_log = EventLog(path / EVENT_LOG, resume)
    broker = RequestBroker(wire, deadline)
    data = DataCache()
    registry = NodeRegistry(recipe, broker, event_log, count, say)
    if not (resume and registry.known and folder.finished(recipe.to_dict()) is not None):
        registry.wait_for_clients(min_nodes or count)
    make = functools.partial(
        DeployedFederation, recipe, registry, broker, event_log, data, path, loggers, int(max_megabytes * 1e6)
    )
    settled: set[int] = set()  # clients with whom there is a federation
    while True:
        federation = _federation_of_fitting_nodes(make, registry, settled, min_nodes or count)
        settled = set(registry.known)
        try:
            return federation.run(resume=resume, overwrite=overwrite)
        except ClientJoined:
            resume, overwrite = True, False
            say(f"{len(registry.known)} of {count} clients are known now")


def _check_request(recipe: Recipe, min_nodes: int | None, deadline: float, max_megabytes: float) -> int:
    """How many clients there are.

    Raises:
        ConfigError: what is asked for cannot be, or not of a deployment.
    """
    count = recipe.data.client_count or min_nodes
    if count is None:
        raise ConfigError("expected data.num_clients or min-nodes, how many clients there are, got neither")
    if min_nodes is not None and not 1 <= min_nodes <= count:
        raise ConfigError(f"min-nodes: expected 1 to {count}, the clients of the recipe, got {min_nodes}")
    if not deadline > 0:
        raise ConfigError(f"deadline: expected seconds above 0, got {deadline}")
    if not max_megabytes > 0:
        raise ConfigError(f"max-megabytes: expected more than 0, got {max_megabytes}")
    if recipe.adversaries.effective():
        raise ConfigError("adversaries: expected none in a deployment, whose clients are what they are, got some")
    return count


def _federation_of_fitting_nodes(
    make: Callable[..., DeployedFederation], registry: NodeRegistry, settled: Collection[int], wanted: int
) -> DeployedFederation:
    """A federation of all nodes that are known, without those with whom there can be none.

    Args:
        make: the federation, or an error. settled: clients with whom there has been one. wanted: how many to wait for.
    """
    while True:
        try:
            return make()
        except Exception:
            gone = unfit(lambda known: make(known=known), registry.known, settled)
            if not gone:
                raise
        for client, reason in gone.items():
            registry.reject(client, reason)
        if not settled and len(registry.node_of) < wanted:
            registry.wait_for_clients(wanted)
