"""The command line: reads words, calls `polyfed.experiments`, prints, ends with the right exit status.

Exit status: 0 done; 1 the run failed; 2 the request is wrong (one line on standard error); 3 nothing was learnt; 130
interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP: 128 and the signal's number.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
import typer.main
from typer.core import TyperCommand

from polyfed.cli import completion
from polyfed.errors import Interrupted, NothingLearnt, PolyfedError, RequestError, RunError
from polyfed.escaping import visible
from polyfed.registry import nearest, texts
from polyfed.signals import exit_status, stops_on_signals

Command = TypeVar("Command", bound=Callable[..., Any])

app = typer.Typer(
    name="polyfed",
    help="Federated learning among clients whose neural networks differ.\n\n"
    "An experiment is a recipe, a TOML file: see recipes/quickstart.toml.\n\n"
    "Exit status: 0 done, 1 failed, 2 wrong request, 3 nothing was learnt, 130 interrupted (Ctrl-C).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
deploy = typer.Typer(
    help="Run a recipe on several machines.\n\nFlower carries the messages: pip install 'polyfed[flower]'.",
    rich_markup_mode=None,
)
app.add_typer(deploy, name="deploy")


class _Closed(Exception):
    """Whoever read our output has gone."""


class _Command(TyperCommand):
    """A command whose help says what its arguments are, and shows brackets as they are."""

    def format_options(self, context: Any, formatter: Any) -> None:
        """Write the sections of arguments and options."""
        hints = get_type_hints(inspect.unwrap(self.callback or _main), include_extras=True)
        arguments, options = [], []
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is None:
                continue
            name, text = record
            if parameter.param_type_name == "option":
                options.append((name, text.replace("\\[", "[")))  # typer escapes them, as if for rich
            else:  # whose help is lost between typer 0.20 and click 8.3
                arguments.append((name, hints[parameter.name].__metadata__[0].help))
        for head, records in (("Arguments", arguments), ("Options", options)):
            if records:
                with formatter.section(head):
                    formatter.write_dl(records)


def _command(function: Command, group: typer.Typer = app) -> Command:
    """Registers a command, and keeps the argument parser from handling what `main` handles."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except BrokenPipeError:
            raise _Closed from None

    group.command(cls=_Command)(guarded)
    return function


_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe's file.", show_default=False)]
_Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A method, a variant from the recipe's [methods], or one of your own: package.module:Class.",
        autocompletion=completion.methods,
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: --set data.clients=20. May be repeated."),
]
_Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Lay a table of the recipe's [profiles] over it; or several: A,B.",
        autocompletion=completion.profiles,
    ),
]
_Seed = Annotated[int | None, typer.Option(metavar="NUMBER", help="The seed of every random draw.")]
_DEVICES = "cpu, or an NVIDIA GPU: cuda, the second cuda:1"
_Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help=f"{_DEVICES} [the recipe's].", autocompletion=completion.one_of("cpu", "cuda")),
]
_DeviceOf = Annotated[
    str, typer.Option(metavar="NAME", help=f"{_DEVICES}.", autocompletion=completion.one_of("cpu", "cuda"))
]
_Workers = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="Clients that train at the same time [the cores; GPU: 32].")
]
_Target = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Also what it took to reach an accuracy: 0.6, '60 %', or '90 % of local', '90 % of best'.",
    ),
]
_Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME",
        help="Live curves in the run folder: tensorboard.",
        autocompletion=completion.one_of("tensorboard"),
    ),
]
_STAGES = ("received", "after_local", "personal")
_FIGURES = ("curves", "clients", "architectures", "sizes", "variants", "labels", "cka", "tsne", "sensitivity")
_Trust = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="Import the code that the folder names: only if it is yours, or you have read it."
    ),
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
_Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from polyfed import __version__

        print(f"polyfed {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# commands ---------------------------------------------------------------------------------------------------------


@_command
def run(
    recipe: _Recipe,
    method: _Method = None,
    settings: _Set = None,
    seed: _Seed = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder [runs/RECIPE-METHOD-seedN].")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run that the folder holds; a finished one, too, for more rounds."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run that the folder holds, and its analyses.")
    ] = False,
    workers: _Workers = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who does the clients' work: auto, serial, pool, cohort, flower-sim (Ray).",
            autocompletion=completion.one_of("auto", "serial", "pool", "cohort", "flower-sim"),
        ),
    ] = None,
    device: _Device = None,
    track: _Track = None,
    timings: Annotated[
        bool,
        typer.Option("--timings", help="Tell where the time of the rounds went; also as --profile without a value."),
    ] = False,
    profile: _Profile = None,
    quiet: _Quiet = False,
) -> None:
    """Run a recipe.

    Exit status 3: nothing was learnt, as the work of the clients was refused in every round.

    \b
    polyfed run recipes/quickstart.toml --method fedgh --seed 1
    polyfed run recipes/quickstart.toml --set data.clients=20 --out runs/twenty
    polyfed run recipes/quickstart.toml --set run.keep=best --out runs/best
    polyfed run mine.toml --out runs/mine
    polyfed run mine.toml --out runs/mine --resume --set training.rounds=25
    polyfed run recipes/quickstart.toml --timings
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.config.recipe import Recipe
    from polyfed.experiments import session

    changes = [*(settings or ()), *_tracked(track)]
    options: dict[str, Any] = {"seed": seed, "out": out, "device": device, "workers": workers, "profile": profile}
    options["executor"] = executor
    _say_imports(recipe, changes, method)
    asked = Recipe.load(recipe, changes, method=method, **options)
    done = session.run(asked, out=asked.folder, resume=resume, force=force, progress=not quiet, timings=timings)
    _print_run(done.result, done.path)
    _print_profile(asked)
    if timings:
        _print_timings(done.result, done.history)
    _end_learnt(done.result)


@_command
def compare(
    recipe: _Recipe,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Methods and variants [all that the recipe names]; Local always is one.",
            autocompletion=completion.method_lists,
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="One run of every method for each.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for runs and tables [runs/RECIPE].")] = None,
    settings: _Set = None,
    force: Annotated[bool, typer.Option("--force", help="Run again what is done already.")] = False,
    workers: _Workers = None,
    device: _Device = None,
    track: _Track = None,
    profile: _Profile = None,
    target: _Target = None,
    quiet: _Quiet = False,
) -> None:
    """Run methods side by side.

    Prints and saves the table and the curves. What is done already is not run again; what was interrupted goes on, and
    what is to have more rounds now. Exit status 3: in a run nothing was learnt.

    \b
    polyfed compare recipes/quickstart.toml --methods fedavg,fedgh --seeds 0,1
    polyfed compare recipes/fedgh/table3.toml --profile small
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments import session
    from polyfed.report.comparison import to_text

    named = None if methods is None else _names(methods)
    _say_imports(recipe, settings or (), *(named or ()))
    done = session.compare(
        recipe,
        named,
        _whole_numbers(seeds),
        out,
        overrides=[*(settings or ()), *_tracked(track)],
        force=force,
        progress=not quiet,
        device=device,
        workers=workers,
        profile=profile,
        target=target,
    )
    _print_table(to_text, done)


