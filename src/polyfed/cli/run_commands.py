"""Commands that write recipes, run them, or try them: new, run, compare, sweep, benchmark, check."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.options import (
    Device,
    Executor,
    Loggers,
    MethodName,
    Overrides,
    PresetNames,
    Quiet,
    RecipePath,
    ReplaceRun,
    Resume,
    RunAgain,
    RunFolder,
    Seed,
    Workers,
    parse_names,
    parse_seeds,
    with_loggers,
)
from polyfed.cli.output import (
    all_problems_listed,
    print_files,
    print_run,
    print_table,
    print_text,
    raise_if_nothing_learnt,
)
from polyfed.errors import ConfigError

_TEMPLATES = resources.files("polyfed.cli") / "project_template"


def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Created if missing; must be empty.")]) -> None:
    """Write a recipe, two networks, a method and its test, to begin with.

    \b
    polyfed new first
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"expected a new or empty folder, got {folder}, which has files")
        for template in sorted(_TEMPLATES.iterdir(), key=lambda one: one.name):
            file = folder / template.name.removesuffix(".template")
            file.write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
            written.append(file)
    except OSError as error:
        raise ConfigError(f"expected a place for {folder}, got {error.strerror}") from None
    print_files(written)
    print_text(f"next: {folder / 'README.md'}")


