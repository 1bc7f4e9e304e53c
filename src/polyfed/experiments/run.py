"""One run of a recipe: what `polyfed run` does, for Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyfed.config.recipe import Recipe
from polyfed.engine.federation import Run
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError
from polyfed.experiments.build import (
    build_federation,
    check_run_folder_place,
    refuse_unread_settings,
    resolve_recipe,
)

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
    profile: bool = False,
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
        overwrite: replace the run that the folder holds, and what `polyfed plot` and `attack` made of it.
        progress: show how it gets on, on standard error.
        device: "cpu", "cuda", "cuda:1".
        workers: clients that train at the same time, each in a process of its own; default: one per core, where that
            pays. The result does not depend on it.
        executor: who does the clients' work: "auto", "serial", "processes", "vectorized", "ray".
        profile: have records and result tell where the time went, too.
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
        RunFolder(folder).validate(resolved.to_dict(), resume, overwrite, resolved.planned)  # before data are loaded
    elif resume:
        raise ConfigError("expected a run folder to resume from, got none; name it with out=...")
    elif resolved.run.loggers:
        raise ConfigError("run.loggers: expected a run folder for live curves, got none; name it with out=...")
    federation = build_federation(resolved, out=folder, loggers=loggers, profile=profile)
    if method is None:
        refuse_unread_settings(federation)
    return federation.run(resume=resume, overwrite=overwrite, progress=progress)
