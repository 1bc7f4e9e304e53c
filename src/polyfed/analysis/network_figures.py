"""All figures by name, and the one call that draws them from run folders, with their numbers beside them.

Those of records alone come from `polyfed.report` (curves, clients, gains) and from here (labels); those that look into
the clients' networks (cka, tsne) need torch, data and models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyfed.errors import ConfigError
from polyfed.markup import image, notes
from polyfed.records.read import ANALYSIS, check_links
from polyfed.registry import suggest
from polyfed.report.figures import axes_of, clients, curve_drawings, gain_drawings
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import FigureWithData
from polyfed.report.run_records import RunRecord, load_runs, rows_of_pooled

if TYPE_CHECKING:
    from polyfed.analysis.representations import GroupRepresentations

__all__ = ["FIGURES", "Plot", "plot"]

Found = TypeVar("Found")
_INPUTS = 1000  # inputs of cka and tsne, unless told otherwise
_USED_BY = {"stage": ("curves", "gains"), "inputs": ("cka", "tsne")}


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
    inputs: int | None = None,
    trust: bool = False,
) -> Plot:
    """Draw figures of finished runs, each as PNG and SVG, with its numbers beside it as JSON and CSV.

    Args:
        folders: run folders, or folders above them; the folder of a sweep.
        figures: names in `FIGURES`; by default all that these folders allow.
        out: where to; by default ``analysis`` in the first folder.
        stage: scoring stage of curves and gains; None: each run's own.
        inputs: how many all clients see in cka and tsne, see `polyfed.analysis.representations.common_inputs`;
            default 1000.
        trust: whether code that the folders name ("package.module:name") may be imported, for cka and tsne.

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
    _check_options({"stage": stage, "inputs": inputs}, chosen)
    runs = _Runs(given, stage, inputs or _INPUTS, chosen, trust)
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


def _check_options(options: Mapping[str, Any], chosen: Sequence[str]) -> None:
    """Whether a figure uses each option that is given."""
    for option, used_by in _USED_BY.items():
        if options[option] is not None and not set(used_by) & set(chosen):
            expected = " or ".join(used_by)
            raise ConfigError(f"{option}: expected a figure that uses it ({expected}), got {', '.join(chosen)}")
    if options["inputs"] is not None and options["inputs"] < 2:
        raise ConfigError(f"inputs: expected at least 2, got {options['inputs']}")


@dataclass
class _Runs:
    """The runs of an analysis, read once; what several figures need of the clients' networks is made once."""

    given: Sequence[Path]
    stage: str | None
    inputs: int
    chosen: Sequence[str]
    trust: bool

    @functools.cached_property
    def found(self) -> list[RunRecord]:
        return load_runs(self.given, self.trust)

    @functools.cached_property
    def groups(self) -> list[Group]:
        return group_runs(rows_of_pooled(self.found), self.stage)[0]

    @functools.cached_property
    def represented(self) -> list[GroupRepresentations]:
        """What the clients' networks make of common inputs: one pass for all figures that need it."""
        from polyfed.analysis.representations import represent_runs

        return represent_runs(
            self.found,
            inputs=self.inputs,
            kernels="cka" in self.chosen,
            vectors="tsne" in self.chosen,
        )


def _labels(runs: _Runs) -> list[FigureWithData]:
    from polyfed.analysis.label_distribution import plot_labels

    return [plot_labels(group, f"labels{end}") for group, end in _numbered(runs.groups)]


def _numbered(groups: Sequence[Found]) -> Iterator[tuple[Found, str]]:
    """Each group, and how the names of its files end: with its number, where there are several."""
    for number, group in enumerate(groups, start=1):
        yield group, f"-{number}" if len(groups) > 1 else ""


def _cka(runs: _Runs) -> list[FigureWithData]:
    from polyfed.analysis.cka import draw_maps

    return [draw_maps(one.group, one.runs, one.seed, f"cka{end}") for one, end in _numbered(runs.represented)]


def _tsne(runs: _Runs) -> list[FigureWithData]:
    from polyfed.analysis.tsne import draw_panels, embeddings

    drawings: list[FigureWithData] = []
    for one, end in _numbered(runs.represented):
        mine = [each for each in one.runs if each.run.seed == one.seed]
        found = [panel for each in mine for panel in embeddings(each)]
        drawings.append(draw_panels(one.group, found, mine[0].inputs, f"tsne{end}"))
    return drawings


FIGURES: dict[str, Callable[[_Runs], list[FigureWithData]]] = {
    "curves": lambda runs: [
        drawing for x in axes_of(runs.groups) for drawing in curve_drawings(runs.groups, x, runs.stage)
    ],
    "clients": lambda runs: clients(runs.groups),
    "gains": lambda runs: gain_drawings(runs.groups, runs.stage),
    "labels": _labels,
    "cka": _cka,
    "tsne": _tsne,
}
