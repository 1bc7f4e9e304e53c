"""The methods, one file each; ``polyfed.methods.FedGH`` imports the file on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed.registry import METHODS

if TYPE_CHECKING:
    from polyfed.methods.fedavg import FedAvg
    from polyfed.methods.fedgh import FedGH
    from polyfed.methods.fedhenn import FedHeNN
    from polyfed.methods.fedin import FedIN
    from polyfed.methods.local import Local

__all__ = ["FedAvg", "FedGH", "FedHeNN", "FedIN", "Local"]


def __getattr__(name: str) -> Any:
    if name.lower() not in METHODS or name not in __all__:
        raise AttributeError(f"polyfed.methods has no method class '{name}'")
    return METHODS[name.lower()]
