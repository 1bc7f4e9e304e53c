"""A suite: every method tuned with as many trials, then compared over seeds, in several settings. Python's
`polyfed benchmark`.

What is done is not run again. Runs lie in ``<out>/tuning/SETTING/METHOD`` and ``<out>/SETTING``; a finished one has its
records only, no weights, unless the suite says ``run.keep``. The page is made of one small JSON file per setting
(`polyfed.report.benchmark_results`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed.config.overrides import parse_override, to_toml
from polyfed.config.protocol import Protocol, Setting
from polyfed.config.recipe import Recipe
from polyfed.engine.arguments import list_of
from polyfed.errors import ConfigError
from polyfed.experiments.compare import Comparison, compare
from polyfed.experiments.controls import runs_alone
from polyfed.experiments.method_compatibility import check_methods
from polyfed.experiments.sweep import sweep
from polyfed.registry import suggest
from polyfed.report.atomic_files import make_folder
from polyfed.report.benchmark_page import ranking, to_text, write_page
from polyfed.report.benchmark_ranks import Ranking
from polyfed.report.benchmark_results import (
    SettingResult,
    join_processor_time,
    join_results,
    processor_time,
    read_processor_time,
    read_result,
    setting_result,
    write_result,
)
from polyfed.report.comparison_formats import Table
from polyfed.report.run_records import load_runs
from polyfed.tracking.base import Tracker
from polyfed.tracking.console import Console
from polyfed.units import human_count, human_seconds

__all__ = ["Benchmark", "benchmark"]

_SET = "methods.{}.{}"  # a hyperparameter of one method, as --set names it
_NO_WEIGHTS = "run.keep=nothing"  # hundreds of runs' networks fill a disk


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` leaves behind.

    Attributes:
        folder: of its runs. table: methods ranked over settings; None where no run was finished.
        settings: the figures of each setting. files: these and the page.
        failures: ``"digits: fedgh, seed 0"`` -> why. unlearnt: likewise, the line on a run that learnt nothing.
    """

    folder: Path
    table: Ranking | None
    settings: tuple[SettingResult, ...] = ()
    files: tuple[Path, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    unlearnt: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "no run was finished" if self.table is None else to_text(self.table)


@dataclass(frozen=True)
class _Suite:
    """A suite as it is asked for. methods: None are those of the suite. figures: the folder of the settings' files."""

    folder: Path
    protocol: Protocol
    methods: tuple[str, ...] | None
    out: Path
    figures: Path
    progress: bool
    workers: int | None
    device: str | None

    @property
    def watchers(self) -> list[Tracker]:
        return [Console()] if self.progress else []

    def tell(self, line: str) -> None:
        """A line of progress."""
        for watcher in self.watchers:
            watcher.message(line)

    def methods_of(self, setting: str) -> list[str]:
        """The methods to run in a setting: one of the suite's where the suite has it, any other one everywhere."""
        here = self.protocol.methods_of(setting)
        if self.methods is None:
            return here
        return [name for name in self.methods if name in here or name not in self.protocol.all_methods]


def benchmark(
    suite: str | Path,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    results: str | Path | None = None,
    progress: bool = False,
    workers: int | None = None,
    device: str | None = None,
) -> Benchmark:
    """Run a suite, or go on with it: tune, compare, write each setting's figures and a page of all.

    Args:
        suite: a folder with a ``protocol.toml`` (`polyfed.config.protocol`) and recipes.
        out: the folder of its runs; default ``runs/<suite>``.
        settings: only these of the suite's; the page has all whose figures are there.
        methods: run only these, of the suite's or further ones, and Local; in the figures that `results` has their rows
            are added or replaced, and all others stay.
        results: the folder of figures and page; default ``<out>/results``.
        progress: show how it gets on, on standard error. workers, device: as for `polyfed.compare`.

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
    chosen_methods = None if methods is None else tuple(dict.fromkeys(list_of("methods", methods)))
    if chosen_methods == ():
        raise ConfigError("methods: expected at least one, got none")
    asked = _Suite(Path(suite), protocol, chosen_methods, place, figures, progress, workers, device)
    for method in asked.methods or ():
        if not any(method in asked.methods_of(name) for name in names):
            raise ConfigError(f"methods: expected some that {' or '.join(names)} has in this suite, got '{method}'")
    names = [name for name in names if asked.methods_of(name)]
    recipes = {name: _recipe(asked, name) for name in names}  # what is wrong is told before the first run
    for name in names:
        _check_stored(asked, name, recipes[name])
    make_folder(figures)
    failures: dict[str, str] = {}
    unlearnt: dict[str, str] = {}
    for number, name in enumerate(names, start=1):
        asked.tell(f"setting {name} ({number} of {len(names)}): {_work_left(asked, name, recipes[name])}")
        chosen = _tune(asked, name, failures)
        done = _compare(asked, name, chosen)
        failures |= {f"{name}: {title}": why for title, why in done.failures.items()}
        unlearnt |= {f"{name}: {title}": why for title, why in done.unlearnt.items()}
    found, files = write_page(figures, protocol.title, list(protocol.settings))
    return Benchmark(place, ranking(found) if found else None, found, files, failures, unlearnt)


def _recipe(asked: _Suite, setting: str, chosen: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Recipe:
    """A setting's recipe with its preset and changes, in which all methods are known. chosen: hyperparameters."""
    own = asked.protocol.settings[setting]
    path = asked.protocol.recipe_of(setting, asked.folder)
    changes = [*_changes(own), *_overrides(chosen)]
    recipe = Recipe.load(path, changes, preset=own.preset, workers=asked.workers, device=asked.device)
    for method in asked.methods_of(setting):
        recipe.choose(method)
    return recipe


def _check_stored(asked: _Suite, setting: str, recipe: Recipe) -> None:
    """Whether rows can be added to the figures that are there."""
    stored = None if asked.methods is None else read_result(asked.figures, setting)
    if stored is not None and stored.rounds != recipe.training.rounds:
        raise ConfigError(
            f"{setting}: expected stored figures of {human_count(recipe.training.rounds, 'round')}, got those of "
            f"{stored.rounds}; choose another --results"
        )


def _changes(own: Setting) -> list[str]:
    """A setting's changes, as ``--set`` takes them; what it says of ``run.keep`` comes last, and holds."""
    return [_NO_WEIGHTS, *own.overrides]


# what is left -------------------------------------------------------------------------------------------------------


def _work_left(asked: _Suite, setting: str, recipe: Recipe) -> str:
    """How many runs are to be done, and about how long they take, as a few batches of each tell."""
    left = {name: number for name, number in _runs(asked, setting, recipe).items() if number}
    if not left:
        return "all runs are done"
    seconds = 0.0
    for one in check_methods(recipe, methods=["local", *(name for name in left if name != "local")], timed=True):
        seconds += left.get(one.method, 0) * (one.seconds or 0.0) * recipe.training.rounds
    return f"{human_count(sum(left.values()), 'run')} left, about {human_seconds(seconds)}"


def _runs(asked: _Suite, setting: str, recipe: Recipe) -> dict[str, int]:
    """Method -> its runs that are not done; a control counts as a run of its method, or of Local."""
    protocol = asked.protocol
    found: dict[str, int] = {}
    for method in dict.fromkeys(("local", *asked.methods_of(setting))):
        chosen = recipe.choose(method)
        rows = [chosen.name]
        if protocol.controls and method == "local":
            rows += ["pooled", "pooled-steps"]
        elif protocol.controls and runs_alone(chosen):
            rows.append(f"{chosen.name}-alone")
        trials = protocol.trials(method) * len(protocol.tuning_seeds)
        found[method] = _left(asked.out / "tuning" / setting / method, trials)
        found[method] += sum(_left(asked.out / setting / row, len(protocol.seeds_of(setting))) for row in rows)
    return found


def _left(folder: Path, runs: int) -> int:
    """How many of the runs at or below a folder are not finished."""
    return max(0, runs - sum(1 for _ in folder.rglob("result.json")))


# tuning, comparing --------------------------------------------------------------------------------------------------


def _tune(asked: _Suite, setting: str, failures: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Method -> the hyperparameters chosen by validation, of the methods that are tuned."""
    protocol = asked.protocol
    own = protocol.settings[setting]
    changes = {".".join(keys): [value] for keys, value in map(parse_override, _changes(own))}
    chosen: dict[str, dict[str, Any]] = {}
    for method in asked.methods_of(setting):
        grid = protocol.tuning.get(method)
        if not grid:
            continue
        tried = sweep(
            protocol.recipe_of(setting, asked.folder),
            changes | {_SET.format(method, name): values for name, values in grid.items()},
            method=method,
            seeds=protocol.tuning_seeds,
            out=asked.out / "tuning" / setting / method,
            progress=asked.progress,
            device=asked.device,
            workers=asked.workers,
            preset=own.preset,
            local=False,
        )
        failures |= {f"{setting}, tuning: {title}": why for title, why in tried.failures.items()}
        if tried.chosen is None:
            raise ConfigError(f"{setting}: expected a trial of {method} with all tuning seeds, got none")
        chosen[method] = {key.rpartition(".")[2]: value for key, value in tried.chosen.settings.items()}
    return chosen


def _compare(asked: _Suite, setting: str, chosen: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """Run the methods as they were chosen, over the seeds that are scored, and write the setting's figures."""
    protocol = asked.protocol
    tuned = _recipe(asked, setting, chosen)
    recipe = tuned.with_run(overrides=_recipe(asked, setting).run.overrides)  # what was chosen is told as such
    done = compare(
        recipe,
        asked.methods_of(setting),
        protocol.seeds_of(setting),
        asked.out / setting,
        progress=asked.progress,
        controls=protocol.controls,
    )
    if done.table is not None:
        _write_figures(asked, setting, recipe, done.table, chosen)
    return done


def _write_figures(
    asked: _Suite, setting: str, recipe: Recipe, table: Table, chosen: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write a setting's figures; those of some methods into the figures that are there."""
    trials = {name: load_runs(asked.out / "tuning" / setting / name) for name in chosen}
    spent = processor_time(table, trials)
    found = setting_result(setting, table, chosen)
    stored = None if asked.methods is None else read_result(asked.figures, setting)
    if stored is not None:
        _tell_other_local(asked, stored, found)
        names = [recipe.choose(method).name for method in asked.methods_of(setting)]
        found = join_results(stored, found, names, asked.protocol.methods_of(setting))
        known = read_processor_time(asked.figures)
        spent = join_processor_time(known[setting], spent, names) if setting in known else spent
    write_result(found, spent, asked.figures)


def _tell_other_local(asked: _Suite, stored: SettingResult, found: SettingResult) -> None:
    """Say so where Local has come out otherwise than in the stored figures."""
    there = stored.row("local")
    here = found.row("local")
    if there is None or here is None:
        return
    other = [seed for seed, accuracy in here.accuracy.items() if there.accuracy.get(seed, accuracy) != accuracy]
    if other:
        seed = other[0]
        asked.tell(
            f"{found.setting}, seed {seed}: local has {here.accuracy[seed]}, in the stored figures "
            f"{there.accuracy[seed]}, as on another machine or version; new rows are compared with local as it is here"
        )


def _overrides(chosen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Tuned hyperparameters as ``--set`` takes them."""
    for method, settings in chosen.items():
        for name, value in settings.items():
            yield f"{_SET.format(method, name)}={to_toml(value)}"
