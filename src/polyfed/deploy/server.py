"""The server of a deployed federation: the engine's own round loop, with nodes for workers.

Clients' weights, states and data are with their nodes; the server holds rows and samples of their number and kind, and
nothing else. A mark in the client's state names the node's state that last counted, so that undoing a round,
checkpoints and resuming work as in any run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.model_factory import BY_SIZE, Builder
from polyfed.core.modules import as_split_model
from polyfed.data.transforms import Prepare
from polyfed.deploy.node_executor import NodeExecutor
from polyfed.deploy.node_registry import EVENT_LOG, EventLog, NodePresence, NodeRegistry, Transport
from polyfed.deploy.placeholders import (
    UNSEEN,
    RemoteStore,
    builder_of,
    can_build,
    check_size,
    placeholder_builder,
    placeholder_samples,
)
from polyfed.deploy.protocol import ClientHello
from polyfed.engine.executors.client_work import Executor
from polyfed.engine.federation import Federation, Run
from polyfed.engine.method_wrappers import preview
from polyfed.engine.round_state import Round
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError
from polyfed.experiments.build import assign_architectures, auxiliary_candidates
from polyfed.experiments.data_cache import DataCache
from polyfed.loggers.base import notify
from polyfed.places import make_private, private_files
from polyfed.registry import LOGGERS

LIMIT = 2_048_000_000  # bytes that a node's answer may have


class ClientJoined(Exception):
    """A new client is there; the federation has to be made anew, with it."""


# the federation -----------------------------------------------------------------------------------------------------


class DeployedFederation(Federation):
    """A federation whose clients are nodes.

    Args:
        recipe: the experiment. registry: who the clients are, and reaches them. data: for public rows. out: run folder.
        loggers: see `Logger`. limit: bytes of an answer.
        known: the clients it is made with; default: all that the registry knows.

    Raises:
        ConfigError: as `Federation`; or the method needs a network that only a node has.
    """

    def __init__(
        self,
        recipe: Recipe,
        registry: NodeRegistry,
        data: DataCache,
        out: Path,
        loggers: Sequence[object] = (),
        limit: int = LIMIT,
        known: Mapping[int, ClientHello] | None = None,
    ) -> None:
        method = recipe.chosen_method
        if known is None:
            known = registry.known
        known = dict(sorted(known.items()))
        usual = Counter(map(kind, known.values())).most_common(1)[0][0]
        first = next(hello for hello in known.values() if kind(hello) == usual)
        count = registry.count
        names = list(registry.class_names or first.class_names)
        outputs = len(names) or 1  # a number, where there are no classes
        if recipe.data.test == "global" and (odd := [i for i, hello in known.items() if hello.test != first.test]):
            raise ConfigError(
                f"client {odd[0]}: expected the {first.test} test rows of everybody, got {known[odd[0]].test}"
            )
        expected = [
            known.get(i, first.model_copy(update={"architecture": name}))
            for i, name in enumerate(assign_architectures(recipe, count))
        ]
        self.unseen = {hello.architecture for hello in expected if not can_build(hello, recipe)}
        candidates = auxiliary_candidates(method)
        builders: dict[str, Builder] = {name: builder_of(name, first, recipe, outputs) for name in candidates}
        for hello in reversed(expected):  # of two of one name, the first counts
            builders[hello.architecture] = placeholder_builder(hello, recipe, outputs)
        for hello in {(kind(hello), hello.architecture): hello for hello in reversed(known.values())}.values():
            check_size(hello, first, recipe, outputs)
        self._registry = registry
        self._limit = limit
        super().__init__(
            [
                Client(
                    hello.architecture,
                    placeholder_samples(hello.train, hello),
                    placeholder_samples(hello.test, hello),
                    placeholder_samples(hello.validation, hello),
                    prepare=Prepare(tuple(hello.mean), tuple(hello.std), table=hello.table),
                )
                for hello in expected
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
                dataset=first.dataset if all(hello.dataset == first.dataset for hello in expected) else "own data",
                feature_names=first.feature_names,
                label_column=recipe.data.label_column,
            ),
            executor=Execution("serial", device=recipe.run.device, precision=recipe.run.precision),
            # a checkpoint after each round: nodes keep their last two states, and that of the best round
            out=Output(out, 1, recipe.run.keep, recipe.run.label, recipe.to_dict()),
            seed=recipe.run.seed,
            builders=builders,
            loggers=[SimpleNamespace(start=lambda info: registry.event_log.open()), *loggers],  # with the run folder
        )
        self.evaluator.silent = self._nodes.silent
        _check_hellos(self, {i: hello for i, hello in enumerate(expected) if i in known})

    def _make_store(self) -> WeightStore:
        """Rows without weights, which are with the nodes."""
        return RemoteStore(self.model_factory, [client.architecture for client in self.clients])

    def _make_executor(self) -> Executor:
        """The nodes."""
        chosen = self.model_factory.chosen
        auxiliary = "" if chosen is None else chosen.network
        self._nodes = NodeExecutor(self, self.unseen, auxiliary, self._registry, self._limit)
        return self._nodes

    def _look(self) -> None:
        if self._registry.poll():
            raise ClientJoined

    def export(self, client_id: int, stage: str = "") -> nn.Module:
        """Refused: models are with the nodes."""
        raise ConfigError(f"client {client_id}'s model is with its node, in its state-dir")

    def write_models(self, folder: RunFolder) -> None:
        """Have every node write its client's models; those that are shared come into the run folder."""
        with folder.models() as write:
            for client, kept, read in self._nodes.save_models(self.exporter.present()):
                write(client.id, kept, {**self.exporter.about(client, None), **read})

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
        """As any federation, without uploads that it fails with."""
        self._nodes.aggregate(uploads, lambda fit: super(DeployedFederation, self)._aggregate(round, fit))


