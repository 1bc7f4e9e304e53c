"""The server of a deployed federation: the engine's own round loop, with nodes for workers.

Clients' weights, states and data are with their nodes; the server holds samples of their number and kind, and nothing
else. A mark in the client's state names the node's state that last counted, so that undoing a round,
checkpoints and resuming work as in any run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import flatten
from polyfed.core.model_factory import BY_SIZE, Builder, network_of
from polyfed.core.modules import as_split_model
from polyfed.data.samples import LabeledSamples, OwnColumns, TableColumns
from polyfed.data.transforms import Prepare
from polyfed.deploy.node_executor import NodeExecutor
from polyfed.deploy.node_registry import EVENT_LOG, EventLog, NodeRegistry, Transport
from polyfed.deploy.protocol import ClientHello, other_classes
from polyfed.engine.executors.executor import Executor
from polyfed.engine.federation import Federation, Run
from polyfed.engine.method_wrappers import preview
from polyfed.engine.model_export import clients_with_models, entry_of
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.weight_store import ClientWeights, WeightStore
from polyfed.errors import ConfigError
from polyfed.experiments.build import auxiliary_candidates, network_builder
from polyfed.experiments.data_cache import DataCache
from polyfed.loggers.base import notify
from polyfed.models.split import SplitModel
from polyfed.models.zoo import without_memory
from polyfed.places import make_private, private_files
from polyfed.registry import LOGGERS, MODELS

_SMALL_INPUT = 2**18
_SMALL = 2**25  # numbers that an input, and a network, may have whatever those of others are
_LARGEST = 2**28  # numbers that no network may have
_TIMES = 4  # ... and else this many times as many as those of others
UNSEEN = "extractor.unseen"  # the tensor that marks a `PlaceholderModel` in a message

# the federation -----------------------------------------------------------------------------------------------------


class DeployedFederation(Federation):
    """A federation whose clients are nodes.

    Args:
        recipe: the experiment. registry: who the clients are, and reaches them. data: for public rows. out: run folder.
        loggers: see `Logger`.

    Attributes:
        unseen: networks that only nodes have.

    Raises:
        ConfigError: as `Federation`; or the method needs a network that only a node has.
    """

    clients_are_elsewhere = True

    def __init__(
        self,
        recipe: Recipe,
        registry: NodeRegistry,
        data: DataCache,
        out: Path,
        loggers: Sequence[object] = (),
    ) -> None:
        method = recipe.chosen_method
        hellos = [hello for _, hello in sorted(registry.known.items())]
        first = hellos[0]
        names = first.class_names
        outputs = len(names) or 1  # a number, where there are no classes
        for hello in hellos:
            check_fit(hello, first, recipe, outputs)
        self.unseen = {hello.architecture for hello in hellos if not can_build(hello, recipe)}
        candidates = auxiliary_candidates(method)
        builders: dict[str, Builder] = {name: builder_of(name, first, recipe, outputs) for name in candidates}
        for hello in reversed(hellos):  # of two of one name, the first counts
            builders[hello.architecture] = placeholder_builder(hello, recipe, outputs)
        self._registry = registry
        super().__init__(
            [
                Client(
                    hello.architecture,
                    placeholder_samples(hello.train, hello),
                    placeholder_samples(hello.test, hello),
                    placeholder_samples(hello.validation, hello),
                    prepare=Prepare(tuple(hello.mean), tuple(hello.std), table=hello.table),
                    columns=columns_of(hello, recipe),
                )
                for hello in hellos
            ],
            method,
            recipe.training,
            recipe.evaluation,
            plugins=recipe.build_plugins(),
            task=Task(
                classes=len(names),
                class_names=names,
                public=data.public(recipe),
                test=placeholder_samples(first.test, first) if recipe.data.test == "global" else None,
                dataset=first.dataset if all(hello.dataset == first.dataset for hello in hellos) else "own data",
                feature_names=first.feature_names,
                label_column=recipe.data.label_column,
            ),
            executor=Execution(executor="serial", device=recipe.run.device),
            # a checkpoint after each round: nodes keep their last two states, and that of the best round
            out=Output(
                path=out, checkpoint_every=1, keep=recipe.run.keep, label=recipe.run.label, settings=recipe.to_dict()
            ),
            seed=recipe.run.seed,
            builders=builders,
            loggers=[SimpleNamespace(start=lambda info: registry.event_log.open()), *loggers],  # with the run folder
        )
        self.evaluator.silent = self._nodes.silent
        _check_hellos(self, dict(enumerate(hellos)))

    def _make_store(self) -> WeightStore:
        """No weights, which are with the nodes."""
        return RemoteStore(self.model_factory, [client.architecture for client in self.clients])

    def _make_executor(self) -> Executor:
        """The nodes."""
        self._nodes = NodeExecutor(self, self.unseen, self._registry)
        return self._nodes

    def export(self, client_id: int, stage: str = "") -> nn.Module:
        """Refused: models are with the nodes."""
        raise ConfigError(f"client {client_id}'s model is with its node, in its state-dir")

    def write_models(self, folder: RunFolder) -> None:
        """Have every node write its client's models; those that are shared come into the run folder."""
        with folder.models() as write:
            for client, kept, read in self._nodes.save_models(clients_with_models(self)):
                write(client.id, kept, {**entry_of(self, client, None), **read})


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