def run(
    recipe: RecipePath,
    method: MethodName = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: RunFolder = None,
    resume: Resume = False,
    overwrite: ReplaceRun = False,
    workers: Workers = None,
    executor: Executor = None,
    device: Device = None,
    loggers: Loggers = None,
    preset: PresetNames = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe.

    Exit status 3: nothing was learnt, as clients' work was refused in most rounds, or diverged.

    \b
    polyfed run recipes/quickstart.toml --method fedgh --seed 1
    polyfed run recipes/quickstart.toml --set data.num_clients=20 --out runs/20
    polyfed run recipes/quickstart.toml --set run.keep=best --out runs/best
    polyfed run mine.toml --out runs/mine
    polyfed run mine.toml --out runs/mine --resume --set training.rounds=25
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.config.recipe import Recipe
    from polyfed.experiments.run import run

    overrides = with_loggers(overrides, loggers)
    asked = Recipe.load(
        recipe,
        overrides,
        method=method,
        seed=seed,
        out=out,
        device=device,
        workers=workers,
        executor=executor,
        preset=preset,
    )
    done = run(asked, out=asked.folder, resume=resume, overwrite=overwrite, progress=not quiet)
    print_run(asked.folder)
    raise_if_nothing_learnt(done.result)


def compare(
    recipe: RecipePath,
    methods: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Methods and variants [all that the recipe names]; Local always is one."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="One run of every method for each.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for runs and tables [runs/RECIPE].")] = None,
    overrides: Overrides = None,
    overwrite: RunAgain = False,
    workers: Workers = None,
    executor: Executor = None,
    device: Device = None,
    loggers: Loggers = None,
    preset: PresetNames = None,
    controls: Annotated[
        bool,
        typer.Option("--controls", help="Also what tells the others' part in a gain: methods alone, pooled data, ..."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run methods side by side.

    Prints and saves the table and the curves. What is done already is not run again; what was interrupted goes on, and
    what is to have more rounds now. Exit status 3: in a run nothing was learnt.

    \b
    polyfed compare recipes/quickstart.toml --methods fedavg,fedgh --seeds 0,1
    polyfed compare recipes/fedgh/table3.toml --preset small
    polyfed compare recipes/quickstart.toml --controls --seeds 0,1,2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments.compare import compare
    from polyfed.report.comparison_tables import to_text

    named = None if methods is None else parse_names(methods)
    done = compare(
        recipe,
        named,
        parse_seeds(seeds),
        out,
        overrides=with_loggers(overrides, loggers),
        overwrite=overwrite,
        progress=not quiet,
        device=device,
        workers=workers,
        executor=executor,
        preset=preset,
        controls=controls,
    )
    print_table(to_text, done)


def sweep(
    recipe: RecipePath,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=A,B,...", help="Values to try; a single one holds throughout. May be repeated."
        ),
    ] = None,
    method: MethodName = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="One run of every combination for each.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for all of it [runs/RECIPE-sweep].")] = None,
    overwrite: RunAgain = False,
    workers: Workers = None,
    executor: Executor = None,
    device: Device = None,
    loggers: Loggers = None,
    preset: PresetNames = None,
    quiet: Quiet = False,
) -> None:
    """Try all combinations of settings, choose by validation.

    Prints and saves the table. What is done already is not run again, what was interrupted goes on.
    Exit status 3: nothing was learnt with any of the settings.

    \b
    polyfed sweep recipes/quickstart.toml --set method.header_lr=0.01,0.1
    polyfed sweep mine.toml --set training.lr=0.01,0.1 --set training.rounds=5,10
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments import sweep as sweeps
    from polyfed.report.sweeps import to_text

    tried = sweeps.parse(grid or ())
    done = sweeps.sweep(
        recipe,
        tried,
        method=method,
        seeds=parse_seeds(seeds),
        out=out,
        overwrite=overwrite,
        progress=not quiet,
        device=device,
        workers=workers,
        executor=executor,
        preset=preset,
        loggers=loggers,
    )
    print_table(to_text, done)


def benchmark(
    suite: Annotated[
        Path, typer.Argument(metavar="SUITE", help="A folder with a protocol.toml and recipes.", show_default=False)
    ],
    settings: Annotated[
        str | None, typer.Option("--settings", metavar="A,B,...", help="Only these settings of the suite [all].")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these methods, or further ones [the suite's].")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for its runs [runs/SUITE].")] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of figures and page; rows that it has stay [OUT/results]."),
    ] = None,
    overwrite: RunAgain = False,
    workers: Workers = None,
    executor: Executor = None,
    device: Device = None,
    loggers: Loggers = None,
    quiet: Quiet = False,
) -> None:
    """Run a suite: tune, compare over seeds, say what the others' data are worth.

    Each method is tuned by validation with as many trials, on seeds that are not scored; then all are compared, in
    every setting. Writes a small JSON file per setting and a page of all. What is done already is not run again, what
    was interrupted goes on; rows of other methods that --results has stay.

    \b
    polyfed benchmark suites/digits
    polyfed benchmark suites/small --settings cifar10-few --results results/small
    polyfed benchmark suites/digits --methods fedrep
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments.benchmark import benchmark
    from polyfed.report.text_tables import NotedTable

    named = None if settings is None else parse_names(settings, "--settings", "digits,tweets")
    done = benchmark(
        suite,
        out,
        settings=named,
        methods=None if methods is None else parse_names(methods, "--methods", "fedgh,fedproto"),
        results=results,
        overwrite=overwrite,
        progress=not quiet,
        workers=workers,
        executor=executor,
        device=device,
        loggers=loggers,
    )
    print_table(NotedTable.to_text, done)


def check(
    recipe: RecipePath,
    method: MethodName = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="A line for each of these methods and variants; or all.")
    ] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    workers: Workers = None,
    executor: Executor = None,
    device: Device = None,
    preset: PresetNames = None,
) -> None:
    """Does a recipe fit, what will it cost?

    Tries some batches per architecture and writes nothing. Tells all that does not fit.

    \b
    polyfed check recipes/quickstart.toml --method fedgh
    polyfed check recipes/quickstart.toml --methods local,fedgh,fedhenn
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.config.recipe import Recipe
    from polyfed.experiments import estimate

    if methods is not None and method is not None:
        raise ConfigError("expected --method or --methods, got both")
    named = None if methods in (None, "all") else parse_names(methods or "")
    run: dict[str, Any] = {"seed": seed, "device": device, "workers": workers, "executor": executor}
    asked = Recipe.load(recipe, overrides or (), method=method, preset=preset, **run)
    if methods is None:
        with all_problems_listed():
            print_text(str(estimate.check(asked)))
        return
    for line in estimate.format_lines(estimate.check_methods(asked, named)):
        print_text(line)
