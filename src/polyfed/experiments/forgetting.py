"""Takes a client's rows out of a stopped run: the server's sums and solution are as if it had sent none."""

from __future__ import annotations

from pathlib import Path

from polyfed.config.recipe import Recipe
from polyfed.engine import checkpoint
from polyfed.engine.run_folder import RunFolder, explain_disk_errors, lock_folder

__all__ = ["forget"]


def forget(run: str | Path, client: int, trust: bool = False) -> None:
    """Take a client's rows out of the checkpoints of a run; what goes on from them has a solution without it.

    Records and models that are there stay as they are.

    Args:
        run: the folder; of a deployment at the server. client: its number.
        trust: whether code that the folder names may be imported.

    Raises:
        ConfigError: the run's method cannot do so, nothing is kept of the client, a process is at work in the folder,
            or it holds no whole checkpoint.
    """
    method = Recipe.of_run(run, trust).chosen_method
    folder = RunFolder(run)
    with lock_folder(folder.path), explain_disk_errors(folder.path):
        checkpoint.change_server(folder.checkpoints, lambda state: method.forget(state, client))
