"""A comparison as people and machines read it: aligned text, Markdown, LaTeX; CSV and JSON.

CSV and JSON hold accuracies in [0, 1] and exact bytes; the other formats show per cent and KiB/MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.escaping import csv_text, markdown_text
from polyfed.markup import Line, curves, details, notes, paragraph
from polyfed.markup import table as as_html
from polyfed.report.paper_results import Beside
from polyfed.report.statistics import Paired, ToTarget
from polyfed.report.text_tables import (
    Column,
    in_width,
    interval,
    interval_of_share,
    latex,
    latex_table,
    markdown_table,
    narrowest,
    percent,
    text_block,
    with_spread,
    wrapped,
)
from polyfed.units import human_bytes, human_seconds

__all__ = [
    "FORMATS",
    "Row",
    "Section",
    "Table",
    "notes_of",
    "sheets",
    "to_csv",
    "to_html",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_text",
]


# what there is to show --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """One method or variant over its seeds. Accuracies in [0, 1]; None is "not known". Means are over seeds.

    A margin is half the width of the 95 % interval of the mean (Student's t).

    Attributes:
        name: method or label, with the knobs that tell variants apart.
        method: the method's registered name.
        stage: the stage that the accuracies were scored in.
        seeds: the seeds averaged over.
        accuracy: last round, mean over clients.
        accuracy_std_seeds: sample standard deviation over seeds; None with one seed.
        accuracy_margin: of the mean over seeds; None with fewer than three.
        accuracy_std_clients: standard deviation over clients.
        accuracy_min_client: the lowest client.
        accuracy_worst_tenth: mean of the lowest tenth of the clients.
        accuracy_best_by_validation: test accuracy in the round that was best on validation data.
        accuracy_best_std_seeds, accuracy_best_margin: of that, over seeds.
        accuracy_by_stage: every stage scored in all of the row's runs.
        accuracy_by_predictor: of the row's stage, by the method's other predictors, where all runs have them.
        accuracy_per_architecture: mean over its clients, for every architecture in all of the row's runs; empty where
            another stage than the runs' own is shown.
        metrics: "balanced_accuracy", "f1", "auc": means over clients, as far as all of the row's runs recorded them.
        bytes_up: clients to server, one whole run; an int when all seeds agree.
        bytes_down: server to clients, likewise.
        seconds: one whole run.
        simulated_seconds: what it would have taken on the clients' devices; None where none are simulated.
        refused: uploads refused, summed over the runs.
        nothing_learnt: in how many of the runs no client's work ever counted.
        difference: accuracy minus Local's, paired on the seeds that both have.
        difference_std: sample standard deviation of those differences.
        difference_margin: of their mean.
        difference_seeds: the seeds paired.
        rival: the best other row but Local: of those that share most seeds with this one, the highest accuracy on
            these; "" where there is none.
        against_rival: accuracy minus the rival's, paired by seed.
        to_target: what it took to reach the target asked for; None where none was.
        epsilon: by unit (client, sample), of all that was released in a run; the largest over the runs.
        published: beside what a paper prints for the row.
        runs: what each run gave, with its folder.
    """

    name: str
    method: str
    stage: str
    seeds: tuple[int, ...]
    accuracy: float | None
    accuracy_std_seeds: float | None
    accuracy_margin: float | None
    accuracy_std_clients: float | None
    accuracy_min_client: float | None
    accuracy_worst_tenth: float | None
    accuracy_best_by_validation: float | None
    accuracy_best_std_seeds: float | None
    accuracy_best_margin: float | None
    accuracy_by_stage: Mapping[str, float]
    accuracy_by_predictor: Mapping[str, float]
    accuracy_per_architecture: Mapping[str, float]
    metrics: Mapping[str, float]
    bytes_up: float | None
    bytes_down: float | None
    seconds: float | None
    simulated_seconds: float | None
    refused: int
    nothing_learnt: int
    difference: float | None
    difference_std: float | None
    difference_margin: float | None
    difference_seeds: tuple[int, ...]
    rival: str
    against_rival: Paired
    to_target: ToTarget | None
    epsilon: Mapping[str, float]
    published: tuple[Beside, ...]
    runs: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Section:
    """One table: comparable runs under one caption.

    Attributes:
        finding: the result in words (`polyfed.report.findings`).
        caption: data, clients, rounds, seeds, what the accuracies are, and what is scaled down.
        facts: the same for machines: dataset, clients, rounds, seeds, test, mean, profile.
        rows: Local first.
        notes: what the columns mean, what a reader must know about these runs, the papers' footnotes.
        models: the architectures of the clients, as far as recipes say.
        versions: of what the numbers depend on.
        published: the papers' tables that stand beside.
        footnotes: a footnote's name -> its number among the notes.
        leaders: "accuracy", "best_by_validation" or a stage -> the row that leads there
            (`polyfed.report.statistics.leader`); what nobody leads is left out.
    """

    finding: str
    caption: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    models: tuple[str, ...]
    versions: Mapping[str, str]
    published: tuple[str, ...]
    footnotes: Mapping[str, int]
    leaders: Mapping[str, str]

    @property
    def extra_stages(self) -> list[str]:
        """The stages that get a column of their own: all that were scored, less the one that every row shows anyway."""
        scored = dict.fromkeys(stage for row in self.rows for stage in row.accuracy_by_stage)
        own = {row.stage for row in self.rows}
        return [stage for stage in scored if own != {stage}]

    @property
    def predictors(self) -> list[str]:
        """The other predictors by which any row was scored, too."""
        return list(dict.fromkeys(name for row in self.rows for name in row.accuracy_by_predictor))

    @property
    def units(self) -> list[str]:
        """Those that an epsilon is told for."""
        return list(dict.fromkeys(unit for row in self.rows for unit in row.epsilon))


@dataclass(frozen=True)
class Table:
    """The comparison: one section for each set of comparable runs, and notes on runs left out."""

    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()

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
    groups |= {"accuracy_per_architecture": "architecture", "metrics": "", "epsilon": "epsilon"}
    keys = {group: dict.fromkeys(key for row in rows for key in getattr(row, group)) for group in groups}
    lines: list[dict[str, Any]] = []
    for number, section in enumerate(table.sections, start=1):
        for row in section.rows:
            line = {"table": number, **section.facts, "name": row.name, **asdict(row)}
            line["seeds"] = " ".join(map(str, row.seeds))
            line["difference_seeds"] = " ".join(map(str, row.difference_seeds))
            for key in ("runs", "against_rival", "to_target", "published"):
                del line[key]
            for group, prefix in groups.items():
                found = line.pop(group)
                line |= {_head(prefix, key): found.get(key) for key in keys[group]}
            lines.append(line | _more(row))
    if all(row.simulated_seconds is None for row in rows):
        for line in lines:
            _drop_simulated(line)
    heads = dict.fromkeys(["table", *(key for line in lines for key in line)])
    return csv_text(list(heads), lines)


def _drop_simulated(line: dict[str, Any]) -> None:
    """Where nothing is simulated, nothing is said of it."""
    for key in ("simulated_seconds", "target_simulated_seconds"):
        line.pop(key, None)


def _head(prefix: str, key: str) -> str:
    """A column's name; a figure of the user's own keeps out of the way of the other columns."""
    prefix = prefix or ("" if key in _METRICS else "metric")
    return f"{prefix}_{key}" if prefix else key


def _more(row: Row) -> dict[str, Any]:
    """The best rival, the target and the paper's numbers, as cells."""
    rival, needed = row.against_rival, row.to_target
    cells = {f"rival_difference{key}": getattr(rival, of) for key, of in (("", "mean"), ("_std", "std"))}
    cells |= {"rival_difference_margin": rival.margin, "rival_seeds": " ".join(map(str, rival.seeds))}
    if needed is not None:
        cells |= {f"target_{key}": value for key, value in vars(needed).items() if key != "by_seed"}
    for one in row.published:
        place = f"published {one.table} {one.quantity}"
        cells |= {f"{place}: {key}": getattr(one, key) for key in ("ours", "ours_spread", "theirs", "theirs_spread")}
        cells |= {f"{place}: {key}": getattr(one, key) for key in ("unit", "stage", "difference", "spread", "mark")}
    return cells


def to_json(table: Table) -> str:
    """Everything, exact, with what each run gave."""
    tables = [_plain(section) for section in table.sections]
    return json.dumps({"tables": tables, "notes": list(table.notes)}, indent=2, ensure_ascii=False) + "\n"


def _plain(section: Section) -> dict[str, Any]:
    found = asdict(section)
    if all(row.simulated_seconds is None for row in section.rows):
        for row in found["rows"]:
            _drop_simulated(row)
            _drop_simulated(row["to_target"] or {})
    return {"finding": found.pop("finding"), "caption": found.pop("caption"), **found.pop("facts"), **found}


# for people -------------------------------------------------------------------------------------------------------
_BY_ARCHITECTURE = "Accuracy in % by architecture"
_OVER_SEEDS = "95 % intervals of the mean over seeds, in %; differences are paired by seed, in percentage points"
_REFUSED = "refused"
_SIMULATED = "simulated\ntime"
_COSTS = ("bytes\nup", "bytes\ndown", "time", _REFUSED, _SIMULATED)
_METRICS = {"balanced_accuracy": "balanced\naccuracy", "f1": "macro\nF1", "auc": "macro\nAUC"}

Sheet = tuple[str, list[Column]]


def _columns(section: Section, metrics: bool = False) -> list[Column]:
    """What people see, with the other figures on request. Columns in which nothing is known are left out, and scores
    that are the same as others.
    """
    rows = section.rows
    columns = [_names_of(section)]
    if len({row.stage for row in rows}) > 1:
        columns.append(Column("stage", [row.stage for row in rows], words=True))
    if len({row.seeds for row in rows}) > 1:
        columns.append(Column("seeds", [" ".join(map(str, row.seeds)) for row in rows], words=True))
    repeated = _repeated(section, metrics)
    accuracy, *others = (column for column in _scores(section, metrics) if column.heading not in repeated)
    numbers = [
        Column("vs Local", with_spread([(row.difference, row.difference_std) for row in rows], sign="+")),
        *others,
        *(Column(f"epsilon\n{unit}", [_number(row.epsilon.get(unit)) for row in rows]) for unit in section.units),
        Column(_COSTS[0], ["-" if row.bytes_up is None else human_bytes(row.bytes_up) for row in rows]),
        Column(_COSTS[1], ["-" if row.bytes_down is None else human_bytes(row.bytes_down) for row in rows]),
        Column(_COSTS[2], [_seconds(row.seconds) for row in rows]),
        Column(_SIMULATED, [_seconds(row.simulated_seconds) for row in rows]),
        Column(_REFUSED, [str(row.refused or "-") for row in rows]),
    ]
    return [*columns, accuracy, *(column for column in numbers if set(column.cells) != {"-"})]


def _scores(section: Section, metrics: bool) -> list[Column]:
    """The accuracy, and what else was scored."""
    rows = section.rows
    bests = [row.accuracy_best_by_validation for row in rows]
    return [
        Column(
            "accuracy",
            with_spread([(row.accuracy, row.accuracy_std_seeds) for row in rows]),
            bold=_bold(section, "accuracy"),
        ),
        Column("std\nclients", [percent(row.accuracy_std_clients) for row in rows]),
        Column("min\nclient", [percent(row.accuracy_min_client) for row in rows]),
        Column("best by\nvalid.", [percent(best) for best in bests], bold=_bold(section, "best_by_validation")),
        *(_of_stage(section, stage) for stage in section.extra_stages),
        *(Column(f"by\n{p}", [percent(row.accuracy_by_predictor.get(p)) for row in rows]) for p in section.predictors),
        *(_metrics_of(section) if metrics else ()),
    ]


def _bold(section: Section, key: str) -> frozenset[int]:
    """The place of the row that leads a column, if one does."""
    return frozenset(at for at, row in enumerate(section.rows) if row.name == section.leaders.get(key))


def _repeated(section: Section, metrics: bool) -> dict[str, str]:
    """The scores that are those of a column before them in every row: heading -> that one's."""
    shown: dict[str, list[str]] = {}
    repeated: dict[str, str] = {}
    for column in _scores(section, metrics):
        values = [cell.partition(" ±")[0] for cell in column.cells]
        alike = [heading for heading, others in shown.items() if values == others and set(values) != {"-"}]
        if alike:
            repeated[column.heading] = alike[0]
        else:
            shown[column.heading] = values
    return repeated


def notes_of(section: Section, metrics: bool = True) -> list[str]:
    """The section's notes, and which columns are not shown."""
    repeated = _repeated(section, metrics)
    named = [f"{one} (as {other})".replace("\n", " ") for one, other in repeated.items()]
    left_out = [f"not shown, as another column says the same: {', '.join(named)}"] if named else []
    return [*section.notes, *left_out]


def _seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _names_of(section: Section) -> Column:
    return Column("method", [f"{row.name}{_learnt_nothing(row)}" for row in section.rows], words=True)


def _learnt_nothing(row: Row) -> str:
    """Behind a row's name: that its accuracy is that of networks as they began."""
    if not row.nothing_learnt:
        return ""
    some = f" in {row.nothing_learnt} of {len(row.seeds)} runs" if row.nothing_learnt < len(row.seeds) else ""
    return f" (nothing learnt{some})"


def _of_stage(section: Section, stage: str) -> Column:
    found = [row.accuracy_by_stage.get(stage) for row in section.rows]
    return Column(stage, list(map(percent, found)), bold=_bold(section, stage))


def _metrics_of(section: Section) -> list[Column]:
    """The figures beside the accuracy; those of the user's own, whose unit nobody knows here, as they are."""
    lowest = Column("lowest\ntenth", [percent(row.accuracy_worst_tenth) for row in section.rows])
    others = [(h, [percent(row.metrics.get(key)) for row in section.rows]) for key, h in _METRICS.items()]
    own = sorted({name for row in section.rows for name in row.metrics} - set(_METRICS))
    others += [(n, [f"{row.metrics[n]:.4g}" if n in row.metrics else "-" for row in section.rows]) for n in own]
    return [lowest, *(Column(heading, cells) for heading, cells in others)]


def _by_architecture(section: Section) -> list[Sheet]:
    """The accuracies by architecture; nothing where all clients have the same."""
    names = list(dict.fromkeys(name for row in section.rows for name in row.accuracy_per_architecture))
    cells = {name: [percent(row.accuracy_per_architecture.get(name)) for row in section.rows] for name in names}
    columns = [_names_of(section), *(Column(name, cells[name]) for name in names)]
    return [(_BY_ARCHITECTURE, columns)] if len(names) > 1 else []


def _over_seeds(section: Section) -> list[Sheet]:
    """The intervals; nothing where no row has seeds enough."""
    rows = section.rows
    if all(row.accuracy_margin is None for row in rows):
        return []
    last = [interval_of_share(row.accuracy, row.accuracy_margin) for row in rows]
    best = [interval_of_share(row.accuracy_best_by_validation, row.accuracy_best_margin) for row in rows]
    columns = [
        Column("accuracy", last),
        *([] if best == last else [Column("best by\nvalid.", best)]),
        Column("minus\nLocal", [interval(row.difference, row.difference_margin, "+") for row in rows]),
        Column("best\nrival", [row.rival or "-" for row in rows], words=True),
        Column("minus\nrival", with_spread([(row.against_rival.mean, row.against_rival.std) for row in rows], "+")),
        Column("interval", [interval(row.against_rival.mean, row.against_rival.margin, "+") for row in rows]),
    ]
    return [(_OVER_SEEDS, [_names_of(section), *(column for column in columns if set(column.cells) != {"-"})])]


def _to_target(section: Section) -> list[Sheet]:
    """Rounds, bytes and seconds; nothing where no target was asked for."""
    needed = [row.to_target for row in section.rows]
    found = [one for one in needed if one is not None]
    if not found:
        return []
    rounds = [(None, None) if one is None else (one.rounds, one.rounds_std) for one in needed]
    columns = [
        _names_of(section),
        Column("seeds that\nreached it", ["-" if one is None else f"{one.reached} of {one.runs}" for one in needed]),
        Column("below it\nagain", ["-" if one is None or not one.reached else str(one.lost) for one in needed]),
        Column("rounds", _numbers(rounds, 1)),
        Column("bytes", ["-" if one is None or one.bytes is None else human_bytes(one.bytes) for one in needed]),
        Column("time", [_seconds(None if one is None else one.seconds) for one in needed]),
    ]
    simulated = Column(_SIMULATED, [_seconds(None if one is None else one.simulated_seconds) for one in needed])
    columns += [simulated] if set(simulated.cells) != {"-"} else []
    return [(f"To reach an accuracy of {percent(found[0].accuracy)} %, means over seeds", columns)]


def _numbers(pairs: Sequence[tuple[float | None, float | None]], decimals: int) -> list[str]:
    """``"12.3 ± 0.6"``; a spread that is not known stays away."""
    return [
        "-" if mean is None else f"{mean:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
        for mean, spread in pairs
    ]


def _published(section: Section) -> Iterator[Sheet]:
    """Ours beside the papers', a table for each of their tables and quantities; only rows that they have."""
    every = [(row, one) for row in section.rows for one in row.published]
    for place, setting, quantity, unit in dict.fromkeys((b.table, b.setting, b.quantity, b.unit) for _, b in every):
        pairs = [(r, b) for r, b in every if (b.table, b.setting, b.quantity) == (place, setting, quantity)]
        found = [one for _, one in pairs]
        decimals = 1 if unit == "rounds" else 2
        ours = _numbers([(one.ours, one.ours_spread) for one in found], decimals)
        theirs = _numbers([(one.theirs, one.theirs_spread) for one in found], decimals)
        marked = [cell + _footnotes(section, one) for cell, one in zip(theirs, found, strict=True)]
        differences = ["-" if one.difference is None else f"{one.difference:+.{decimals}f}" for one in found]
        columns = [
            Column("method", [row.name for row, _ in pairs], words=True),
            Column("stage", [one.stage for one in found], words=True),
            Column("seeds", [" ".join(map(str, one.seeds)) for one in found], words=True),
            Column("ours", ours),
            Column("paper", marked),
            Column("difference", differences),
            Column("mark", [one.mark or "-" for one in found], words=True),
        ]
        where = ", ".join(part for part in (place, setting) if part)
        yield f"Beside the paper: {where}: {quantity}{f' [{unit}]' if unit not in ('', 'rounds') else ''}", columns


def _footnotes(section: Section, one: Beside) -> str:
    """The footnotes' numbers behind a printed figure: " [1, 4]"."""
    numbers = sorted(section.footnotes[name] for name in one.footnotes)
    return f" [{', '.join(map(str, numbers))}]" if numbers else ""


def sheets(section: Section) -> list[Sheet]:
    """All that people see of a section: the table under its caption (no title), then those with titles of their own."""
    more = [*_over_seeds(section), *_to_target(section), *_published(section), *_by_architecture(section)]
    return [("", _columns(section, metrics=True)), *more]


def to_markdown(table: Table) -> str:
    """GitHub's tables, each under its caption; what leads a column is bold."""
    blocks = [f"**{markdown_text(section.caption)}**\n\n{markdown_body(section)}" for section in table.sections]
    if table.notes:
        blocks.append("\n".join(f"- {markdown_text(note)}" for note in table.notes) + "\n")
    return "\n".join(blocks)


def markdown_body(section: Section) -> str:
    """The tables and notes of a section, without its caption."""
    (_, main), *more = sheets(section)
    told = "\n".join(f"- {markdown_text(note)}" for note in notes_of(section))
    others = "".join(f"{markdown_text(title)}:\n\n{markdown_table(columns)}\n\n" for title, columns in more)
    return f"{markdown_table(main)}\n\n{others}{told}\n"


def to_html(table: Table, lines: Sequence[Sequence[Line]] = ()) -> str:
    """For notebooks: the result in words, the table, what else there is to be opened.

    Args:
        table: what to show. lines: of each section the curves that go with it.
    """
    parts = []
    for number, section in enumerate(table.sections):
        (_, whole), *more = sheets(section)
        others = [f"{paragraph(title)}{_html(columns)}" for title, columns in [("All figures", whole), *more]]
        parts += [paragraph(section.finding, strong=True), paragraph(section.caption), _html(_columns(section))]
        if number < len(lines):
            parts.append(curves(lines[number], "round", "test accuracy in %, mean over seeds"))
        parts.append(details("More", "".join([*others, notes(notes_of(section))])))
    return "".join([*parts, notes(table.notes)])


def _html(columns: Sequence[Column]) -> str:
    headings = [column.heading.replace("\n", " ") for column in columns]
    words = [place for place, column in enumerate(columns) if column.words]
    bold = [(row, place) for place, column in enumerate(columns) for row in column.bold]
    return as_html(headings, list(zip(*(column.cells for column in columns), strict=True)), words, bold)


def to_latex(table: Table) -> str:
    """A ``table`` with ``booktabs`` rules for each section and each of its further tables; what leads is bold."""
    blocks = []
    for section in table.sections:
        shown = sheets(section)
        for number, (title, columns) in enumerate(shown, start=1):
            caption = f"{title}. {section.caption}" if title else section.caption
            told = notes_of(section) if number == len(shown) else []
            blocks.append(
                "\\begin{table}\n\\centering\n"
                f"\\caption{{{latex(caption)}}}\n"
                f"{latex_table(columns)}\n"
                + "".join(f"\\par\\small {latex(note)}\n" for note in told)
                + "\\end{table}\n"
            )
    return (
        "% needs \\usepackage{booktabs}\n"
        + "\n".join(blocks)
        + "".join(f"% {' '.join(note.split())}\n" for note in table.notes)
    )


def to_text(table: Table, width: int = 100, ascii_only: bool = False, metrics: bool = False) -> str:
    """Aligned plain text; long names wrap so that it fits ``width`` columns where the numbers leave room.

    Args:
        table: what to show.
        width: columns to aim for.
        ascii_only: write "+/-" for "±", for terminals that are not UTF-8.
        metrics: also the figures beside the accuracy, and the accuracies by architecture, in blocks of their own.
    """
    blocks = [_text_section(section, width, metrics) for section in table.sections]
    if table.notes:
        blocks.append("\n".join(wrapped(f"note: {note}", width) for note in table.notes) + "\n")
    text = "\n".join(blocks)
    return text.replace("±", "+/-").encode("ascii", "replace").decode("ascii") if ascii_only else text


def _text_section(section: Section, width: int, metrics: bool) -> str:
    columns = _columns(section)
    blocks = [columns]
    if narrowest(columns) > width:  # costs move into a block of their own below
        costs = [column for column in columns if column.heading in _COSTS]
        scores = [column for column in columns if column not in costs]
        blocks = in_width(scores, width)
        if len(blocks) > 1 and narrowest([*blocks[-1], *costs]) <= width:  # what is left over has room for them
            blocks[-1] += costs
        else:
            blocks += in_width([columns[0], *costs], width)
    if metrics:
        hidden = _repeated(section, metrics)
        known = [c for c in _metrics_of(section) if set(c.cells) != {"-"} and c.heading not in hidden]
        blocks += [[columns[0], *known]] if known else []
    texts = [text_block(block, width) for block in blocks]
    more = [*_over_seeds(section), *_to_target(section), *_published(section)]
    for title, sheet in [*more, *(_by_architecture(section) if metrics else ())]:
        found = [text_block(block, width) for block in in_width(sheet, width)]
        texts.append(wrapped(f"{title}:", width) + "\n\n" + "\n\n".join(found))
    told = "\n".join(wrapped(note, width) for note in notes_of(section, metrics))
    return "\n\n".join([wrapped(section.caption, width), *texts, told]) + "\n"


FORMATS = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex, "txt": to_text}
