"""polyfed: federated learning among clients whose neural networks differ.

What programs use is listed below; `polyfed.methods` holds the methods, one class each.
"""

from __future__ import annotations

import importlib
from typing import Any

from polyfed.errors import suggest
from polyfed.version import __version__ as __version__

_PLACES = {  # __init__.pyi says the same to type checkers and editors
    "run": "experiments.run", "compare": "experiments.compare", "check": "experiments.estimate",
    "sweep": "experiments.sweep", "benchmark": "experiments.benchmark",
    "federate": "experiments.data_cache", "predict": "experiments.prediction",
    "load": "experiments.prediction", "plot": "report.figures", "results": "report.frames",
    "Recipe": "config.recipe", "Federation": "engine.federation", "Run": "engine.federation",
    "Devices": "plugins.settings", "Task": "engine.task", "Execution": "engine.task",
    "Output": "engine.task", "Plugin": "engine.plugin", "alone": "engine.method_wrappers",
    "Executor": "engine.executors.executor",
    "Training": "core.settings", "Evaluation": "core.settings", "Availability": "plugins.settings",
    "Privacy": "core.settings", "RobustAggregation": "plugins.settings",
    "Adversaries": "plugins.settings", "SecureSums": "plugins.settings",
    "Client": "core.client", "PublicData": "core.client", "Method": "core.method",
    "SplitModel": "models.split",
    "hyperparameters": "validation.settings",
    "split": "models.adapt", "load_dataset": "data.datasets", "from_tensors": "data.dataset",
    "from_frame": "data.tables", "PolyfedError": "errors",
}  # fmt: skip
__all__ = [*_PLACES, "methods"]


def __getattr__(name: str) -> Any:  # PyTorch is imported on first use, so that `polyfed --help` answers at once
    if name == "methods":
        return importlib.import_module("polyfed.methods")
    if name not in _PLACES:
        near = suggest(name, __all__)
        raise AttributeError(f"polyfed has no attribute '{name}'{near if 'did you mean' in near else ''}")
    return getattr(importlib.import_module(f"polyfed.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
