"""Several runs of one request, of a comparison or a sweep: all are checked before the first one begins.

Several processes may have the same request, on one machine or on several with a shared disk. A process
at work on a run has it alone until it ends; a lock of the system's ends with the process, so that others go on with
what a killed one left.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.engine.checkpoint import began_with, check_made_of
from polyfed.engine.run_folder import FolderInUse, RunFolder, lock_folder
from polyfed.errors import ConfigError, PolyfedError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.run import check_run_folder_place
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console
from polyfed.registry import own_code
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.report.text_tables import image, preformatted

__all__ = [
    "Outcome",
    "PlannedRun",
    "Report",
    "check_planned_runs",
    "data_checksum",
    "plan",
    "run_planned",
    "wait_until_free",
]


@dataclass(frozen=True)
class PlannedRun:
    """One run of several. name: what tells it from the others, but for the seed."""

    name: str
    recipe: Recipe
    folder: Path

    @property
    def title(self) -> str:
        """For progress and errors: ``"fedgh, seed 0"``."""
        return f"{self.name}, seed {self.recipe.run.seed}"


@dataclass(frozen=True)
class Report:
    """What a comparison, a sweep or a benchmark leaves behind.

    Attributes:
        folder: of its runs. table: what is shown of them; None where no run was finished. files: tables and figures.
        failures: ``"fedin, seed 0"`` -> why. unlearnt: likewise, the line on a run in which nothing was learnt.
    """

    folder: Path
    table: Any
    files: tuple[Path, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    unlearnt: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = "no run was finished" if self.table is None else repr(self.table)
        failed = [f"{run} failed: {why}" for run, why in self.failures.items()]
        return "\n".join([shown, *failed, f"In {self.folder}"])

    def _repr_html_(self) -> str:
        drawn = [image(file) for file in self.files if file.suffix == ".png" and file.exists()]
        return preformatted(repr(self)) + "".join(drawn)


@dataclass(frozen=True)
class Outcome:
    """What has come of planned runs.

    Attributes:
        runs: all that are finished, of all rows. failures: ``"fedin, seed 0"`` -> why it failed.
        unlearnt: likewise, the line on a run in which nothing was learnt.
    """

    runs: Sequence[RunRecord]
    failures: Mapping[str, str]
    unlearnt: Mapping[str, str]

    def of_row(self, folder: str) -> list[RunRecord]:
        """The finished runs of a row, in order of seeds. folder: name of the one that holds its runs."""
        return sorted((run for run in self.runs if run.path.parent.name == folder), key=lambda run: run.seed)


def plan(rows: Iterable[Recipe], seeds: Iterable[int], folder: Path) -> list[PlannedRun]:
    """Each row with each seed, in ``<folder>/<row>/seed-<n>``; seed by seed, so that the runs of one share its data."""
    named = {row.name: row for row in rows}
    return [
        PlannedRun(name, row.with_run(seed=seed, out=None), folder / name / f"seed-{seed}")
        for seed in seeds
        for name, row in named.items()
    ]


def check_planned_runs(
    members: Sequence[PlannedRun], folder: Path, overwrite: bool, data: DataCache
) -> list[PlannedRun]:
    """The runs that are still to be done, after everything that can be known beforehand has been checked.

    Args:
        members: all runs. folder: where tables will lie. overwrite: also those that are done. data: kept between calls.

    Raises:
        ConfigError: a folder is taken or cannot be made, data that are not there, models that do not fit.
    """
    pending = []
    check_run_folder_place(folder)
    if (folder / "rounds.jsonl").exists() or (folder / "recipe.toml").exists():
        raise ConfigError(f"expected a folder for many runs, got {folder}, which holds a single one")
    for member in members:
        place = RunFolder(member.folder)
        settings = member.recipe.to_dict()
        place.validate(settings, not overwrite, overwrite, member.recipe.chosen_method.planned)
        if overwrite or place.finished(settings) is None:
            pending.append(member)
    if not overwrite:
        _check_made_of(members, bool(pending), data)
    fitted: set[str] = set()
    for member in pending:
        data.federated(member.recipe)
        if member.name not in fitted:
            build_federation(member.recipe, data=data, pretrained=False)
            gc.collect()
            fitted.add(member.name)
    return pending


def _check_made_of(members: Sequence[PlannedRun], is_needed: bool, data: DataCache) -> None:
    """Whether the runs that are there began with the data that there are now; of other code it is warned.

    is_needed: whether any is to be run; without, data that have gone since are no error.

    Raises:
        ConfigError: one began with others; or the data cannot be had.
    """
    asked: object = None
    now: str | None = None
    names: Sequence[str] = ()
    for member in members:
        recipe = member.recipe
        place = RunFolder(member.folder)
        of_data = (recipe.data, recipe.beside, recipe.run.seed, recipe.run.control)
        if began_with(place).data is not None and of_data != asked:
            try:
                now = data_checksum(recipe, data)
                names = data.federated(recipe).names
            except ConfigError:
                if is_needed:
                    raise
                return
            asked = of_data
        is_known = of_data == asked  # not of a run that another process has begun since it was looked at
        place.check_clients(names if is_known else ())
        check_made_of(place, now if is_known else None, own_code(recipe.to_dict(), recipe.beside))


def data_checksum(recipe: Recipe, data: DataCache) -> str | None:
    """That of a recipe's data as they are now (`polyfed.engine.federation.Federation.data_checksum`)."""
    try:
        return build_federation(recipe, data=data, pretrained=False).data_checksum
    finally:
        gc.collect()


