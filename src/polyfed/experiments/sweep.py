"""A grid over settings: every combination is run, and one is chosen by validation, never by test.

Like a comparison, a sweep is checked as a whole before its first run; what is done already is not run again, what was
interrupted goes on, and a run that fails does not keep the others from running.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.config.resolve import parse_override, to_toml
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.planned_runs import PlannedRun, Report, check_planned_runs, run_planned
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console
from polyfed.report.sweeps import SweepCell, SweepTable, build_table, named, write

__all__ = ["Sweep", "parse", "sweep"]

_SLUG = 100  # characters of a folder's name


class Sweep(Report):
    """What `sweep` leaves behind. unlearnt: of each run, where nothing was learnt with any of the settings."""

    table: SweepTable | None

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The swept settings chosen by validation; None where no combination was run with all seeds."""
        return None if self.table is None else self.table.chosen


@dataclass(frozen=True)
class _Point:
    """One combination. settings: of the swept keys. words: all settings, as the command line takes them."""

    name: str
    slug: str
    recipe: Recipe
    settings: Mapping[str, Any]
    words: tuple[str, ...] = ()


def parse(texts: Sequence[str]) -> dict[str, list[Any]]:
    """``["method.lr=0.1,1", "data.num_clients=5"]`` to ``{"method.lr": [0.1, 1], "data.num_clients": [5]}``.

    The values are the inside of a list of TOML's; where they are none, words with commas between. A key given twice has
    the values given last.

    Raises:
        ConfigError: no ``SECTION.KEY=VALUE``, or nothing between two commas.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        keys, listed = parse_override(f"{key}=[{values}]" if values else text)
        if not isinstance(listed, list) or values.rstrip().endswith(","):
            pieces = [piece.strip() for piece in values.split(",")]
            if len(pieces) > 1 and not all(pieces):
                raise ConfigError(f"expected values with commas between ({key}=A,B), got '{text}'")
            listed = [parse_override(f"{key}={piece}")[1] for piece in pieces]
        name = ".".join(keys)
        found.pop(name, None)
        found[name] = listed
    return found


def sweep(  # noqa: PLR0913 - what a user may choose, each by its name
    recipe: str | Path,
    grid: Mapping[str, Any],
    *,
    method: str | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    device: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    preset: str | None = None,
    loggers: Sequence[str] | None = None,
) -> Sweep:
    """Run all combinations of settings x seeds, and choose one by validation accuracy.

    Chosen is the combination with the highest validation accuracy of the method's main stage in the reported round,
    mean over seeds, among those that were run with all seeds; the first where several are equal.

    Args:
        recipe: a TOML file; the data need validation rows.
        grid: dotted key -> a list of values to try, or one value that holds throughout:
            ``{"method.header_lr": [0.01, 0.1], "training.rounds": 5}``. A value that is a list stands in a list.
        method: a method's or a variant's name, in place of the recipe's own.
        seeds: one run of every combination for each.
        out: folder; default ``runs/<recipe>-sweep``. Runs lie in ``<out>/<settings>/seed-<n>``, the table in
            ``<out>/sweep.csv``.
        overwrite: run again what is already done.
        progress: show how it gets on, on standard error.
        device, workers, executor, preset: as for `polyfed.run`. loggers: names, in place of the recipe's run.loggers.

    Raises:
        ConfigError: the request is wrong, or there are no validation rows; nothing has been written.
        RunInterrupted: Ctrl-C; call it again to go on.
    """
    values = {key: list(value) if isinstance(value, list | tuple) else [value] for key, value in grid.items()}
    swept = _swept(values, seeds)
    options: dict[str, Any] = {"method": method, "preset": preset, "loggers": loggers}
    options |= {"device": device, "workers": workers, "executor": executor}
    points = list(_points(recipe, values, swept, **options))
    _check_different(points)
    folder = Path(out if out is not None else points[0].recipe.run.out or f"runs/{points[0].recipe.stem}-sweep")
    members = [
        PlannedRun(point.name, point.recipe.with_run(seed=seed, out=None), folder / point.slug / f"seed-{seed}")
        for seed in dict.fromkeys(seeds)
        for point in points
    ]
    data = DataCache()
    pending = check_planned_runs(members, folder, overwrite, data)
    _check_validation(pending, data)
    watchers: list[Logger] = [Console()] if progress else []
    done = run_planned(members, pending, overwrite, data, watchers)
    cells = [SweepCell(point.settings, done.of_row(point.slug), point.words) for point in points]
    failed = [f"{title} failed: {reason}" for title, reason in done.failures.items()]
    table = build_table(cells, list(dict.fromkeys(seeds)), failed)
    files = () if table is None else (write(table, folder),)
    lost = done.unlearnt if len(done.unlearnt) == len(done.runs) else {}
    return Sweep(folder, table, files, done.failures, lost)


# the grid -----------------------------------------------------------------------------------------------------------


def _swept(values: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[str]:
    """The keys with several values, once it is known that they can be swept."""
    for key, given in values.items():
        if not given:
            raise ConfigError(f"{key}: expected at least one value, got none")
        if key == "run.seed":
            raise ConfigError("run.seed: expected a setting of the experiment; for seeds give --seeds 0,1")
        if key.startswith("run.") and len(given) > 1:
            raise ConfigError(f"{key}: expected one value, as [run] is no part of the experiment, got {len(given)}")
    if not seeds:
        raise ConfigError("expected at least one seed, got none")
    swept = [key for key, given in values.items() if len(given) > 1]
    if not swept:
        raise ConfigError("expected several values for at least one setting (--set training.lr=0.01,0.1), got none")
    return swept


def _points(
    recipe: str | Path, values: Mapping[str, Sequence[Any]], swept: Sequence[str], **options: Any
) -> Iterator[_Point]:
    """Every combination, the last key's values changing fastest; `options` are those of `Recipe.load`."""
    given = [word for key in ("preset", "method") if options[key] for word in (f"--{key}", options[key])]
    for combination in itertools.product(*values.values()):
        asked = dict(zip(values, combination, strict=True))
        resolved = Recipe.load(recipe, [f"{key}={to_toml(value)}" for key, value in asked.items()], **options)
        words = itertools.chain(*(("--set", f"{key}={_word(key, value)}") for key, value in asked.items()))
        settings = {key: asked[key] for key in swept}
        yield _Point(named(settings), _slug(settings), resolved, settings, (*given, *words))


