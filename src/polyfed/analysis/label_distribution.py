"""The label table: how many training samples of each class each client has trained on, as its run recorded it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from polyfed.errors import ConfigError
from polyfed.report.grouping import Group
from polyfed.report.plot_style import SHADES, FigureWithData, add_colorbar, canvas, shortened
from polyfed.report.run_records import RunRecord

__all__ = ["label_table", "plot_labels"]

_FEW = (30, 20)  # clients and classes up to which the counts are written into the cells
_SIZE = 8  # points of names and counts
_LONG = 24  # letters of a name
_NAME = 24  # letters of a client's
_ROW = 0.23  # inches, of a client's row with counts


def label_table(run: RunRecord) -> pd.DataFrame:
    """The counts that a run recorded: a row for each client, with its number and name; a column for each class.

    Columns are classes by name, as clients may have label spaces of their own; by number where no record names them.

    Raises:
        ConfigError: the run recorded none, as one that predicts numbers, or a server whose nodes know them alone.
    """
    rows = run.result.clients_table or []
    names = run.result.class_names or []
    counts: list[dict[str, int]] = []
    for row in rows:
        named = {str(number): name for number, name in enumerate(row.class_names or names)}
        counts.append({named.get(label, label): count for label, count in (row.labels or {}).items()})
    if not any(counts):
        raise ConfigError(f"expected training samples by class in the result.json of {run.path}, got none")
    columns = list(dict.fromkeys([*names, *(name for row in counts for name in row)]))
    index = [f"{row.id} {run.result.client_name(row.id):.{_NAME}}".rstrip() for row in rows]
    return pd.DataFrame(counts, index=index, columns=columns).fillna(0).astype(int)


def plot_labels(group: Group, stem: str = "labels") -> FigureWithData:
    """Of a group's first run: clients down, classes across, a shade for each count; the count itself where clients and
    classes are few.
    """
    run = group.runs[0]
    table = label_table(run)
    architectures = [row.architecture for row in run.result.clients_table or []]
    clients, classes = table.shape
    few = clients <= _FEW[0] and classes <= _FEW[1]
    about = f"{group.about.rsplit(', ', 1)[0]}, seed {run.seed}. Training samples by client and class."
    names = list(table.index)
    if few:
        names = [f"{kind}  {name}" for kind, name in zip(shortened(architectures, _LONG), names, strict=True)]
    columns = shortened(list(table), _LONG)
    figure, ((axes,),) = canvas("Label table", about, _ROW * clients + 1.0 if few else 4.0)
    shown = axes.imshow(table, cmap=SHADES, vmin=0, aspect="auto", interpolation="nearest", gid="counts")
    for y, row in enumerate(table.to_numpy() if few else ()):
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
    by_client = table.reset_index(drop=True).assign(architecture=architectures).rename_axis("client").reset_index()
    rows = by_client.melt(["client", "architecture"], var_name="class", value_name="samples")
    return FigureWithData(stem, figure, about, rows.sort_values("client", kind="stable"))


def _every(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Ticks, and a name at each of at most so many."""
    step = -(-len(names) // most)
    return list(range(0, len(names), step)), list(names[::step])
