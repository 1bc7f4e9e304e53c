"""What the shell offers when a word of a command is begun: names that are known without loading PyTorch.

Each function gets the context of the command so far, which typer calls `ctx`, and the word as it stands, and gives what
it may become.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.registry import DATASETS, METHODS, MODELS

SECTIONS = (  # a copy, as the classes that check recipes load PyTorch
    *(
        "data",
        "models",
        "pretraining",
        "method",
        "methods.NAME",
        "training",
        "evaluation",
        "availability",
        "privacy",
        "compression",
    ),
    *("devices", "devices.custom.NAME", "robust_aggregation", "adversaries", "plugins", "run", "presets.NAME"),
)

Complete = Callable[[Any, str], list[str]]


def methods(ctx: Any, incomplete: str) -> list[str]:
    """The methods, and the variants of the recipe that is named already."""
    return _beginning(incomplete, [*METHODS, *_tables(ctx, "methods")])


def method_lists(ctx: Any, incomplete: str) -> list[str]:
    """The same, for the last of several names with commas between."""
    return _last_of(incomplete, methods(ctx, ""))


def registered_methods(ctx: Any, incomplete: str) -> list[str]:
    """The methods."""
    return _beginning(incomplete, METHODS)


def registered_models(ctx: Any, incomplete: str) -> list[str]:
    """The models."""
    return _beginning(incomplete, MODELS)


def registered_datasets(ctx: Any, incomplete: str) -> list[str]:
    """The data sets that have a loader."""
    return _beginning(incomplete, DATASETS)


def recipe_sections(ctx: Any, incomplete: str) -> list[str]:
    """What `polyfed recipe` explains: the sections, and the methods' hyperparameters."""
    return _beginning(incomplete, [*SECTIONS, *(f"method.{name}" for name in METHODS)])


def presets(ctx: Any, incomplete: str) -> list[str]:
    """The presets of the recipe that is named already."""
    return _beginning(incomplete, _tables(ctx, "presets"))


def one_of(*words: str) -> Complete:
    """A fixed choice."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        return _beginning(incomplete, words)

    return complete


def several_of(*words: str) -> Complete:
    """A fixed choice, of which several may stand with commas between."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        return _last_of(incomplete, words)

    return complete


def _beginning(incomplete: str, words: Sequence[str] | Mapping[str, Any]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def _last_of(incomplete: str, words: Sequence[str]) -> list[str]:
    """What the last of the words with commas between may become; none is offered twice."""
    before, comma, last = incomplete.rpartition(",")
    named = before.split(",")
    return [f"{before}{comma}{word}" for word in _beginning(last, words) if word not in named]


def _tables(ctx: Any, section: str) -> list[str]:
    """The names of a recipe's tables ``[section.NAME]``; none where there is no recipe to be read."""
    words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    named = [word for word in words if word.endswith(".toml")]  # an option without its value leaves the context empty
    recipe = ctx.params.get("recipe") or next(iter(named), None)
    if recipe is None:
        return []
    try:
        found = tomllib.loads(Path(recipe).read_text(encoding="utf-8")).get(section, {})
    except (OSError, ValueError, RecursionError):
        return []
    return list(found) if isinstance(found, Mapping) else []