@_command
def sweep(
    recipe: _Recipe,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=A,B,...", help="Values to try; a single one holds throughout. May be repeated."
        ),
    ] = None,
    method: _Method = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="One run of every combination for each.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for all of it [runs/RECIPE-sweep].")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run again what is done already.")] = False,
    workers: _Workers = None,
    device: _Device = None,
    profile: _Profile = None,
    quiet: _Quiet = False,
) -> None:
    """Try all combinations of settings, choose by validation.

    Prints and saves the table and, for one or two settings, the figure; Local runs beside. What is done already is not
    run again, what was interrupted goes on. Exit status 3: nothing was learnt with any of the settings.

    \b
    polyfed sweep recipes/quickstart.toml --set method.header_lr=0.01,0.1
    polyfed sweep mine.toml --set training.lr=0.01,0.1 --set training.epochs=1,2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments import sweep as sweeps
    from polyfed.report.sweeps import to_text

    tried = sweeps.parse(settings or ())
    _say_imports(recipe, (), method, *texts(tried))
    done = sweeps.sweep(
        recipe,
        tried,
        method=method,
        seeds=_whole_numbers(seeds),
        out=out,
        force=force,
        progress=not quiet,
        device=device,
        workers=workers,
        profile=profile,
    )
    _print_table(to_text, done)


@_command
def check(
    recipe: _Recipe,
    method: _Method = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="A line for each of these methods and variants; or all.",
            autocompletion=completion.method_lists,
        ),
    ] = None,
    settings: _Set = None,
    seed: _Seed = None,
    workers: _Workers = None,
    device: _Device = None,
    profile: _Profile = None,
    json: _Json = False,
) -> None:
    """Does a recipe fit, what will it cost?

    Tries some batches per architecture and writes nothing. Tells all that does not fit.

    \b
    polyfed check recipes/quickstart.toml --method fedgh
    polyfed check recipes/quickstart.toml --methods local,fedgh,fedhenn
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    import dataclasses

    from polyfed.config.recipe import Recipe
    from polyfed.engine.compatibility import Unfit
    from polyfed.experiments import method_table, session

    if methods is not None and method is not None:
        raise RequestError("expected --method or --methods, came both")
    options: dict[str, Any] = {"seed": seed, "device": device, "workers": workers, "profile": profile}
    named = [] if methods in (None, "all") else _names(methods or "")
    _say_imports(recipe, settings or (), method, *named)
    asked = Recipe.load(recipe, settings or (), method=method, **options)
    if methods is not None:
        found = method_table.fits(asked, methods=None if methods == "all" else _names(methods), timed=True)
        if json:
            return _print_json([dataclasses.asdict(one) for one in found])
        for line in method_table.fits_lines(found, timed=True):
            _print(line)
        return _print_profile(asked)
    try:
        done = session.check(asked)
    except Unfit as error:
        if len(error.problems) == 1:
            raise
        for problem in error.problems:
            _print(f"- {problem}")
        raise RequestError(f"{len(error.problems)} things do not fit, as listed") from None
    if json:
        import json as form

        told = {key: getattr(done, key) for key in ("seconds_round", "peak_at_work", "peak")}
        return print(form.dumps({**dataclasses.asdict(done), **told}, indent=2))
    _print(str(done))
    _print_profile(asked)