def wait_until_free(folder: Path) -> None:
    """Wait until the process that is at work in a run folder has ended the run, or has itself ended.

    Raises:
        RunInterrupted: Ctrl-C.
    """
    try:
        with lock_folder(folder, waits=True):
            pass
    except KeyboardInterrupt:
        raise RunInterrupted(f"interrupted; another process is at work in {folder}, and what is done is kept") from None


def run_planned(
    members: Sequence[PlannedRun],
    pending: Sequence[PlannedRun],
    overwrite: bool,
    data: DataCache,
    watchers: Sequence[Logger],
) -> Outcome:
    """Run what is pending, in order; a run that fails does not keep the others from running.

    What other processes are at comes last: this one waits for them, and goes on with what they left.

    Raises:
        RunInterrupted: Ctrl-C; what is done is kept.
    """
    failures: dict[str, str] = {}
    titles = {one.title: f"run {number} of {len(members)}: {one.title}" for number, one in enumerate(members, 1)}
    for member in members:
        if member not in pending:
            _tell(watchers, f"{member.title}: already done, in {member.folder}")
    left = [member for member in members if member in pending]
    while left:
        busy = []
        for member in left:
            shown = [one.of_several(titles[member.title]) if isinstance(one, Console) else one for one in watchers]
            try:
                _run_or_skip(member, overwrite, data, shown)
            except RunInterrupted as stop:
                raise RunInterrupted(f"{member.title}: {stop}") from None
            except FolderInUse:
                busy.append(member)
            except PolyfedError as error:
                failures[member.title] = str(error)
                _tell(shown, f"{member.title} failed: {error}")
        left = busy
        if left:
            _tell(watchers, f"{left[0].title}: waiting for another process, which is at work on it")
            wait_until_free(left[0].folder)
    done = {member.folder.resolve(): member.title for member in members if member.title not in failures}
    runs = [run for run in load_runs(done) if run.finished] if done else []
    lines = {done[run.path.resolve()]: run.result.nothing_learnt for run in runs}
    return Outcome(runs, failures, {title: line for title, line in lines.items() if line})


def _tell(watchers: Sequence[Logger], line: str) -> None:
    for watcher in watchers:
        watcher.message(line)


def _run_or_skip(member: PlannedRun, overwrite: bool, data: DataCache, watchers: Sequence[Logger]) -> None:
    """Run one unless another process has done it, and free its memory.

    A federation's parts know each other, so that only the collector frees them.

    Raises:
        FolderInUse: another process is at it.
        PolyfedError: it failed, or was interrupted.
    """
    place = RunFolder(member.folder)
    if member.folder.is_dir():
        with lock_folder(member.folder):  # who finds it in use builds nothing
            pass
    if not overwrite and place.finished(member.recipe.to_dict()) is not None:
        _tell(watchers, f"{member.title}: done by another process, in {member.folder}")
        return
    try:
        build_federation(member.recipe, out=member.folder, loggers=watchers, data=data).run(
            resume=not overwrite, overwrite=overwrite
        )
    finally:
        gc.collect()
