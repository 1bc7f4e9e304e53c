"""Options of a federation by their own names, for tests that vary one of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from polyfed.engine.task import Execution, Output, Task

PLUGINS = ("availability", "privacy", "compression", "devices", "robust_aggregation", "adversaries")


def grouped(**options: Any) -> dict[str, Any]:
    """The arguments of `Federation` that these options stand for."""
    if "out" in options:
        options["path"] = options.pop("out")
    task, execution, output = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (Task, Execution, Output)
    )
    plugins = [options.pop(name) for name in PLUGINS if name in options]
    return {
        "task": Task(**task),
        "executor": Execution(**execution),
        "out": Output(**output),
        "plugins": [*(plugin for plugin in plugins if plugin is not None), *options.pop("plugins", ())],
        **options,
    }
