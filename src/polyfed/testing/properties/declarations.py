"""What a method says of itself: settings, messages of tensors, what it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Requirements, not_a_hyperparameter
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.errors import ConfigError, PolyfedError, RunError
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import SHORT, TinyFederation, tiny_model
from polyfed.testing.kit import AggregationScene, ConformanceError, ConformanceKit, replaced
from polyfed.testing.spy import Spy


def has_hyperparameters(kit: ConformanceKit) -> None:
    """It is an object of a class with `hyperparameters` above it, so that its fields are settings and nothing changes
    them.
    """
    method = kit.method
    kind = type(kit.method)
    if isinstance(method, type):
        raise ConformanceError(f"{method.__name__}: expected a method, {method.__name__}(), got its class")
    write = f"write @hyperparameters (of polyfed.core.method) above the class {kind.__name__}"
    if (field := not_a_hyperparameter(kind)) is not None:
        kit.fail(f"the field '{field}' is no hyperparameter: {write}")
    if not dataclasses.is_dataclass(method) or not kind.__dataclass_params__.frozen:
        kit.fail(f"expected a frozen dataclass of hyperparameters: {write}")


def speaks_in_tensors(kit: ConformanceKit) -> None:
    """Messages and states are tensors by name, or groups of them: no plain numbers."""

    def look(call: Callable[..., Message], first: Any, second: Any) -> Message:
        message = call(first, second)
        _all_tensors(kit, "upload" if isinstance(first, Client) else "broadcast", "a message", message)
        _all_tensors(kit, "the method", "a state", first.state)
        return message

    scenes: list[AggregationScene] = []

    def aggregate(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        scenes.append(AggregationScene(kit.method, server, dict(uploads), federation).snapshot())
        call(server, uploads)
        _all_tensors(kit, "aggregate", "the server's state", server.state)

    federation = kit.usual.federation(Spy(kit.method, broadcast=look, upload=look, aggregate=aggregate), SHORT)
    try:
        federation.run()
    except PolyfedError as error:
        if isinstance(error.__cause__, ConformanceError):
            raise error.__cause__ from None
    else:
        kit.seen["scenes"] = scenes


def _all_tensors(kit: ConformanceKit, who: str, where: str, message: Message) -> None:
    """Whether a message or a state holds nothing but tensors."""
    try:
        flatten(message)
    except RunError as error:
        kit.fail(f"{who} puts something else than tensors into {where}: {error}")


def runs(kit: ConformanceKit) -> None:
    """It runs with networks as different as its `requirements` allow; with plain ones, where it needs no parts."""
    needs = kit.method.requirements
    try:
        if not _needs_parts(needs):
            with contextlib.suppress(ConfigError):  # its `build` may refuse them
                worlds.world([worlds.plain_model], 2 * needs.public).run(kit.method)
        kit.usual.run(kit.method)
    except PolyfedError as error:
        kit.fail(
            f"{error}; the kit's networks differ in all that `requirements` allow: do these name what it needs "
            "(split_model=True for represent and head)?"
        )


def _needs_parts(needs: Requirements) -> bool:
    return needs.split_model or needs.same_feature_dim or needs.same_head or needs.same_cut_shapes


def declared(kit: ConformanceKit) -> None:
    """Name, paper, docstring, stage and hyperparameters are there; a wrong hyperparameter is refused."""
    method = kit.method
    kind = type(kit.method)
    if not method.name or not method.paper:
        kit.fail("expected a name and the paper it comes from (`name`, `paper`)")
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):
        kit.fail("expected a docstring that says what it does")
    if any(type(other) is not kind or other == method for other in method.alternative_predictors.values()):
        kit.fail("expected `alternative_predictors` to name this method with another `predict`")
    if method.evaluation_stage not in typing.get_args(Stage) or not isinstance(method.requirements, Requirements):
        kit.fail(
            f"expected a stage of {typing.get_args(Stage)} and Requirements, got {method.evaluation_stage!r}, "
            f"{method.requirements!r}"
        )
    try:
        kind()
    except Exception as error:
        kit.fail(f"expected a default for every hyperparameter: {error}")
    if replaced(method, no_such_hyperparameter=1) is not None:
        kit.fail("a hyperparameter that does not exist is taken without a word")


def refused_before_round_1(kit: ConformanceKit) -> None:
    """Models and data that do not fit are refused before the first round, with a ConfigError."""
    needs = kit.method.requirements
    unfit: dict[str, tuple[bool, list[Callable[[], nn.Module]]]] = {
        "networks without parts": (_needs_parts(needs), [worlds.plain_model]),
        "two architectures": (needs.same_architecture, [lambda: tiny_model(1, 4, 6), lambda: tiny_model(2, 4, 6)]),
        "two feature widths": (
            needs.same_feature_dim or needs.same_head,
            [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 4, 7)],
        ),
        "one name with two shapes": (needs.shared_shapes, [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 5, 6)]),
        "unequal cuts": (needs.same_cut_shapes, [lambda: tiny_model(1, 4, 6), lambda: tiny_model(1, 5, 6)]),
    }
    for what, (matters, builds) in unfit.items():
        if matters:
            _must_refuse(kit, what, worlds.world(builds, 2 * needs.public))
    if needs.public:
        _must_refuse(kit, "no public data", kit.usual, public=False)


def _must_refuse(kit: ConformanceKit, what: str, among: TinyFederation, **options: Any) -> None:
    try:
        among.federation(kit.method, **options)
    except ConfigError:
        return
    kit.fail(f"it needs {kit.method.requirements}, yet a federation with {what} was not refused")
