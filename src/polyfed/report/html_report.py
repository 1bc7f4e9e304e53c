"""report.html: one page that holds everything a comparison has to tell, from run folders only.

Styles, script and data are inline: the page is one file, works without network, and its content policy forbids it to
load anything. What comes from run folders is data for the script, which writes it as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from polyfed.escaping import html_text, visible_in
from polyfed.places import without_places
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.client_scores import ClientScores, client_columns
from polyfed.report.comparison_tables import ComparisonGroup, Table, notes_of, sub_tables
from polyfed.report.figures import AXES, METRICS, axes_of, metric_factor, metric_title, series
from polyfed.report.glossary import about_column, about_stage
from polyfed.report.grouping import Group, group_runs, scored_stages
from polyfed.report.heatmaps import heat_maps
from polyfed.report.results_page import read_command
from polyfed.report.round_figures import LOST
from polyfed.report.run_records import RunRecord, rows_of_pooled
from polyfed.report.statistics import finite
from polyfed.report.text_tables import Column
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.results.schema import ClientRow
from polyfed.version import __version__

_POINTS = 300  # of a line, at most
_CELLS = 60_000  # of all heat maps of a page, about 400 kB
_NAMES = 500  # classes that are called by their names
_REASONS = 5  # reasons of refusals that are given, the most frequent ones
_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_TIMES = {"d": 86400, "h": 3600, "min": 60, "s": 1}
_NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def write_page(runs: Iterable[RunRecord], table: Table, folder: str | Path, stage: str | None = None) -> Path:
    """Write ``report.html`` into the folder (made if missing), whole or not at all.

    Args:
        runs: from ``load_runs``; unfinished ones are left out, and a note says so.
        table: their `comparison`, in the same stage.
        folder: where to.
        stage: which stage the table and the curves show; None: each run's own evaluation.

    Returns:
        The file.

    Raises:
        ConfigError: a file in a run folder cannot be read, or the folder cannot be written to.
    """
    return write_whole(make_folder(folder) / "report.html", page(runs, table, stage).encode("utf-8"))


def page(runs: Iterable[RunRecord], table: Table, stage: str | None = None) -> str:
    """The page as text; the arguments are those of `write_page`."""
    data = page_data(runs, table, stage)
    parts = {"title": html_text(data["title"]), "data": _embedded(data)}
    parts |= {"style": _part("page.css"), "script": _part("page.js")}
    parts |= {f"{name}_hash": _hash(parts[name]) for name in ("style", "script")}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))  # once: data hold what they like


def _part(name: str) -> str:
    return resources.files("polyfed.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """By which the page's policy knows its own style and script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON in which nothing can end the element that holds it."""
    text = json.dumps(visible_in(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# what the page shows ----------------------------------------------------------------------------------------------


def page_data(runs: Iterable[RunRecord], table: Table, stage: str | None = None) -> dict[str, Any]:
    """Everything on the page as plain values; one section for each set of comparable runs."""
    groups, _ = group_runs(rows_of_pooled(runs), stage)
    room = _CELLS // len(groups)
    pairs = zip(groups, table.sections, strict=True)
    scores = [section.score for section in table.sections] or [ACCURACY]
    return {
        "title": groups[0].about if len(groups) == 1 else f"{len(groups)} comparisons",
        "notes": list(table.notes),
        "overview": [_table(title, columns, scores[0]) for title, columns in table.overview],
        "axes": {axis: AXES[axis] for axis in axes_of(run for group in groups for run in group.runs)},
        "polyfed": __version__,
        "sections": [_section(group, section, stage, room) for group, section in pairs],
    }


def _section(group: Group, section: ComparisonGroup, stage: str | None, room: int) -> dict[str, Any]:
    """One set of comparable runs. room: cells of its heat maps."""
    tables = [_table(title, columns, group.score) for title, columns in sub_tables(section)]
    about = dict.fromkeys((one["heading"], one["about"]) for sheet in tables for one in sheet["columns"])
    scored = dict.fromkeys(stage for run in group.runs for stage in scored_stages(run))
    return {
        "title": group.about,
        "finding": section.finding,
        "caption": section.caption,
        "scaled": any(run.scaled_down for run in group.runs),
        "notes": notes_of(section),
        "tables": tables,
        "meanings": [*filter(None, map(about_stage, scored)), *(f"{name}: {text}" for name, text in about if text)],
        "rows": [{"name": name, "look": group.looks[name]} for name in group.rows],
        "curves": _curves(group, stage),
        "clients": _clients(group, section.clients),
        "lost": _lost(group),
        "heat_maps": heat_maps(group, room),
        "commands": _commands(group),
        "recipes": _recipes(group),
        "versions": _versions(group.runs),
    }


# tables -----------------------------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[Column], score: MainScore) -> dict[str, Any]:
    return {"title": title, "columns": [_column(column, about_column(column.title, score)) for column in columns]}


def _column(column: Column, about: str = "") -> dict[str, Any]:
    """order: by which the cells are sorted; None: by the words themselves."""
    order = None if column.words else list(map(sort_order, column.cells))
    cells = ["" if cell == "-" else cell for cell in column.cells]
    return {"heading": column.title, "about": about, "cells": cells, "order": order, "bold": sorted(column.bold)}


def sort_order(cell: str) -> float | None:
    """By which number a cell of a table is sorted; None where it holds none.

    >>> [sort_order(cell) for cell in ("75.12 ± 0.40", "+3.33", "1.5 KiB", "1 min 05 s", "[70.1, 72.3]", "-")]
    [75.12, 3.33, 1536.0, 65.0, 70.1, None]
    """
    text = cell.split("±")[0].strip().lstrip("[(").replace("\N{MINUS SIGN}", "-")
    first = _NUMBER.match(text)
    if first is None:
        return None
    number = float(first[1])
    unit = first[2]
    if unit in _TIMES:
        return sum(float(part) * _TIMES.get(name, 0) for part, name in _NUMBER.findall(text))
    return number * _SIZES.get(unit, 1)


# curves -----------------------------------------------------------------------------------------------------------


def _curves(group: Group, stage: str | None) -> dict[str, Any]:
    """Each row's places on the axes, and of each figure recorded at all of these, mean, lowest and highest seed."""
    lines: dict[str, dict[str, Any]] = {}
    thinned = 0
    for metric in METRICS:
        for line in series(group, stage, metric):
            count = len(line.mean)
            kept = [at * (count - 1) // (_POINTS - 1) for at in range(_POINTS)] if count > _POINTS else range(count)
            axes = {axis: [_short(places[at], 2) for at in kept] for axis, places in line.axes.items()}
            known = lines.setdefault(line.name, {"seeds": line.seeds, "axes": axes, "metrics": {}})
            if axes["round"] == known["axes"]["round"]:
                thinned = max(thinned, count if count > _POINTS else 0)
                ends = {"mean": line.mean, "low": line.low, "high": line.high}
                known["metrics"][metric] = {end: [_short(found[at]) for at in kept] for end, found in ends.items()}
    names = [metric for metric in METRICS if any(metric in line["metrics"] for line in lines.values())]
    return {
        "metrics": names,
        "titles": {name: metric_title(group, name) for name in names},
        "factors": {name: metric_factor(group, name) for name in names},
        "lines": lines,
        "note": f"Curves of up to {thinned} rounds are drawn through {_POINTS} of them." if thinned else "",
    }


def _short(value: float, digits: int = 5) -> float | None:
    """Rounded, and whole where it is; None for what has run over, say seconds that add up to no number."""
    if not math.isfinite(value):
        return None
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded


# clients ----------------------------------------------------------------------------------------------------------


def _clients(group: Group, over_seeds: Sequence[ClientScores]) -> dict[str, Any]:
    """Of each seed, which assigns data anew, a table of its clients, and their last accuracy with every row.

    Of several seeds first what clients have over all of them.
    """
    seeds = [found for found in (_clients_of(group, seed) for seed in group.seeds) if found is not None]
    if len(seeds) > 1:
        seeds = [_over_seeds(over_seeds, group.score), *seeds]
    names: list[str] = next((run.result.class_names for run in group.runs if run.result.class_names is not None), [])
    stages = list(dict.fromkeys(run.stage for run in group.runs))
    where = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
    score = group.score
    return {
        "about": score.of_it(f"Accuracy on a client's test data, {group.evaluation.when}, {where}."),
        "title": score.of_it("Accuracy per client in %"),
        "axis": score.axis,
        "factor": score.shown(1.0),
        "class_names": names if len(names) <= _NAMES else [],
        "seeds": seeds,
    }


def _clients_of(group: Group, seed: int) -> dict[str, Any] | None:
    """The clients of a seed; None where none was scored."""
    runs = {name: run for name, members in group.rows.items() for run in members if run.seed == seed}
    scores = {name: list(map(finite, run.result.accuracy_per_client)) for name, run in runs.items()}
    scores = {name: values for name, values in scores.items() if any(value is not None for value in values)}
    numbers = range(max(map(len, scores.values()), default=0))
    if not numbers:
        return None
    tables = [sorted(run.result.clients_table or [], key=lambda row: row.id) for run in runs.values()]
    names = [next(filter(None, (run.result.client_name(at) for run in runs.values())), "") for at in numbers]
    keys = ("architecture", "parameters", "samples", "test_samples")
    facts = {key: [_joined(tables, at, key) for at in numbers] for key in keys}
    columns = [
        _column(Column("client", list(map(str, numbers)))),
        _column(Column("name", names, words=True), "What the client is called."),
        _column(Column("architecture", facts["architecture"], words=True), "The client's network."),
        _column(Column("parameters", facts["parameters"]), "Numbers in the network that are trained."),
        _column(Column("samples", facts["samples"]), "That the client trains on."),
        _column(Column("test samples", facts["test_samples"]), "That the client is tested on."),
        *(
            _column(Column(name, ["-" if value is None else group.score.text(value) for value in values]))
            for name, values in scores.items()
        ),
    ]
    return {
        "seed": seed,
        "columns": [column for column in columns if any(column["cells"])],
        "labels": [_labels(tables, at) for at in numbers],
        "accuracy": {
            name: [None if value is None else _short(value) for value in values] for name, values in scores.items()
        },
    }


def _over_seeds(clients: Sequence[ClientScores], score: MainScore) -> dict[str, Any]:
    """Means over seeds and differences to Local, in the form of a seed's table."""
    columns = client_columns(clients, score)[1:]
    numbers = Column("client", [str(one.number) for one in clients])
    names = Column("name", [one.name for one in clients], words=True)
    means = {row: [one.scores[row].mean for one in clients] for row in clients[0].scores}
    return {
        "seed": "all, mean",
        "columns": [_column(column) for column in (numbers, names, *columns) if any(column.cells)],
        "labels": [None for _ in clients],
        "accuracy": {row: [None if one is None else _short(one) for one in found] for row, found in means.items()},
    }


def _joined(tables: Sequence[Sequence[ClientRow]], at: int, key: str) -> str:
    """What a client is or has; both where methods give it different networks, "" where no record shows it."""
    values = [getattr(table[at], key) for table in tables if at < len(table)]
    return " / ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _labels(tables: Sequence[Sequence[ClientRow]], at: int) -> Mapping[str, int] | None:
    """How many training samples of each class a client holds; None where no record shows it, or they differ."""
    known = [table[at].labels for table in tables if at < len(table) and table[at].labels is not None]
    return known[0] if known and all(labels == known[0] for labels in known) else None


# what did not count, runs and versions ----------------------------------------------------------------------------


def _lost(group: Group) -> dict[str, Any]:
    """Uploads refused, late or discarded, and clients dropped out, over all rounds and seeds; all-zero columns go."""
    counts = {
        name: {key: sum(record.lost.get(key, 0) for run in runs for record in run.rounds) for key in LOST}
        for name, runs in group.rows.items()
    }
    for name, runs in group.rows.items():  # a record may be shorter than the result that sums it up
        counts[name]["refused"] = max(counts[name]["refused"], sum(run.result.refused or 0 for run in runs))
    shown = [key for key in LOST if any(row[key] for row in counts.values())]
    columns = [Column("method", list(counts), words=True)]
    columns += [Column(LOST[key], [str(row[key]) for row in counts.values()]) for key in shown]
    reasons: Counter[str] = Counter()
    for record in (record for run in group.runs for record in run.rounds):
        reasons.update(record.reasons)
    lines = [f"refused {count} times: {reason}" for reason, count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        lines.append(f"refused for {len(reasons) - _REASONS} other reasons")
    return {"columns": list(map(_column, columns)) if shown else [], "reasons": lines}


def _recipes(group: Group) -> list[dict[str, Any]]:
    """Of each row, the settings with which its first seed ran, as they lie in the run folder."""
    found = []
    for name, runs in group.rows.items():
        first = runs[0]
        text = "" if first.recipe.is_empty else (first.path / "recipe.toml").read_text(encoding="utf-8")
        found.append({"name": name, "text": without_places(text)})
    return found


def _commands(group: Group) -> list[str]:
    """The comparisons that the runs are of."""
    above = dict.fromkeys(folder for run in group.runs for folder in run.path.parents[:2])
    commands = [read_command(folder)["command"] for folder in above]
    return list(dict.fromkeys(command for command in commands if command))


def _versions(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """With what the runs were made; where they differ, how many with each."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        for key, value in run.result.versions.items():
            counts.setdefault(key, Counter())[value] += 1
    return [
        (
            key,
            "; ".join(f"{value} ({count} of the runs)" if len(found) > 1 else value for value, count in found.items()),
        )
        for key, found in counts.items()
    ]
