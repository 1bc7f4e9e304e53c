"""A suite: every method tuned with as many trials, then compared over seeds, in several settings. Python's
`polyfed benchmark`.

What is done is not run again: neither what the figures have, one small JSON file per setting
(`polyfed.report.benchmark_results`), wherever they were made, nor finished runs; what was interrupted goes on. Figures
keep the recipe and the hyperparameters: a key that has come into the library since counts as its default, and a
hyperparameter that has left it is not compared. Runs lie in ``<out>/tuning/SETTING/METHOD`` and ``<out>/SETTING``; a
finished one has its records only, no weights, unless the suite says ``run.keep``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed.config.protocol import Protocol
from polyfed.config.recipe import Recipe
from polyfed.config.resolve import parse_override, to_toml
from polyfed.engine.arguments import list_of
from polyfed.engine.run_folder import lock_folder
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.controls import pooled, runs_alone
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.planned_runs import (
    AtWorkElsewhere,
    PlannedRun,
    check_planned_runs,
    data_checksum,
    nothing_learnt_in,
    run_planned,
)
from polyfed.experiments.sweep import sweep
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console
from polyfed.registry import suggest
from polyfed.report.atomic_files import make_folder
from polyfed.report.benchmark_page import Wanted, to_text, write_page
from polyfed.report.benchmark_results import (
    ProcessorTime,
    RowResult,
    RowRuns,
    SettingResult,
    Tuning,
    join_processor_time,
    join_results,
    processor_time,
    read_processor_time,
    read_results,
    setting_result,
    write_result,
)
from polyfed.report.benchmark_worth import Worth, worth_of
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.results.read import flat_table
from polyfed.units import human_count

__all__ = ["Benchmark", "BenchmarkRequest", "BenchmarkSetting", "benchmark"]

_LOCAL = "local"
_NO_WEIGHTS = "run.keep=nothing"  # hundreds of runs' networks fill a disk


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` leaves behind.

    Attributes:
        folder: of its runs. table: what the others' data are worth in each setting; None where no run was finished.
        settings: the figures of each setting. files: these and the page.
        failures: ``"digits: fedgh, seed 0"`` -> why. unlearnt: likewise, the line on a run that learnt nothing.
    """

    folder: Path
    table: tuple[Worth, ...] | None
    settings: tuple[SettingResult, ...] = ()
    files: tuple[Path, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    unlearnt: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "no run was finished" if self.table is None else to_text(self.table)


def benchmark(  # noqa: PLR0913 - what a user may choose, each by its name
    suite: str | Path,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    results: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    workers: int | None = None,
    executor: str | None = None,
    device: str | None = None,
    loggers: Sequence[str] | None = None,
) -> Benchmark:
    """Run a suite, or go on with it: tune, compare, write each setting's figures and a page of all.

    Args:
        suite: a folder with a ``protocol.toml`` (`polyfed.config.protocol`) and recipes.
        out: the folder of its runs; default ``runs/<suite>``.
        settings: only these of the suite's; the page has all whose figures are there.
        methods: only these, and Local: one that some of the settings have in these, any other one in all of them.
        results: the folder of figures and page; default ``<out>/results``. Figures that are there are gone on from,
            wherever they were made: what they have is not run again.
        overwrite: run again also what is done, and what the figures have, of these methods in these settings.
        progress: show how it gets on, on standard error. workers, executor, device: as for `polyfed.run`.
        loggers: names, in place of the recipes' run.loggers.

    Raises:
        ConfigError: the request is wrong; nothing has been written.
        RunInterrupted: Ctrl-C; call it again to go on.
    """
    protocol = Protocol.load(suite)
    names = tuple(dict.fromkeys(settings or protocol.settings))
    for name in names:
        if name not in protocol.settings:
            raise ConfigError(f"expected a setting of the suite, got '{name}'{suggest(name, protocol.settings)}")
    place = Path(out if out is not None else f"runs/{Path(suite).resolve().name}")
    figures = place / "results" if results is None else Path(results)
    chosen_methods = None if methods is None else tuple(dict.fromkeys(list_of("methods", methods)))
    if chosen_methods == ():
        raise ConfigError("methods: expected at least one, got none")
    request = BenchmarkRequest(
        Path(suite),
        protocol,
        names,
        chosen_methods,
        place,
        figures,
        progress,
        workers,
        executor,
        device,
        overwrite,
        trackers=loggers,
    )
    read_processor_time(figures)  # an error of theirs comes before the first run
    asked = [BenchmarkSetting(request, name) for name in names if request.methods_of(name)]
    ready = {setting.name: setting for setting in asked}
    every = [ready.get(name) or BenchmarkSetting(request, name) for name in protocol.settings]
    _check_named(protocol, every)
    wanted = {setting.name: setting.wanted for setting in every}
    make_folder(figures)
    left = dict(enumerate(asked, start=1))
    while left:
        elsewhere = {}
        for number, setting in left.items():
            try:
                is_new = setting.run(f"{number} of {len(asked)}")
            except AtWorkElsewhere as busy:
                elsewhere[number] = busy
                continue
            if is_new and number < len(asked):  # the next setting may be interrupted
                request.write_page(wanted)
        left = {number: left[number] for number in elsewhere}
        if elsewhere:
            others = next(iter(elsewhere.values()))
            request.tell(f"waiting: {others}")
            others.wait()
    found, files = request.write_page(wanted)
    table = tuple(map(worth_of, found)) or None
    return Benchmark(place, table, found, files, request.failures, request.unlearnt)


def _check_named(protocol: Protocol, settings: Sequence[BenchmarkSetting]) -> None:
    """Whether what a suite names can come of it in some setting: primary pairs of rows, and methods alone.

    Raises:
        ConfigError: it cannot.
    """
    for upper, lower in protocol.primary:
        if not any(setting.can_have(upper) and setting.can_have(lower) for setting in settings):
            raise ConfigError(f"primary: expected two rows that one setting has, got {upper} and {lower}")
    for method in protocol.alone_of or ():
        if not any(setting.can_have_alone(method) for setting in settings):
            raise ConfigError(f"alone_of: expected methods that send something and are no controls, got {method}")


def key_of(method: str, name: str) -> str:
    """What is tuned, as --set names it: a setting of [training], or a hyperparameter of one method."""
    return name if name.startswith("training.") else f"methods.{method}.{name}"


@dataclass(frozen=True)
class BenchmarkRequest:
    """A suite as it is asked for.

    Attributes:
        folder: the suite's. settings: those asked for. methods: likewise; None are all that the settings have.
        out: the folder of runs. figures: the folder of the settings' files.
        progress, workers, executor, device, overwrite: see `benchmark`. trackers: its `loggers`.
        failures, unlearnt: what went wrong so far, see `Benchmark`. failed: folder -> why its run failed.
    """

    folder: Path
    protocol: Protocol
    settings: tuple[str, ...]
    methods: tuple[str, ...] | None
    out: Path
    figures: Path
    progress: bool = False
    workers: int | None = None
    executor: str | None = None
    device: str | None = None
    overwrite: bool = False
    trackers: Sequence[str] | None = None
    failures: dict[str, str] = field(default_factory=dict)
    unlearnt: dict[str, str] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)

    @property
    def all_again(self) -> bool:
        """Whether stored figures do not matter."""
        return self.overwrite and self.methods is None

    @property
    def loggers(self) -> list[Logger]:
        """What shows progress."""
        return [Console()] if self.progress else []

    def tell(self, line: str) -> None:
        """A line of progress."""
        for logger in self.loggers:
            logger.message(line)

    def write_page(self, wanted: Mapping[str, Wanted]) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
        """See `polyfed.report.benchmark_page.write_page`; of the figures as they are, with those of other processes."""
        with lock_folder(self.figures, waits=True):
            return write_page(self.figures, self.protocol.title, wanted, self.protocol.primary)

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
        path = self.folder / own.recipe
        tuned = [f"{key_of(method, name)}={to_toml(value)}" for name, value in chosen.items()]
        changes = [*self.changes_of(setting), *tuned]
        run: dict[str, Any] = {"workers": self.workers, "executor": self.executor, "device": self.device}
        run["loggers"] = self.trackers
        recipe = Recipe.load(path, changes, preset=own.preset, **run)
        shown = [change for change in tuned if change.startswith("training.")]  # the others stand in [method]
        return recipe.with_run(overrides=[*own.overrides, *shown])

    def changes_of(self, setting: str) -> list[str]:
        """What is changed of a setting's recipe, as ``--set`` takes it; its own ``run.keep`` comes last, and holds."""
        return [_NO_WEIGHTS, *self.protocol.overrides_of(setting)]


