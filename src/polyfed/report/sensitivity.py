"""How much a setting matters: the folders that `polyfed sweep` leaves, drawn again.

Accuracy against one setting (`polyfed.report.sweep_figure`), and for two settings that are numbers a map of both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.places import check_name
from polyfed.report.plot_style import SHADES, WIDTH, FigureWithData, add_colorbar, canvas, inches
from polyfed.report.run_records import format_setting
from polyfed.report.sweep_figure import figure_of
from polyfed.report.sweeps import SweepRow, SweepTable, short_names, to_json
from polyfed.results.fields import validated
from polyfed.results.main_score import main_score_of
from polyfed.results.read import SWEEP, check_links, parse_json
from polyfed.results.stored_files import StoredSweep

__all__ = ["GridMap", "is_sweep", "map_of", "read_sweep", "sensitivity"]


def is_sweep(folder: str | Path) -> bool:
    """Whether `polyfed sweep` has left its table there."""
    check_name(folder)
    return (Path(folder) / SWEEP).exists()


def read_sweep(folder: str | Path) -> SweepTable:
    """The table of a finished sweep.

    Raises:
        ConfigError: no ``sweep.json`` there, not one of this version, or a link.
    """
    check_links(Path(folder))
    path = Path(folder) / SWEEP
    try:
        stored = validated(StoredSweep, parse_json(path.read_bytes()))
        stored.check_settings()
    except OSError as error:
        raise ConfigError(f"expected the folder of a sweep, got {folder}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"expected {path} as `polyfed sweep` writes it, got another: {error}") from None
    return SweepTable(stored.keys, stored.caption, stored.rows, stored.notes, main_score_of([stored.score]))


def sensitivity(folder: str | Path) -> list[FigureWithData]:
    """``sensitivity``: accuracy against a swept number; ``sensitivity-map``: against two of them.

    Raises:
        ConfigError: no sweep there, or one in which no setting is a number with several values.
    """
    table = read_sweep(folder)
    rows = [row for row in table.rows if row.words]
    data = json.loads(to_json(table))
    flat = [{"method": row.method, **_shown(row), **_figures(row)} for row in rows]
    figure = figure_of(table)
    both = map_of(table)
    found = [] if figure is None else [FigureWithData("sensitivity", figure, data, flat)]
    if both is not None:
        found.append(FigureWithData("sensitivity-map", _draw(table, both), data, flat))
    if not found:
        keys = ", ".join(table.keys)
        raise ConfigError(f"nothing to draw: expected one or two swept settings, a number among them, got {keys}")
    return found


def _shown(row: SweepRow) -> dict[str, str]:
    return {key: format_setting(value) for key, value in row.settings.items()}


def _figures(row: SweepRow) -> dict[str, Any]:
    names = ("validation", "validation_std", "accuracy", "accuracy_std", "local", "difference", "chosen")
    return {name: getattr(row, name) for name in names}


# two settings -----------------------------------------------------------------------------------------------------


class GridMap:
    """Test accuracy over two settings: columns by the first key, rows by the second; None for what was not run."""

    def __init__(self, table: SweepTable) -> None:
        rows = [row for row in table.rows if row.words]
        self.across, self.up = table.keys
        self.columns, self.rows = (_values(rows, key) for key in table.keys)
        known = {(row.settings[self.up], row.settings[self.across]): row for row in rows}
        self.cells = [[known.get((up, across)) for across in self.columns] for up in self.rows]
        self.values = [[None if cell is None else cell.accuracy for cell in line] for line in self.cells]


def map_of(table: SweepTable) -> GridMap | None:
    """Of a sweep of two numbers with at least two values each; None for any other."""
    rows = [row for row in table.rows if row.words]
    if len(table.keys) != 2:
        return None
    numbers = [row.settings[key] for row in rows for key in table.keys]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
        return None
    return GridMap(table) if all(len(_values(rows, key)) > 1 for key in table.keys) else None


def _values(rows: Sequence[SweepRow], key: str) -> list[float]:
    return sorted({row.settings[key] for row in rows})


def _draw(table: SweepTable, both: GridMap) -> Any:
    from matplotlib.patches import Rectangle

    names = short_names(table.keys)
    score = table.score
    title = f"{score.of_it('Accuracy')} over {names[both.across]} and {names[both.up]}"
    about = f"{table.caption} Test {score.title_with_unit}; framed: chosen by validation."
    columns, rows = ([f"{value:g}" for value in values] for values in (both.columns, both.rows))
    column = max(0.5, inches(columns, 9) + 0.12)  # room for "100.0" and for the setting below it
    width = max(WIDTH, 1.2 + inches(rows, 9) + column * len(columns))
    figure, ((axes,),) = canvas(title, about, 0.9 + 0.42 * len(rows), width=width)
    nan = float("nan")
    values = [[nan if value is None else score.shown(value) for value in line] for line in both.values]
    shown = axes.imshow(values, cmap=SHADES, aspect="auto", origin="lower")
    low, high = shown.get_clim()
    for y, line in enumerate(both.cells):
        for x, cell in enumerate(line):
            if cell is None or cell.accuracy is None:
                continue
            value = score.shown(cell.accuracy)
            color = "white" if value > (low + high) / 2 else "black"
            said = f"{value:.1f}" if score.is_share else f"{value:.3g}"
            axes.text(x, y, said, ha="center", va="center", color=color)
            if cell.chosen:
                for color, width in (("white", 4.5), ("black", 2.0)):  # shows on light and dark
                    axes.add_patch(Rectangle((x - 0.46, y - 0.45), 0.92, 0.9, fill=False, ec=color, lw=width))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(both.across)
    axes.set_ylabel(both.up)
    add_colorbar(figure, shown, [axes], score.axis)
    return figure
