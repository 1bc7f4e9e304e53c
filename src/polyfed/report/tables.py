"""The comparison table: methods down, accuracy, cost and the difference to Local across; one table per experiment.

Runs of one name are averaged over their seeds. "±" is the sample standard deviation over seeds (n - 1) and is left
blank with one seed: a spread over one run is unknown, not zero. The best round is the one best on validation data,
never on test data. CSV and JSON hold accuracies in [0, 1] and exact bytes; the other formats show percent and KiB/MiB.
The other figures that the runs recorded (lowest tenth of the clients, balanced accuracy, F1, AUC) and the accuracies by
architecture are in all files; plain text shows them on request, since they would not fit a terminal beside the rest.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import RequestError
from polyfed.registry import nearest
from polyfed.report.columns import (
    Column,
    finite,
    in_width,
    markdown_table,
    mean_of,
    narrowest,
    percent,
    std_of,
    text_block,
    with_spread,
    wrapped,
)
from polyfed.report.folders import RunRecord
from polyfed.report.grouping import Group, group_runs
from polyfed.report.writing import make_folder, write_whole
from polyfed.units import human_bytes, human_seconds

__all__ = [
    "Row",
    "Section",
    "Table",
    "comparison",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_text",
    "write",
]


@dataclass(frozen=True)
class Row:
    """One method or variant over its seeds. Accuracies in [0, 1]; None is "not known". Means are over seeds.

    Attributes:
        name: method or label, with the knobs that tell variants apart.
        method: the method's registered name.
        stage: the stage that the accuracies were scored in.
        seeds: the seeds averaged over.
        accuracy: last round, mean over clients.
        accuracy_std_seeds: sample standard deviation over seeds; None with one seed.
        accuracy_std_clients: standard deviation over clients.
        accuracy_min_client: the lowest client.
        accuracy_worst_tenth: mean of the lowest tenth of the clients.
        accuracy_best_by_validation: test accuracy in the round that was best on validation data.
        accuracy_by_stage: every stage scored in all of the row's runs.
        accuracy_by_predictor: of the row's stage, by the method's other predictors, where all runs have them.
        accuracy_per_architecture: mean over its clients, for every architecture in all of the row's runs; empty where
            another stage than the runs' own is shown.
        metrics: "balanced_accuracy", "f1", "auc": means over clients, as far as all of the row's runs recorded them.
        bytes_up: clients to server, one whole run; an int when all seeds agree.
        bytes_down: server to clients, likewise.
        seconds: one whole run.
        refused: uploads refused, summed over the runs.
        difference: accuracy minus Local's, paired on the seeds that both have.
        difference_std: sample standard deviation of those differences.
        difference_seeds: the seeds paired.
        runs: what each run gave, with its folder.
    """

    name: str
    method: str
    stage: str
    seeds: tuple[int, ...]
    accuracy: float | None
    accuracy_std_seeds: float | None
    accuracy_std_clients: float | None
    accuracy_min_client: float | None
    accuracy_worst_tenth: float | None
    accuracy_best_by_validation: float | None
    accuracy_by_stage: Mapping[str, float]
    accuracy_by_predictor: Mapping[str, float]
    accuracy_per_architecture: Mapping[str, float]
    metrics: Mapping[str, float]
    bytes_up: float | None
    bytes_down: float | None
    seconds: float | None
    refused: int
    difference: float | None
    difference_std: float | None
    difference_seeds: tuple[int, ...]
    runs: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Section:
    """One table: comparable runs under one caption.

    Attributes:
        caption: data, clients, rounds, seeds and what the accuracies are.
        facts: the same for machines: dataset, clients, rounds, seeds, test, mean.
        rows: Local first.
        notes: what the columns mean, and what a reader must know about these runs.
    """

    caption: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

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


@dataclass(frozen=True)
class Table:
    """The comparison: one section for each set of comparable runs, and notes on runs left out."""

    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return to_text(self)


# building -------------------------------------------------------------------------------------------------------
def comparison(runs: Iterable[RunRecord], stage: str | None = None) -> Table:
    """Compare runs, grouped by name over seeds; different data, clients or rounds give separate tables.

    Args:
        runs: from ``find_runs``.
        stage: which stage to compare; by default each run's own evaluation.

    Raises:
        RequestError: no finished run, two runs with the same name and seed, or a run without the stage.
    """
    groups, notes = group_runs(runs, stage)
    return Table(tuple(_section(group, stage) for group in groups), notes)


def _section(group: Group, stage: str | None) -> Section:
    notes = list(group.notes)
    local = [name for name, runs in group.rows.items() if runs[0].method == "local"]
    if len(local) > 1:
        notes.append(f"several Local rows ({', '.join(local)}): no difference to Local is shown")
    reference = group.rows[local[0]] if len(local) == 1 else ()
    stages = group.stages(stage)
    rows = tuple(_row(name, runs, stages[name], reference, notes) for name, runs in group.rows.items())
    several = any(len(row.seeds) > 1 for row in rows)
    spread = "; ± is the sample standard deviation over seeds" if several else ""
    if any(row.difference is not None for row in rows if row.method != "local"):
        spread += f"; the difference to Local{' is paired by seed and' if several else ''} is in percentage points"
    over_clients = "std and min are over clients" + (" (mean over seeds)" if several else "")
    notes.insert(0, f"accuracy in % after the last round{spread}; {over_clients}; bytes of one whole run")
    if any(row.accuracy_by_predictor for row in rows):
        notes.append("by ...: the same models in the same stage, predicting in another of their method's ways")
    facts = {
        "dataset": group.runs[0].result["dataset"],
        "clients": group.runs[0].result["clients"],
        "rounds": group.runs[0].result["rounds"],
        "seeds": list(group.seeds),
        "test": group.evaluation.get("test"),
        "mean": group.evaluation.get("mean"),
    }
    caption = f"{group.about}, {group.seeds_text()}. Accuracy: {group.scoring(stage)}."
    return Section(caption, facts, rows, tuple(notes))


def _row(name: str, runs: Sequence[RunRecord], stage: str, local: Sequence[RunRecord], notes: list[str]) -> Row:
    scores = [_score(run, stage) for run in runs]
    accuracies = [score["mean"] for score in scores]
    stages = [run.result.get("accuracy_by_stage") or {} for run in runs]
    architectures = [(run.result.get("accuracy_per_architecture") or {}) if run.stage == stage else {} for run in runs]
    metrics, predictors = (
        [(run.result.get(key) or {}).get(stage) or {} for run in runs] for key in ("metrics", "accuracy_by_predictor")
    )
    difference, seeds = _differences(runs, stage, local, notes, name)
    best = [run.result.get("accuracy_best_by_validation") if run.stage == stage else None for run in runs]
    return Row(
        name=name,
        method=runs[0].method,
        stage=stage,
        seeds=tuple(run.seed for run in runs),
        accuracy=mean_of(accuracies),
        accuracy_std_seeds=std_of(accuracies),
        accuracy_std_clients=mean_of([score["std"] for score in scores]),
        accuracy_min_client=mean_of([score["min"] for score in scores]),
        accuracy_best_by_validation=mean_of(best),
        accuracy_worst_tenth=mean_of([score["worst_tenth"] for score in scores]),
        accuracy_by_stage=_means(stages),
        accuracy_by_predictor=_means(predictors),
        accuracy_per_architecture=_means(architectures),
        metrics=_means(metrics),
        bytes_up=mean_of([run.result.get("bytes_up") for run in runs]),
        bytes_down=mean_of([run.result.get("bytes_down") for run in runs]),
        seconds=mean_of([run.result.get("seconds") for run in runs]),
        refused=sum(int(run.result.get("refused") or 0) for run in runs),
        difference=mean_of(difference),
        difference_std=std_of(difference),
        difference_seeds=seeds,
        runs=tuple(
            {
                "seed": run.seed,
                "path": str(run.path),
                "accuracy": score["mean"],
                **{key: finite(run.result.get(key)) for key in ("bytes_up", "bytes_down", "seconds", "refused")},
                "knobs": run.result.get("knobs"),
            }
            for run, score in zip(runs, scores, strict=True)
        ),
    )


def _score(run: RunRecord, stage: str) -> dict[str, float | None]:
    """Mean, std and min over clients of the run's last evaluation in a stage; None for what it does not tell."""
    found: Mapping[str, Any] = (run.result.get("accuracy_by_stage") or {}).get(stage) or {}
    score: dict[str, float | None] = {key: finite(found.get(key)) for key in ("mean", "std", "min", "worst_tenth")}
    if stage == run.stage:
        clients = [value for value in map(finite, run.result.get("accuracy_per_client") or []) if value is not None]
        score["mean"] = finite(run.result["accuracy"])
        score["std"] = finite(run.result.get("accuracy_std")) if score["std"] is None else score["std"]
        score["min"] = min(clients, default=None) if score["min"] is None else score["min"]
    return score


