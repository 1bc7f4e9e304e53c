"""A comparison as people and machines read it: aligned text, Markdown, LaTeX; CSV and JSON.

CSV and JSON hold accuracies in [0, 1] and exact bytes; the other formats show per cent and KiB/MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.escaping import csv_text, json_text, markdown_text
from polyfed.markup import Line, curves, details, notes, paragraph
from polyfed.markup import table as as_html
from polyfed.places import shown_place
from polyfed.report.comparison_columns import (
    COSTS,
    METRICS,
    SubTable,
    architecture_tables,
    columns_of,
    decomposition_tables,
    interval_tables,
    metrics_of,
    notes_of,
    paper_tables,
    repeated_columns,
    sub_tables,
    target_tables,
)
from polyfed.report.comparison_rows import ComparisonGroup, ComparisonRow
from polyfed.report.decomposition import Decomposition
from polyfed.report.text_tables import (
    Column,
    escape_latex,
    latex_table,
    markdown_table,
    min_width,
    render_text,
    wrap_columns,
    wrapped,
)
from polyfed.results.main_score import RMSE

_LATEX_WIDTH = 56  # letters, which are 3.3 inches in 9 points

__all__ = ["FORMATS", "Table", "markdown_body", "to_csv", "to_html", "to_json", "to_latex", "to_markdown", "to_text"]


@dataclass(frozen=True)
class Table:
    """The comparison: one section for each set of comparable runs, and notes on runs left out.

    overview: tables over several sections (`polyfed.report.leave_one_out`).
    """

    sections: tuple[ComparisonGroup, ...]
    notes: tuple[str, ...] = ()
    overview: tuple[SubTable, ...] = ()

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        told = [f"{len(section.rows)} methods: {section.finding}" for section in self.sections]
        return f"Table({' | '.join(told)})"

    def _repr_html_(self) -> str:
        return to_html(self)


# for machines -----------------------------------------------------------------------------------------------------
def to_csv(table: Table) -> str:
    """All sections in one sheet: a line per row, with the evaluation in columns of its own; None is empty."""
    rows = [row for section in table.sections for row in section.rows]
    groups = {"accuracy_by_stage": "accuracy", "accuracy_by_predictor": "accuracy_by"}
    groups |= {"accuracy_by_classes": "classes", "held_out": "held_out"}
    groups |= {"accuracy_per_architecture": "architecture", "metrics": "", "epsilon": "epsilon"}
    keys = {group: dict.fromkeys(key for row in rows for key in getattr(row, group)) for group in groups}
    lines: list[dict[str, Any]] = []
    for number, section in enumerate(table.sections, start=1):
        decomposed = {one.name: _decomposed(one) for one in section.decompositions}
        for row in section.rows:
            line = {"table": number, **asdict(section.facts), "name": row.name, **asdict(row)}
            line["seeds"] = " ".join(map(str, row.seeds))
            line["difference_seeds"] = " ".join(map(str, row.difference_seeds))
            for key in ("runs", "against_rival", "to_target", "published"):
                del line[key]
            for group, prefix in groups.items():
                found = line.pop(group)
                line |= {_head(prefix, key): found.get(key) for key in keys[group]}
            lines.append(section.score.renamed(line) | _more(row) | decomposed.get(row.name, {}))
    for line in lines:
        _drop_unknown(line, table)
    heads = dict.fromkeys(["table", *(key for line in lines for key in line)])
    return csv_text(list(heads), lines)


def _drop_unknown(line: dict[str, Any], table: Table) -> None:
    """Columns of which no row of the table has anything."""
    rows = [row for section in table.sections for row in section.rows]
    if all(row.simulated_seconds is None for row in rows):
        _drop_simulated(line)
    if not any(row.control for row in rows):
        del line["control"]
    if all(section.facts.held_out_group is None for section in table.sections):
        del line["held_out_group"]


def _drop_simulated(line: dict[str, Any]) -> None:
    """Where nothing is simulated, nothing is said of it."""
    for key in ("simulated_seconds", "target_simulated_seconds"):
        line.pop(key, None)


def _head(prefix: str, key: str) -> str:
    """A column's name; a figure of the user's own keeps out of the way of the other columns."""
    prefix = prefix or ("" if key in (*METRICS, *RMSE.metrics) else "metric")
    return f"{prefix}_{key}" if prefix else key


def _more(row: ComparisonRow) -> dict[str, Any]:
    """The best rival, the target and the paper's numbers, as cells."""
    rival = row.against_rival
    needed = row.to_target
    cells = {f"rival_difference{key}": getattr(rival, of) for key, of in (("", "mean"), ("_std", "std"))}
    cells |= {"rival_difference_margin": rival.margin, "rival_seeds": " ".join(map(str, rival.seeds))}
    if needed is not None:
        cells |= {f"target_{key}": value for key, value in vars(needed).items() if key != "by_seed"}
    for one in row.published:
        place = f"published {one.table} {one.quantity}"
        cells |= {f"{place}: {key}": getattr(one, key) for key in ("ours", "ours_spread", "theirs", "theirs_spread")}
        cells |= {f"{place}: {key}": getattr(one, key) for key in ("unit", "stage", "difference", "spread", "mark")}
    return cells