# placeholders for clients' networks, weights and data, which are with their nodes -------------------------------------


class RemoteStore(WeightStore):
    """A store of nothing but networks' names: the weights are with the nodes."""

    def keep(self, architecture: str, variant: str, tensors: Mapping[str, Tensor]) -> ClientWeights:
        """See `WeightStore`."""
        return ClientWeights(architecture, variant, {})


class PlaceholderModel(SplitModel):
    """Stands for a network that only its node has: its head, a linear layer, gets zeros.

    Its body has one tensor without entries, whose name marks a message with such a network in it.
    """

    def __init__(self, hello: ClientHello, classes: int) -> None:
        super().__init__(hello.architecture, hello.feature_dim)
        self.extractor = nn.Module()
        self.extractor.register_parameter(UNSEEN.partition(".")[2], nn.Parameter(torch.zeros(0)))
        self.add_module("head", nn.Linear(hello.feature_dim, classes))

    def extract(self, x: Tensor) -> Tensor:
        """(N, ...) to (N, D), zeros."""
        return torch.zeros(len(x), self.feature_dim, device=x.device)

    def transform(self, s_in: Tensor) -> Tensor:
        """As it is."""
        return s_in


class _Blank(LabeledSamples):
    """Samples of which only their number and what an input looks like is known."""

    def __post_init__(self) -> None:
        """Nothing to check."""

    @property
    def largest_label(self) -> int:
        """Unknown; within the task's classes."""
        return 0


def placeholder_samples(count: int, hello: ClientHello) -> LabeledSamples:
    """So many samples of a client's kind, which take no memory as long as only some of them are read."""
    x = torch.zeros((), dtype=getattr(torch, hello.dtype)).expand(count, *hello.shape)
    kind = torch.int64 if hello.class_names else torch.float32
    return _Blank(x, torch.zeros((), dtype=kind).expand(count))


def columns_of(hello: ClientHello, recipe: Recipe) -> OwnColumns | None:
    """Which of the federation's columns a client's table has; None where all have the same.

    Raises:
        ConfigError: it names columns that there are not.
    """
    features = recipe.data.features
    if features is None:
        return None
    if not hello.columns or hello.columns != sorted({*hello.columns}) or hello.columns[-1] >= len(features):
        raise ConfigError(
            f"client {hello.client}: expected some of the {len(features)} columns of data.features, each once and in "
            f"order, got {hello.columns[:10]}"
        )
    widths = tuple(len(feature.categories or ()) for feature in features.values())
    return OwnColumns(tuple(hello.columns), widths, tuple(hello.feature_names), TableColumns(), (), (), ())


def can_build(hello: ClientHello, recipe: Recipe) -> bool:
    """Whether the server can build a client's network: the recipe names it, or polyfed has it."""
    network = network_of(hello.architecture)
    return hello.words >= 0 and (network in recipe.models.architectures or network in MODELS)


def builder_of(name: str, hello: ClientHello, recipe: Recipe, classes: int) -> Builder:
    """Makes a network for a client's inputs."""
    return network_builder(recipe, name, hello.shape, classes, max(hello.words, 0) or None, hello.categories)