def _slug(settings: Mapping[str, Any]) -> str:
    """A folder's name; where the settings cannot be read from it, it ends with their digest."""
    plain = named(settings).replace(", ", "_")
    slug = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", plain)[:_SLUG]
    exact = json.dumps(dict(settings), sort_keys=True, default=str)
    return slug if slug == plain else f"{slug}-{hashlib.blake2b(exact.encode(), digest_size=4).hexdigest()}"


def _word(key: str, value: Any) -> str:
    """The same as short as ``--set`` takes it: text that reads as nothing else needs no quotes."""
    bare = isinstance(value, str) and parse([f"{key}={value}"]) == {key: [value]}
    return str(value) if bare else to_toml(value)


def _check_different(points: Sequence[_Point]) -> None:
    """A combination that is there twice would be one row too many."""
    slugs = [point.slug for point in points]
    if again := next((point.name for point in points if slugs.count(point.slug) > 1), None):
        raise ConfigError(f"expected values that differ, got {again} twice")


def _check_validation(pending: Sequence[PlannedRun], data: DataCache) -> None:
    for member in pending:
        if not any(len(client.validation) for client in data.federated(member.recipe).clients):
            raise ConfigError(
                f"a sweep chooses by validation accuracy: expected validation rows ({member.title}), got none with "
                f"data.split = '{member.recipe.data.split}'; use for instance '8:1:1' or 'official:9:1'"
            )
