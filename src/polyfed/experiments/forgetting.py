"""Takes a client's rows out of a stopped run, for good: the server's sums are as if it had sent none."""

from __future__ import annotations

from pathlib import Path

from polyfed.config.recipe import Recipe
from polyfed.engine import checkpoint
from polyfed.engine.run_folder import RunFolder, explain_disk_errors, lock_folder
from polyfed.errors import ConfigError

__all__ = ["forget"]


def forget(run: str | Path, client: int, trust: bool = False) -> bool:
    """Take a client's rows out of a run folder, and keep them out of all that goes on from it.

    First the client is listed in the folder, which every checkpoint is read and written with; then it is taken out of
    those that are there. Killed meanwhile, or asked again, it does the rest. Models, and what was made of them, are
    removed, as others' have the client's rows in them. Records stay but for their validation scores: the best round is
    chosen anew, among those that follow.

    Args:
        run: the folder; of a deployment at the server. client: its number.
        trust: whether code that the folder names may be imported.

    Returns:
        Whether there were models.

    Raises:
        ConfigError: the run's method cannot do so, nothing is kept of the client, a process is at work in the folder,
            or it holds no whole checkpoint.
    """
    method = Recipe.of_run(run, trust).chosen_method
    folder = RunFolder(run)
    with lock_folder(folder.path), explain_disk_errors(folder.path):
        folder.clear_unfinished()
        listed = folder.forgotten()
        known = checkpoint.remembered_in(folder.checkpoints, method)
        if client not in listed:
            if client not in known:
                there = ", ".join(map(str, sorted(known))) or "none"
                raise ConfigError(f"expected a client whose rows count ({there}), got {client}")
            listed = [*listed, client]
            folder.write_forgotten(listed)
        folder.clear_validation()
        checkpoint.purge(folder.checkpoints, checkpoint.forgetting(method, listed))
        return folder.clear_models()