def check_recipe(recipe: Recipe) -> None:
    """Refuse settings that nodes cannot follow."""
    evaluation = recipe.evaluation
    keep = recipe.run.keep
    epsilon = recipe.privacy.target_epsilon
    own_recipes = "expected noise in numbers, which every node reads in its own recipe"
    refused: list[tuple[object, str]] = [
        (recipe.devices.enabled, "[devices]: expected none, as nodes are devices of their own, got some"),
        (recipe.pretraining.epochs, "[pretraining]: expected none, as nodes begin with weights as drawn, got epochs"),
        (keep == "nothing", "run.keep: expected 'last' or 'best', as nodes keep their own models, got 'nothing'"),
        (epsilon, f"privacy.target_epsilon: {own_recipes}, got {epsilon or 0:g}"),
        (recipe.method.alone or recipe.run.control, "expected a federation's own method, got a control"),
        (
            evaluation.missing_classes,
            "evaluation.missing_classes: expected false, as test rows are with nodes, got true",
        ),
        (evaluation.held_out, "evaluation.held_out: expected none, as all nodes train, got some"),
        (recipe.adversaries.effective(), "adversaries: expected none in a deployment, got some"),
    ]
    for found, line in refused:
        if found:
            raise ConfigError(line)


def kind(hello: ClientHello) -> tuple[object, ...]:
    """The facts that clients of one federation usually share."""
    alike = ("shape", "dtype", "table", "feature_names", "words", "categories", "class_names")
    return tuple(repr(getattr(hello, name)) for name in alike)


def unfit(
    make: Callable[[Mapping[int, ClientHello]], object], known: Mapping[int, ClientHello], settled: Collection[int]
) -> dict[int, str]:
    """The clients with whom there can be no federation, and why; those of the most common kind are kept.

    Args:
        make: a federation of some of them, or an error. settled: clients of an earlier one.

    Returns:
        {} where it is for none of them, or where none would be left.
    """
    common = Counter(kind(hello) for hello in known.values())
    fit = {i: known[i] for i in settled}
    found = dict[int, str]()
    for i in sorted({*known} - {*settled}, key=lambda i: (-common[kind(known[i])], i)):
        try:
            make({**fit, i: known[i]})
        except Exception as problem:  # caused by its introduction
            found[i] = next(iter(str(problem).splitlines()), type(problem).__name__)
        else:
            fit[i] = known[i]
    return found if fit else {}