def _decomposed(one: Decomposition) -> dict[str, Any]:
    """A decomposition, as cells."""
    cells: dict[str, Any] = {}
    parts = {"gain": one.gain, "gain_alone": one.alone, "federated_gain": one.federated, "over_longer": one.longer}
    for name, difference in parts.items():
        cells |= {name: difference.mean, f"{name}_std": difference.std, f"{name}_margin": difference.margin}
    return cells | {"gain_seeds": " ".join(map(str, one.gain.seeds)), "way_to_pooled": one.way}


def to_json(table: Table) -> str:
    """Everything, exact, with what each run gave."""
    tables = [_plain(section) for section in table.sections]
    return json_text({"tables": tables, "notes": list(table.notes)}, indent=2) + "\n"


def _plain(section: ComparisonGroup) -> dict[str, Any]:
    found = asdict(section)
    del found["score"]
    for row in found["rows"]:
        row["runs"] = [section.score.renamed(run | {"path": shown_place(run["path"])}) for run in row["runs"]]
    found["rows"] = list(map(section.score.renamed, found["rows"]))
    if all(row.simulated_seconds is None for row in section.rows):
        for row in found["rows"]:
            _drop_simulated(row)
            _drop_simulated(row["to_target"] or {})
    for key in ("accuracy_by_classes", "held_out"):
        if not any(getattr(row, key) for row in section.rows):
            for row in found["rows"]:
                row.pop(next(iter(section.score.renamed({key: None}))))
    if not any(row.control for row in section.rows):
        del found["decompositions"]
        for row in found["rows"]:
            del row["control"]
    facts = found.pop("facts")
    if facts["held_out_group"] is None:
        del facts["held_out_group"]
    return {"finding": found.pop("finding"), "caption": found.pop("caption"), **facts, **found}


# for people -------------------------------------------------------------------------------------------------------
def to_markdown(table: Table) -> str:
    """GitHub's tables, each under its caption; what leads a column is bold."""
    blocks = [_markdown_titled(title, columns) for title, columns in table.overview]
    blocks += [f"**{markdown_text(section.caption)}**\n\n{markdown_body(section)}" for section in table.sections]
    if table.notes:
        blocks.append("\n".join(f"- {markdown_text(note)}" for note in table.notes) + "\n")
    return "\n".join(blocks)


def _markdown_titled(title: str, columns: Sequence[Column]) -> str:
    return f"**{markdown_text(title)}**\n\n{markdown_table(columns)}\n"


def markdown_body(section: ComparisonGroup) -> str:
    """The tables and notes of a section, without its caption."""
    (_, main), *more = sub_tables(section)
    told = "\n".join(f"- {markdown_text(note)}" for note in notes_of(section))
    others = "".join(f"{markdown_text(title)}:\n\n{markdown_table(columns)}\n\n" for title, columns in more)
    return f"{markdown_table(main)}\n\n{others}{told}\n"


def to_html(table: Table, lines: Sequence[Sequence[Line]] = ()) -> str:
    """For notebooks: the result in words, the table, what else there is to be opened.

    Args:
        table: what to show. lines: of each section the curves that go with it.
    """
    parts = [f"{paragraph(title, strong=True)}{_html(columns)}" for title, columns in table.overview]
    for number, section in enumerate(table.sections):
        (_, whole), *more = sub_tables(section)
        others = [f"{paragraph(title)}{_html(columns)}" for title, columns in [("All figures", whole), *more]]
        parts += [paragraph(section.finding, strong=True), paragraph(section.caption), _html(columns_of(section))]
        if number < len(lines):
            parts.append(curves(lines[number], "round", f"test {section.score.title_with_unit}, mean over seeds"))
        parts.append(details("More", "".join([*others, notes(notes_of(section))])))
    return "".join([*parts, notes(table.notes)])


