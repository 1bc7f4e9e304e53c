"""A suite: every method tuned with as many trials, then compared over seeds, in several settings. Python's
`polyfed benchmark`.

In each setting a method is a sweep of its hyperparameters, in ``<out>/tuning/SETTING/METHOD``, and then runs with what
was chosen, in ``<out>/SETTING``, as those of a comparison. What is done there is not run again, what was interrupted
goes on. A finished run has its records only, no weights, unless the suite says ``run.keep``. Figures are one small JSON
file per setting (`polyfed.report.benchmark_results`), to which each method adds its rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from polyfed.experiments.controls import own, pooled, runs_alone
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.own_rows import OWN
from polyfed.experiments.planned_runs import Report, check_planned_runs, data_checksum, plan, run_planned
from polyfed.experiments.sweep import sweep
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console
from polyfed.records.read import flat_table, make_folder
from polyfed.registry import suggest
from polyfed.report.benchmark_page import worth_of, write_page
from polyfed.report.benchmark_results import SettingResult, Tuning, add_rows, read_results, rows_of
from polyfed.report.run_records import load_runs
from polyfed.report.statistics import sum_of

__all__ = ["Benchmark", "benchmark"]

_LOCAL = "local"
_POOLED = "pooled"  # the control, which is tuned as methods are
_POOLED_ROWS = ("pooled", "pooled-shares", "pooled-tuned")
_NO_WEIGHTS = "run.keep=nothing"  # hundreds of runs' networks fill a disk


@dataclass(frozen=True)
class Benchmark(Report):
    """What `benchmark` leaves behind. table: what the others' data are worth. settings: the figures of each setting."""

    settings: tuple[SettingResult, ...] = ()


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
    names = list(dict.fromkeys(settings or protocol.settings))
    for name in names:
        if name not in protocol.settings:
            raise ConfigError(f"expected a setting of the suite, got '{name}'{suggest(name, protocol.settings)}")
    place = Path(out if out is not None else f"runs/{Path(suite).resolve().name}")
    figures = place / "results" if results is None else Path(results)
    chosen = None if methods is None else list(dict.fromkeys(list_of("methods", methods)))
    if chosen == []:
        raise ConfigError("methods: expected at least one, got none")
    run = {"workers": workers, "executor": executor, "device": device, "loggers": loggers}
    request = _Request(Path(suite), protocol, place, figures, overwrite, progress, run)
    known = {method for name in names for method in protocol.methods_of(name)}

    def methods_of(setting: str) -> list[str]:
        """One that some of the settings asked for have in these, any other in all."""
        here = protocol.methods_of(setting)
        return here if chosen is None else [name for name in chosen if name in here or name not in known]

    every = {name: _Setting(request, name, methods_of(name)) for name in protocol.settings}
    possible = [setting.possible_rows() for setting in every.values()]
    for upper, lower in protocol.primary:
        if not any({upper, lower} <= rows for rows in possible):
            raise ConfigError(f"primary: expected two rows that one setting has, got {upper} and {lower}")
    make_folder(figures)
    for name in filter(methods_of, names):
        every[name].run()
        request.write_page()
    found, files = request.write_page()
    return Benchmark(place, worth_of(found) if found else None, files, request.failures, request.unlearnt, found)


def key_of(method: str, name: str) -> str:
    """What is tuned, as --set names it: a setting of [training], or a hyperparameter of one method."""
    return name if name.startswith("training.") else f"methods.{method}.{name}"


def _trained_by(name: str) -> str:
    """The method that a name of [tuning] stands for: networks on pooled rows are trained as Local's."""
    return _LOCAL if name == _POOLED else name


@dataclass(frozen=True)
class _Request:
    """A suite as it is asked for, and what has become of it so far."""

    folder: Path  # the suite's
    protocol: Protocol
    out: Path  # of runs
    figures: Path  # of the settings' files
    overwrite: bool
    progress: bool
    run: Mapping[str, Any]  # workers, executor, device, loggers
    failures: dict[str, str] = field(default_factory=dict)  # as in `Benchmark`
    unlearnt: dict[str, str] = field(default_factory=dict)

    def write_page(self) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
        """See `polyfed.report.benchmark_page.write_page`; of the figures as they are, with those of other processes."""
        with lock_folder(self.figures, waits=True):
            protocol = self.protocol
            settings = list(protocol.settings)
            return write_page(self.figures, protocol.title, settings, protocol.primary, protocol.seen_before)


