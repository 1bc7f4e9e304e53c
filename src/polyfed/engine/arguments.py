"""What a federation is given in Python: a wrong kind of argument is one line that says what to write."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from polyfed.core.client import Client, PublicData
from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Training
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, LabeledSamples, classes_up_to, samples_of
from polyfed.engine.plugin import Plugin
from polyfed.engine.task import Execution, Output, Task
from polyfed.errors import ConfigError, described
from polyfed.escaping import client_text
from polyfed.places import check_values
from polyfed.registry import METHODS, PLUGINS

_Kind = TypeVar("_Kind")
_WRITE: Mapping[type, str] = {  # what to write where one of these is expected
    Client: "polyfed.Client(model, train=(x, y), test=(x, y))",
    Method: "one such as polyfed.methods.FedAvg()",
    Training: "Training(rounds=..., ...)",
    Evaluation: "Evaluation(stage=..., ...)",
    Execution: "its name or polyfed.Execution(...)",
    Task: "polyfed.Task(classes=..., ...)",
    PublicData: "polyfed.PublicData((x, y))",
    dict: "a dictionary of functions by name",
}
_MADE_OF_NONE = (Training, Evaluation, Task, dict)


def expect(name: str, given: Any, kind: type[_Kind], where: str = "") -> _Kind:
    """What was given, if it is of this kind; the default of the kind for None.

    Raises:
        ConfigError: it is not; says what to write `where`.
    """
    if given is None and kind in _MADE_OF_NONE:
        return kind()
    if not isinstance(given, kind):
        raise ConfigError(f"{name}: expected {_WRITE[kind]}{where}, got {described(given)}")
    return given


def clients_of(given: Any) -> list[Client]:
    """Copies of the clients, in order.

    Raises:
        ConfigError: none, or something else than clients.
    """
    if isinstance(given, Client) or not isinstance(given, Iterable):
        raise ConfigError(f"clients: expected a list of {_WRITE[Client]}, got {described(given)}")
    clients = [expect("clients", one, Client, f" in place {place}") for place, one in enumerate(given)]
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
    return expect("method", given, Method)


def list_of(name: str, given: Any) -> list[Any]:
    """What was given as a list.

    Raises:
        ConfigError: a single thing.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"{name}: expected a list, got {described(given)}; put it into [ ]")
    return list(given)


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
        if not isinstance(plugin, Plugin):
            raise ConfigError(f"plugins: expected settings ({known}) or a polyfed.Plugin, got {described(plugin)}")
        if plugin.name in found:
            raise ConfigError(f"plugins: expected one '{plugin.name}', got two")
        found[plugin.name] = plugin
    ours = {name: found[name] if name in found else kinds[name]() for name in kinds}
    return list((ours | found).values())


def complete_task(given: Any, clients: Sequence[Client]) -> Task:
    """The task, the defaults for None, with all that the data say.

    Raises:
        ConfigError: something else than a task, or the data do not fit it.
    """
    task = expect("task", given, Task)
    if task.public is not None:
        expect("public", task.public, PublicData)
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
    numbers = not task.classes
    own_spaces = any(client.class_names for client in clients)
    metrics_here = task.main_score.metrics
    unknown = [name for name in evaluation.metrics if name not in metrics_here]
    if numbers and evaluation.metrics == Evaluation.model_fields["metrics"].default:
        unknown = []
    own = "got clients with classes of their own"
    has_validation = any(len(client.data.validation) for client in clients)
    no_validation = "got none; give data.split a validation part ('8:1:1', 'official:9:1')"
    problems: list[tuple[object, str]] = [
        (
            numbers and evaluation.missing_classes,
            "evaluation.missing_classes: expected classes as labels, got numbers to predict",
        ),
        (own_spaces and evaluation.missing_classes, f"evaluation.missing_classes: expected one label space, {own}"),
        (
            own_spaces and "confusion" in evaluation.metrics,
            f"evaluation.metrics 'confusion': expected one label space, {own}",
        ),
        (unknown, f"evaluation.metrics: expected of {', '.join(metrics_here)}, got '{', '.join(unknown[:1])}'"),
        (
            evaluation.patience and not has_validation,
            f"evaluation.patience: expected validation data, by which a run stops early, {no_validation}",
        ),
        (
            output.keep == "best" and not has_validation,
            f"run.keep = 'best': expected validation data, by which the best round is chosen, {no_validation}",
        ),
    ]
    for is_wrong, line in problems:
        if is_wrong:
            raise ConfigError(line)


def _largest_label(data: ClientData, test: LabeledSamples | None) -> int:
    parts = [data.train, data.validation, data.test, *([] if test is None else [test])]
    return max(part.largest_label for part in parts if len(part))
