"""The networks of the zoo: each module here registers its own, and whatever is registered here is found by name.

    register("tiny", _tiny, Home((1, 8, 8), 10, "Nobody et al., 2026"), "A linear layer.", width=16)

makes ``_tiny("tiny", in_shape, classes, width=16)`` the network "tiny". A parameter ``words`` or ``categories`` gets
what `polyfed.models.zoo.build` says of it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.errors import ConfigError
from polyfed.models.split import SplitModel
from polyfed.registry import MODELS

ImageShape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Home:
    """The data that a network was made for, and by whom: the shape of a sample, the number of classes, the paper."""

    in_shape: tuple[int, ...]
    classes: int
    paper: str


HOMES: dict[str, Home] = {}  # of each registered network


def register(name: str, make: Callable[..., SplitModel], home: Home, about: str, **sizes: Any) -> None:
    """Add ``make(name, in_shape, classes, **sizes)`` to the networks. about: it is, in a line, for `polyfed models`."""
    builder = functools.partial(make, name, **sizes)
    builder.__doc__ = about
    MODELS.add(name, builder)
    HOMES[name] = home


def check_request(name: str, in_shape: Sequence[int], classes: int) -> ImageShape:
    """Returns (channels, height, width), or says which of them a builder cannot use."""
    if len(in_shape) != 3 or any(not isinstance(n, int) or n < 1 for n in in_shape):
        raise ConfigError(f"{name} needs images (channels, height, width), got the shape {tuple(in_shape)}")
    if not isinstance(classes, int) or classes < 1:
        raise ConfigError(f"{name} needs at least one class, got {classes!r}")
    channels, height, width = in_shape
    return channels, height, width


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
