"""One run of a recipe: what `polyfed run` does, for Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.engine.arguments import list_of
from polyfed.engine.federation import Federation, Run
from polyfed.engine.remarks import unread_settings
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError, described
from polyfed.experiments.build import build_federation
from polyfed.places import check_name

__all__ = ["run"]


def run(  # noqa: PLR0913 - what a user may choose, each by its name
    recipe: str | Path | Recipe,
    *,
    method: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    device: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    preset: str | None = None,
    loggers: Sequence[object] = (),
) -> Run:
    """Run a recipe.

    Args:
        recipe: a TOML file, or a `Recipe`.
        method: a method's or a variant's name, in place of the recipe's own.
        seed: in place of the recipe's own.
        overrides: ``"data.num_clients=20"``, settings in place of the recipe's; the command line's ``--set``.
        out: run folder; default: the recipe's own, if it names one, else nothing is written. (The command line writes
            to `Recipe.folder`.)
        resume: go on where the run folder's last checkpoint ends; a finished run is only read, unless it is to have
            more rounds now (``overrides=["training.rounds=25"]``): it goes on, to the result of so many from the start.
        overwrite: replace the run that the folder holds, and what `polyfed.plot` and `polyfed audit` made of it.
        progress: show how it gets on, on standard error.
        device: "cpu", "cuda", "cuda:1".
        workers: clients that train at the same time, each in a process of its own; default: one per core, where that
            pays. The result does not depend on it.
        executor: who does the clients' work: "auto", "serial", "processes", "vectorized", "ray", or your own
            ("package.module:Class").
        preset: one of the recipe's ``[presets]``, or several with commas between.
        loggers: who watches: functions of a round's record, and objects with any of `Logger`'s methods.

    Raises:
        ConfigError: the request is wrong; nothing has been written.
        RunError: the run failed.
        RunInterrupted: Ctrl-C; a checkpoint has been written.
    """
    options = {"seed": seed, "out": out, "device": device, "workers": workers, "executor": executor, "preset": preset}
    resolved = resolve_recipe(recipe, overrides, method, **options)
    folder = resolved.run.out
    if folder is not None:
        check_run_folder_place(Path(folder))
        planned = resolved.chosen_method.planned
        RunFolder(folder).validate(resolved.to_dict(), resume, overwrite, planned)  # before data are loaded
    elif resume:
        raise ConfigError("expected a run folder to resume from, got none; name it with out=...")
    elif resolved.run.loggers:
        raise ConfigError("run.loggers: expected a run folder for live curves, got none; name it with out=...")
    federation = build_federation(resolved, out=folder, loggers=loggers)
    if method is None:
        refuse_unread_settings(federation)
    return federation.run(resume=resume, overwrite=overwrite, progress=progress)


def resolve_recipe(
    recipe: str | Path | Recipe, overrides: Sequence[str], method: str | None, **settings: Any
) -> Recipe:
    """A recipe from a file, or the one given with the same changes."""
    if not isinstance(recipe, Recipe | str | os.PathLike):
        write = "; write polyfed.Recipe.from_dict(...)" if isinstance(recipe, Mapping) else ""
        raise ConfigError(f"recipe: expected a recipe's file or a Recipe, got {described(recipe)}{write}")
    if method is not None and not isinstance(method, str):
        raise ConfigError(
            f"method: expected a method's name, such as 'fedgh', got {described(method)}; its hyperparameters are "
            "overrides, such as 'method.header_lr=0.1'"
        )
    for text in list_of("overrides", overrides):
        if not isinstance(text, str):
            raise ConfigError(f"overrides: expected texts such as 'data.num_clients=20', got {described(text)}")
    if not isinstance(recipe, Recipe):
        return Recipe.load(recipe, overrides, method=method, **settings)
    for what, given in (("overrides", overrides), ("a preset", settings.pop("preset", None))):
        if given:
            raise ConfigError(f"expected {what} together with a recipe's file, got {what} with a Recipe")
    chosen = recipe if method is None else recipe.choose(method)
    changes = {key: value for key, value in settings.items() if value is not None}
    if "out" in changes:
        changes["out"] = str(changes["out"])
    return chosen.with_run(**changes)


def refuse_unread_settings(federation: Federation) -> None:
    """Whether a recipe's own method reads all of its settings; one that was asked for in its place need not.

    Raises:
        ConfigError: it does not read one.
    """
    unread = unread_settings(federation)
    if unread:
        raise ConfigError(unread[0])


def check_run_folder_place(place: Path) -> None:
    """Whether a run folder can be made there; nothing is."""
    check_name(place)
    above = next(above for above in (place, *place.absolute().parents) if above.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"expected a place for the run folder {place}, got {above}, where nothing can be written")