@_command
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders above them.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [the first DIR].")] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="received, after_local or personal [each run's own].",
            autocompletion=completion.one_of(*_STAGES),
        ),
    ] = None,
    x: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Axis of the curves: round, bytes, seconds or simulated.",
            autocompletion=completion.one_of("round", "bytes", "seconds", "simulated"),
        ),
    ] = "round",
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What the curves show: accuracy, worst_tenth, balanced_accuracy, f1 or auc.",
            autocompletion=completion.one_of("accuracy", "worst_tenth", "balanced_accuracy", "f1", "auc"),
        ),
    ] = "accuracy",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print the other figures, and those by architecture, too.")
    ] = False,
    target: _Target = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE.md", help="Only write a page of all tables, a part per DIR, as docs/results.md is."),
    ] = None,
) -> None:
    """Table, curves and a page of finished runs.

    Prints the table, and writes it (md, csv, json, tex), the curves (png, svg) and report.html, which holds both and
    more, to click through in a browser.

    \b
    polyfed report runs/quickstart --x bytes --target "60 %"
    polyfed report runs/fedgh runs/fedin --results results.md
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.report.comparison import comparison, to_text, write
    from polyfed.report.figures import curves
    from polyfed.report.html_report import write_page
    from polyfed.report.run_records import find_runs

    if results is not None:
        from polyfed.report.results_page import write_results

        if out is not None or x != "round" or metric != "accuracy" or metrics:
            raise RequestError("expected --results with no other options than --stage and --target, came others")
        return _print_files([write_results(folders, results, stage, target)])
    runs = find_runs(folders)
    table = comparison(runs, stage, target)
    place = folders[0] if out is None else out
    files = [*curves(runs, place, x, stage, metric), *write(table, place), write_page(runs, table, place, stage)]
    _print(to_text(table, _width(), metrics=metrics))
    _print_files(files)


@_command
def epsilon(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders above them.", show_default=False)
    ],
    delta: Annotated[float | None, typer.Option(metavar="NUMBER", help="At which [each run's own].")] = None,
    json: _Json = False,
) -> None:
    """What runs have cost in privacy, by two accountants.

    \b
    polyfed epsilon runs/fedin-privacy --delta 1e-6
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    import dataclasses
    import json as form

    from polyfed.experiments.privacy_report import spent, to_text

    found = spent(folders, delta)
    _print(form.dumps([dataclasses.asdict(one) for one in found], indent=2) if json else to_text(found, _width()))