def _html(columns: Sequence[Column]) -> str:
    headings = [column.heading.replace("\n", " ") for column in columns]
    words = [place for place, column in enumerate(columns) if column.words]
    bold = [(row, place) for place, column in enumerate(columns) for row in column.bold]
    return as_html(headings, list(zip(*(column.cells for column in columns), strict=True)), words, bold)


def _latex_titled(caption: str, columns: Sequence[Column], told: Sequence[str] = ()) -> str:
    """Cut into parts, one above the other, that fit a column of a paper in two columns."""
    below = "".join(f"\\par {escape_latex(note)}\n" for note in told)
    parts = "\n\\par\\medskip\n".join(map(latex_table, wrap_columns(columns, _LATEX_WIDTH)))
    return (
        "\\begin{table}\n\\centering\n"
        f"\\caption{{{escape_latex(caption)}}}\n"
        f"\\small\\setlength{{\\tabcolsep}}{{3pt}}\n{parts}\n{below}\\end{{table}}\n"
    )


def to_latex(table: Table) -> str:
    """A ``table`` with ``booktabs`` rules for each section and each of its further tables; what leads is bold.

    Of a section's own columns those that a paper shows; all are in the other formats.
    """
    blocks = [_latex_titled(title, columns) for title, columns in table.overview]
    for section in table.sections:
        _, *more = sub_tables(section)
        shown = [("", _latex_columns(section)), *more]
        for number, (title, columns) in enumerate(shown, start=1):
            caption = f"{title}. {section.caption}" if title else section.caption
            told = notes_of(section) if number == len(shown) else []
            blocks.append(_latex_titled(caption, columns, told))
    return (
        "% needs \\usepackage{booktabs}\n"
        + "\n".join(blocks)
        + "".join(f"% {' '.join(note.split())}\n" for note in table.notes)
    )


def _latex_columns(section: ComparisonGroup) -> list[Column]:
    """Who, how good, how much better than Local, for the worst client, at the cost of how many bytes."""
    left_out = {column.heading for column in metrics_of(section)} | {*section.extra_stages, "std\nclients", COSTS[2]}
    return [column for column in columns_of(section) if column.heading not in left_out]


def to_text(table: Table, width: int = 100, ascii_only: bool = False, metrics: bool = False) -> str:
    """Aligned plain text; long names wrap so that it fits ``width`` columns where the numbers leave room.

    Args:
        table: what to show.
        width: columns to aim for.
        ascii_only: write "+/-" for "±", for terminals that are not UTF-8.
        metrics: also the figures beside the accuracy, and the accuracies by architecture, in blocks of their own.
    """
    blocks = [f"{_text_titled(title, columns, width)}\n" for title, columns in table.overview]
    blocks += [_text_section(section, width, metrics) for section in table.sections]
    if table.notes:
        blocks.append("\n".join(wrapped(f"note: {note}", width) for note in table.notes) + "\n")
    text = "\n".join(blocks)
    return text.replace("±", "+/-").encode("ascii", "replace").decode("ascii") if ascii_only else text


def _text_section(section: ComparisonGroup, width: int, metrics: bool) -> str:
    columns = columns_of(section)
    blocks = [columns]
    if min_width(columns) > width:  # costs move into a block of their own below
        costs = [column for column in columns if column.heading in COSTS]
        scores = [column for column in columns if column not in costs]
        blocks = wrap_columns(scores, width)
        if len(blocks) > 1 and min_width([*blocks[-1], *costs]) <= width:  # what is left over has room for them
            blocks[-1] += costs
        else:
            blocks += wrap_columns([columns[0], *costs], width)
    if metrics:
        hidden = repeated_columns(section, metrics)
        known = [c for c in metrics_of(section) if set(c.cells) != {"-"} and c.heading not in hidden]
        blocks += [[columns[0], *known]] if known else []
    texts = [render_text(block, width) for block in blocks]
    more = [*decomposition_tables(section), *interval_tables(section), *target_tables(section), *paper_tables(section)]
    if metrics:
        more += architecture_tables(section)
    for title, columns in more:
        texts.append(_text_titled(title, columns, width))
    told = "\n".join(wrapped(note, width) for note in notes_of(section, metrics))
    return "\n\n".join([wrapped(section.caption, width), *texts, told]) + "\n"


def _text_titled(title: str, columns: Sequence[Column], width: int) -> str:
    found = [render_text(block, width) for block in wrap_columns(columns, width)]
    return wrapped(f"{title}:", width) + "\n\n" + "\n\n".join(found)


FORMATS = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex, "txt": to_text}
