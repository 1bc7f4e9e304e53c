"""What a federation is given in Python: a wrong kind of argument is one line that says what to write."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from polyfed.core.client import Client, PublicData
from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Settings, Training
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, LabeledSamples, classes_up_to, samples_of
from polyfed.engine.plugin import Plugin
from polyfed.engine.task import Execution, Output, Task
from polyfed.errors import ConfigError, described
from polyfed.escaping import client_text
from polyfed.places import check_values
from polyfed.registry import METHODS, PLUGINS
from polyfed.results.main_score import ACCURACY, RMSE

_Kind = TypeVar("_Kind")
_Settings = TypeVar("_Settings", bound=Settings)


def expect(name: str, given: Any, kind: type[_Kind], write: str) -> _Kind:
    """What was given, if it is of this kind.

    Raises:
        ConfigError: it is not; says what to `write`.
    """
    if not isinstance(given, kind):
        raise ConfigError(f"{name}: expected {write}, got {described(given)}")
    return given


def clients_of(given: Any) -> list[Client]:
    """Copies of the clients, in order.

    Raises:
        ConfigError: none, or something else than clients.
    """
    write = "polyfed.Client(model, train=(x, y), test=(x, y))"
    if isinstance(given, Client) or not isinstance(given, Iterable):
        raise ConfigError(f"clients: expected a list of {write}, got {described(given)}")
    clients = [expect("clients", one, Client, f"{write} in place {place}") for place, one in enumerate(given)]
    if not clients:
        raise ConfigError("expected at least one client, got none")
    return [copy.copy(client) for client in clients]


def method_of(given: Any) -> Method:
    """The method.

    Raises:
        ConfigError: a method's name or class, or something else.
    """
    kind = METHODS[given] if isinstance(given, str) else given
    if isinstance(kind, type) and issubclass(kind, Method):
        ours = kind.__module__.startswith("polyfed.methods.")
        write = f"polyfed.methods.{kind.__name__}()" if ours else f"{kind.__name__}()"
        raise ConfigError(f"method: expected an object of its class, got {described(given)}; write {write}")
    return expect("method", given, Method, "one such as polyfed.methods.FedAvg()")


def settings_of(name: str, given: Any, kind: type[_Settings]) -> _Settings:
    """The settings of that name, or their defaults for None."""
    key = next(iter(kind.model_fields))
    return kind() if given is None else expect(name, given, kind, f"{kind.__name__}({key}=..., ...)")


def list_of(name: str, given: Any) -> list[Any]:
    """What was given as a list.

    Raises:
        ConfigError: a single thing.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"{name}: expected a list, got {described(given)}; put it into [ ]")
    return list(given)


