"""A suite: every method tuned with as many trials, then compared over seeds, in several settings. Python's
`polyfed benchmark`.

In each setting a method is a sweep of its hyperparameters, in ``<out>/tuning/SETTING/METHOD``, and then runs with what
was chosen, in ``<out>/SETTING``, as those of a comparison. What is done there is not run again, what was interrupted
goes on. A finished run has its records only, no weights, unless the suite says ``run.keep``. Figures are one small JSON
file per setting (`polyfed.report.benchmark_results`), to which each method adds its rows.
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
    PlannedRun,
    check_planned_runs,
    data_checksum,
    nothing_learnt_in,
    run_planned,
)
from polyfed.experiments.sweep import sweep
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console
from polyfed.records.read import flat_table
from polyfed.registry import suggest
from polyfed.report.atomic_files import make_folder
from polyfed.report.benchmark_page import to_text, write_page
from polyfed.report.benchmark_results import (
    SettingResult,
    Tuning,
    add_result,
    read_processor_time,
    read_results,
    rows_of,
)
from polyfed.report.benchmark_worth import Worth, worth_of
from polyfed.report.run_records import RunRecord, load_runs

__all__ = ["Benchmark", "benchmark"]

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
        results: the folder of figures and page; default ``<out>/results``. Rows that are there, wherever they were
            made, stay beside those of these methods.
        overwrite: run again also what is done.
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
    run = {"workers": workers, "executor": executor, "device": device, "loggers": loggers}
    request = _Request(Path(suite), protocol, names, chosen_methods, place, figures, progress, run)
    read_processor_time(figures)  # an error of theirs comes before the first run
    asked = [_Setting(request, name) for name in names if request.methods_of(name)]
    ready = {setting.name: setting for setting in asked}
    every = [ready.get(name) or _Setting(request, name) for name in protocol.settings]
    _check_named(protocol, every)
    make_folder(figures)
    for setting in asked:
        setting.run(overwrite)
        request.write_page()
    found, files = request.write_page()
    return Benchmark(place, tuple(map(worth_of, found)) or None, found, files, request.failures, request.unlearnt)


def _check_named(protocol: Protocol, settings: Sequence[_Setting]) -> None:
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
class _Request:
    """A suite as it is asked for, and what has become of it so far."""

    folder: Path  # the suite's
    protocol: Protocol
    settings: tuple[str, ...]
    methods: tuple[str, ...] | None  # None: all that the settings have
    out: Path  # of runs
    figures: Path  # of the settings' files
    progress: bool
    run: Mapping[str, Any]  # workers, executor, device, loggers
    failures: dict[str, str] = field(default_factory=dict)  # as in `Benchmark`
    unlearnt: dict[str, str] = field(default_factory=dict)

    @property
    def watchers(self) -> list[Logger]:
        return [Console()] if self.progress else []

    def write_page(self) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
        """See `polyfed.report.benchmark_page.write_page`; of the figures as they are, with those of other processes."""
        with lock_folder(self.figures, waits=True):
            return write_page(self.figures, self.protocol.title, list(self.protocol.settings), self.protocol.primary)

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
        tuned = [f"{key_of(method, name)}={to_toml(value)}" for name, value in chosen.items()]
        changes = [*self.changes_of(setting), *tuned]
        recipe = Recipe.load(self.folder / own.recipe, changes, preset=own.preset, **self.run)
        shown = [change for change in tuned if change.startswith("training.")]  # the others stand in [method]
        return recipe.with_run(overrides=[*own.overrides, *shown])

    def changes_of(self, setting: str) -> list[str]:
        """What is changed of a setting's recipe, as ``--set`` takes it; its own ``run.keep`` comes last, and holds."""
        return [_NO_WEIGHTS, *self.protocol.overrides_of(setting)]


