"""Methods side by side: what `polyfed compare` does, for Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyfed.config.recipe import Recipe
from polyfed.engine.arguments import list_of
from polyfed.errors import ConfigError
from polyfed.experiments.controls import controls_of
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.planned_runs import Report, check_planned_runs, plan, run_planned
from polyfed.experiments.run import resolve_recipe
from polyfed.loggers.base import Logger
from polyfed.loggers.console import Console
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import Table
from polyfed.report.html_report import save_command, write_report
from polyfed.report.statistics import SEEDS
from polyfed.units import human_count

__all__ = ["Comparison", "compare"]


class Comparison(Report):
    """What `compare` leaves behind; in a notebook its tables and curves."""

    table: Table | None


def compare(  # noqa: PLR0913 - what a user may choose, each by its name
    recipe: str | Path | Recipe,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = False,
    device: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    preset: str | None = None,
    controls: bool = False,
) -> Comparison:
    """Run methods x seeds on the same data, and put them side by side. Local is always among them.

    What is already done in `out` is not run again, what was interrupted goes on, also what is to have more rounds now;
    a run that fails does not keep the others from running.

    Args:
        recipe: a TOML file, or a `Recipe`.
        methods: names of methods, or of variants in the recipe's ``[methods]``; default: all that the recipe names.
        seeds: one run of every method for each.
        out: folder; default ``runs/<recipe>``. Runs lie in ``<out>/<method>/seed-<n>``, tables and curves in `out`.
        overrides: as for `run`; for one method only: ``"methods.fedgh.header_lr=0.1"``.
        overwrite: run again what is already done.
        progress: show how it gets on, on standard error.
        device, workers, executor, preset: as for `run`.
        controls: also run what says how much of a method's gain needs the other clients: every method alone,
            other models on each client's own rows, and training on all clients' rows (`polyfed.experiments.controls`).

    Raises:
        ConfigError: the request is wrong; nothing has been written.
        RunInterrupted: Ctrl-C; call it again to go on.
    """
    given = list(dict.fromkeys(list_of("methods", methods or ())))
    seeds = list_of("seeds", seeds)
    options = {"device": device, "workers": workers, "executor": executor, "preset": preset}
    base = resolve_recipe(recipe, overrides, given[0] if given else None, **options)
    if any(text.strip().startswith("method.") for text in overrides):
        raise ConfigError(
            "expected --set methods.NAME.KEY=VALUE, which says whose hyperparameter it is, got --set method.*"
        )
    if not seeds:
        raise ConfigError("expected at least one seed, got none")
    folder = Path(out if out is not None else base.run.out or f"runs/{base.stem}")
    data = DataCache()
    chosen = {name: base.choose(name) for name in given or base.variants()}
    if not any(one.method.name == "local" for one in chosen.values()):
        chosen = {"local": base.choose("local"), **chosen}
    if controls:
        chosen |= controls_of(base, chosen, data.source(base.with_run(seed=seeds[0])))
    _check_names(chosen)
    unique_seeds = list(dict.fromkeys(seeds))
    planned = plan(chosen.values(), unique_seeds, folder)
    watchers: list[Logger] = [Console()] if progress else []
    pending = check_planned_runs(planned, folder, overwrite, data)
    if len(unique_seeds) < SEEDS:
        for watcher in watchers:
            watcher.message(
                f"warning: {human_count(len(unique_seeds), 'seed')} cannot tell a difference from chance; use at "
                f"least {SEEDS}: --seeds 0,1,2"
            )
    done = run_planned(planned, pending, overwrite, data, watchers)
    if not done.runs:
        return Comparison(folder, None, (), done.failures)
    if not isinstance(recipe, Recipe):
        asked = {
            "--methods": ",".join(given),
            "--seeds": ",".join(map(str, seeds)),
            "--preset": preset,
            "--out": None if out is None else str(out),
        }
        words = [word for option, value in asked.items() if value for word in (option, value)]
        words += [word for text in overrides for word in ("--set", text)]
        words += ["--controls"] if controls else []
        save_command(folder, shlex.join(["polyfed", "compare", str(recipe), *words]))
    table = compare_runs(done.runs)
    return Comparison(folder, table, tuple(write_report(table, folder)), done.failures, done.unlearnt)


def _check_names(chosen: Mapping[str, Recipe]) -> None:
    """Whether each row has a name, and so a folder, of its own; two classes may have one name."""
    owners: dict[str, str] = {}
    for asked, recipe in chosen.items():
        other = owners.setdefault(recipe.name, asked)
        if other != asked:
            raise ConfigError(
                f"expected methods with names of their own, got '{recipe.name}' of {other} and {asked}; give a "
                "class another `name`, or name one in [methods]"
            )
