"""The label table of a partition: how many training samples of each class each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.analysis.inputs import dealt_as_in
from polyfed.report.folders import RunRecord
from polyfed.report.grouping import Group
from polyfed.report.style import SHADES, Drawing, canvas, colour_bar
from polyfed.session import Prepared

__all__ = ["LabelTable", "draw_table", "label_table"]

_FEW = (30, 20)  # clients and classes up to which the counts are written into the cells


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


def label_table(run: RunRecord, data: Prepared | None = None) -> LabelTable:
    """Deal the run's data again, and count.

    Raises:
        RequestError: see `dealt_as_in`.
    """
    dealt = dealt_as_in(run, data)
    counts = tuple(tuple(map(int, row)) for row in dealt.label_table)
    table = run.result.get("clients_table") or [{} for _ in counts]
    names = tuple(dealt.source.class_names) or tuple(map(str, range(dealt.classes)))
    return LabelTable(run.seed, counts, names, tuple(row.get("architecture") for row in table))


def draw_table(group: Group, table: LabelTable, stem: str = "labels") -> Drawing:
    """Clients down, classes across, a shade for each count; the count itself where there is room."""
    clients, classes = len(table.counts), len(table.counts[0])
    few = clients <= _FEW[0] and classes <= _FEW[1]
    about = f"{group.about.rsplit(', ', 1)[0]}, seed {table.seed}. Training samples by client and class."
    height = 0.6 + (0.23 * clients if few else min(4.0, max(1.6, 0.05 * clients)))
    figure, ((axes,),) = canvas("Label table of the partition", about, height)
    shown = axes.imshow(table.counts, cmap=SHADES, vmin=0, aspect="auto", interpolation="nearest", gid="counts")
    if few:
        _numbers(axes, table.counts, dark=shown.get_clim()[1] / 2)
    colour_bar(figure, shown, [axes], "samples")
    known = few and None not in table.architectures
    names = [f"{table.architectures[client]}  {client}" if known else str(client) for client in range(clients)]
    axes.set_yticks(*_every(names, 30), fontsize=8)
    axes.set_xticks(*_every(table.class_names, 20), fontsize=8, **_turned(table.class_names))
    axes.set_ylabel("client")
    axes.set_xlabel("class")
    rows = [
        {"client": client, "architecture": table.architectures[client], "class": label, "samples": count}
        for client, row in enumerate(table.counts)
        for label, count in enumerate(row)
    ]
    return Drawing(stem, figure, {**table.map(), "about": about, "seed": table.seed}, rows)


def _numbers(axes: Any, counts: Sequence[Sequence[int]], dark: float) -> None:
    for y, row in enumerate(counts):
        for x, count in enumerate(row):
            if count:
                colour = "white" if count > dark else "black"
                axes.text(x, y, str(count), ha="center", va="center", fontsize=8, color=colour)


def _every(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Ticks, and a name at each of at most so many."""
    step = -(-len(names) // most)
    return list(range(0, len(names), step)), list(names[::step])


def _turned(names: Sequence[str]) -> dict[str, Any]:
    fit = sum(len(name) + 1 for name in names[:: -(-len(names) // 20)]) < 45
    return {} if fit else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
