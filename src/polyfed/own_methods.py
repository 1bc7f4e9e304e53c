"""A method's class by its name: registered, or ``"package.module:Class"`` of the user's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from polyfed.core.method import Method, not_a_hyperparameter
from polyfed.errors import ConfigError
from polyfed.registry import METHODS, import_object, is_own, suggest

__all__ = ["LABEL", "check_class", "label_of", "method_class"]

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a name of a method, a variant or a preset, which is a folder's, too


def method_class(name: str, beside: Sequence[str] = (), others: Iterable[str] = ()) -> type[Method]:
    """The class.

    Args:
        name: of a registered method, or ``"package.module:Class"``.
        beside: folders in which the module is looked for, too.
        others: further names that would have been understood, for the message.

    Raises:
        ConfigError: no such method; or it is none, or has no hyperparameters.
    """
    if not is_own(name):
        if name not in METHODS:
            hint = "" if not {":", "."} & set(name) else "; a method of your own is 'package.module:Class'"
            raise ConfigError(f"unknown method '{name}'{hint or suggest(name, {*METHODS, *others})}")
        return check_class(name, METHODS[name])
    return check_class(name, import_object("method", name, beside))


def label_of(name: str, beside: Sequence[str] = ()) -> str:
    """What a method is called in tables and folders: its name, if no registered method has it and a folder can."""
    if not is_own(name):
        return name
    own = method_class(name, beside).name
    return own if LABEL.fullmatch(own) and own not in METHODS else name.replace(":", ".")


def check_class(name: str, kind: Any) -> type[Method]:
    """The class, if it is one of a method, with hyperparameters.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(kind, type) or not issubclass(kind, Method):
        given = f"the class {kind.__name__}" if isinstance(kind, type) else f"an object of {type(kind).__name__}"
        raise ConfigError(f"method '{name}': expected a class that extends polyfed.Method, got {given}")
    field = not_a_hyperparameter(kind)
    if field is not None or not dataclasses.is_dataclass(kind):
        what = "" if field is None else f", so that '{field}' is no hyperparameter"
        raise ConfigError(
            f"method '{name}': expected @hyperparameters (of polyfed.core.method) above the class {kind.__name__}, "
            f"got a class without it{what}"
        )
    return kind
