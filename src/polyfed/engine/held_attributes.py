"""What a network's layers hold beside parameters and saved buffers: seen at one time, compared with another time."""

from __future__ import annotations

import functools
import math
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.engine.executors.stack_parts import MODULES_OWN, are_near

_DEEP = 6  # objects within objects that are looked into
_PLAIN = (int, float, complex, str, bytes, type(None), types.CodeType)
_STATE = (int, float, Tensor, list, dict, set, deque)  # of a class's attributes, what a forward may write into
_NAMED = (types.BuiltinFunctionType, types.ModuleType, type)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_NO_SETTINGS = ("architecture",)  # names, by which nothing is computed


def held(network: nn.Module) -> dict[str, object]:
    """A copy of what layers and their classes hold, by dotted name, for `same`; buffers that are not saved count."""
    seen: dict[int, Any] = {id(tensor): tensor for tensor in network.state_dict(keep_vars=True).values()}
    return {f"{place}.{name}".lstrip("."): _frozen(value, seen, 0) for place, name, value in _attributes(network)}


def settings(network: nn.Module) -> dict[str, object]:
    """What of `held` tells how layers compute; of polyfed's own layers numbers and texts alone."""
    found = {}
    for name, value in held(network).items():
        place, _, key = name.rpartition(".")
        is_ours = type(network.get_submodule(place)).__module__.startswith("polyfed.")
        if value is not None and key not in _NO_SETTINGS and (not is_ours or isinstance(value, int | float | str)):
            found[name] = value
    return found


def owner_of(network: nn.Module, name: str) -> tuple[Any, str]:
    """What holds an attribute that `held` has named, a layer or its class, and the attribute's own name."""
    place, _, key = name.rpartition(".")
    layer = network.get_submodule(place)
    kinds = [kind for kind in type(layer).__mro__ if key in vars(kind)]
    return (layer if key in vars(layer) or not kinds else kinds[0]), key


def same(a: object, b: object, close: float) -> bool:
    """Whether two copies agree; floats up to a share `close` of the largest."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not a.is_floating_point() or not b.is_floating_point():
            return a.dtype == b.dtype and torch.equal(a, b)
        return are_near({"": a}, {"": b}, close, 0.0)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=close) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(one, other, close) for one, other in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def _attributes(network: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Name of the layer, name of the attribute, value."""
    for place, layer in network.named_modules():
        kinds = [kind for kind in reversed(type(layer).__mro__) if not kind.__module__.startswith("torch.")]
        of_class = {name: v for kind in kinds for name, v in vars(kind).items() if isinstance(v, _STATE)}
        unsaved = {name: layer._buffers[name] for name in layer._non_persistent_buffers_set}
        made = {name for name in vars(layer) if {f"{name}_g", f"{name}_orig"} & layer._parameters.keys()}  # of norms
        own = {name: value for name, value in vars(layer).items() if name not in MODULES_OWN | made}
        for name, value in {**of_class, **unsaved, **own}.items():
            if not name.startswith("__"):
                yield place, name, value


def _frozen(value: Any, seen: dict[int, Any], depth: int) -> object:
    """A copy of plain values, tensors and lists; None for what cannot be compared, and for what was `seen` before."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _NAMED):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if id(value) in seen or depth > _DEEP:
        return None
    seen[id(value)] = value  # which stays, so that no other gets its id
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    parts = _parts(value)
    if parts is None:
        text = repr(value)
        return None if " at 0x" in text else text
    return [_frozen(part, seen, depth + 1) for part in parts]


def _parts(value: Any) -> list[Any] | None:
    """What an object is made of; None: of nothing that can be told."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | deque):
        return list(value)
    for kind, parts in _PARTS:
        if isinstance(value, kind):
            return parts(value)
    return [type(value), vars(value)] if hasattr(value, "__dict__") else None


_PARTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    ((set, frozenset), lambda value: sorted(map(repr, value))),
    (np.ndarray, lambda value: [torch.from_numpy(value)] if value.dtype.kind in "biuf" else value.tolist()),
    (random.Random, lambda value: [value.getstate()]),
    (np.random.RandomState, lambda value: [value.get_state()]),
    (np.random.Generator, lambda value: [value.bit_generator.state]),
    (nn.Module, lambda value: [value.state_dict()]),  # which is no layer, as it hides in a list
    (types.MethodType, lambda value: [value.__func__]),
    (functools.partial, lambda value: [value.func, value.args, value.keywords]),
    (
        types.FunctionType,
        lambda value: [value.__code__, value.__defaults__, *(cell.cell_contents for cell in value.__closure__ or ())],
    ),
)
