"""polyfed: federated learning among clients whose neural networks differ."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyfed.version import __version__ as __version__

_PLACES = {
    "run": "polyfed.session", "compare": "polyfed.session", "check": "polyfed.session", "Recipe": "polyfed.recipe",
    "Federation": "polyfed.engine.federation", "Run": "polyfed.engine.federation",
    "Training": "polyfed.core.settings", "Evaluation": "polyfed.core.settings", "split": "polyfed.models.adapt",
    "Client": "polyfed.core.client", "Method": "polyfed.core.method", "SplitModel": "polyfed.models.split",
}  # fmt: skip
__all__ = [*_PLACES, "methods"]

if TYPE_CHECKING:
    from polyfed import methods as methods
    from polyfed.core.client import Client as Client
    from polyfed.core.method import Method as Method
    from polyfed.core.settings import Evaluation as Evaluation
    from polyfed.core.settings import Training as Training
    from polyfed.engine.federation import Federation as Federation
    from polyfed.engine.federation import Run as Run
    from polyfed.models.adapt import split as split
    from polyfed.models.split import SplitModel as SplitModel
    from polyfed.recipe import Recipe as Recipe
    from polyfed.session import check as check
    from polyfed.session import compare as compare
    from polyfed.session import run as run


def __getattr__(name: str) -> Any:  # PyTorch is imported on first use, so that `polyfed --help` answers at once
    if name == "methods":
        return importlib.import_module("polyfed.methods")
    if name not in _PLACES:
        raise AttributeError(f"polyfed has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)
