"""Options of a federation by their own names, for tests that vary one of them."""

from __future__ import annotations

from typing import Any

from polyfed.engine.task import Execution, Output, Task

TASK = ("public", "test", "classes", "class_names", "dataset", "feature_names", "vocabulary", "label_column")
EXECUTION = ("executor", "workers", "device", "precision", "profile")
OUTPUT = {
    "out": "path",
    "checkpoint_every": "checkpoint_every",
    "keep": "keep",
    "label": "label",
    "settings": "settings",
}
PLUGINS = ("availability", "privacy", "compression", "devices", "robust_aggregation", "adversaries")


def grouped(**options: Any) -> dict[str, Any]:
    """The arguments of `Federation` that these options stand for."""
    task = {name: options.pop(name) for name in TASK if name in options}
    execution = {name: options.pop(name) for name in EXECUTION if name in options}
    output = {OUTPUT[name]: options.pop(name) for name in OUTPUT if name in options}
    plugins = [options.pop(name) for name in PLUGINS if name in options]
    return {
        "task": Task(**task),
        "executor": Execution(**execution),
        "out": Output(**output),
        "plugins": [*(plugin for plugin in plugins if plugin is not None), *options.pop("plugins", ())],
        **options,
    }
