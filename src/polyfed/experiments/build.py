"""From a recipe to a federation: the only place that puts data, models and a method together by name."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder, with_classes
from polyfed.core.randomness import numpy_generator
from polyfed.core.settings import Evaluation
from polyfed.data.dataset import DatasetSource
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import ClientData
from polyfed.engine.arguments import list_of
from polyfed.engine.executors.base import Executor
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.unread_settings import unread_settings
from polyfed.errors import ConfigError, described
from polyfed.experiments.data_cache import DataCache, input_normalization
from polyfed.experiments.pooled import SharedByNetwork, check_pooled, is_pooled, pooled_method, with_pooled_rows
from polyfed.experiments.pretraining import pretrain
from polyfed.models.zoo import build
from polyfed.places import check_name
from polyfed.registry import LOGGERS, MODELS, suggest

__all__ = ["assign_architectures", "auxiliary_candidates", "build_federation", "resolve_recipe"]


def build_federation(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    loggers: Sequence[object] = (),
    data: DataCache | None = None,
    profile: bool = False,
    wrap_executor: Callable[[Executor], Executor] | None = None,
    pretrained: bool = True,
) -> Federation:
    """The federation that a recipe describes; nothing is written.

    Args:
        recipe: resolved settings.
        out: run folder; None for a run that leaves nothing behind.
        loggers: who watches.
        data: where data are kept between calls.
        profile: whether the records tell where the time of each round went.
        wrap_executor: makes the executor that is used of the recipe's.
        pretrained: False: networks begin as drawn, whatever ``[pretraining]`` says, for who does not let it run.

    Raises:
        ConfigError: data that are not there or cannot be dealt so, models or a method that do not fit.
    """
    method = recipe.chosen_method
    live = [LOGGERS[name]() for name in recipe.run.loggers]  # whether they can be had is asked of a check, too
    watching = list(loggers)
    if out is not None:
        watching += live
    data = data or DataCache()
    federated = data.federated(recipe)
    source = federated.source
    prepare = input_normalization(source, recipe.models.architectures)
    if recipe.data.mean is not None and prepare != source.prepare:
        raise ConfigError(
            "data.mean does nothing beside pre-trained models.architectures, which normalize images as they were "
            "trained; leave out data.mean and data.std"
        )
    if recipe.training.augmentation != "none" and source.train.x.dim() != 4:
        raise ConfigError(
            f"training.augmentation '{recipe.training.augmentation}' expects images, '{source.name}' has none"
        )
    names = assign_architectures(recipe, len(federated.clients))
    rows_of_clients: Sequence[ClientData] = federated.clients
    if is_pooled(recipe):
        check_pooled(recipe)
        method = pooled_method(recipe, federated.clients)
        rows_of_clients = with_pooled_rows(federated.clients)
        wrap_executor = SharedByNetwork
    names, builders = _networks(recipe, federated, names, auxiliary_candidates(method))
    clients = [
        Client(
            name,
            train=own.train,
            test=own.test if federated.test is None else None,
            validation=own.validation,
            prepare=prepare,
            class_names=own.class_names,
            name=title,
        )
        for name, own, title in zip(names, rows_of_clients, _titles(federated), strict=True)
    ]
    if recipe.evaluation.missing_classes:
        for client, rows in zip(clients, federated.clients, strict=True):
            client.own_classes = rows.train.y.unique().tolist()  # not those of pooled rows
    plugins = recipe.build_plugins()
    settings = recipe.with_run(client_names=list(federated.names)).to_dict()
    if recipe.pretraining.epochs:
        if source.is_regression or recipe.data.label_space == "own":
            raise ConfigError("pretraining.epochs: expected classes that all clients share, got others")
        own = {name: builders[name] for name in dict.fromkeys(names)}
        trained, told = pretrain(recipe, own, data.public(recipe), federated.classes, pretrained)
        builders |= trained
        plugins.append(told)
    return Federation(
        clients,
        method,
        recipe.training,
        _with_numbers(recipe.evaluation, federated),
        plugins=plugins,
        task=Task(
            classes=None if recipe.data.label_space == "own" else federated.classes,
            class_names=None if recipe.data.label_space == "own" else source.class_names,
            public=data.public(recipe),
            test=federated.test,
            dataset=source.name,
            feature_names=source.feature_names,
            vocabulary=source.vocabulary,
            label_column=source.label_column,
            columns=source.columns,
        ),
        executor=Execution(
            recipe.run.executor,
            recipe.run.workers,
            recipe.run.device,
            recipe.run.precision,
            profile,
            wrap_executor,
            functools.partial(rebuild_federation, recipe.dumps()) if recipe.run.executor == "ray" else None,
        ),
        out=Output(out, recipe.run.checkpoint_every, recipe.run.keep, recipe.run.label, settings),
        seed=recipe.run.seed,
        builders=builders,
        loggers=watching,
    )


def _titles(federated: FederatedDataset) -> list[str]:
    """What clients are called beside their numbers; names that are these numbers say nothing."""
    names = list(federated.names)
    numbers = list(map(str, range(len(federated.clients))))
    return [""] * len(numbers) if names in ([], numbers) else names


def _networks(
    recipe: Recipe, federated: FederatedDataset, names: list[str], auxiliary: Sequence[str]
) -> tuple[list[str], dict[str, Builder]]:
    """The clients' architectures, and what makes each; with label spaces of their own, one per number of classes."""
    source = federated.source
    outputs = federated.classes or 1
    builders = {name: _builder(recipe, source, name, outputs) for name in (*names, *auxiliary)}
    if recipe.data.label_space == "shared":
        return names, builders
    counts = [len(own.class_names) for own in federated.clients]
    for name, count in zip(names, counts, strict=True):
        builders[with_classes(name, count)] = _builder(recipe, source, name, count)
    return [with_classes(name, count) for name, count in zip(names, counts, strict=True)], builders