@_command
def analyse(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders, folders above them, or that of a sweep.", show_default=False),
    ],
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Which of these figures [all that can be drawn].",
            autocompletion=completion.several_of(*_FIGURES),
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [analysis in the first RUN].")] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Scoring stage of curves and variants [each run's own].",
            autocompletion=completion.one_of(*_STAGES),
        ),
    ] = None,
    smooth: Annotated[int, typer.Option(metavar="NUMBER", help="curves: mean of so many evaluated rounds.")] = 1,
    inputs: Annotated[int, typer.Option(metavar="NUMBER", help="cka, tsne: inputs that all clients see.")] = 1000,
    rows: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="cka, tsne: their rows, test or holdout.",
            autocompletion=completion.one_of("test", "holdout"),
        ),
    ] = "test",
    places: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="cka: where in the networks; also a block, such as stage3 [extractor,representation,logits].",
        ),
    ] = None,
    clients: Annotated[int, typer.Option(metavar="NUMBER", help="cka, tsne: clients at most.")] = 40,
    points: Annotated[int, typer.Option(metavar="NUMBER", help="tsne: points of a panel at most.")] = 1000,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"cka, tsne: {_DEVICES}.", autocompletion=completion.one_of("cpu", "cuda")),
    ] = "cpu",
    trust_code: _Trust = False,
) -> None:
    """Figures of finished runs.

    Each is written as png and svg, with its numbers beside it as json and csv: curves, clients, architectures, sizes,
    variants, labels, cka, tsne; sensitivity for the folder of a sweep.

    \b
    polyfed analyse runs/quickstart
    polyfed analyse runs/quickstart/fedgh/seed-0 --figures cka,tsne --out figures
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed import analysis

    names = None if figures is None else _names(figures, "--figures", "curves,cka")
    at = None if places is None else tuple(_names(places, "--places", "extractor,logits"))
    choices = analysis.Choices(stage, smooth, inputs, rows, at, clients, points, device)
    done = analysis.analyse(folders, names, out, choices, trust_code)
    for note in done.notes:
        _print(note)
    _print_files(done.files)


@_command
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Parquet or image files (one, or a folder of them), a .csv, a .txt or a .npy file.",
            show_default=False,
        ),
    ],
    client: Annotated[int, typer.Option(metavar="NUMBER", help="Whose personal model.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="Where to write; - is standard output.")] = Path("-"),
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Those of all classes, too.")] = False,
    json: _Json = False,
    device: _DeviceOf = "cpu",
    image_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of Parquet files.")] = None,
    label_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of Parquet or CSV files.")] = None,
    text_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of Parquet or CSV files of texts.")] = None,
    resize: Annotated[bool, typer.Option("--resize", help="Bring images to the size of the run's.")] = False,
    trust_code: _Trust = False,
) -> None:
    """Use a client's model on new data.

    Writes a row per input: its row number or file, the class's number and name, the probability. Where the data have
    labels, in the run's own column or one of a usual name, the accuracy is told. Texts (a column, or the lines of a
    .txt file) are read with the run's own words; texts without any of them are told.

    \b
    polyfed predict runs/mine --client 3 photos --out photos.csv
    polyfed predict runs/mine --client 3 new.parquet --json
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments import prediction
    from polyfed.report.atomic_files import write_whole

    found = prediction.predict(
        run,
        client,
        data,
        device=device,
        image_column=image_column,
        label_column=label_column,
        text_column=text_column,
        resize=resize,
        trust=trust_code,
    )
    to_file = str(out) != "-"
    if to_file:
        write_whole(out, found.to_csv(probabilities).encode())
    if json:
        import json as form

        facts = {"run": str(run), "client": client, "inputs": len(found.names), "accuracy": found.accuracy}
        facts["unknown"] = list(found.unknown)
        print(form.dumps({**facts, "predictions": found.rows(probabilities)}, indent=2))
    elif not to_file:
        _print(found.to_csv(probabilities).removesuffix("\n"))
    if found.accuracy is not None and not json:  # not among the rows, where there are rows
        told = f"accuracy {100 * found.accuracy:.2f} % of {len(found.names)} inputs with labels"
        print(told, file=sys.stdout if to_file else sys.stderr)
    if found.unknown:
        rows = ", ".join(found.unknown[:10]) + (", ..." if len(found.unknown) > 10 else "")
        count = f"{len(found.unknown)} of {len(found.names)} texts"
        _tell(f"{count} have no word that the run knows: rows {rows}")
    if to_file and not json:
        _print_files([out])


@_command
def attack(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    client: Annotated[int, typer.Option(metavar="NUMBER", help="Whose images.")] = 0,
    images: Annotated[
        int, typer.Option(metavar="NUMBER", help="How many of those it sent, or of the classes it has fewest of.")
    ] = 4,
    noise: Annotated[
        str | None,
        typer.Option(metavar="0,0.4,...", help="Levels of noise on what it sends [0, and the run's own or 0.8]."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME,...",
            help="s_in, s_out or both of FedIN's features [s_in]; prototypes.",
            autocompletion=completion.several_of("s_in", "s_out", "prototypes"),
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Steps of Adam.")] = 1000,
    lr: Annotated[float, typer.Option(metavar="NUMBER", help="Its learning rate.")] = 0.1,
    tv: Annotated[
        str, typer.Option(metavar="0,1,...", help="Weights of total variation, one attack for each; 0: the paper's.")
    ] = "0,1",
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of the noise that images are made from.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [RUN/attack].")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the attack that the folder holds.")] = False,
    device: _DeviceOf = "cpu",
    trust_code: _Trust = False,
) -> None:
    """Reconstruct a client's images from what it sent.

    For methods that upload features (FedIN) or class means of representations (FedGH, FedProto, FedTGP). The attacker
    knows the client's network. Prints the table, and writes it (json), the images and the curves (png, svg). Needs the
    run's data, to compare with.

    \b
    polyfed attack runs/fedin --noise 0,0.4,0.8,1.2
    polyfed attack runs/fedgh --client 3 --images 2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed import attacks
    from polyfed.attacks.reconstruction_plots import to_text

    found, files = attacks.attack(
        run,
        client=client,
        images=images,
        noise=None if noise is None else _decimals(noise, "--noise"),
        sources=None if source is None else [name.strip() for name in source.split(",")],
        steps=steps,
        lr=lr,
        tv=_decimals(tv, "--tv"),
        seed=seed,
        device=device,
        out=out,
        force=force,
        trust=trust_code,
    )
    _print(to_text(found, _width()))
    _print_files(files)


@_command
def leakage(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or folders above them.", show_default=False),
    ],
    shadows: Annotated[int, typer.Option(metavar="NUMBER", help="Shadow models per client and kind; 0: no LiRA.")] = 16,
    shadow_data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What the attacker has to train them on: others' rows, or the holdout.",
            autocompletion=completion.one_of("others", "holdout"),
        ),
    ] = "others",
    rows: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Members, and others, asked for per client [all].")
    ] = None,
    clients: Annotated[int | None, typer.Option(metavar="NUMBER", help="The first so many clients [all].")] = None,
    images: Annotated[int, typer.Option(metavar="NUMBER", help="Images to make again; 0: none.")] = 4,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Steps of Adam for each.")] = 300,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of all of the attacker's draws.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [RUN/attack].")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the report that the folder holds.")] = False,
    trust_code: _Trust = False,
) -> None:
    """Report what a curious server learns, method by method.

    From the messages of finished runs, made again by running their last rounds once more: what goes up, what it states
    in the clear, which rows a client trained on (loss threshold and LiRA), which classes it has, and images made again.
    Prints the table, and writes it (md, json) and the ROC curves (png, svg).

    \b
    polyfed leakage runs/fedavg
    polyfed leakage runs/leakage --shadows 32 --out leakage
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed import attacks
    from polyfed.attacks.attack_tables import to_text

    found, files = attacks.report(
        runs,
        shadows=shadows,
        shadow_data=shadow_data,  # type: ignore[arg-type]  # which checks it
        rows=rows,
        clients=clients,
        images=images,
        steps=steps,
        seed=seed,
        out=out,
        force=force,
        trust=trust_code,
        say=_tell,
    )
    _print(to_text(found, _width()))
    _print_files(files)


