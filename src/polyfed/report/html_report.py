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
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from polyfed.escaping import html_text, visible_in
from polyfed.places import shown_place, without_places
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.comparison_columns import notes_of, sub_tables
from polyfed.report.comparison_formats import Table
from polyfed.report.figures import AXES, METRICS, axes_of, metric_factor, metric_title, series
from polyfed.report.glossary import about_column, about_stage
from polyfed.report.grouping import Group, group_runs, scored_stages
from polyfed.report.heatmaps import heat_maps
from polyfed.report.results_page import read_command
from polyfed.report.run_records import RunRecord
from polyfed.report.text_tables import Column, finite
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.results.schema import ClientRow
from polyfed.version import __version__

__all__ = ["page", "page_data", "write_page"]

_POINTS = 300  # points of a line at most
_FEWEST = 40  # points that a line keeps, however many lines there are
_ALL_POINTS = 60_000  # numbers in all curves of a page, about 400 kB
_CELLS = 60_000  # cells in all heat maps of a page, about as much
_LABELS = 60_000  # counts of classes in all tables of clients of a page, about as much
_NAME = 60  # characters of a file's name
_NAMES = 500  # classes that are called by their names
_OF_CLIENT = ("architecture", "parameters", "samples", "test_samples")  # what the page tells of a client
_REASONS = 5  # refusals told by name, the most frequent ones
_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_TIMES = {"d": 86400, "h": 3600, "min": 60, "s": 1}
_LOST = {"refused": "refused", "dropped": "dropped out", "late": "late", "discarded": "discarded"}
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
    """The page as text; the arguments are those of `write_page`.

    Raises:
        ConfigError: a file in a run folder cannot be read.
    """
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
    """Everything on the page as plain values; one section for each set of comparable runs.

    Raises:
        ConfigError: as `page`.
    """
    groups, _ = group_runs(runs, stage)
    lines = sum(len(group.rows) for group in groups)
    most = max(_FEWEST, min(_POINTS, _ALL_POINTS // (3 * (len(METRICS) + 1) * lines)))
    cells = _CELLS // len(groups)
    counts = _LABELS // len(groups)
    sections = [
        {
            "title": group.about,
            "score": _score(group.score),
            "finding": section.finding,
            "caption": section.caption,
            "scaled": any(run.scaled_down for run in group.runs),
            "notes": notes_of(section),
            "tables": [_sub_table(title, columns, group.score) for title, columns in sub_tables(section)],
            "stages": _stages(group),
            "rows": [{"name": name, "look": group.looks[name]} for name in group.rows],
            "curves": _curves(group, stage, most),
            "clients": _clients(group, counts),
            "lost": _lost(group),
            "heat_maps": heat_maps(group, cells),
            "commands": _commands(group),
            "recipes": _recipes(group),
            "versions": _versions(group.runs),
        }
        for group, section in zip(groups, table.sections, strict=True)
    ]
    title = groups[0].about if len(groups) == 1 else f"{len(groups)} comparisons"
    axes = {axis: AXES[axis] for axis in axes_of(run for group in groups for run in group.runs)}
    scores = [section.score for section in table.sections] or [ACCURACY]
    overview = [_sub_table(title, columns, scores[0]) for title, columns in table.overview]
    told = {"overview": overview, "axes": axes, "polyfed": __version__}
    return {"title": title, "notes": list(table.notes), **told, "sections": sections}


# tables -----------------------------------------------------------------------------------------------------------


def _score(score: MainScore) -> dict[str, Any]:
    """How the page shows the main score: a share in percent, or a number as it is."""
    return {
        "axis": score.axis,
        "per_client": score.of_it("Accuracy per client in %"),
        "every_client": score.of_it("Accuracy of every client"),
        "factor": score.shown(1.0),
    }


def _sub_table(title: str, columns: Sequence[Column], score: MainScore) -> dict[str, Any]:
    return {"title": title, "columns": [_column(column, score) for column in columns]}


def _column(column: Column, score: MainScore = ACCURACY) -> dict[str, Any]:
    order = None if column.words else list(map(sort_order, column.cells))
    cells = ["" if cell == "-" else cell for cell in column.cells]
    heading = column.heading.replace("\n", " ")
    about = about_column(heading, score)
    return {"heading": heading, "about": about, "cells": cells, "order": order, "bold": sorted(column.bold)}


def _stages(group: Group) -> list[str]:
    """What the stages are in which these runs were scored."""
    scored = dict.fromkeys(stage for run in group.runs for stage in scored_stages(run))
    return [about for about in map(about_stage, scored) if about]


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


def _curves(group: Group, stage: str | None, most: int) -> dict[str, Any]:
    """Of each row: places on its axes, and for each figure mean, lowest and highest seed at these places."""
    lines: dict[str, dict[str, Any]] = {}
    thinned = 0
    for metric in METRICS:
        known = axes_of(group.runs)
        found = {axis: {line.name: line for line in series(group, axis, stage, metric)} for axis in known}
        for name, line in found["round"].items():
            kept = _kept(len(line.x), most)
            thinned = max(thinned, len(line.x) if len(kept) < len(line.x) else 0)
            points = lines.setdefault(name, {"seeds": line.seeds, "metrics": {}})
            axes = [axis for axis in known if name in found[axis]]
            values = {axis: [_short(found[axis][name].x[at], 2) for at in kept] for axis in axes}
            values |= {"mean": [_short(line.mean[at]) for at in kept]}
            if line.seeds > 1:
                values |= {key: [_short(getattr(line, key)[at]) for at in kept] for key in ("low", "high")}
            shared = points.setdefault("axes", {axis: values[axis] for axis in axes})
            for axis in axes:  # most figures are recorded at the same rounds as the accuracy
                if values[axis] == shared[axis]:
                    del values[axis]
            points["metrics"][metric] = values
    names = [metric for metric in METRICS if any(metric in line["metrics"] for line in lines.values())]
    note = f"Curves of up to {thinned} rounds are drawn through {most} of them." if thinned else ""
    titles = {name: metric_title(group, name) for name in names}
    factors = {name: metric_factor(group, name) for name in names}
    return {"metrics": names, "titles": titles, "factors": factors, "lines": lines, "note": note}


def _kept(count: int, most: int) -> list[int]:
    """Which of the points are drawn: all if they are few, else evenly chosen ones with the first and the last.

    >>> _kept(4, 5), _kept(9, 5)
    ([0, 1, 2, 3], [0, 2, 4, 6, 8])
    """
    return list(range(count)) if count <= most else [at * (count - 1) // (most - 1) for at in range(most)]


def _short(value: float, digits: int = 5) -> float | None:
    """Rounded, and whole where it is; None for what has run over, say seconds that add up to no number."""
    if not math.isfinite(value):
        return None
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded


# clients ----------------------------------------------------------------------------------------------------------


def _clients(group: Group, most: int) -> dict[str, Any]:
    """Of each seed, which deals data anew: the clients, and their last accuracy with every row that has the seed.

    most: counts of classes that have room.
    """
    found: list[dict[str, Any]] = []
    for seed in group.seeds:
        runs = {name: run for name, members in group.rows.items() for run in members if run.seed == seed}
        scores = {name: list(map(finite, run.result.accuracy_per_client)) for name, run in runs.items()}
        scores = {name: values for name, values in scores.items() if any(value is not None for value in values)}
        count = max(map(len, scores.values()), default=0)
        if count:
            tables = [_table_of_clients(run) for run in runs.values()]
            found.append(
                {
                    "seed": seed,
                    "names": [_name(runs.values(), at) for at in range(count)],
                    **{key: [_joined(tables, at, key) for at in range(count)] for key in _OF_CLIENT},
                    "labels": [_labels(tables, at) for at in range(count)],
                    "accuracy": {
                        name: [None if value is None else _short(value) for value in values]
                        for name, values in scores.items()
                    },
                }
            )
    crowded = sum(len(labels or ()) for one in found for labels in one["labels"]) > most
    if crowded:
        for one in found:
            one["labels"] = [None] * len(one["labels"])
    names: list[str] = next((run.result.class_names for run in group.runs if run.result.class_names is not None), [])
    stages = list(dict.fromkeys(run.stage for run in group.runs))
    about = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
    return {
        "about": group.score.of_it(f"Accuracy on a client's test data, last round, {about}."),
        "note": "Who holds which classes has no room on this page." if crowded else "",
        "class_names": names if len(names) <= _NAMES else [],
        "seeds": found,
    }


def _name(runs: Iterable[RunRecord], at: int) -> str | None:
    """What a client is called; None where no record tells."""
    told = (run.result.client_name(at) for run in runs)
    return next((name for name in told if name), None)


def _table_of_clients(run: RunRecord) -> Sequence[ClientRow]:
    return sorted(run.result.clients_table or [], key=lambda row: row.id)


def _joined(tables: Sequence[Sequence[ClientRow]], at: int, key: str) -> Any:
    """What a client is or has; both where methods give it different networks, None where no record tells."""
    told = [getattr(table[at], key) for table in tables if at < len(table)]
    values = list(dict.fromkeys(value for value in told if value is not None))
    if len(values) > 1:
        return " / ".join(map(str, values))
    return values[0] if values else None


def _labels(tables: Sequence[Sequence[ClientRow]], at: int) -> Mapping[str, int] | None:
    """How many training samples of each class a client holds; None where no record tells, or they differ."""
    told = [table[at].labels for table in tables if at < len(table)]
    known = [labels for labels in told if labels is not None]
    alike = bool(known) and all(labels == known[0] for labels in known)
    return known[0] if alike else None


# what did not count, runs and versions ----------------------------------------------------------------------------


def _lost(group: Group) -> dict[str, Any]:
    """Uploads refused, late or discarded, and clients dropped out, over all rounds and seeds; all-zero columns go."""
    counts = {
        name: {key: sum(len(getattr(record, key)) for run in runs for record in run.rounds) for key in _LOST}
        for name, runs in group.rows.items()
    }
    for name, runs in group.rows.items():  # a record may be shorter than the result that sums it up
        counts[name]["refused"] = max(counts[name]["refused"], sum(run.result.refused or 0 for run in runs))
    shown = [key for key in _LOST if any(row[key] for row in counts.values())]
    columns = [Column("method", list(counts), words=True)]
    columns += [Column(_LOST[key], [str(row[key]) for row in counts.values()]) for key in shown]
    reasons = Counter(upload.reason for run in group.runs for record in run.rounds for upload in record.refused)
    told = [f"refused {count} times: {reason}" for reason, count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        told.append(f"refused for {len(reasons) - _REASONS} other reasons")
    return {"columns": list(map(_column, columns)) if shown else [], "reasons": told}


def _recipes(group: Group) -> list[dict[str, Any]]:
    """Of each row, the settings with which its first seed ran, as they lie in the run folder."""
    found = []
    files = _file_names(group)
    for name, runs in group.rows.items():
        first = runs[0]
        text = "" if first.recipe.is_empty else (first.path / "recipe.toml").read_text(encoding="utf-8")
        text = without_places(text)
        found.append({"name": name, "file": f"{files[name]}.toml", "text": text})
    return found


def _commands(group: Group) -> dict[str, list[str]]:
    """How the runs can be made again: the comparisons that they are of, and each run by itself."""
    above = dict.fromkeys(folder for run in group.runs for folder in run.path.parents[:2])
    commands = [read_command(folder).command for folder in above]
    compared = list(dict.fromkeys(command for command in commands if command))
    files = _file_names(group)
    single = [
        _command_of(run, f"again/{files[name]}-seed-{run.seed}")
        for name, runs in group.rows.items()
        for run in runs
        if not run.recipe.is_empty
    ]
    return {"compared": compared, "single": single}


def _command_of(run: RunRecord, out: str) -> str:
    return shlex.join(["polyfed", "run", shown_place(run.path / "recipe.toml"), "--seed", str(run.seed), "--out", out])


def _file_names(group: Group) -> dict[str, str]:
    """Each row's name as a file may be called; no two alike."""
    found: dict[str, str] = {}
    for number, name in enumerate(group.rows, start=1):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_NAME]
        found[name] = f"{plain}-{number}".strip("-") if plain in (*found.values(), "") else plain
    return found


def _versions(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """With what the runs were made; where they differ, how many with each."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        for key, value in run.result.versions.items():
            counts.setdefault(key, Counter())[value] += 1
    several = "{} ({} of the runs)".format
    return [
        (key, "; ".join(several(*pair) if len(found) > 1 else pair[0] for pair in found.items()))
        for key, found in counts.items()
    ]