class BenchmarkSetting:
    """One setting of a suite.

    Args:
        request: what is asked for. name: the setting's.

    Raises:
        ConfigError: the recipe is wrong, has not all methods, or is not that of the figures that are there.
    """

    def __init__(self, request: BenchmarkRequest, name: str) -> None:
        self.request = request
        self.name = name
        self.recipe = request.recipe_of(name)
        self.methods = list(dict.fromkeys((_LOCAL, *request.methods_of(name))))
        for method in self.methods:
            self.recipe.choose(method)
        self._stored = self._read_stored()
        self._made: set[str] = set()  # rows of which all seeds were run by this object
        for method in self.methods:
            if None in self._known_choices(method).values():
                self._check_trials(method)

    @property
    def wanted(self) -> Wanted:
        """What the page expects of the setting: the suite's methods and seeds."""
        protocol = self.request.protocol
        rows = [self.recipe.choose(method) for method in (_LOCAL, *protocol.methods_of(self.name))]
        names = list(dict.fromkeys(row.name for row in rows))
        readings = [row.name for row in rows if row.chosen_method.card.reading]
        return Wanted(names, protocol.seeds_of(self.name), readings)

    def can_have(self, row: str) -> bool:
        """Whether the suite may give a row of this name."""
        controls = self.request.protocol.controls
        methods = self.request.protocol.methods_of(self.name)
        alone = [self._row_name(method, alone=True) for method in methods if self.can_have_alone(method)]
        further = ["pooled", "pooled-shares", "pooled-tuned"] if "pooled" in controls else []
        return row in (*self.wanted.methods, *alone, *further)

    def can_have_alone(self, method: str) -> bool:
        """Whether the suite has a row of a method alone."""
        is_compared = method in self.request.protocol.methods_of(self.name)
        return is_compared and self._runs_alone(method, self.recipe.choose(method))

    def run(self, position: str) -> bool:
        """Do what is left, if anything is; figures are written after every method.

        Args:
            position: of the setting in the suite, for progress: "1 of 2".

        Raises:
            ConfigError: a method does not fit; nothing of the setting has been run.
            RunInterrupted: Ctrl-C; call it again to go on.
            AtWorkElsewhere: other processes are at runs that it needs; all else is done.
        """
        every = {method: self._runs_left(method) for method in self.methods}
        left = {method: runs for method, runs in every.items() if runs is not None}
        if not left:
            self.request.tell(f"setting {self.name} ({position}): all figures are there")
            return False
        runs = sum(left.values())
        how_many = f"{human_count(runs, 'run')} left" if runs else "all runs are done"
        self.request.tell(f"setting {self.name} ({position}): {how_many}")
        data = DataCache()
        for method, own in left.items():
            if own:
                build_federation(self.recipe.choose(method), data=data, pretrained=False)  # whether it fits at all
        elsewhere = []
        for method, own in left.items():
            if own:
                self.request.tell(f"{self.name}, {method}: {human_count(own, 'run')}")
            try:
                self._run_method(method, data)
            except AtWorkElsewhere as others:
                elsewhere.append(others)
        if elsewhere:
            raise elsewhere[0]
        return True

    def _check_trials(self, method: str) -> None:
        """Whether a method has the hyperparameters that are tried, and takes the values: a trial may begin hours later.

        Raises:
            ConfigError: it does not.
        """
        for name, values in self._grid(method).items():
            for value in values:
                self.request.recipe_of(self.name, {name: value}, method).choose(method)

    # what is there --------------------------------------------------------------------------------------------------

    def _read_stored(self) -> SettingResult | None:
        """The figures that are there; None also where they are of another recipe, and all is run again."""
        stored = next(iter(read_results(self.request.figures, [self.name])), None)
        difference = None if stored is None else first_difference(stored.recipe, self.recipe)
        if difference is None:
            return stored
        if self.request.all_again:
            return None
        key, there, here = difference
        raise ConfigError(
            f"{self.name}: expected stored figures with {key} = {here}, as in the recipe, got those with {there}; "
            "choose another --results, or --overwrite without --methods, which runs all again"
        )

    def _known_choices(self, method: str) -> dict[bool, dict[str, Any] | None]:
        """What was chosen for a method, under False, and for it alone, under True, where that is tuned for itself."""
        found = {False: self._known_choice(method, alone=False)}
        is_separate = method in (self.request.protocol.tune_alone or ())
        if is_separate and self._runs_alone(method, self.recipe.choose(method)):
            found[True] = self._known_choice(method, alone=True)
        return found

    def _known_choice(self, method: str, alone: bool) -> dict[str, Any] | None:
        """The hyperparameters that were chosen for a row; None where it is still to be tuned."""
        grid = self._grid(method)
        if not grid:
            return {}
        name = self._row_name(method, alone)
        tuning = None if self._stored is None or self._is_forced(name) else self._stored.tuning.get(name)
        if tuning is None or (tuning.tried, tuning.seeds) != (as_json(grid), self.request.protocol.tuning_seeds):
            return None
        return tuning.chosen

    def _grid(self, method: str) -> dict[str, list[Any]]:
        """Hyperparameter -> the values that are tried; empty for a method that is not tuned."""
        return self.request.protocol.tuning_of(self.name).get(method, {})

    def _stored_row(self, row: Recipe) -> RowResult | None:
        """The row of the figures that was made with these hyperparameters."""
        found = None if self._stored is None or self._is_forced(row.name) else self._stored.row(row.name)
        return found if found is not None and has_hyperparameters(found, row, self._tuned_training(row)) else None

    def _tuned_training(self, row: Recipe) -> dict[str, Any]:
        """The settings of [training] that were chosen for a row, such as "training.lr"."""
        chosen = row.run.overrides[len(self.recipe.run.overrides) :]
        return {".".join(keys): value for keys, value in map(parse_override, chosen)}

    def _seeds_left(self, row: Recipe) -> list[int]:
        stored = self._stored_row(row)
        return [n for n in self.request.protocol.seeds_of(self.name) if stored is None or n not in stored.by_seed]

    def _is_forced(self, row: str) -> bool:
        """Whether a row is run again though it is done: one of a method that was asked for."""
        request = self.request
        if not request.overwrite or row in self._made:
            return False
        return request.methods is None or row.removesuffix("-alone") in map(self._row_name, request.methods)

    # what is left ---------------------------------------------------------------------------------------------------

    def _runs_left(self, method: str) -> int | None:
        """How many runs of a method are not done; None: the figures lack nothing."""
        protocol = self.request.protocol
        forced = self._is_forced(self._row_name(method))
        choices = self._known_choices(method)
        runs = sum(self._trials_left(method, alone, forced) for alone, chosen in choices.items() if chosen is None)
        own, *controls = self._rows_of(method, {alone: chosen or {} for alone, chosen in choices.items()})
        is_lacking = None in choices.values()
        for row in (own, *controls):
            is_tuned = choices[row.method.alone and len(choices) > 1] is not None
            seeds = self._seeds_left(row) if is_tuned else protocol.seeds_of(self.name)
            is_lacking = is_lacking or bool(seeds)
            runs += sum(forced or not _count_finished(self._folder_of(row, seed)) for seed in seeds)
        return runs if is_lacking else None

    def _trials_left(self, method: str, alone: bool, forced: bool) -> int:
        """How many runs the tuning of a row still needs, without those by which a grid is widened."""
        protocol = self.request.protocol
        trials = protocol.trials(self.name, method)
        others = len(protocol.tuning_seeds) - 1
        needed = trials + others * min(trials, protocol.race or trials)
        done = 0 if forced else _count_finished(self._tuning_folder(method, alone))
        return max(0, needed - done)

    # running --------------------------------------------------------------------------------------------------------

    def _run_method(self, method: str, data: DataCache) -> None:
        """Tune a method where that is to be done, run its rows, and write them; nothing if others have done so."""
        self._stored = self._read_stored()
        if self._runs_left(method) is None:
            return
        forced = self._is_forced(self._row_name(method))
        choices: dict[bool, Mapping[str, Any]] = {}
        tuning = {}
        for alone, known in self._known_choices(method).items():
            if known is not None:
                choices[alone] = known
                continue
            tuned = self._tune(method, alone, forced)
            if tuned is None:
                return
            choices[alone] = tuned.chosen
            trials = [run for run in load_runs(self._tuning_folder(method, alone)) if run.finished]
            tuning[self._row_name(method, alone)] = (tuned, trials)
        own, *controls = self._rows_of(method, choices)
        found = self._run_rows((own, *controls), forced, data)
        with lock_folder(self.request.figures, waits=True):
            is_written = self._write(found, tuning)
        if not is_written:
            self._run_method(method, data)

    def _run_rows(self, rows: Sequence[Recipe], forced: bool, data: DataCache) -> list[RowRuns]:
        """Run what the figures lack of some rows."""
        planned = self._plan(rows)
        self._check_data(data)
        pending = check_planned_runs(planned, self.request.out / self.name, forced, data)
        failed = run_planned(planned, pending, forced, data, self.request.loggers, self.request.failed)
        self.request.failures.update({f"{self.name}: {title}": why for title, why in failed.items()})
        done = [one for one in planned if one.title not in failed]
        if not done:
            return []
        runs = {run.path.resolve(): run for run in load_runs([one.folder for one in done])}
        unlearnt = nothing_learnt_in(done, list(runs.values()))
        self.request.unlearnt.update({f"{self.name}: {title}": line for title, line in unlearnt.items()})
        by_row = {row.name: [runs[one.folder.resolve()] for one in done if one.name == row.name] for row in rows}
        return [
            RowRuns(row.name, by_row[row.name], self._kept_as(row), row.chosen_method.is_control)
            for row in rows
            if by_row[row.name]
        ]

    def _check_data(self, data: DataCache) -> None:
        """Whether the figures that are there are of the data that there are now; of older ones that is not known.

        Raises:
            ConfigError: they are not.
        """
        if self._stored is None or not self._stored.data or self.request.all_again:
            return
        seed, checksum = next(iter(self._stored.data.items()))
        if data_checksum(self.recipe.choose(_LOCAL).with_run(seed=int(seed), out=None), data) != checksum:
            raise ConfigError(
                f"{self.name}: expected stored figures of the data that there are now, got those of others of this "
                "name; choose another --results, or --overwrite without --methods, which runs all again"
            )

    def _kept_as(self, row: Recipe) -> dict[str, Any]:
        """A row's hyperparameters; as the figures have them where they have the row, so that its seeds are joined."""
        stored = self._stored_row(row)
        return hyperparameters_of(row) | self._tuned_training(row) if stored is None else stored.hyperparameters

    def _tune(self, method: str, alone: bool, forced: bool) -> Tuning | None:
        """What validation chooses of the values tried for a row; None where no trial was finished."""
        protocol = self.request.protocol
        grid = self._grid(method)
        chosen = self._search(method, alone, grid, forced)
        further: dict[str, Any] = {}
        if chosen is not None and protocol.widen:
            beyond = {name: one_beyond(values, chosen[name]) for name, values in grid.items()}
            further = {name: value for name, value in beyond.items() if self._is_allowed(method, name, value)}
        if further:
            wider = {name: [*values, further[name]] if name in further else values for name, values in grid.items()}
            chosen = self._search(method, alone, wider, False)
        if chosen is None:
            return None
        return Tuning(tried=as_json(grid), widened=further, seeds=protocol.tuning_seeds, chosen=as_json(chosen))

    def _is_allowed(self, method: str, name: str, value: Any) -> bool:
        """Whether a value beyond those tried is one that the method takes."""
        if value is None:
            return False
        try:
            self.request.recipe_of(self.name, {name: value}, method).choose(method)
        except ConfigError:
            return False
        return True

    def _search(self, method: str, alone: bool, values: Mapping[str, list[Any]], forced: bool) -> dict[str, Any] | None:
        """The combination that validation chooses; None where no trial was finished."""
        request = self.request
        protocol = request.protocol
        changes = {".".join(keys): [value] for keys, value in map(parse_override, request.changes_of(self.name))}
        if alone:
            changes[key_of(method, "alone")] = [True]
        grid = {key_of(method, name): tried for name, tried in values.items()}
        tried = sweep(
            request.folder / protocol.settings[self.name].recipe,
            changes | grid,
            method=method,
            seeds=protocol.tuning_seeds,
            out=self._tuning_folder(method, alone),
            overwrite=forced,
            progress=request.progress,
            device=request.device,
            workers=request.workers,
            executor=request.executor,
            loggers=request.trackers,
            preset=protocol.settings[self.name].preset,
            local=False,
            race=protocol.race,
            failed=request.failed,
        )
        self.request.failures.update({f"{self.name}, tuning: {title}": why for title, why in tried.failures.items()})
        if tried.chosen is None:
            return None
        chosen = tried.chosen.settings  # of what has several values
        return {name: chosen.get(key_of(method, name), given[0]) for name, given in values.items()}

    def _rows_of(self, method: str, choices: Mapping[bool, Mapping[str, Any]]) -> Iterator[Recipe]:
        """A method, and its controls.

        choices: its hyperparameters; under True those of the method alone, where they are others.
        """
        protocol = self.request.protocol
        tuned = self.request.recipe_of(self.name, choices[False], method)
        own = tuned.choose(method)
        yield own
        if method == _LOCAL:
            if "pooled" in protocol.controls:
                yield pooled(tuned)
            return
        if self._runs_alone(method, own):
            separate = self.request.recipe_of(self.name, choices.get(True, choices[False]), method)
            yield separate.choose_alone(method)

    def _runs_alone(self, method: str, row: Recipe) -> bool:
        """Whether a method also runs with each client alone."""
        protocol = self.request.protocol
        is_asked = "alone" in protocol.controls and (protocol.alone_of is None or method in protocol.alone_of)
        return is_asked and method != _LOCAL and runs_alone(row)

    def _plan(self, rows: Sequence[Recipe]) -> list[PlannedRun]:
        """The runs that the figures lack; seed by seed, so that the runs of a seed share the data in memory."""
        left = {row.name: self._seeds_left(row) for row in rows}
        return [
            PlannedRun(row.name, row.with_run(seed=seed, out=None), self._folder_of(row, seed))
            for seed in self.request.protocol.seeds_of(self.name)
            for row in rows
            if seed in left[row.name]
        ]

    def _folder_of(self, row: Recipe, seed: int) -> Path:
        return self.request.out / self.name / row.name / f"seed-{seed}"

    def _tuning_folder(self, method: str, alone: bool) -> Path:
        return self.request.out / "tuning" / self.name / (f"{method}-alone" if alone else method)

    def _row_name(self, method: str, alone: bool = False) -> str:
        return (self.recipe.choose_alone(method) if alone else self.recipe.choose(method)).name

    def _write(self, rows: Sequence[RowRuns], tuning: Mapping[str, tuple[Tuning, Sequence[RunRecord]]]) -> bool:
        """Write what was found into the figures, unless others have written these rows since the runs began.

        tuning: row -> what was chosen for it, and its trials.
        """
        trials = {name: runs for name, (_, runs) in tuning.items()}
        tuned = {name: one for name, (one, _) in tuning.items()}
        spent = processor_time(rows, trials)
        known = self._stored
        stored = self._read_stored()  # as it is now: others may have added rows
        if any(_row_of(stored, row.name) != _row_of(known, row.name) for row in rows):
            return False
        if rows:
            found = setting_result(self.name, rows, described(self.recipe), tuned)
        elif stored is not None:
            found = stored.model_copy(update={"rows": [], "tuning": tuned})
        else:
            return True
        if stored is not None:
            every = dict.fromkeys((*self.request.protocol.methods_of(self.name), *self.methods))
            found = join_results(stored, found, [self._row_name(method) for method in every])
            before = read_processor_time(self.request.figures).get(self.name, ProcessorTime(tuning={}, runs={}))
            spent = join_processor_time(before, spent, found.rows)
        write_result(found, spent, self.request.figures)
        self._stored = found
        self._made.update(row.name for row in rows)
        return True