@_command
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this one, with all that is said of it; also package.module:Class of your own.",
            autocompletion=completion.registered_methods,
        ),
    ] = None,
    fits: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE.toml", help="Which of them can run on these models and data, why not the others."),
    ] = None,
    settings: _Set = None,
    measure: Annotated[
        bool, typer.Option("--bytes/--no-bytes", help="With --fits: also play two rounds, for the bytes.")
    ] = True,
    json: _Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of docs/methods/README.md.")] = False,
) -> None:
    """List the methods and their knobs; one of them; or which fit a recipe.

    With --fits, two rounds of one batch are played per method and architecture; nothing is written.

    \b
    polyfed methods fedgh
    polyfed methods --fits recipes/quickstart.toml --set models.feature_dim=64
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    import dataclasses
    import shutil

    from polyfed.experiments import method_table

    if name is not None and (fits is not None or markdown or settings):
        raise RequestError("expected the name of a method alone or with --json, came it with other options")
    if fits is None and settings:
        raise RequestError("expected --set together with --fits RECIPE.toml, which it changes, came it alone")
    if markdown and (json or fits is not None):
        raise RequestError("expected --markdown alone, came it together with --json or --fits")
    if name is not None:
        page = method_table.page(name, [os.getcwd()])
        if json:
            return _print_json(page)
        from polyfed.cli.listing import of_method

        _print(of_method(page, _width()))
    elif fits is not None:
        _say_imports(fits, settings or ())
        found = method_table.fits(fits, settings or (), measure)
        if json:
            return _print_json([dataclasses.asdict(one) for one in found])
        for line in method_table.fits_lines(found):
            _print(line)
    elif markdown:
        _print(method_table.to_markdown().rstrip("\n"))
    elif json:
        _print_json(method_table.describe())
    else:
        _print(method_table.to_text(method_table.describe(), max(40, shutil.get_terminal_size((100, 24)).columns)))


@_command
def models(json: _Json = False) -> None:
    """List the models and their sizes.

    Numbers of parameters and widths of the representation are those on the data that a model was made for.
    """
    from polyfed.models.zoo import describe

    if json:
        return _print_json(describe())
    from polyfed.cli.listing import of_models

    _print(of_models(describe(), _width()))


@_command
def datasets(json: _Json = False) -> None:
    """List the data sets, and which are here.

    Files are looked for below POLYFED_DATA.
    """
    from polyfed.data.parquet_images import has_parquet
    from polyfed.registry import DATASETS

    root = os.environ.get("POLYFED_DATA")
    place = Path(root).expanduser() if root else None
    own = sorted(p.name for p in place.iterdir() if has_parquet(p)) if place is not None and place.is_dir() else []
    rows: list[dict[str, Any]] = []
    for name, loader in DATASETS.items():
        about = " ".join((loader.__doc__ or "").split("\n\n")[0].replace("`", "").split())
        here = {"digits": True, "parquet": None}.get(name, name.removesuffix("-coarse") in own)
        rows.append({"name": name, "here": here, "about": about})
    rows += [
        {"name": name, "here": True, "about": f"Parquet files in {place}/{name}"}
        for name in own
        if name not in DATASETS
    ]
    if json:
        return _print_json(rows)
    from polyfed.cli.listing import of_datasets

    _print(of_datasets(rows, _width()))


# deployment -------------------------------------------------------------------------------------------------------

_deploy_command = functools.partial(_command, group=deploy)
_RecipeFile = Annotated[Path, typer.Option("--recipe", metavar="RECIPE.toml", help="The recipe's file.")]


@deploy.callback(invoke_without_command=True)
def _deploy(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@_deploy_command
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the app.", show_default=False)],
    recipe: _RecipeFile,
    host: Annotated[str, typer.Option(metavar="NAME", help="How nodes call the server's machine.")] = "localhost",
    method: _Method = None,
    settings: _Set = None,
    seed: _Seed = None,
    profile: _Profile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a recipe as a Flower app.

    Beside the app: a README with all commands, and examples of services and of a container.

    \b
    polyfed deploy init federation --recipe recipes/quickstart.toml --host fl.example.org
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.app_template import init

    options: dict[str, Any] = {"method": method, "seed": seed, "profile": profile, "host": host, "force": force}
    _say_imports(recipe, settings or (), method)
    _print_files(init(folder, recipe, overrides=settings or (), **options))


@_deploy_command
def certify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the certificates.", show_default=False)],
    host: Annotated[
        list[str], typer.Option("--host", metavar="NAME", help="How nodes call the server. May be repeated.")
    ],
    days: Annotated[int, typer.Option(metavar="NUMBER", help="How long the certificate is good for.")] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace the server's certificate that is there.")] = False,
) -> None:
    """Write the server's certificate, and its authority.

    An authority that the folder holds already is kept, and signs the new certificate: nodes need not be told.

    \b
    polyfed deploy certify keys --host fl.example.org --host 10.0.0.5
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.tls import certify

    _print_files(certify(folder, host, days, force))


