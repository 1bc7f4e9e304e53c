"""A suite as it is asked for: where it lies, which methods of it are run, and with which recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed.config.protocol import Protocol
from polyfed.config.recipe import Recipe
from polyfed.config.resolve import to_toml
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console

__all__ = ["BenchmarkRequest", "key_of"]

_NO_WEIGHTS = "run.keep=nothing"  # hundreds of runs' networks fill a disk


def key_of(method: str, name: str) -> str:
    """What is tuned, as --set names it: a setting of [training], or a hyperparameter of one method."""
    return name if name.startswith("training.") else f"methods.{method}.{name}"


@dataclass(frozen=True)
class BenchmarkRequest:
    """A suite as it is asked for.

    Attributes:
        folder: the suite's. settings: those asked for. methods: likewise; None are all that the settings have.
        out: the folder of runs. figures: the folder of the settings' files.
        progress, workers, executor, device, overwrite: see `polyfed.experiments.benchmark`.
    """

    folder: Path
    protocol: Protocol
    settings: tuple[str, ...]
    methods: tuple[str, ...] | None
    out: Path
    figures: Path
    progress: bool
    workers: int | None
    executor: str | None
    device: str | None
    overwrite: bool

    @property
    def watchers(self) -> list[Logger]:
        """Who is told how it gets on."""
        return [Console()] if self.progress else []

    def tell(self, line: str) -> None:
        """A line of progress."""
        for watcher in self.watchers:
            watcher.message(line)

    def methods_of(self, setting: str) -> list[str]:
        """The methods to run in a setting: one that some of the settings asked for have in these, any other in all."""
        here = self.protocol.methods_of(setting)
        if self.methods is None:
            return here
        known = {name for asked in self.settings for name in self.protocol.methods_of(asked)}
        return [name for name in self.methods if name in here or name not in known]

    def recipe_of(self, setting: str, chosen: Mapping[str, Any] = MappingProxyType({}), method: str = "") -> Recipe:
        """A setting's recipe with its preset and changes. chosen: hyperparameters of a method.

        Raises:
            ConfigError: the recipe is wrong.
        """
        own = self.protocol.settings[setting]
        path = self.protocol.recipe_of(setting, self.folder)
        tuned = [f"{key_of(method, name)}={to_toml(value)}" for name, value in chosen.items()]
        changes = [*self.changes_of(setting), *tuned]
        run: dict[str, Any] = {"workers": self.workers, "executor": self.executor, "device": self.device}
        recipe = Recipe.load(path, changes, preset=own.preset, **run)
        told = [change for change in tuned if change.startswith("training.")]  # the others stand in [method]
        return recipe.with_run(overrides=[*own.overrides, *told])

    def changes_of(self, setting: str) -> list[str]:
        """What is changed of a setting's recipe, as ``--set`` takes it; its own ``run.keep`` comes last, and holds."""
        return [_NO_WEIGHTS, *self.protocol.overrides_of(setting)]
