"""A package `ray` in this process: actors are objects here, and do what they are asked when they are waited for."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from polyfed.engine.executors import ray_executor
from polyfed.experiments import build
from tests.helpers.nearby import DATA

Fault = Callable[[str, tuple[Any, ...]], Exception | None]  # method, arguments -> what it dies of


class RayError(Exception):
    """What Ray raises when an actor is no more."""


class ActorDiedError(RayError):
    """Likewise."""


class Promise:
    """The answer of a method, found out once."""

    def __init__(self, work: Callable[[], Any], has_room: bool) -> None:
        self._work = work
        self.has_room = has_room
        self._found: list[Any] = []

    def settle(self) -> None:
        """Find it out."""
        if self._found:
            return
        try:
            self._found.append(self._work())
        except RayError as error:
            self._found.append(error)

    def get(self) -> Any:
        """The answer."""
        self.settle()
        if isinstance(self._found[0], RayError):
            raise self._found[0]
        return self._found[0]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> RayStub:
    """One in place of Ray, and of a cluster's data those that the tests keep."""
    stub = RayStub()
    there = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "ray", stub)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ray" or there(name))
    monkeypatch.setattr(ray_executor, "tune_process", lambda: None)  # it is that of the tests
    monkeypatch.setattr(build, "DataCache", lambda: DATA)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return stub


class RayStub(types.ModuleType):
    """What of Ray the executor uses.

    Attributes:
        fault: asked before a method of an actor runs. cpus: of the cluster. without_room: whether
        further actors wait for a core for ever. actors: how many were made. ended: how many were killed. starts:
        settings of `init`. sent: arguments and answers of the actors' methods but the first two.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=RayError)
        self.fault: Fault = lambda name, args: None
        self.cpus = 8
        self.without_room = False
        self.actors = self.ended = 0
        self.starts: list[dict[str, Any]] = []
        self.is_on = False
        self.sent: list[Any] = []

    def init(self, **settings: Any) -> None:
        """Start."""
        self.starts.append(settings)
        self.is_on = True

    def is_initialized(self) -> bool:
        """Whether it was started."""
        return self.is_on

    def shutdown(self) -> None:
        """End."""
        self.is_on = False

    def cluster_resources(self) -> dict[str, float]:
        """All that there is."""
        return {"CPU": float(self.cpus)}

    def remote(self, **options: Any) -> Callable[[type], Any]:
        """Decorate a class."""
        assert options["num_cpus"] == 1

        def decorate(kind: type) -> Any:
            return types.SimpleNamespace(remote=lambda: self._actor(kind))

        return decorate

    def _actor(self, kind: type) -> Any:
        self.actors += 1
        actor = kind()
        has_room = not self.without_room
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        return types.SimpleNamespace(**{name: self._method(actor, name, has_room) for name in names})

    def _method(self, actor: Any, name: str, has_room: bool) -> Any:
        def remote(*args: Any) -> Promise:
            return Promise(lambda: self.perform(actor, name, args), has_room)

        return types.SimpleNamespace(remote=remote)

    def perform(self, actor: Any, name: str, args: tuple[Any, ...]) -> Any:
        """Run a method of an actor."""
        assert self.is_on
        if error := self.fault(name, args):
            raise error
        found = getattr(actor, name)(*args)
        if name == "answer":
            self.sent += [*args, found]
        return found

    def wait(self, promises: Sequence[Any], num_returns: int = 1, timeout: float | None = None) -> Any:
        """The last first, as no order is promised."""
        ready = [promise for promise in promises if promise.has_room]
        ready = ready[-num_returns:]
        for promise in ready:
            promise.settle()
        return ready, promises

    def get(self, promise: Promise) -> Any:
        """The answer."""
        return promise.get()

    def kill(self, actor: Any) -> None:
        """End an actor."""
        self.ended += 1