@_deploy_command
def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its private half.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
) -> None:
    """Write a node's key pair.

    FILE stays on the node; FILE.pub is what the server is told.

    \b
    polyfed deploy key keys/node
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.tls import make_key

    _print_files(make_key(file, force))


@_deploy_command
def release(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, at the server.", show_default=False)],
    client: Annotated[int, typer.Argument(min=0, metavar="CLIENT", help="The client's number.", show_default=False)],
) -> None:
    """Give a client's number to the next node that comes with it.

    A number belongs to the node that came with it first, also after restarts. This is for a node that is replaced.

    \b
    polyfed deploy release runs/ours 2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.node_registry import release

    owner = release(folder, client)
    _print(f"client {client} belonged to the node that came as {owner.node}, and is free now; go on with resume=true")


@_deploy_command
def server(
    keys: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that certify has filled.", show_default=False)],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where it listens; a proxy on this machine lets nodes in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="NUMBER", help="Its port.")] = 8000,
    database: Annotated[Path, typer.Option(metavar="FILE", help="Remembers which nodes are registered.")] = Path(
        "superlink.db"
    ),
) -> None:
    """Run Flower's server, for nodes and its keeper alone.

    Whoever has a registered key is let through to what nodes ask for; the rest (apps, keys, runs) is for programs of
    the user who starts this, on this machine.

    \b
    polyfed deploy server keys
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.superlink import serve_nodes

    serve_nodes(keys, host=host, port=port, database=database)


@_deploy_command
def node(
    recipe: _RecipeFile,
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.", show_default=False)],
    config: Annotated[
        str, typer.Option("--node-config", metavar="TEXT", help="What is this node's own.", show_default=False)
    ],
    authority: Annotated[
        Path, typer.Option("--authority", metavar="FILE", help="Certificate by which the server is known.")
    ] = Path("keys/ca.crt"),
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private half of this node's keys.")] = Path("keys/node"),
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="NUMBER", help="Free on this machine, for the node alone.")
    ] = 9094,
    method: _Method = None,
    settings: _Set = None,
    seed: _Seed = None,
    profile: _Profile = None,
) -> None:
    """Be a node: one client, with a recipe of its own.

    Code that a server sends is not run: the installed polyfed answers, by the recipe on this machine, and refuses a
    server whose settings are others.

    \b
    polyfed deploy node --recipe recipes/quickstart.toml --server 10.0.0.5:443 --node-config 'client-id=0 state-dir="s"'
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.config.recipe import Recipe
    from polyfed.deploy.supernode import join

    own = Recipe.load(recipe, settings or (), method=method, seed=seed, profile=profile)
    join(own, config, server=server, authority=authority, key=key, port=port)


