"""The command of `polyfed audit`: what finished runs have given away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.options import Trust
from polyfed.cli.output import print_files, print_stderr, print_text, terminal_width


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
