"""Runs in Weights & Biases: offline, in the run folder, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from polyfed.loggers.tracker import PROJECT, Tracker


class WandB(Tracker):
    """Shows a run in Weights & Biases; its project is WANDB_PROJECT, or "polyfed"."""

    package = "wandb"

    def open(self, known: str, name: str, parameters: Mapping[str, str]) -> tuple[str, int]:
        """See `Tracker`. Offline none goes on; a new record of all rounds, of the same id, replaces the older one."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports go to its makers, even from offline runs
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        if known and mode == "offline":
            for older in self._place.glob(f"offline-run-*-{known}"):
                shutil.rmtree(older)
        # The terminal is the run's. Nothing is said of the machine but what the recipe says.
        settings = wandb.Settings(
            silent=True,
            init_timeout=30,  # seconds, instead of 90, that a run waits for a server
            console="off",
            symlink=False,
            reinit="create_new",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(self._out),
            mode=mode,
            id=known or None,
            resume=None if mode == "offline" else "allow",
            name=name,
            config=dict(parameters),
            allow_val_change=True,
            settings=settings,
        )
        return str(self._run.id), max(0, self._run.starting_step - 1)

    def log(self, values: Mapping[str, float], number: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=number)

    def close(self, is_done: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=0 if is_done else 1)
