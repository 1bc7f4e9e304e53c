"""Commands that read finished runs: report, predict, export, audit leakage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.options import ModelStage, OwnDevice, Trust
from polyfed.cli.output import all_problems_listed, print_files, print_stderr, print_text, terminal_width
from polyfed.escaping import client_text


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders above them.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [the first DIR].")] = None,
    clients: Annotated[bool, typer.Option("--clients", help="Print a line for each client, too.")] = False,
    target: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Also what it took to reach an accuracy, such as 0.6.")
    ] = None,
) -> None:
    """Table, curves and a page of finished runs.

    Prints the table, and writes it (md, csv), what each client has (csv), the curves (png, svg) and
    report.html, one page with all of it.

    \b
    polyfed report runs/quickstart --clients
    polyfed report runs/quickstart --target 0.6
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.report.comparison import compare_runs
    from polyfed.report.comparison_tables import to_text
    from polyfed.report.html_report import write_report
    from polyfed.report.run_records import load_runs

    table = compare_runs(load_runs(folders), target)
    place = folders[0] if out is None else out
    files = write_report(table, place)
    print_text(to_text(table, terminal_width(), clients=clients))
    print_files(files)


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="An image file or a folder of them, a .csv or a .npy file.",
            show_default=False,
        ),
    ],
    client: Annotated[str, typer.Option(metavar="CLIENT", help="Whose model: a number or a name.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="Where to write; - is standard output.")] = Path("-"),
    device: OwnDevice = "cpu",
    stage: ModelStage = None,
    trust: Trust = False,
) -> None:
    """Use a client's model on new data.

    Writes a row per input: its row number or file, the class's number and name, the probability; or the number that is
    predicted. Where the data have labels, in the run's own column or one of a usual name, the accuracy (or the RMSE) is
    printed. Texts are read with the run's own words; texts without any of them are listed.

    \b
    polyfed predict runs/mine --client 3 photos --out photos.csv
    polyfed predict runs/mine --client north new.csv
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments import prediction
    from polyfed.records.read import write_whole

    with all_problems_listed(print_stderr):
        found = prediction.predict(run, client, data, stage=stage, device=device, trust=trust)
    to_file = str(out) != "-"
    model = found.model
    if model.name:
        print_stderr(f"model of {client_text(model.client, model.name)}")
    if to_file:
        write_whole(out, found.to_csv().encode())
    else:
        print_text(found.to_csv().removesuffix("\n"))
    score_text = None if found.accuracy is None else f"accuracy {100 * found.accuracy:.2f} %"
    if found.rmse is not None:
        score_text = f"RMSE {found.rmse:.4g}"
    if score_text is not None:
        score_text += f" of {len(found.names)} inputs with labels"
        print(score_text, file=sys.stdout if to_file else sys.stderr)  # not among the rows, where these are printed
    if found.unknown:
        rows = ", ".join(found.unknown[:10])
        more = ", ..." if len(found.unknown) > 10 else ""
        told = f"{len(found.unknown)} of {len(found.names)} texts have no word that the run knows"
        print_stderr(f"{told}: rows {rows}{more}")
    if to_file:
        print_files([out])


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What to write: a .pt2 or .onnx file.", show_default=False)
    ],
    client: Annotated[str, typer.Option(metavar="CLIENT", help="Whose model: a number or a name.", show_default=False)],
    stage: ModelStage = None,
    trust: Trust = False,
) -> None:
    """Write a client's model as a program that runs without polyfed.

    From inputs as the run stored them to the scores of polyfed predict, with all that the method predicts by. A .pt2
    file is for torch.export.load, an .onnx file for other runtimes (pip install 'polyfed[onnx]').

    \b
    polyfed export runs/mine client-3.pt2 --client 3
    polyfed export runs/mine north.onnx --client north
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments.exported_model import export_model

    print_files([export_model(run, client, file, stage=stage, trust=trust)])


def leakage(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or folders above them.", show_default=False),
    ],
    images: Annotated[
        int, typer.Option(metavar="NUMBER", help="How many features or class means are turned into images; 0 for none.")
    ] = 4,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Steps of Adam for each.")] = 300,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [RUN/attack].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report that the folder holds.")] = False,
    trust: Trust = False,
) -> None:
    """Report what a curious server learns, method by method.

    The last rounds of finished runs are run once more, and their messages read: what is uploaded, what it states in
    the clear, which rows a client trained on (loss threshold), which classes it has, and images reconstructed from
    features, class means or sums. Prints the tables, and writes their numbers (json) and the images (png, svg).

    \b
    polyfed audit leakage runs/fedavg
    polyfed audit leakage runs/leakage --images 2 --out leakage
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed import attacks
    from polyfed.attacks.audit import to_text

    found, files = attacks.leakage(
        runs,
        images=images,
        steps=steps,
        out=out,
        overwrite=overwrite,
        trust=trust,
        say=print_stderr,
    )
    print_text(to_text(found, terminal_width()))
    print_files(files)
