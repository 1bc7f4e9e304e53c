"""A method that hands every call on to another one, and lets somebody look on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from polyfed.core.client import Client, PublicData
from polyfed.core.message import flatten
from polyfed.core.method import Method
from polyfed.core.server import Server

HOOKS = [name for name, hook in vars(Method).items() if isinstance(hook, FunctionType) and not name.startswith("_")]

Around = Callable[..., Any]  # (call, *arguments) -> result; it decides whether to call


class Spy(Method):
    """Passes every hook on to `inner`, through the function given for it, or for `every` hook.

    Args:
        inner: the method.
        every: around all hooks, with the hook's name first: (name, call, *arguments). around: hook -> function.
    """

    def __init__(self, inner: Method, every: Around | None = None, **around: Around) -> None:
        vars(self).update(inner=inner)
        for hook in HOOKS:
            call = getattr(inner, hook)
            if hook in around:
                vars(self)[hook] = _through(around[hook], call)
            elif every is not None:
                vars(self)[hook] = _through(every, hook, call)
            else:
                vars(self)[hook] = call


def _of_inner(name: str) -> property:
    return property(lambda spy: getattr(vars(spy)["inner"], name))


for _name in vars(Method):
    if _name not in HOOKS and not _name.startswith("_"):
        setattr(Spy, _name, _of_inner(_name))


def _through(function: Around, *first: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: function(*first, *arguments, **named)


def tensors(thing: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors that a hook was handed, with their places; of servers and clients, those of their states."""
    if isinstance(thing, Tensor):
        yield place, thing
    elif isinstance(thing, Server):
        yield from tensors(thing.state, " the server's state")
        yield from tensors(_of_public(thing.public), " the public data")
    elif isinstance(thing, Client):
        yield from tensors(thing.state, f" client {thing.id}'s state")
        parts = (thing.data.train, thing.data.validation, thing.data.test)
        yield from tensors([(part.x, part.y) for part in parts], f" client {thing.id}'s data")
        yield from tensors(_of_public(thing.public), " the public data")
    elif isinstance(thing, Mapping):
        for name, value in thing.items():
            yield from tensors(value, f"{place} '{name}'")
    elif isinstance(thing, tuple | list):
        for value in thing:
            yield from tensors(value, place)


def _of_public(public: PublicData | None) -> tuple[Tensor, ...]:
    """The tensors of what everybody may see."""
    return () if public is None else (public.samples.x, public.samples.y)


def storages(message: Mapping[str, Any]) -> dict[int, str]:
    """Address of each tensor's memory -> the tensor's name."""
    return {t.untyped_storage().data_ptr(): name for name, t in flatten(message).items() if t.numel()}


def global_draws() -> tuple[object, ...]:
    """The state of the global generators."""
    _, key, place, *_ = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), key.tobytes(), place, random.getstate()  # type: ignore[union-attr]


@contextlib.contextmanager
def logged_seeds() -> Iterator[set[int]]:
    """The seeds that generators are given inside the block."""
    seeds: set[int] = set()

    class Logged(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds.add(int(seed))
            return super().manual_seed(seed)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(seed: Any = None) -> Any:
            if isinstance(seed, int):
                seeds.add(seed)
            return function(seed)

        return call

    with (
        mock.patch("torch.Generator", Logged),
        mock.patch("torch.manual_seed", noting(torch.manual_seed)),
        mock.patch("numpy.random.default_rng", noting(np.random.default_rng)),
    ):
        yield seeds