def _differences(
    runs: Sequence[RunRecord], stage: str, local: Sequence[RunRecord], notes: list[str], name: str
) -> tuple[list[float | None], tuple[int, ...]]:
    """The run's accuracy minus Local's, for each seed that both have, and those seeds."""
    if not local or runs[0].method == "local":
        return [], ()
    reference = {run.seed: run for run in local}
    pairs = [(run, reference[run.seed]) for run in runs if run.seed in reference]
    compared = stage
    if any(_score(other, stage)["mean"] is None for _, other in pairs):
        compared = local[0].stage
        notes.append(f"{name}: its stage {stage} is compared with Local's stage {compared}")
    found: list[float | None] = []
    for run, other in pairs:
        mine, its = _score(run, stage)["mean"], _score(other, compared)["mean"]
        found.append(None if mine is None or its is None else mine - its)
    return found, tuple(run.seed for run, _ in pairs)


def _means(summaries: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """The means of every entry that all runs have, over the runs."""
    shared = [key for key in summaries[0] if all(key in other for other in summaries)]
    found = {key: mean_of([summary[key].get("mean") for summary in summaries]) for key in shared}
    return {key: mean for key, mean in found.items() if mean is not None}


# for machines ---------------------------------------------------------------------------------------------------
def to_csv(table: Table) -> str:
    """All sections in one sheet: a line per row, with the evaluation in columns of its own; None is empty."""
    rows = [row for section in table.sections for row in section.rows]
    groups = {"accuracy_by_stage": "accuracy", "accuracy_by_predictor": "accuracy_by"}
    groups |= {"accuracy_per_architecture": "architecture", "metrics": ""}
    keys = {group: dict.fromkeys(key for row in rows for key in getattr(row, group)) for group in groups}
    lines: list[dict[str, Any]] = []
    for number, section in enumerate(table.sections, start=1):
        for row in section.rows:
            line = {"table": number, **section.facts, "name": row.name, **_plain(row)}
            line["seeds"] = " ".join(map(str, row.seeds))
            line["difference_seeds"] = " ".join(map(str, row.difference_seeds))
            del line["runs"]
            for group, prefix in groups.items():
                found = line.pop(group)
                line |= {f"{prefix}_{key}" if prefix else key: found.get(key) for key in keys[group]}
            lines.append(line)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(lines[0]) if lines else ["table"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def to_json(table: Table) -> str:
    """Everything, exact, with what each run gave."""
    tables = [
        {"caption": s.caption, **s.facts, "rows": [_plain(row) for row in s.rows], "notes": list(s.notes)}
        for s in table.sections
    ]
    return json.dumps({"tables": tables, "notes": list(table.notes)}, indent=2, ensure_ascii=False) + "\n"


def _plain(row: Row) -> dict[str, Any]:
    groups = {key: dict(value) for key, value in vars(row).items() if isinstance(value, Mapping)}
    return vars(row) | groups | {"runs": [dict(run) for run in row.runs]}


# for people -----------------------------------------------------------------------------------------------------
_BY_ARCHITECTURE = "Accuracy in % by architecture"
_REFUSED = "refused"
_COSTS = ("bytes\nup", "bytes\ndown", "time", _REFUSED)
_METRICS = {"balanced_accuracy": "balanced\naccuracy", "f1": "macro\nF1", "auc": "macro\nAUC"}


def _columns(section: Section, metrics: bool = False) -> list[Column]:
    """What people see, with the other figures on request. Columns in which nothing is known are left out."""
    rows = section.rows
    columns = [_names_of(section)]
    if len({row.stage for row in rows}) > 1:
        columns.append(Column("stage", [row.stage for row in rows], words=True))
    if len({row.seeds for row in rows}) > 1:
        columns.append(Column("seeds", [" ".join(map(str, row.seeds)) for row in rows], words=True))
    numbers = [
        ("accuracy", with_spread([(row.accuracy, row.accuracy_std_seeds) for row in rows])),
        ("std\nclients", [percent(row.accuracy_std_clients) for row in rows]),
        ("min\nclient", [percent(row.accuracy_min_client) for row in rows]),
        ("best by\nvalid.", [percent(row.accuracy_best_by_validation) for row in rows]),
        *((stage, [percent(row.accuracy_by_stage.get(stage)) for row in rows]) for stage in section.extra_stages),
        *((f"by\n{p}", [percent(row.accuracy_by_predictor.get(p)) for row in rows]) for p in section.predictors),
        ("vs Local", with_spread([(row.difference, row.difference_std) for row in rows], sign="+")),
        *(_metrics_of(section) if metrics else ()),
        (_COSTS[0], ["-" if row.bytes_up is None else human_bytes(row.bytes_up) for row in rows]),
        (_COSTS[1], ["-" if row.bytes_down is None else human_bytes(row.bytes_down) for row in rows]),
        (_COSTS[2], ["-" if row.seconds is None else human_seconds(row.seconds) for row in rows]),
        (_REFUSED, [str(row.refused or "-") for row in rows]),
    ]
    known = [(head, cells) for head, cells in numbers if head == "accuracy" or set(cells) != {"-"}]
    return columns + [Column(head, cells) for head, cells in known]


def _names_of(section: Section) -> Column:
    return Column("method", [row.name for row in section.rows], words=True)


def _metrics_of(section: Section) -> list[tuple[str, list[str]]]:
    """Heading and cells of the figures beside the accuracy."""
    lowest = [("lowest\ntenth", [percent(row.accuracy_worst_tenth) for row in section.rows])]
    return lowest + [(h, [percent(row.metrics.get(key)) for row in section.rows]) for key, h in _METRICS.items()]


def _by_architecture(section: Section) -> list[Column]:
    """The accuracies by architecture; nothing where all clients have the same."""
    names = list(dict.fromkeys(name for row in section.rows for name in row.accuracy_per_architecture))
    cells = {name: [percent(row.accuracy_per_architecture.get(name)) for row in section.rows] for name in names}
    return [_names_of(section), *(Column(name, cells[name]) for name in names)] if len(names) > 1 else []


def to_markdown(table: Table) -> str:
    """GitHub's tables, each under its caption."""
    blocks = []
    for section in table.sections:
        columns, by_architecture = _columns(section, metrics=True), _by_architecture(section)
        notes = "\n".join(f"- {note}" for note in section.notes)
        more = f"\n{_BY_ARCHITECTURE}:\n\n{markdown_table(by_architecture)}\n" if by_architecture else ""
        blocks.append(f"**{section.caption}**\n\n{markdown_table(columns)}\n\n{notes}\n{more}")
    if table.notes:
        blocks.append("\n".join(f"- {note}" for note in table.notes) + "\n")
    return "\n".join(blocks)


def to_latex(table: Table) -> str:
    """One ``table`` with ``booktabs`` rules for each section."""
    blocks = []
    for section in table.sections:
        columns = _columns(section, metrics=True)
        rows = [" & ".join(map(_latex, cells)) for cells in zip(*(column.cells for column in columns), strict=True)]
        heading = " & ".join(_latex(column.heading.replace("\n", " ")) for column in columns)
        blocks.append(
            "\\begin{table}\n\\centering\n"
            f"\\caption{{{_latex(section.caption)}}}\n"
            f"\\begin{{tabular}}{{{''.join('l' if column.words else 'r' for column in columns)}}}\n"
            "\\toprule\n" + heading + " \\\\\n\\midrule\n" + "".join(f"{row} \\\\\n" for row in rows) + "\\bottomrule\n"
            "\\end{tabular}\n" + "".join(f"\\par\\small {_latex(note)}\n" for note in section.notes) + "\\end{table}\n"
        )
    return "% needs \\usepackage{booktabs}\n" + "\n".join(blocks) + "".join(f"% {note}\n" for note in table.notes)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"$<$",
    ">": r"$>$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


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
        known = [Column(heading, cells) for heading, cells in _metrics_of(section) if set(cells) != {"-"}]
        blocks += [[columns[0], *known]] if known else []
    texts = [text_block(block, width) for block in blocks]
    if metrics and (by_architecture := _by_architecture(section)):
        found = [text_block(block, width) for block in in_width(by_architecture, width)]
        texts.append(f"{_BY_ARCHITECTURE}:\n\n" + "\n\n".join(found))
    notes = "\n".join(wrapped(note, width) for note in section.notes)
    return "\n\n".join([wrapped(section.caption, width), *texts, notes]) + "\n"


# files ----------------------------------------------------------------------------------------------------------
_FORMATS = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex, "txt": to_text}


def write(
    table: Table, folder: str | Path, formats: Sequence[str] = ("md", "csv", "json"), name: str = "comparison"
) -> list[Path]:
    """Write ``<name>.<format>`` for each format into the folder (made if missing), each file whole or not at all.

    Args:
        table: from ``comparison``.
        folder: where to.
        formats: of md, csv, json, tex, txt.
        name: the files' name without its ending.

    Returns:
        The files written.

    Raises:
        RequestError: unknown format, or the folder cannot be written to.
    """
    for form in formats:
        if form not in _FORMATS:
            raise RequestError(f"unknown table format '{form}'{nearest(form, _FORMATS)}")
    path = make_folder(folder)
    return [write_whole(path / f"{name}.{form}", _FORMATS[form](table).encode("utf-8")) for form in formats]