class _Setting:
    """One setting of a suite.

    Raises:
        ConfigError: the recipe has not all methods, or they do not take the values that are tried; or the figures that
            are there are of another recipe.
    """

    def __init__(self, request: _Request, name: str) -> None:
        self.request = request
        self.name = name
        self.recipe = request.recipe_of(name)
        self.methods = list(dict.fromkeys((_LOCAL, *request.methods_of(name))))
        for method in self.methods:
            self.recipe.choose(method)
            for key, values in self._grid(method).items():
                for value in values:
                    request.recipe_of(name, {key: value}, method).choose(method)
        self._read_stored()

    def can_have(self, row: str) -> bool:
        """Whether the suite may give a row of this name."""
        methods = self.request.protocol.methods_of(self.name)
        alone = [self._row_name(method, alone=True) for method in methods if self.can_have_alone(method)]
        is_pooled = "pooled" in self.request.protocol.controls
        further = ["pooled", "pooled-shares", "pooled-tuned"] if is_pooled else []
        return row in (*map(self._row_name, (_LOCAL, *methods)), *alone, *further)

    def can_have_alone(self, method: str) -> bool:
        """Whether the suite has a row of a method alone."""
        is_compared = method in self.request.protocol.methods_of(self.name)
        return is_compared and self._runs_alone(method, self.recipe.choose(method))

    def run(self, overwrite: bool) -> None:
        """Tune the methods and run their rows; figures are written after every method.

        Raises:
            ConfigError: a method does not fit; nothing of the setting has been run.
            RunInterrupted: Ctrl-C; call it again to go on.
        """
        data = DataCache()
        for method in self.methods:
            build_federation(self.recipe.choose(method), data=data, pretrained=False)  # whether it fits at all
        self._check_data(data)
        for method in self.methods:
            for watcher in self.request.watchers:
                watcher.message(f"setting {self.name}, {method}")
            self._run_method(method, overwrite, data)

    def _read_stored(self) -> SettingResult | None:
        """The figures that are there, once it is known that they are of the same recipe."""
        stored = next(iter(read_results(self.request.figures, [self.name])), None)
        difference = None if stored is None else first_difference(stored.recipe, self.recipe)
        if difference is None:
            return stored
        key, there, here = difference
        raise ConfigError(
            f"{self.name}: expected stored figures with {key} = {here}, as in the recipe, got those with {there}; "
            f"choose another --results, or remove {self.name}.json there"
        )

    def _check_data(self, data: DataCache) -> None:
        """Whether the figures that are there are of the data that there are now; of older ones that is not known.

        Raises:
            ConfigError: they are not.
        """
        stored = self._read_stored()
        if stored is None or not stored.data:
            return
        seed, checksum = next(iter(stored.data.items()))
        if data_checksum(self.recipe.choose(_LOCAL).with_run(seed=int(seed), out=None), data) != checksum:
            raise ConfigError(
                f"{self.name}: expected stored figures of the data that there are now, got those of others of this "
                f"name; choose another --results, or remove {self.name}.json there"
            )

    # a method -------------------------------------------------------------------------------------------------------

    def _run_method(self, method: str, overwrite: bool, data: DataCache) -> None:
        tuning: dict[str, Tuning] = {}
        choices: dict[bool, Mapping[str, Any]] = {}
        trials: dict[str, list[RunRecord]] = {}
        for alone in self._tuned_rows(method):
            tuned = self._tune(method, alone, overwrite)
            if tuned is None:
                return
            row = self._row_name(method, alone)
            tuning[row] = tuned
            choices[alone] = tuned.chosen
            trials[row] = [run for run in load_runs(self._tuning_folder(method, alone)) if run.finished]
        rows = list(self._rows_of(method, choices))
        runs = self._run_rows(rows, overwrite, data)
        found = [
            each
            for row in rows
            if runs[row.name]
            for each in rows_of(row.name, runs[row.name], self._hyperparameters(row), row.chosen_method.is_control)
        ]
        if not found:
            return
        order = dict.fromkeys((_LOCAL, *self.request.protocol.methods_of(self.name), *self.methods))
        with lock_folder(self.request.figures, waits=True):
            add_result(
                self.request.figures,
                self.name,
                found,
                {name: own for name, own in runs.items() if own},
                recipe=described(self.recipe),
                tuning=tuning,
                trials=trials,
                order=[self._row_name(one) for one in order],
            )

    def _run_rows(self, rows: Sequence[Recipe], overwrite: bool, data: DataCache) -> dict[str, list[RunRecord]]:
        """Run what is not done of some rows, seed by seed, so that the runs of a seed share the data in memory.

        Returns:
            Row -> its finished runs.
        """
        request = self.request
        planned = [
            PlannedRun(row.name, row.with_run(seed=seed, out=None), self._place(row, seed))
            for seed in request.protocol.seeds_of(self.name)
            for row in rows
        ]
        pending = check_planned_runs(planned, request.out / self.name, overwrite, data)
        failed = run_planned(planned, pending, overwrite, data, request.watchers)
        request.failures.update({f"{self.name}: {title}": why for title, why in failed.items()})
        done = [one for one in planned if one.title not in failed]
        found: dict[str, list[RunRecord]] = {row.name: [] for row in rows}
        if done:
            runs = load_runs([one.folder for one in done])
            unlearnt = nothing_learnt_in(done, runs)
            request.unlearnt.update({f"{self.name}: {title}": line for title, line in unlearnt.items()})
            for run in runs:
                found[run.path.parent.name].append(run)
        return found

    def _rows_of(self, method: str, choices: Mapping[bool, Mapping[str, Any]]) -> Iterator[Recipe]:
        """A method, and its controls.

        choices: its hyperparameters; under True those of the method alone, where they are others.
        """
        together = choices.get(False, {})
        tuned = self.request.recipe_of(self.name, together, method)
        own = tuned.choose(method)
        yield own
        if method == _LOCAL and "pooled" in self.request.protocol.controls:
            yield pooled(tuned)
        elif self._runs_alone(method, own):
            yield self.request.recipe_of(self.name, choices.get(True, together), method).choose_alone(method)

    def _runs_alone(self, method: str, row: Recipe) -> bool:
        protocol = self.request.protocol
        is_asked = "alone" in protocol.controls and (protocol.alone_of is None or method in protocol.alone_of)
        return is_asked and method != _LOCAL and runs_alone(row)

    def _hyperparameters(self, row: Recipe) -> dict[str, Any]:
        """All hyperparameters of a row's method, and the settings of [training] chosen for it, as figures keep them."""
        found: dict[str, Any] = _as_json(row.to_dict()["method"])
        del found["name"]
        chosen = row.run.overrides[len(self.recipe.run.overrides) :]
        return found | {".".join(keys): _as_json(value) for keys, value in map(parse_override, chosen)}

    # tuning ---------------------------------------------------------------------------------------------------------

    def _grid(self, method: str) -> dict[str, list[Any]]:
        """Hyperparameter -> the values that are tried; empty for a method that is not tuned."""
        return self.request.protocol.tuning_of(self.name).get(method, {})

    def _tuned_rows(self, method: str) -> list[bool]:
        """Which rows of a method are tuned: False for the method, True for the method alone, if for itself."""
        if not self._grid(method):
            return []
        is_separate = method in (self.request.protocol.tune_alone or ())
        return [False, True] if is_separate and self._runs_alone(method, self.recipe.choose(method)) else [False]

    def _tune(self, method: str, alone: bool, overwrite: bool) -> Tuning | None:
        """What validation chooses of the values tried for a row; None where no trial was finished."""
        protocol = self.request.protocol
        grid = self._grid(method)
        chosen = self._search(method, alone, grid, overwrite)
        further: dict[str, Any] = {}
        if chosen is not None and protocol.widen:
            beyond = {name: one_beyond(values, chosen[name]) for name, values in grid.items()}
            further = {name: value for name, value in beyond.items() if self._is_allowed(method, name, value)}
        if further:
            wider = {name: [*values, further[name]] if name in further else values for name, values in grid.items()}
            chosen = self._search(method, alone, wider, False)
        if chosen is None:
            return None
        return Tuning(tried=_as_json(grid), widened=further, seeds=protocol.tuning_seeds, chosen=_as_json(chosen))

    def _is_allowed(self, method: str, name: str, value: Any) -> bool:
        """Whether a value beyond those tried is one that the method takes."""
        if value is None:
            return False
        try:
            self.request.recipe_of(self.name, {name: value}, method).choose(method)
        except ConfigError:
            return False
        return True

    def _search(
        self, method: str, alone: bool, values: Mapping[str, list[Any]], overwrite: bool
    ) -> dict[str, Any] | None:
        """The combination that validation chooses; None where no trial was finished."""
        request = self.request
        setting = request.protocol.settings[self.name]
        changes = {".".join(keys): [value] for keys, value in map(parse_override, request.changes_of(self.name))}
        if alone:
            changes[key_of(method, "alone")] = [True]
        tried = sweep(
            request.folder / setting.recipe,
            changes | {key_of(method, name): tried for name, tried in values.items()},
            method=method,
            seeds=request.protocol.tuning_seeds,
            out=self._tuning_folder(method, alone),
            overwrite=overwrite,
            progress=request.progress,
            preset=setting.preset,
            local=False,
            race=request.protocol.race,
            **request.run,
        )
        request.failures.update({f"{self.name}, tuning: {title}": why for title, why in tried.failures.items()})
        if tried.chosen is None:
            return None
        chosen = tried.chosen  # of what has several values
        return {name: chosen.get(key_of(method, name), given[0]) for name, given in values.items()}

    # places ---------------------------------------------------------------------------------------------------------

    def _place(self, row: Recipe, seed: int) -> Path:
        return self.request.out / self.name / row.name / f"seed-{seed}"

    def _tuning_folder(self, method: str, alone: bool) -> Path:
        return self.request.out / "tuning" / self.name / (f"{method}-alone" if alone else method)

    def _row_name(self, method: str, alone: bool = False) -> str:
        return (self.recipe.choose_alone(method) if alone else self.recipe.choose(method)).name


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
    kept: dict[str, Any] = _as_json({name: table for name, table in found.items() if name not in ("method", "run")})
    return kept


def _with_new_defaults(stored: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A stored recipe with the keys that have come since, which have their defaults."""
    try:
        return described(Recipe.from_dict({**stored, "method": {"name": _LOCAL}}, beside=recipe.beside))
    except ConfigError:
        return dict(stored)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