def _builder(recipe: Recipe, source: DatasetSource, name: str, outputs: int) -> Builder:
    """What makes a network of this name for the inputs of a data set."""
    return functools.partial(
        build,
        name,
        tuple(source.train.x.shape[1:]),
        outputs,
        recipe.models.feature_dim,
        source.words,
        beside=recipe.beside,
        categories=source.columns.counts,
    )


def _with_numbers(evaluation: Evaluation, federated: FederatedDataset) -> Evaluation:
    """The evaluation with the numbers of the clients that a group held out is dealt to.

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
    """The client that a group was dealt to, which has no other."""
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


def refuse_unread_settings(federation: Federation) -> None:
    """Whether a recipe's own method reads all of its settings; one that was asked for in its place is only told.

    Raises:
        ConfigError: it does not read one.
    """
    unread = unread_settings(federation)
    if unread:
        raise ConfigError(unread[0])


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
    names = recipe.models.architectures
    if recipe.models.assignment == "blocks":
        places = [client * len(names) // count for client in range(count)]
    elif recipe.models.assignment == "random":
        drawn = numpy_generator(recipe.run.seed, "architectures").integers(0, len(names), count)
        places = [int(place) for place in drawn]
    else:
        places = [client % len(names) for client in range(count)]
    return [names[place] for place in places]


def auxiliary_candidates(method: Method) -> list[str]:
    """Networks that a method may name as its auxiliary model: all registered ones, or one that it imports."""
    wanted = method.auxiliary_model
    if wanted is None:
        return []
    return [*MODELS, wanted.network] if ":" in wanted.network else list(MODELS)


def resolve_recipe(
    recipe: str | Path | Recipe, overrides: Sequence[str], method: str | None, **settings: Any
) -> Recipe:
    """A recipe from a file, or the one given with the same changes."""
    if not isinstance(recipe, Recipe | str | os.PathLike):
        write = "; write polyfed.Recipe.from_dict(...)" if isinstance(recipe, Mapping) else ""
        raise ConfigError(f"recipe: expected a recipe's file or a Recipe, got {described(recipe)}{write}")
    if method is not None and not isinstance(method, str):
        raise ConfigError(
            f"method: expected a method's name, such as 'fedgh', got {described(method)}; its hyperparameters are "
            "overrides, such as 'method.header_lr=0.1'"
        )
    for text in list_of("overrides", overrides):
        if not isinstance(text, str):
            raise ConfigError(f"overrides: expected texts such as 'data.num_clients=20', got {described(text)}")
    if not isinstance(recipe, Recipe):
        return Recipe.load(recipe, overrides, method=method, **settings)
    for what, given in (("overrides", overrides), ("a preset", settings.pop("preset", None))):
        if given:
            raise ConfigError(f"expected {what} together with a recipe's file, got {what} with a Recipe")
    chosen = recipe if method is None else recipe.choose(method)
    changes = {key: value for key, value in settings.items() if value is not None}
    if "out" in changes:
        changes["out"] = str(changes["out"])
    return chosen.with_run(**changes)


def check_run_folder_place(place: Path) -> None:
    """Whether a run folder can be made there; nothing is."""
    check_name(place)
    above = next(above for above in (place, *place.absolute().parents) if above.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"expected a place for the run folder {place}, got {above}, where nothing can be written")
