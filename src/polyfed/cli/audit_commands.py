"""The commands of `polyfed audit`: what finished runs have given away: attack, leakage, epsilon."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.options import AsJson, OwnDevice, Trust, parse_names, parse_numbers
from polyfed.cli.output import print_files, print_json, print_stderr, print_text, terminal_width


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
    sources: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="s_in, s_out or both of FedIN's features [s_in]; prototypes; rows."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Steps of Adam.")] = 1000,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of the noise that images are made from.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [RUN/attack].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the attack that the folder holds.")] = False,
    device: OwnDevice = "cpu",
    trust: Trust = False,
) -> None:
    """Reconstruct a client's images from what it sent.

    For methods that upload features (FedIN) or class means: of representations (FedGH, FedProto, FedSA, FedSAF, FedTGP,
    FedORGP, ProtoNorm), where the attacker knows the client's network, or of a map that everybody knows (closed-form).
    Prints the table, and writes it (json) and the images (png, svg). Needs the run's data, to compare with.

    \b
    polyfed audit attack runs/fedin --noise 0,0.4,0.8,1.2
    polyfed audit attack runs/fedgh --client 3 --images 2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed import attacks
    from polyfed.attacks.reconstruction import to_text

    found, files = attacks.attack(
        run,
        client=client,
        images=images,
        noise=None if noise is None else parse_numbers(noise, "--noise", float, "0,0.8"),
        sources=None if sources is None else parse_names(sources, "--sources", "s_in,s_out"),
        steps=steps,
        seed=seed,
        device=device,
        out=out,
        overwrite=overwrite,
        trust=trust,
    )
    print_text(to_text(found, terminal_width()))
    print_files(files)


def leakage(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or folders above them.", show_default=False),
    ],
    shadows: Annotated[int, typer.Option(metavar="NUMBER", help="Shadow models per client and kind; 0: no LiRA.")] = 16,
    shadow_data: Annotated[
        str, typer.Option(metavar="NAME", help="What the attacker has to train them on: others' rows, or the holdout.")
    ] = "others",
    clients: Annotated[int | None, typer.Option(metavar="NUMBER", help="The first so many clients [all].")] = None,
    images: Annotated[int, typer.Option(metavar="NUMBER", help="Images to make again; 0: none.")] = 4,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Steps of Adam for each.")] = 300,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of all of the attacker's draws.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [RUN/attack].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report that the folder holds.")] = False,
    trust: Trust = False,
) -> None:
    """Report what a curious server learns, method by method.

    From the messages of finished runs, made again by running their last rounds once more: what goes up, what it states
    in the clear, which rows a client trained on (loss threshold and LiRA), which classes it has, and images made again.
    Prints the table, and writes it (md, json) and the ROC curves (png, svg).

    \b
    polyfed audit leakage runs/fedavg
    polyfed audit leakage runs/leakage --shadows 32 --out leakage
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed import attacks
    from polyfed.attacks.audit import to_text

    found, files = attacks.leakage(
        runs,
        shadows=shadows,
        shadow_data=shadow_data,  # type: ignore[arg-type]  # which checks it
        clients=clients,
        images=images,
        steps=steps,
        seed=seed,
        out=out,
        overwrite=overwrite,
        trust=trust,
        say=print_stderr,
    )
    print_text(to_text(found, terminal_width()))
    print_files(files)


def epsilon(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders above them.", show_default=False)
    ],
    delta: Annotated[float | None, typer.Option(metavar="NUMBER", help="At which [each run's own].")] = None,
    json: AsJson = False,
) -> None:
    """What runs have cost in privacy, by two accountants.

    \b
    polyfed audit epsilon runs/fedin-privacy --delta 1e-6
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments.privacy_report import privacy_costs, to_text

    found = privacy_costs(folders, delta)
    if json:
        print_json([dataclasses.asdict(one) for one in found])
    else:
        print_text(to_text(found, terminal_width()))