def _check_hellos(federation: DeployedFederation, hellos: Mapping[int, ClientHello]) -> None:
    """Check that networks are as nodes describe them, and that the method needs none that only nodes have."""
    method = federation.method
    server = federation.server
    seen = federation.model_factory
    for number, hello in hellos.items():
        model = as_split_model(seen.build_raw(hello.architecture))
        if model.feature_dim != hello.feature_dim:
            raise ConfigError(
                f"client {number}: expected '{hello.architecture}' with {model.feature_dim} features, got "
                f"{hello.feature_dim}"
            )
        if hello.architecture in federation.unseen and not hello.linear:
            raise ConfigError(
                f"client {number}: expected a linear layer with biases as the head of '{hello.architecture}', a "
                "network that the server does not have, got another head"
            )
    if not federation.unseen:
        return
    unseen = [i for i, hello in hellos.items() if hello.architecture in federation.unseen]
    lack = f"which the server does not have; {method.name} needs it there: name it in models.architectures"
    beside = method.auxiliary_model
    if beside is not None and (beside.network in BY_SIZE or any(hello.words < 0 for hello in hellos.values())):
        raise ConfigError(f"client {unseen[0]} has the network '{hellos[unseen[0]].architecture}', {lack}")
    trial = preview(method, server, hellos)
    for number in unseen:
        sent = flatten(method.broadcast(trial, number))
        if any(name.rpartition("/")[2].endswith(UNSEEN) for name in sent):
            raise ConfigError(f"client {number} has the network '{hellos[number].architecture}', {lack}")


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
        resume: go on after the run folder's last round. overwrite: replace the run that it holds.
        min_nodes: begin when so many clients are there; default: all. Later ones join.
        deadline: seconds that a node has for an answer; then it has dropped out of the round.
        max_megabytes: of a node's answer; a larger one counts for nothing.
        loggers: see `Logger`.

    Raises:
        ConfigError: the request is wrong, or nodes, method and settings do not fit. RunError: the run failed.
    """
    count = _check_request(recipe, min_nodes, deadline, max_megabytes)
    path = Path(out or recipe.folder)
    folder = RunFolder(path)
    folder.validate(recipe.to_dict(), resume, overwrite, recipe.chosen_method.planned)
    if path.exists():
        make_private(path)

    loggers = [*loggers, *(LOGGERS[name]() for name in recipe.run.loggers)]
    say = functools.partial(notify, loggers, "message")
    registry = NodeRegistry(recipe, wire, deadline, EventLog(path / EVENT_LOG, resume), count, say)
    if not (resume and registry.known and folder.finished(recipe.to_dict()) is not None):
        registry.wait_for_clients(min_nodes or count)
    make = functools.partial(DeployedFederation, recipe, registry, DataCache(), path, loggers, int(max_megabytes * 1e6))
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
    """How many clients there are; refuses what no deployment can do."""
    count = recipe.data.client_count or min_nodes
    if count is None:
        raise ConfigError("expected data.num_clients or min-nodes, how many clients there are, got neither")
    if min_nodes is not None and not 1 <= min_nodes <= count:
        raise ConfigError(f"min-nodes: expected 1 to {count}, the clients of the recipe, got {min_nodes}")
    if not deadline > 0:
        raise ConfigError(f"deadline: expected seconds above 0, got {deadline}")
    if not max_megabytes > 0:
        raise ConfigError(f"max-megabytes: expected more than 0, got {max_megabytes}")
    check_recipe(recipe)
    return count


def _federation_of_fitting_nodes(
    make: Callable[..., DeployedFederation], registry: NodeRegistry, settled: Collection[int], wanted: int
) -> DeployedFederation:
    """A federation of all known nodes, without those with whom there can be none.

    Args:
        make: the federation, or an error. settled: clients of an earlier one. wanted: how many to wait for.
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
