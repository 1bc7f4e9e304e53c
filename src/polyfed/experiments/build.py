"""From a recipe to a federation: the only place that puts data, models and a method together by name."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder, is_frozen, network_of, with_classes, with_columns
from polyfed.core.randomness import deal
from polyfed.core.settings import Evaluation
from polyfed.data.augmentation import augmentation
from polyfed.data.dataset import DatasetSource
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import ClientData, OwnColumns
from polyfed.data.transforms import Prepare
from polyfed.engine.executors.choice import executor_kind
from polyfed.engine.executors.executor import RunJobs
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Output, Task
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache, input_normalization
from polyfed.experiments.own_rows import own_rows
from polyfed.experiments.pooled import pool
from polyfed.experiments.pretraining import pretrain
from polyfed.models.zoo import build
from polyfed.registry import LOGGERS, MODELS, suggest

__all__ = [
    "assign_architectures",
    "auxiliary_candidates",
    "build_federation",
    "check_normalization",
    "make_client",
    "make_task",
    "network_builder",
    "network_builders",
]


def build_federation(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    loggers: Sequence[object] = (),
    data: DataCache | None = None,
    wrap: Callable[[RunJobs], RunJobs] | None = None,
    pretrained: bool = True,
) -> Federation:
    """The federation that a recipe describes; nothing is written.

    Args:
        recipe: resolved settings.
        out: run folder; None for a run that leaves nothing behind.
        loggers: who watches.
        data: where data are kept between calls.
        wrap: makes of the executor's `run` the one that is used.
        pretrained: False: networks begin as drawn, whatever ``[pretraining]`` says, for who does not let it run.

    Raises:
        ConfigError: data that are not there or cannot be partitioned so, models or a method that do not fit.
    """
    live = [LOGGERS[name]() for name in recipe.run.loggers]  # whether they can be had is asked of a check, too
    data = data or DataCache()
    federated = data.federated(recipe)
    prepare = check_normalization(recipe, federated.source)
    method = recipe.chosen_method
    rows: Sequence[ClientData] = federated.clients
    if recipe.run.control == "pooled":
        if federated.source.columns_differ:
            raise ConfigError("run.control 'pooled': expected clients with the same columns, got data.features")
        method, rows, wrap = pool(recipe, federated.clients, federated.classes)
    elif recipe.run.control is not None:
        method = own_rows(recipe, federated, prepare)
    names, builders = _networks(recipe, federated, auxiliary_candidates(method))
    plugins = recipe.build_plugins()
    if recipe.pretraining.epochs:
        trained, facts = pretrain(recipe, {name: builders[name] for name in names}, data, pretrained)
        builders |= trained
        plugins.append(facts)
    settings = recipe.to_dict()
    settings["run"].pop("client_names", None)
    settings["run"] |= {"client_names": list(federated.names)} if federated.names else {}
    run = recipe.run
    return Federation(
        _clients(recipe, federated, names, rows, prepare),
        method,
        recipe.training,
        _with_numbers(recipe.evaluation, federated),
        plugins=plugins,
        task=make_task(recipe, federated, data),
        executor=Execution(
            executor=executor_kind(run.executor, recipe.beside),
            workers=run.workers,
            device=run.device,
            wrap=wrap,
            rebuild=functools.partial(rebuild_federation, recipe.dumps()),
        ),
        out=Output(path=out, checkpoint_every=run.checkpoint_every, keep=run.keep, label=run.label, settings=settings),
        seed=run.seed,
        builders=builders,
        loggers=[*loggers, *(live if out is not None else ())],
    )


def _with_numbers(evaluation: Evaluation, federated: FederatedDataset) -> Evaluation:
    """The evaluation with the numbers of the clients that hold a group that is held out.

    Raises:
        ConfigError: there is no such group, or its client has others, too.
    """
    asked = evaluation.held_out
    if isinstance(asked, int | str) or all(isinstance(value, int) for value in asked):
        return evaluation
    if not federated.groups:
        named = next(value for value in asked if isinstance(value, str))
        raise ConfigError(
            f"evaluation.held_out: expected numbers of clients, as groups have names with data.partition 'by_group' "
            f"alone, got '{named}'"
        )
    numbers = [value if isinstance(value, int) else _client_of_group(value, federated.groups) for value in asked]
    if len({*numbers}) < len(numbers):
        raise ConfigError(f"evaluation.held_out: expected every client once, got one again in {asked}")
    return evaluation.model_copy(update={"held_out": numbers})


def _client_of_group(name: str, groups: Sequence[Sequence[str]]) -> int:
    """The client that holds a group, and no other."""
    for client, held in enumerate(groups):
        if name in held and len(held) > 1:
            others = ", ".join(f"'{other}'" for other in held if other != name)
            raise ConfigError(
                f"evaluation.held_out: expected a group that is a client of its own, got '{name}', which shares client "
                f"{client} with {others:.200}; leave out data.num_clients"
            )
        if name in held:
            return client
    known = [group for held in groups for group in held]
    raise ConfigError(f"evaluation.held_out: expected a value of data.group_by, got '{name}'{suggest(name, known)}")


def check_normalization(recipe: Recipe, source: DatasetSource) -> Prepare:
    """How stored inputs become what networks take.

    Raises:
        ConfigError: what the recipe says of inputs does nothing, or is of other ones.
    """
    prepare = input_normalization(source, recipe)
    if recipe.data.mean is not None and prepare != source.prepare:
        raise ConfigError(
            "data.mean does nothing beside pre-trained networks, which normalize images as they were "
            "trained; leave out data.mean and data.std"
        )
    augment = augmentation(recipe.training.augmentation)
    if augment is not None and not augment.suits(source.train.x.shape[1:]):
        raise ConfigError(
            f"training.augmentation '{recipe.training.augmentation}' expects images, '{source.name}' has none"
        )
    return prepare


def _networks(
    recipe: Recipe, federated: FederatedDataset, auxiliary: Sequence[str]
) -> tuple[list[str], dict[str, Builder]]:
    """The clients' architectures, and what makes each; with label spaces of their own, one per number of classes."""
    names = assign_architectures(recipe, len(federated.clients))
    builders = network_builders(recipe, federated.source, [*names, *auxiliary], federated.classes)
    if federated.source.columns_differ:
        return _names_with_columns(recipe, federated, names, builders)
    if recipe.data.label_space == "shared":
        return names, builders
    counts = [len(own.class_names) for own in federated.clients]
    for name, count in zip(names, counts, strict=True):
        builders[with_classes(name, count)] = network_builders(recipe, federated.source, [name], count)[name]
    return [with_classes(name, count) for name, count in zip(names, counts, strict=True)], builders