def _row_of(stored: SettingResult | None, name: str) -> RowResult | None:
    return None if stored is None else stored.row(name)


def one_beyond(values: Sequence[Any], chosen: Any) -> Any:
    """The next number beyond the first or last of those tried, where that was chosen; else None.

    >>> one_beyond([0.1, 1.0, 10.0], 10.0), one_beyond([5, 10, 20], 5), one_beyond([0.1, 1.0, 10.0], 1.0)
    (100.0, 2, None)
    """
    if not all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values):
        return None
    ordered = sorted(values)
    if len(ordered) < 2 or chosen not in (ordered[0], ordered[-1]):
        return None
    next_to_it = ordered[1] if chosen == ordered[0] else ordered[-2]
    beyond = chosen * chosen / next_to_it
    if all(isinstance(value, int) for value in values):
        whole = math.floor(beyond)
        return None if whole == 0 or whole in ordered else whole
    return float(f"{beyond:.3g}")


def _count_finished(folder: Path) -> int:
    """The finished runs at or below a folder."""
    return sum(1 for _ in folder.rglob("result.json"))


# stored figures -----------------------------------------------------------------------------------------------------


def first_difference(stored: Mapping[str, Any], recipe: Recipe) -> tuple[str, Any, Any] | None:
    """The first key in which a stored recipe is another than this one: its name, the stored value and this one's."""
    here = flat_table(described(recipe))
    there = flat_table(stored)
    for key, value in there.items():  # first, so that nothing is resolved, or imported, that the recipe does not name
        if here.get(key) != value:
            return key, value, here.get(key)
    if here.keys() - there.keys():
        there = flat_table(_with_new_defaults(stored, recipe))
    for key, value in here.items():
        if there.get(key) != value:
            return key, there.get(key), value
    return None


