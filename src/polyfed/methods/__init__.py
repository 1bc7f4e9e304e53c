"""The methods, one file each; ``polyfed.methods.FedGH`` imports the file on first use."""

from __future__ import annotations

from typing import Any

from polyfed.errors import suggest
from polyfed.registry import METHODS

_NAMES = {  # class -> name in recipes; when this is imported, no method has been added yet
    entry.partition(":")[2]: name for name, entry in METHODS.entries.items() if isinstance(entry, str)
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        like = next((known for known in _NAMES if known.lower() == name.lower()), None)
        near = suggest(name, _NAMES) if like is None else f"; did you mean '{like}'?"
        raise AttributeError(f"polyfed.methods has no method class '{name}'{near}")
    return METHODS[_NAMES[name]]


def __dir__() -> list[str]:
    return sorted(_NAMES)
