"""Options that several commands have, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyfed.errors import ConfigError
from polyfed.registry import EXECUTORS, LOGGERS

DEVICES = "cpu, or an NVIDIA GPU: cuda, the second cuda:1"

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe's file.", show_default=False)]
RecipeOption = Annotated[Path, typer.Option("--recipe", metavar="RECIPE.toml", help="The recipe's file.")]
MethodName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A method, a variant from the recipe's [methods], or one of your own: package.module:Class.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: --set data.num_clients=20. May be repeated."),
]
PresetNames = Annotated[
    str | None, typer.Option(metavar="NAME", help="Lay a table of the recipe's [presets] over it; or several: A,B.")
]
Seed = Annotated[int | None, typer.Option(metavar="NUMBER", help="The seed of every random draw.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help=f"{DEVICES} [the recipe's].")]
OwnDevice = Annotated[str, typer.Option(metavar="NAME", help=f"{DEVICES}.")]
Workers = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="Clients that train at the same time [the cores; GPU: 32].")
]
Executor = Annotated[
    str | None,
    typer.Option(metavar="NAME", help=f"Who does the clients' work: {', '.join(EXECUTORS)} [the recipe's]."),
]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--logger", metavar="NAME", help=f"Live curves: {', '.join(sorted({*LOGGERS} - {'console'}))}. May be repeated."
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the code that the folder names: only if it is yours, or you have read it."),
]
ModelStage = Annotated[
    str | None,
    typer.Option(
        "--stage",
        metavar="NAME",
        help="received, as the server sends it, or personal, as the client keeps it [the one that the run has scored].",
    ),
]
RunFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder [runs/RECIPE-METHOD-seedN].")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run that the folder holds; a finished one, too, for more rounds."),
]
ReplaceRun = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run that the folder holds, and its analyses.")
]
RunAgain = Annotated[bool, typer.Option("--overwrite", help="Run again what is done already.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def with_loggers(overrides: Sequence[str] | None, loggers: Sequence[str] | None) -> list[str]:
    """The overrides, and ``--logger`` as one of them."""
    chosen = [f"run.loggers={list(loggers)}"] if loggers else []
    return [*(overrides or ()), *chosen]


def parse_names(text: str, option: str = "--methods", example: str = "local,fedgh") -> list[str]:
    """``"local,fedgh"`` to its names; raises `ConfigError` for an empty one. option: whose value it is."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"expected {option} as names with commas between ({example}), got '{text}'")
    return names


def parse_seeds(text: str) -> list[int]:
    """``"0,1,2"``, the seeds of `--seeds`, to [0, 1, 2]; raises `ConfigError` for anything else."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"expected --seeds as whole numbers with commas between (0,1,2), got '{text}'") from None
