"""All figures by name, and the one call that draws them from run folders, with their numbers beside them.

All of them are made of records alone. `polyfed.load` gives the clients' networks for what looks into these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.errors import ConfigError
from polyfed.markup import image, notes
from polyfed.records.read import ANALYSIS, check_links
from polyfed.registry import suggest
from polyfed.report.figures import axes_of, clients, curve_drawings, gain_drawings
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import FigureWithData
from polyfed.report.run_records import RunRecord, load_runs, rows_of_pooled

__all__ = ["FIGURES", "Plot", "plot"]

_OF_STAGES = ("curves", "gains")  # figures that the option `stage` is for


@dataclass(frozen=True)
class Plot:
    """What `plot` leaves behind; in a notebook the figures.

    files: all that was written. notes: what was left out, and why.
    """

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        return "".join(image(file) for file in self.files if file.suffix == ".png") + notes(self.notes)


def plot(
    folders: str | Path | Iterable[str | Path],
    figures: Sequence[str] | None = None,
    out: str | Path | None = None,
    *,
    stage: str | None = None,
) -> Plot:
    """Draw figures of finished runs, each as PNG and SVG, with its numbers beside it as JSON and CSV.

    Args:
        folders: run folders, or folders above them; the folder of a sweep.
        figures: names in `FIGURES`; by default all that these folders allow.
        out: where to; by default ``analysis`` in the first folder.
        stage: scoring stage of curves and gains; None: each run's own.

    Raises:
        ConfigError: an unknown figure, one that these folders do not allow, an option that no figure uses.
    """
    given = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
    for name in figures or ():
        if name not in FIGURES:
            raise ConfigError(f"unknown figure '{name}'{suggest(name, FIGURES)}")
    if not given or (figures is not None and not figures):
        raise ConfigError(f"expected at least one {'figure' if given else 'run folder'}, got none")
    chosen = list(dict.fromkeys(figures or FIGURES))
    if stage is not None and not {*_OF_STAGES} & {*chosen}:
        expected = " or ".join(_OF_STAGES)
        raise ConfigError(f"stage: expected a figure that uses it ({expected}), got {', '.join(chosen)}")
    runs = _Runs(given, stage)
    drawings = []
    left_out = []
    for name in chosen:
        try:
            drawings += FIGURES[name](runs)
        except ConfigError as error:
            if figures is not None:
                raise
            left_out.append(f"left out: {name}: {error}")
    left_out += [f"left out: {note}" for run in runs.found if not run.finished for note in run.notes]
    if not drawings:
        raise ConfigError("; ".join(left_out) or "nothing to draw")
    if out is None:
        check_links(given[0])
    place = given[0] / ANALYSIS if out is None else Path(out)
    files = [file for drawing in drawings for file in drawing.write(place)]
    return Plot(tuple(files), tuple(left_out))


@dataclass
class _Runs:
    """The runs of an analysis, read once."""

    given: Sequence[Path]
    stage: str | None

    @functools.cached_property
    def found(self) -> list[RunRecord]:
        return load_runs(self.given)

    @functools.cached_property
    def groups(self) -> list[Group]:
        return group_runs(rows_of_pooled(self.found), self.stage)[0]


FIGURES: dict[str, Callable[[_Runs], list[FigureWithData]]] = {
    "curves": lambda runs: [
        drawing for x in axes_of(runs.groups) for drawing in curve_drawings(runs.groups, x, runs.stage)
    ],
    "clients": lambda runs: clients(runs.groups),
    "gains": lambda runs: gain_drawings(runs.groups, runs.stage),
}