@_deploy_command
def local(
    recipe: _RecipeFile,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Clients, each a node of its own [the recipe's].")
    ] = None,
    method: _Method = None,
    settings: _Set = None,
    seed: _Seed = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder [runs/RECIPE-METHOD-seedN].")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run that the folder holds; a finished one, too, for more rounds."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run that the folder holds, and its analyses.")
    ] = False,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="How long a node may take for an answer.")] = 600.0,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Give the run up after so long.")] = None,
    profile: _Profile = None,
    quiet: _Quiet = False,
) -> None:
    """Run a recipe with a server and nodes on this machine.

    With TLS and node authentication, over 127.0.0.1 alone; the run folder and its numbers are those of `polyfed run`.

    \b
    polyfed deploy local --recipe recipes/quickstart.toml --nodes 3 --set training.rounds=2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.local_cluster import local

    options: dict[str, Any] = {"method": method, "seed": seed, "profile": profile, "out": out, "nodes": nodes}
    options |= {"resume": resume, "force": force, "deadline": deadline, "timeout": timeout}
    _say_imports(recipe, settings or (), method)
    done = local(recipe, overrides=settings or (), progress=not quiet, **options)
    _print_run(done.result, done.path)
    _end_learnt(done.result)


# printing ---------------------------------------------------------------------------------------------------------


def _print(text: str) -> None:
    """To standard output, in whatever encoding it has; control characters that came from elsewhere are written out."""
    encoding = sys.stdout.encoding or "utf-8"
    text = visible(text)
    plain = text if "utf" in encoding.lower() else text.replace("±", "+/-").replace("─", "-")
    print(plain.encode(encoding, "replace").decode(encoding))


def _tell(text: str) -> None:
    """One line to standard error, likewise."""
    print(visible(" ".join(text.split())), file=sys.stderr)


def _say_imports(recipe: Path, settings: Sequence[str], *names: str | None) -> None:
    """Tell on standard error which code that is not polyfed's a recipe will import, before it is read any further.

    names: of methods that are asked for beside it.
    """
    from polyfed.config.recipe import code_named

    for line in code_named(recipe, settings, [name for name in names if name is not None]):
        _tell(line)


def _width(most: int = 120) -> int:
    """Columns of the terminal, within what is still readable; 100 where there is none."""
    import shutil

    return min(max(60, shutil.get_terminal_size((100, 24)).columns), most)


def _print_table(to_text: Callable[[Any, int], str], done: Any) -> None:
    """The table of several runs and its files; what failed or learnt nothing is an error, once the rest is shown."""
    _print("no run was finished" if done.table is None else to_text(done.table, _width()))
    _print_files(done.files)
    if done.failures:
        raise RunError("; ".join(f"{title} failed: {reason}" for title, reason in done.failures.items()))
    if done.unlearnt:
        first = next(iter(done.unlearnt.values()))
        raise NothingLearnt(f"{'; '.join(done.unlearnt)}: {first}")


def _end_learnt(result: Mapping[str, Any]) -> None:
    """An error for a run in which nothing was learnt, once the rest is shown."""
    if result.get("nothing_learnt"):
        raise NothingLearnt(result["nothing_learnt"])


def _print_run(result: Mapping[str, Any], path: Path | None) -> None:
    from polyfed.units import human_bytes, human_seconds

    for stage, score in result["accuracy_by_stage"].items():
        mean, std, low, high = (100 * score[key] for key in ("mean", "std", "min", "max"))
        _print(f"accuracy {stage:<12} {mean:6.2f} %  (clients: std {std:.2f}, lowest {low:.2f}, highest {high:.2f})")
    if (before := result.get("accuracy_before_closing")) is not None:
        _print(f"accuracy {100 * before:.2f} % before the closing round")
    if (stopped := result.get("stopped_after")) is not None:
        why = "another round would exceed attacks.budget"
        if result.get("stopped_by") != "budget":
            why = "the validation accuracy no longer rose (evaluation.patience)"
        _print(f"stopped after round {stopped}, as {why}")
    _print_kept(result)
    for unit, epsilon in result.get("epsilon", {}).items():
        of = result["epsilon_of"][unit]
        given = ", for given weights" if of == ["features"] else ""
        _print(f"epsilon {epsilon:.4g} at delta {result['delta']:g}, by {unit}: {', '.join(of)}{given}")
    _print(
        f"bytes {human_bytes(result['bytes_up'])} up, {human_bytes(result['bytes_down'])} down; "
        f"{human_seconds(result['seconds'])}" + (f"; {result['refused']} refused" if result["refused"] else "")
    )
    if (simulated := result.get("simulated_seconds")) is not None:
        late = f"; {result['stragglers']} uploads behind the deadline" if result.get("stragglers") else ""
        without = f"; left out: clients {', '.join(map(str, result['left_out']))}" if result["left_out"] else ""
        _print(f"simulated time {human_seconds(simulated)}{late}{without}")
    _print(f"run folder {path}")


def _print_kept(result: Mapping[str, Any]) -> None:
    """Which round's the models are, where it is not the last one's."""
    kept = result.get("models_of_round")
    if kept is None or kept == (result["stopped_after"] or result["rounds"]) + result["closed"]:
        return
    best = result["accuracy_best_by_validation"]
    score = "" if best is None else f": accuracy {100 * best:.2f} %"
    _print(f"the models are those of round {kept}, the best by validation{score}")


def _print_timings(result: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    """Where the time went: in all, of the whole, per round."""
    rounds = [record for record in history if "timings" in record]
    if not rounds:
        _print("no timings: the run was done before they were asked for")
        return
    spent, wall = result["timings"], sum(record["seconds"] for record in rounds)
    whole = sum(spent.values()) or 1.0
    _print(f"{'':<12}{'seconds':>10}{'share':>9}{'per round':>12}")
    for name, seconds in sorted(spent.items(), key=lambda one: -one[1]):
        _print(f"{name:<12}{seconds:>10.2f}{100 * seconds / whole:>7.1f} %{seconds / len(rounds):>12.3f}")
    workers = f"{result['workers']} workers" if result["workers"] > 1 else "1 worker"
    _print(f"{'all':<12}{whole:>10.2f}{100:>7.1f} %{whole / len(rounds):>12.3f}  ({workers}, {wall:.2f} s)")


def _print_profile(recipe: Any) -> None:
    """What was laid over the recipe, and what that scales down."""
    if recipe.run.profile is not None:
        _print(f"profile {recipe.run.profile}" + (f": {note}" if (note := recipe.run.profile_note) else ""))


def _print_files(files: Sequence[Path]) -> None:
    for file in files:
        _print(f"wrote {file}")


def _print_json(value: Any) -> None:
    """For machines."""
    import json

    print(json.dumps(value, indent=2))


def _tracked(names: Sequence[str] | None) -> list[str]:
    """``--track`` as a setting."""
    return [f"run.track={list(names)}"] if names else []


def _names(text: str, option: str = "--methods", example: str = "local,fedgh") -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise RequestError(f"expected {option} as names with commas between ({example}), came '{text}'")
    return names


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise RequestError(f"expected --seeds as whole numbers with commas between (0,1,2), came '{text}'") from None


def _decimals(text: str, option: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise RequestError(f"expected {option} as numbers with commas between (0,0.8), came '{text}'") from None


# ending -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program: runs a command and exits."""
    warnings.showwarning = lambda message, *_, **__: _tell(f"note: {message}")
    raise SystemExit(status(sys.argv[1:] if arguments is None else arguments))


