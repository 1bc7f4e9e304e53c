"""The label table: how many training samples of each class each client has trained on, as its run recorded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.errors import ConfigError
from polyfed.records.schema import ClientRow
from polyfed.report.grouping import Group
from polyfed.report.plot_style import SHADES, FigureWithData, add_colorbar, canvas, shortened
from polyfed.report.run_records import RunRecord

__all__ = ["label_table", "plot_labels"]

_FEW = (30, 20)  # clients and classes up to which the counts are written into the cells
_SIZE = 8  # points of names and counts
_LONG = 24  # letters of a name
_NAME = 24  # letters of a client's
_ROW = 0.23  # inches, of a client's row with counts


def label_table(run: RunRecord) -> dict[str, Any]:
    """The counts that a run recorded, "matrix" (clients x classes) with the names of "rows" and "columns", as JSON.

    Columns are classes by name, as clients may have label spaces of their own.

    Raises:
        ConfigError: the run recorded none, as one that predicts numbers, or a server whose nodes know them alone.
    """
    table = run.result.clients_table or []
    names = run.result.class_names or []
    counts = [_by_name(row, names) for row in table]
    columns = list(dict.fromkeys([*names, *(name for row in counts for name in row)]))
    if not any(counts):
        raise ConfigError(f"expected training samples by class in the result.json of {run.path}, got none")
    return {
        "about": f"Training samples of each class that each client holds, seed {run.seed}.",
        "seed": run.seed,
        "matrix": [[row.get(name, 0) for name in columns] for row in counts],
        "rows": [f"{row.id} {run.result.client_name(row.id):.{_NAME}}".rstrip() for row in table],
        "columns": columns,
        "row_axis": "client",
        "column_axis": "class",
        "architectures": [row.architecture for row in table],
    }


def _by_name(row: ClientRow, names: Sequence[str]) -> Mapping[str, int]:
    """A client's counts by the name of the class; by its number where no record names it."""
    known = {str(number): name for number, name in enumerate(row.class_names or names)}
    return {known.get(label, label): count for label, count in (row.labels or {}).items()}


def plot_labels(group: Group, table: Mapping[str, Any], stem: str = "labels") -> FigureWithData:
    """Clients down, classes across, a shade for each count; the count itself where clients and classes are few."""
    counts = table["matrix"]
    clients = len(counts)
    classes = len(counts[0])
    few = clients <= _FEW[0] and classes <= _FEW[1]
    about = f"{group.about.rsplit(', ', 1)[0]}, seed {table['seed']}. Training samples by client and class."
    names = table["rows"]
    if few:
        architectures = shortened(table["architectures"], _LONG)
        names = [f"{architecture}  {name}" for architecture, name in zip(architectures, names, strict=True)]
    columns = shortened(table["columns"], _LONG)
    height = _ROW * clients + 1.0 if few else 4.0
    figure, ((axes,),) = canvas("Label table", about, height)
    shown = axes.imshow(counts, cmap=SHADES, vmin=0, aspect="auto", interpolation="nearest", gid="counts")
    for y, row in enumerate(counts if few else ()):
        for x, count in enumerate(row):
            if count:
                color = "white" if count > shown.get_clim()[1] / 2 else "black"
                axes.text(x, y, str(count), ha="center", va="center", fontsize=_SIZE, color=color)
    add_colorbar(figure, shown, [axes], "samples")
    long = max(map(len, columns)) > 3
    aslant = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axes.set_yticks(*_every(names, 30), fontsize=_SIZE)
    axes.set_xticks(*_every(columns, _FEW[1]), fontsize=_SIZE, **aslant)
    axes.set_ylabel("client")
    axes.set_xlabel("class")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    rows = [
        {"client": client, "architecture": table["architectures"][client], "class": label, "samples": count}
        for client, row in enumerate(counts)
        for label, count in enumerate(row)
    ]
    return FigureWithData(stem, figure, {**table, "about": about}, rows)


def _every(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Ticks, and a name at each of at most so many."""
    step = -(-len(names) // most)
    return list(range(0, len(names), step)), list(names[::step])
