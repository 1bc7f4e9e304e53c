"""The label table of a partition: how many training samples of each class each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.analysis.probe_inputs import load_run_data
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.report.grouping import Group
from polyfed.report.plot_style import SHADES, WIDTH, FigureWithData, add_colorbar, canvas, inches, shortened
from polyfed.report.run_records import RunRecord

__all__ = ["LabelTable", "label_table", "plot_labels"]

_FEW = (30, 20)  # clients and classes up to which the counts are written into the cells
_SIZE = 8  # points of names and counts
_LONG = 36  # letters of a name
_ROW = 0.23  # inches, of a client's row with counts
_BESIDE = 1.3  # inches, of what stands beside the cells: the axis' label, the scale of shades


@dataclass(frozen=True)
class LabelTable:
    """counts: clients x classes, training samples. architectures: of the clients, where they are recorded."""

    seed: int
    counts: tuple[tuple[int, ...], ...]
    class_names: tuple[str, ...]
    architectures: tuple[str | None, ...]

    def map(self) -> dict[str, Any]:
        """The table with the names of its rows and columns, as JSON takes it."""
        about = f"Training samples of each class that each client holds, seed {self.seed}."
        rows = [str(client) for client in range(len(self.counts))]
        names = {"rows": rows, "columns": list(self.class_names), "row_axis": "client", "column_axis": "class"}
        return {"about": about, "matrix": [list(row) for row in self.counts], **names}


def label_table(run: RunRecord, data: DataCache | None = None) -> LabelTable:
    """Deal the run's data again, and count.

    Raises:
        ConfigError: see `load_run_data`.
    """
    dealt = load_run_data(run, data)
    if dealt.source.is_regression:
        raise ConfigError(f"expected a run on classes, got {run.path}, which predicts numbers")
    counts = tuple(tuple(map(int, row)) for row in dealt.label_table)
    table = run.result.clients_table
    architectures = tuple(row.architecture for row in table) if table else (None,) * len(counts)
    names = tuple(dealt.source.class_names) or tuple(map(str, range(dealt.classes)))
    return LabelTable(run.seed, counts, names, architectures)


def plot_labels(group: Group, table: LabelTable, stem: str = "labels") -> FigureWithData:
    """Clients down, classes across, a shade for each count; the count itself where clients and classes are few.

    The figure is as wide as counts and names ask for.
    """
    clients = len(table.counts)
    classes = len(table.counts[0])
    few = clients <= _FEW[0] and classes <= _FEW[1]
    about = f"{group.about.rsplit(', ', 1)[0]}, seed {table.seed}. Training samples by client and class."
    known = few and None not in table.architectures
    names = [str(client) for client in range(clients)]
    if known:
        architectures = shortened([str(name) for name in table.architectures], _LONG)
        names = [f"{architecture}  {name}" for architecture, name in zip(architectures, names, strict=True)]
    columns = shortened(table.class_names, _LONG)
    width = WIDTH
    if few:
        cell = inches([str(count) for row in table.counts for count in row], _SIZE) + 0.08
        width = max(WIDTH, inches(names, _SIZE) + classes * cell + _BESIDE)
    beside = (width - inches(names, _SIZE) - _BESIDE) / min(classes, _FEW[1])
    turned = inches(columns, _SIZE) + 0.05 > beside
    below = 0.3 + (inches(columns, _SIZE) * 0.71 if turned else 0.2)
    height = _ROW * clients if few else min(4.0, max(1.6, 0.05 * clients))
    figure, ((axes,),) = canvas("Label table of the partition", about, height + below, width=width)
    shown = axes.imshow(table.counts, cmap=SHADES, vmin=0, aspect="auto", interpolation="nearest", gid="counts")
    if few:
        _numbers(axes, table.counts, dark=shown.get_clim()[1] / 2)
    add_colorbar(figure, shown, [axes], "samples")
    aslant = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    axes.set_yticks(*_every(names, 30), fontsize=_SIZE)
    axes.set_xticks(*_every(columns, _FEW[1]), fontsize=_SIZE, **aslant)
    axes.set_ylabel("client")
    axes.set_xlabel("class")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    rows = [
        {"client": client, "architecture": table.architectures[client], "class": label, "samples": count}
        for client, row in enumerate(table.counts)
        for label, count in enumerate(row)
    ]
    return FigureWithData(stem, figure, {**table.map(), "about": about, "seed": table.seed}, rows)


def _numbers(axes: Any, counts: Sequence[Sequence[int]], dark: float) -> None:
    for y, row in enumerate(counts):
        for x, count in enumerate(row):
            if count:
                color = "white" if count > dark else "black"
                axes.text(x, y, str(count), ha="center", va="center", fontsize=_SIZE, color=color)


def _every(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Ticks, and a name at each of at most so many."""
    step = -(-len(names) // most)
    return list(range(0, len(names), step)), list(names[::step])