class _Setting:
    """One setting of a suite. methods: those to run; Local runs beside them.

    Raises:
        ConfigError: the recipe has not all methods, or they do not take the values that are tried; or the figures that
            are there are of another recipe.
    """

    def __init__(self, request: _Request, name: str, methods: Sequence[str]) -> None:
        self.request = request
        self.protocol = request.protocol
        self.name = name
        self.recipe = self._recipe_of()
        self.methods = list(dict.fromkeys((_LOCAL, *methods)))
        self.watchers: list[Logger] = [Console()] if request.progress else []
        for method in self.methods:
            self.recipe.choose(method)
        for method in (*self.methods, _POOLED):
            for key, values in self._grid(method).items():
                for value in values:
                    self._recipe_of({key: value}, method).choose(_trained_by(method))
        self._read_stored()

    def possible_rows(self) -> set[str]:
        """The names of all rows that the suite may give."""
        methods = self.protocol.methods_of(self.name)
        alone = [self._row_name(method, alone=True) for method in methods if self._runs_alone(method)]
        pooled_rows = _POOLED_ROWS if "pooled" in self.protocol.controls else ()
        own_rows = OWN if "own" in self.protocol.controls else ()
        return {*map(self._row_name, (_LOCAL, *methods)), *alone, *own_rows, *pooled_rows}

    def _runs_alone(self, method: str) -> bool:
        """Whether the suite has a row of a method alone.

        Raises:
            ConfigError: it asks for one, and there is none.
        """
        asked = self.protocol.alone_of
        if "alone" not in self.protocol.controls or method == _LOCAL or method not in (asked or [method]):
            return False
        is_possible = runs_alone(self.recipe.choose(method))
        if asked and not is_possible:
            raise ConfigError(f"alone_of: expected methods that send something and are no controls, got {method}")
        return is_possible

    def run(self) -> None:
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
            for watcher in self.watchers:
                watcher.message(f"setting {self.name}, {method}")
            self._run_method(method, data)

    def _recipe_of(self, chosen: Mapping[str, Any] = MappingProxyType({}), method: str = "") -> Recipe:
        """The setting's recipe with its preset and changes. chosen: hyperparameters of a method.

        Raises:
            ConfigError: the recipe is wrong.
        """
        own = self.protocol.settings[self.name]
        tuned = [f"{key_of(method, name)}={to_toml(value)}" for name, value in chosen.items()]
        changes = [*self._changes(), *tuned]
        recipe = Recipe.load(self.request.folder / own.recipe, changes, preset=own.preset, **self.request.run)
        return recipe.with_run(overrides=own.overrides)

    def _changes(self) -> list[str]:
        """What is changed of the recipe, as ``--set`` takes it; its own ``run.keep`` comes last, and holds."""
        return [_NO_WEIGHTS, *self.protocol.overrides_of(self.name)]

    def _row_name(self, method: str, alone: bool = False) -> str:
        if method == _POOLED:
            return _POOLED
        return (self.recipe.choose_alone(method) if alone else self.recipe.choose(method)).name

    # stored figures -------------------------------------------------------------------------------------------------

    def _read_stored(self) -> SettingResult | None:
        """The figures that are there, once it is known that they are of the same recipe."""
        stored = next(iter(read_results(self.request.figures, [self.name])), None)
        difference = None if stored is None else first_difference(stored.recipe, self.recipe)
        if difference is None:
            return stored
        key, there, here = difference
        raise self._refusal(f"with {key} = {here}, as in the recipe, got those with {there}")

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
            raise self._refusal("of the data that there are now, got those of others of this name")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: expected stored figures {why}; choose another --results, or remove {self.name}.json there"
        )

    # a method -------------------------------------------------------------------------------------------------------

    def _run_method(self, method: str, data: DataCache) -> None:
        """Tune a method, run it with its controls, and write their rows; none where no trial was finished."""
        rows: list[Recipe] = []
        tuning: dict[str, Tuning] = {}
        chosen: Mapping[str, Any] = {}
        for alone in [False, True] if self._runs_alone(method) else [False]:
            if self._grid(method) and (not alone or method in (self.protocol.tune_alone or ())):
                tuned = self._tune(method, alone)
                if tuned is None:
                    return
                tuning[self._row_name(method, alone)] = tuned
                chosen = tuned.chosen
            recipe = self._recipe_of(chosen, method)
            rows.append(recipe.choose_alone(method) if alone else recipe.choose(method))
            if method == _LOCAL and "own" in self.protocol.controls:
                rows += own(recipe, data.source(recipe))
        if method == _LOCAL and "pooled" in self.protocol.controls:
            rows += self._pooled_row(chosen, tuning)
        planned = plan(rows, self.protocol.seeds_of(self.name), self.request.out / self.name)
        pending = check_planned_runs(planned, self.request.out / self.name, self.request.overwrite, data)
        done = run_planned(planned, pending, self.request.overwrite, data, self.watchers)
        self.request.failures.update({f"{self.name}: {title}": why for title, why in done.failures.items()})
        self.request.unlearnt.update({f"{self.name}: {title}": line for title, line in done.unlearnt.items()})
        if not done.runs:
            return
        kept = described(self.recipe)
        found = [
            each
            for row in rows
            for each in rows_of(row.name, done.of_row(row.name), kept, row.chosen_method.is_control, tuning)
        ]
        order = dict.fromkeys((_LOCAL, *self.protocol.methods_of(self.name), *self.methods))
        with lock_folder(self.request.figures, waits=True):
            add_rows(self.request.figures, self.name, found, done.runs, kept, list(map(self._row_name, order)))

    def _pooled_row(self, chosen_for_local: Mapping[str, Any], tuning: dict[str, Tuning]) -> list[Recipe]:
        """The run on the rows of all; none where no trial was finished. tuning: takes what its rows were tuned over."""
        chosen = chosen_for_local
        if self._grid(_POOLED):
            tuned = self._tune(_POOLED, alone=False)
            if tuned is None:
                return []
            tuning.update(dict.fromkeys(_POOLED_ROWS, tuned))
            chosen = tuned.chosen
        return [pooled(self._recipe_of(chosen, _POOLED))]

    # tuning ---------------------------------------------------------------------------------------------------------

    def _grid(self, method: str) -> dict[str, list[Any]]:
        """Hyperparameter -> the values that are tried; empty for a method that is not tuned."""
        return self.protocol.tuning_of(self.name).get(method, {})

    def _tune(self, method: str, alone: bool) -> Tuning | None:
        """What validation chooses of the values tried for a row; None where no trial was finished."""
        grid = self._grid(method)
        setting = self.protocol.settings[self.name]
        changes = {".".join(keys): [value] for keys, value in map(parse_override, self._changes())}
        if alone:
            changes[key_of(method, "alone")] = [True]
        if method == _POOLED:
            changes["run.control"] = [_POOLED]
        folder = self.request.out / "tuning" / self.name / self._row_name(method, alone)
        tried = sweep(
            self.request.folder / setting.recipe,
            changes | {key_of(method, name): values for name, values in grid.items()},
            method=_trained_by(method),
            seeds=self.protocol.tuning_seeds,
            out=folder,
            overwrite=self.request.overwrite,
            progress=self.request.progress,
            preset=setting.preset,
            **self.request.run,
        )
        self.request.failures.update({f"{self.name}, tuning: {title}": why for title, why in tried.failures.items()})
        if tried.chosen is None:
            return None
        chosen = {name: tried.chosen.get(key_of(method, name), given[0]) for name, given in grid.items()}
        trials = [run for run in load_runs(folder) if run.finished]
        seconds = sum_of([run.figure("processor_seconds") for run in trials])
        return Tuning(tried=grid, seeds=self.protocol.tuning_seeds, chosen=chosen, processor_seconds=seconds)


# stored figures -----------------------------------------------------------------------------------------------------


def first_difference(stored: Mapping[str, Any], recipe: Recipe) -> tuple[str, Any, Any] | None:
    """The first key in which a stored recipe is another than this one: its name, the stored value and this one's."""
    here = flat_table(described(recipe))
    for key, value in flat_table(stored).items():  # first: nothing is imported that the recipe does not name
        if here.get(key) != value:
            return key, value, here.get(key)
    there = flat_table(_with_new_defaults(stored, recipe))
    return next(((key, there.get(key), value) for key, value in here.items() if there.get(key) != value), None)


def described(recipe: Recipe) -> dict[str, Any]:
    """A recipe as figures keep it: resolved, without method, run and the place of data."""
    found = recipe.choose(_LOCAL).to_dict()
    found["data"].pop("root", None)
    kept = {name: table for name, table in found.items() if name not in ("method", "run")}
    as_stored: dict[str, Any] = json.loads(json.dumps(kept))
    return as_stored


def _with_new_defaults(stored: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A stored recipe with the keys that have come since, which have their defaults."""
    try:
        return described(Recipe.from_dict({**stored, "method": {"name": _LOCAL}}, beside=recipe.beside))
    except ConfigError:
        return dict(stored)