def described(recipe: Recipe) -> dict[str, Any]:
    """A recipe as figures keep it: resolved, without method, run and the place of data."""
    found = recipe.choose(_LOCAL).to_dict()
    found["data"].pop("root", None)
    kept: dict[str, Any] = as_json({name: table for name, table in found.items() if name not in ("method", "run")})
    return kept


def _with_new_defaults(stored: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A stored recipe with the keys that have come since, which have their defaults."""
    try:
        return described(Recipe.from_dict({**stored, "method": {"name": _LOCAL}}, beside=recipe.beside))
    except ConfigError:
        return dict(stored)


def hyperparameters_of(row: Recipe) -> dict[str, Any]:
    """All hyperparameters of a row's method, as figures keep them."""
    found: dict[str, Any] = as_json(row.to_dict()["method"])
    del found["name"]
    return found


def has_hyperparameters(stored: RowResult, row: Recipe, training: Mapping[str, Any]) -> bool:
    """Whether a stored row was made with these; new ones count as their defaults, ones that have left do not count.

    Args:
        training: settings of [training] that were chosen for the row, by their whole keys.
    """
    now = flat_table(hyperparameters_of(row)) | as_json(training)
    then = flat_table(stored.hyperparameters)
    gone = then.keys() - now.keys()
    if stored.method != row.method.name or any(key.startswith("training.") for key in gone):
        return False
    if now.keys() - then.keys():
        then = flat_table(_default_hyperparameters(row)) | then
    return all(then.get(key) == value for key, value in now.items())


def _default_hyperparameters(row: Recipe) -> dict[str, Any]:
    """Those that a method has where a recipe names none; empty where it needs some."""
    try:
        plain = {**described(row), "method": {"name": row.method.name}}
        return hyperparameters_of(Recipe.from_dict(plain, beside=row.beside))
    except ConfigError:
        return {}


def as_json(value: Any) -> Any:
    """A value as a JSON file gives it back."""
    return json.loads(json.dumps(value))