def status(arguments: Sequence[str]) -> int:
    """Run a command; its exit status."""
    arguments = _bare_profile(arguments)
    try:
        with stops_on_signals():
            code = typer.main.get_command(app).main(list(arguments), prog_name="polyfed", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (_Closed, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 1
    except KeyboardInterrupt as error:
        return _said("interrupted", exit_status(error))
    except PolyfedError as error:
        code = exit_status(error) if isinstance(error, Interrupted) else error.exit_status
        alone = "whole rounds" in str(error) and "same command" not in str(error)  # of several runs, it says how
        hint = "; go on with --resume" if isinstance(error, Interrupted) and alone else ""
        return _said(f"{error}{hint}", code)
    except Exception as error:
        if hasattr(error, "format_message"):  # the argument parser's own
            return _said(_usage(error, arguments), 2)
        if os.environ.get("POLYFED_DEBUG"):
            raise
        return _said(f"{type(error).__name__}: {error} (POLYFED_DEBUG=1 shows where)", 1)


def _bare_profile(arguments: Sequence[str]) -> list[str]:
    """``polyfed run ... --profile`` without a value is ``--timings``; the word behind it is a value if it can be one.

    It can be none if it is an option or names a recipe's file, or where there is none.

    >>> _bare_profile(["run", "--profile", "a.toml"]), _bare_profile(["run", "a.toml", "--profile", "small"])
    (['run', '--timings', 'a.toml'], ['run', 'a.toml', '--profile', 'small'])
    """
    words = list(arguments)
    if words[:1] != ["run"]:
        return words
    behind = [*words[1:], ""]
    return [
        "--timings" if word == "--profile" and (not after or after.startswith("-") or after.endswith(".toml")) else word
        for word, after in zip(words, behind, strict=True)
    ]


def _said(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # a terminal that has gone
        _tell(f"polyfed: {text}")
    return code


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """One line for an unknown command or option, a missing argument, a value of the wrong kind."""
    text = " ".join(str(error.format_message()).split())
    text = text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    command = getattr(context, "command", None)
    place = getattr(context, "command_path", "polyfed")
    option = getattr(error, "option_name", None)
    if option is not None and "no such option" in text:
        known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
        return f"unknown option '{option}'{nearest(option, known | {'--help'})}"
    if text.startswith("no such command"):
        known = set(getattr(command, "commands", ()))
        words = [word for word in arguments if not word.startswith("-")]
        word = next(iter(words[len(place.split()) - 1 :]), "")
        return f"unknown command '{word}'{nearest(word, known)}"
    parameter = getattr(error, "param", None)
    words = [*getattr(parameter, "opts", ())]
    came = next((after for word, after in pairwise(arguments) if word in words), None)
    if came is None:
        came = next((a.partition("=")[2] for a in arguments if "=" in a and a.partition("=")[0] in words), None)
    if parameter is not None and came is not None and "valid integer" in text:
        return f"{words[0]}: expected a whole number, came '{came}'"
    text = text.rstrip(".") + ("" if came is None or f"'{came}'" in text else f", came '{came}'")
    return f"{text}; see '{place} --help'"