def _names_with_columns(
    recipe: Recipe, federated: FederatedDataset, names: Sequence[str], builders: dict[str, Builder]
) -> tuple[list[str], dict[str, Builder]]:
    """The same for clients with different columns: a network reads those of its client."""
    named = []
    for name, own in zip(names, federated.clients, strict=True):
        assert own.columns is not None
        named.append(with_columns(name, own.columns.names))
        builders[named[-1]] = builder_of_columns(recipe, name, own.columns, federated.classes)
    return named, builders


def builder_of_columns(recipe: Recipe, name: str, columns: OwnColumns, classes: int) -> Builder:
    """What makes a network of this name for rows with these columns. classes: 0: numbers are predicted."""
    return network_builder(recipe, name, (len(columns.names),), classes or 1, None, columns.table.counts)


def network_builders(recipe: Recipe, source: DatasetSource, names: Iterable[str], classes: int) -> dict[str, Builder]:
    """What makes networks of these names for the inputs of a data set. classes: 0: numbers are predicted."""
    inputs = tuple(source.train.x.shape[1:])
    return {
        name: network_builder(recipe, name, inputs, classes or 1, source.words, source.columns.counts) for name in names
    }


def network_builder(
    recipe: Recipe,
    name: str,
    shape: Sequence[int],
    outputs: int,
    words: int | Tensor | None,
    categories: Sequence[int],
) -> Builder:
    """What makes a network of this name; of one that nobody trains, as wide as it is.

    Args:
        shape: of one stored input. words: of texts, how many ids there are, or their vectors. categories: of a table,
            see `Client.categories`.
    """
    return functools.partial(
        build,
        network_of(name),
        tuple(shape),
        outputs,
        None if is_frozen(name) else recipe.models.feature_dim,
        words,
        beside=recipe.beside,
        categories=categories,
        feature_pool=recipe.models.feature_pool,
        frozen=is_frozen(name),
    )


def _clients(
    recipe: Recipe, federated: FederatedDataset, names: Sequence[str], rows: Sequence[ClientData], prepare: Prepare
) -> list[Client]:
    """The clients with their networks' names. rows: those they train on."""
    titles = list(federated.names)
    if titles in ([], list(map(str, range(len(names))))):  # names that are the clients' numbers say nothing
        titles = [""] * len(names)
    has_test = federated.test is None
    clients = [
        make_client(name, own, prepare, title, has_test) for name, own, title in zip(names, rows, titles, strict=True)
    ]
    if recipe.evaluation.missing_classes:
        for client, data in zip(clients, federated.clients, strict=True):
            client.own_classes = data.train.y.unique().tolist()  # not those of pooled rows
    return clients


def make_client(architecture: str, rows: ClientData, prepare: Prepare, name: str = "", has_test: bool = True) -> Client:
    """A client with these rows; `Task.assign` tells it the rest. has_test: else its test rows are the task's.

    prepare: of all columns, where clients have different ones.
    """
    return Client(
        architecture,
        train=rows.train,
        test=rows.test if has_test else None,
        validation=rows.validation,
        prepare=prepare if rows.columns is None else prepare.of_features(rows.columns.features),
        class_names=rows.class_names,
        name=name,
        columns=rows.columns,
    )


def make_task(recipe: Recipe, federated: FederatedDataset, data: DataCache) -> Task:
    """What the recipe's clients predict. data: for public rows."""
    source = federated.source
    is_shared = recipe.data.label_space == "shared"
    return Task.of_source(
        source,
        classes=federated.classes if is_shared else None,
        class_names=source.class_names if is_shared else None,
        public=data.public(recipe),
        test=federated.test,
    )


def rebuild_federation(recipe: str) -> Federation:
    """The federation of a recipe once more, in another process that does clients' work for the first one.

    Args:
        recipe: in TOML.
    """
    settings = tomllib.loads(recipe)
    settings["run"] = {**settings["run"], "executor": "serial", "workers": 1, "loggers": []}
    return build_federation(Recipe.from_dict(settings))


def assign_architectures(recipe: Recipe, count: int) -> list[str]:
    """The architecture of each of `count` clients."""
    return deal(recipe.models.architectures, recipe.models.assignment, count, recipe.run.seed, "architectures")


def auxiliary_candidates(method: Method) -> list[str]:
    """Networks that a method may name as its auxiliary model: all registered ones, or one that it imports."""
    wanted = method.auxiliary_model
    if wanted is None:
        return []
    if wanted.frozen:
        return [wanted.architecture]
    return [*MODELS, wanted.network] if ":" in wanted.network else list(MODELS)