def placeholder_builder(hello: ClientHello, recipe: Recipe, classes: int) -> Builder:
    """Makes a client's network here, or its placeholder."""
    if not can_build(hello, recipe):
        return functools.partial(PlaceholderModel, hello, classes)
    return builder_of(hello.architecture, hello, recipe, classes)


def check_fit(hello: ClientHello, first: ClientHello, recipe: Recipe, classes: int) -> None:
    """Check that a client's task is that of the first, and that the server can hold its inputs and its network.

    Networks are weighed without being built. Where one cannot be, inputs are the measure.

    Raises:
        ConfigError: it does not fit, or there is no such network for such inputs; says which client's.
    """
    who = f"client {hello.client}"
    if recipe.data.test == "global" and hello.test != first.test:
        raise ConfigError(f"{who}: expected the {first.test} test rows of everybody, got {hello.test}")
    if hello.class_names != first.class_names:
        raise ConfigError(f"{who}: {other_classes(first.class_names, hello.class_names)}")
    inputs = _input_size(hello)
    most_inputs = max(_SMALL_INPUT, _TIMES * _input_size(first))
    if inputs > most_inputs:
        raise ConfigError(f"{who}: expected inputs of at most {most_inputs} numbers, got {inputs}")
    try:
        size = _size(hello, recipe, classes) if can_build(hello, recipe) else 0
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    if size <= _SMALL:
        return
    usual = [first.model_copy(update={"architecture": name}) for name in recipe.models.architectures]
    most = min(_LARGEST, max(_SMALL, _TIMES * max(_size(one, recipe, classes) for one in usual)))
    if size > most:
        raise ConfigError(
            f"{who}: expected a network of at most {most} numbers, got '{hello.architecture}' for "
            f"inputs {tuple(hello.shape)} with {size}; the recipe's models.architectures set the measure"
        )


def _input_size(hello: ClientHello) -> int:
    """Numbers of an input, or of a network's tables of words and categories."""
    return max(math.prod(hello.shape), hello.words, sum(hello.categories))


def _size(hello: ClientHello, recipe: Recipe, classes: int) -> int:
    """Numbers of a client's network; 0 of one that cannot be weighed."""
    try:
        with without_memory():
            return sum(tensor.numel() for tensor in placeholder_builder(hello, recipe, classes)().state_dict().values())
    except (NotImplementedError, RuntimeError):
        return 0


# the whole run ------------------------------------------------------------------------------------------------------


@private_files()
def serve(
    recipe: Recipe,
    wire: Transport,
    *,
    out: str | Path = "",
    resume: bool = False,
    overwrite: bool = False,
    clients: int = 0,
    deadline: float = 600.0,
    loggers: Sequence[object] = (),
) -> Run:
    """Run a recipe with nodes for clients; the run folder is that of any run, with `nodes.jsonl` beside.

    Args:
        recipe: the experiment, the same as the nodes'. wire: reaches them. out: run folder; default: the recipe's own.
        resume: go on after the run folder's last round. overwrite: replace the run that it holds.
        clients: how many there are, where the recipe does not say; the run begins when all are there.
        deadline: seconds that a node has for an answer; then it has dropped out of the round.
        loggers: see `Logger`.

    Raises:
        ConfigError: the request is wrong, or nodes, method and settings do not fit. RunError: the run failed.
    """
    count = recipe.data.client_count or clients
    if not count:
        raise ConfigError("expected data.num_clients or clients, how many clients there are, got neither")
    if clients and clients != count:
        raise ConfigError(f"clients: expected {count}, the clients of the recipe, got {clients}")
    check_recipe(recipe)
    path = Path(out or recipe.folder)
    folder = RunFolder(path)
    folder.validate(recipe.to_dict(), resume, overwrite, recipe.chosen_method.planned)
    if path.exists():
        make_private(path)

    loggers = [*loggers, *(LOGGERS[name]() for name in recipe.run.loggers)]
    say = functools.partial(notify, loggers, "message")
    log = EventLog(path / EVENT_LOG, resume)
    registry = NodeRegistry(recipe, wire, deadline, log, count, say)
    if not (resume and registry.known and folder.finished(recipe.to_dict()) is not None):
        registry.wait_for_clients()
    federation = DeployedFederation(recipe, registry, DataCache(), path, loggers)
    return federation.run(resume=resume, overwrite=overwrite)