def functions_of(name: str, given: Any) -> dict[str, Any]:
    """Functions by name; nothing for None."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name}: expected a dictionary of functions by name, got {described(given)}")
    return dict(given or {})


def plugins_of(given: Any) -> list[Plugin]:
    """All plugins of a federation: those of the library, with the settings that were given, and one's own behind them.

    Raises:
        ConfigError: neither settings of a plugin nor a plugin; or two for one concern.
    """
    kinds: dict[str, type[Plugin]] = {name: PLUGINS[name] for name in PLUGINS}
    of_settings = {kind.settings_class: kind for kind in kinds.values() if kind.settings_class is not None}
    known = ", ".join(kind.__name__ for kind in of_settings)
    found: dict[str, Plugin] = {}
    for each in list_of("plugins", given):
        plugin = of_settings[type(each)](each) if type(each) in of_settings else each
        plugin = expect("plugins", plugin, Plugin, f"settings ({known}) or a polyfed.Plugin")
        if plugin.name in found:
            raise ConfigError(f"plugins: expected one '{plugin.name}', got two")
        found[plugin.name] = plugin
    ours = {name: found[name] if name in found else kinds[name]() for name in kinds}
    return list((ours | found).values())


def execution_of(given: Any) -> Execution:
    """How work is done: by the name of an executor, or all of it."""
    made = Execution(given) if isinstance(given, str) else given
    return expect("executor", made, Execution, "its name or polyfed.Execution(...)")


def output_of(given: Any) -> Output:
    """What is written: the run folder's path, or all of it.

    Raises:
        ConfigError: neither, or a value that cannot be.
    """
    output = given if isinstance(given, Output) else Output(given)
    if output.path is not None and not isinstance(output.path, str | os.PathLike):
        raise ConfigError(f"out: expected the path of a folder, got {described(output.path)}")
    if output.keep not in ("last", "best", "nothing"):
        raise ConfigError(f"keep: expected 'last', 'best' or 'nothing', got {output.keep!r}")
    every = check_integer("checkpoint_every", output.checkpoint_every, 1)
    return replace(output, path=None if output.path is None else Path(output.path), checkpoint_every=every)


def complete_task(given: Any, clients: Sequence[Client]) -> Task:
    """The task, the defaults for None, with all that the data say.

    Raises:
        ConfigError: something else than a task, or the data do not fit it.
    """
    task = expect("task", Task() if given is None else given, Task, "polyfed.Task(classes=..., ...)")
    if task.public is not None:
        expect("public", task.public, PublicData, "polyfed.PublicData((x, y))")
    test = None if task.test is None else samples_of(task.test, "test")
    task = replace(task, test=test, feature_names=tuple(task.feature_names))
    if _are_numbers(clients, test):
        return _complete_regression(task)
    if any(client.class_names for client in clients):
        return _complete_own_spaces(task, clients)
    known = classes_up_to(max(_largest_label(client.data, test) for client in clients), "the clients' data")
    classes = known if task.classes is None else check_integer("classes", task.classes, 1)
    names = list(map(str, range(classes))) if task.class_names is None else list(task.class_names)
    if len(names) != classes:
        raise ConfigError(f"expected {classes} class names, got {len(names)}")
    return replace(task, classes=classes, class_names=names)


def _are_numbers(clients: Sequence[Client], test: LabeledSamples | None) -> bool:
    """Whether labels are numbers to predict, everywhere; else they are classes, everywhere."""
    parts: dict[str, LabeledSamples] = {} if test is None else {"test": test}
    for number, client in enumerate(clients):
        for side in ("train", "validation", "test"):
            parts[f"{client_text(number, client.name)}, {side}"] = getattr(client.data, side)
    known = {place: part.are_numbers for place, part in parts.items() if len(part)}
    first = f"{client_text(0, clients[0].name)}, train"
    are_numbers = known[first]
    for place, other in known.items():
        if other != are_numbers:
            expected, got = ("floats", "whole numbers") if are_numbers else ("whole numbers", "floats")
            raise ConfigError(
                f"{place}: expected {expected} as labels, as of {first}, got {got}; whole numbers are classes, floats "
                "are numbers to predict"
            )
    return are_numbers


def _complete_own_spaces(task: Task, clients: Sequence[Client]) -> Task:
    """The task of clients that each have classes of their own."""
    for name in ("classes", "class_names", "test"):
        if getattr(task, name) is not None:
            raise ConfigError(f"task: expected no {name}, as clients have class_names of their own")
    for number, client in enumerate(clients):
        title = client_text(number, client.name)
        count = len(client.class_names)
        if len({*client.class_names}) < max(2, count):
            names = ", ".join(client.class_names) or "none"
            raise ConfigError(f"{title}: expected two or more different class_names, as of others, got {names}")
        largest = _largest_label(client.data, None)
        if largest >= count:
            raise ConfigError(f"{title}: expected labels below its {count} class_names, got {largest}")
    classes = max(len(client.class_names) for client in clients)
    return replace(task, classes=classes, class_names=list(map(str, range(classes))))


def _complete_regression(task: Task) -> Task:
    for name in ("classes", "class_names"):
        if given := getattr(task, name):
            raise ConfigError(
                f"{name}: expected none, as labels are floats, numbers to predict, got {given}; write y.long() if they "
                "are classes"
            )
    return replace(task, classes=0, class_names=[])


def check_settings(
    task: Task,
    training: Training,
    evaluation: Evaluation,
    metrics: Mapping[str, Any],
    output: Output,
    clients: Sequence[Client],
) -> None:
    """Whether settings fit the data and one another, and can be written.

    Raises:
        ConfigError: they do not.
    """
    texts: dict[str, Any] = {"dataset": task.dataset, "class_names": task.class_names, "label": output.label}
    texts |= {"feature_names": task.feature_names, "label_column": task.label_column}
    check_values({**texts, "metrics": metrics, "settings": output.settings})
    _check_evaluation(task, evaluation, clients)
    _check_class_weights(training, clients, task.classes or 0)
    _check_validation(clients, evaluation, output)


def _check_evaluation(task: Task, evaluation: Evaluation, clients: Sequence[Client]) -> None:
    """Whether what is to be scored can be, where numbers are predicted and where classes are."""
    score = task.main_score
    if score is RMSE and evaluation.missing_classes:
        raise ConfigError("evaluation.missing_classes: expected classes as labels, got numbers to predict")
    if any(client.class_names for client in clients):
        for key, asked in (
            ("missing_classes", evaluation.missing_classes),
            ("metrics 'confusion'", "confusion" in evaluation.metrics),
        ):
            if asked:
                raise ConfigError(f"evaluation.{key}: expected one label space, got clients with classes of their own")
    default = Evaluation.model_fields["metrics"].default
    wrong = [name for name in evaluation.metrics if name not in score.metrics]
    if wrong and (score is ACCURACY or evaluation.metrics != default):
        raise ConfigError(f"evaluation.metrics: expected of {', '.join(score.metrics)}, got '{wrong[0]}'")


def _check_class_weights(training: Training, clients: Sequence[Client], classes: int) -> None:
    """Whether the weights of classes are of these classes, and reach the losses."""
    asked = training.class_weights
    if asked is None:
        return
    if not classes:
        raise ConfigError("training.class_weights: expected classes as labels, got numbers to predict")
    if asked == "balanced":
        return
    if any(client.class_names for client in clients):
        raise ConfigError(
            "training.class_weights: expected one label space for a number per class, got clients with classes of "
            "their own; set it to 'balanced'"
        )
    if len(asked) != classes:
        raise ConfigError(f"training.class_weights: expected a number for each of {classes} classes, got {len(asked)}")


def _check_validation(clients: Sequence[Client], evaluation: Evaluation, output: Output) -> None:
    if any(len(client.data.validation) for client in clients):
        return
    for key, asked, why in (
        ("evaluation.patience", evaluation.patience > 0, "by which a run stops early"),
        ("run.keep = 'best'", output.keep == "best", "by which the best round is chosen"),
    ):
        if asked:
            raise ConfigError(
                f"{key}: expected validation data, {why}, got none; give data.split a validation part ('8:1:1', "
                "'official:9:1')"
            )


def _largest_label(data: ClientData, test: LabeledSamples | None) -> int:
    parts = [data.train, data.validation, data.test, *([] if test is None else [test])]
    return max(part.largest_label for part in parts if len(part))
