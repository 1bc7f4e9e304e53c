"""What a run, its history and a federation look like in a notebook; the markup itself is `polyfed.markup`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.client import Client
from polyfed.escaping import clients_text
from polyfed.markup import Line, curves, cut, details, paragraph, table
from polyfed.results.main_score import MainScore, main_score_of
from polyfed.units import human_bytes, human_seconds

_FIRST, _LAST = 5, 15  # rows of a long table that are shown
_GAP = "…"


def of_history(records: Sequence[Mapping[str, Any]]) -> str:
    """The rounds as curves and as a table."""
    return curves(_lines(records), "round", _axis(records)) + _rounds(records)


def of_run(result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], path: Path | None) -> str:
    """What came of a run, its curves, and, to be opened, its rounds and its clients."""
    sent = f"{human_bytes(result['bytes_up'])} up, {human_bytes(result['bytes_down'])} down"
    where = "" if path is None else f"; run folder {path}"
    refused = f", {result['refused']} uploads refused" if result["refused"] else ""
    parts = [
        paragraph(_title(result), strong=True),
        paragraph(result["nothing_learnt"], strong=True) if result.get("nothing_learnt") else "",
        _stages(result),
        paragraph(f"{sent}, {human_seconds(result['seconds'])}{refused}{where}"),
        curves(_lines(records), "round", _axis(records)),
        details("Rounds", _rounds(records)),
        details("Clients", _clients(result["clients_table"], result.get("client_names", ()))),
    ]
    return "".join(parts)


def of_federation(facts: Mapping[str, Any], clients: Sequence[Client], parameters: Mapping[str, int]) -> str:
    """Who takes part. parameters: architecture -> numbers that are trained."""
    headings = ["client", "network", "parameters", "training samples", "validation", "test"]
    names = [client.name for client in clients]
    rows = [
        (
            clients_text([client.id], names),
            client.architecture,
            f"{parameters[client.architecture]:,}",
            *(len(part) for part in (client.data.train, client.data.validation, client.data.test)),
        )
        for client in clients
    ]
    between: Sequence[object] = [_GAP] * len(headings)
    return paragraph(_title(facts), strong=True) + table(headings, cut(rows, between, _FIRST, _LAST), words=(1,))


def _title(facts: Mapping[str, Any]) -> str:
    what = f"{facts['label'] or facts['method']} on {facts['dataset']}"
    return f"{what}: {facts['clients']} clients, {facts['rounds']} rounds, seed {facts['seed']}"


def _stages(result: Mapping[str, Any]) -> str:
    score = main_score_of(result)
    headings = [f"test {score.title_with_unit}", "mean over clients", "std", "lowest client", "highest client"]
    rows = [
        (stage, *(_shown(score, found.get(key)) for key in ("mean", "std", "min", "max")))
        for stage, found in result[f"{score.name}_by_stage"].items()
    ]
    return table(headings, rows) if rows else paragraph("No client was scored: none has test samples.")


def _rounds(records: Sequence[Mapping[str, Any]]) -> str:
    score = _score(records)
    stages = list(dict.fromkeys(stage for record in records for stage in record[score.name]))
    refused = ["refused"] if any(record["refused"] for record in records) else []
    headings = ["round", "loss", *stages, "up", "down", "time", *refused]
    rows = [
        (
            record["round"],
            "" if record["train_loss"] is None else f"{record['train_loss']:.4f}",
            *(_shown(score, _mean(record, stage)) for stage in stages),
            human_bytes(record["bytes_up"]),
            human_bytes(record["bytes_down"]),
            human_seconds(record["seconds"]),
            *(len(record[key]) for key in refused),
        )
        for record in records
    ]
    between: Sequence[object] = [_GAP] * len(headings)
    return table(headings, cut(rows, between, _FIRST, _LAST), words=())


def _clients(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    score = main_score_of(rows[0] if rows else ())
    headings = ["client", "network", "training samples", f"test {score.title_with_unit}"]
    cells = [
        (clients_text([row["id"]], names), row["architecture"], row["samples"], _shown(score, row[score.name]))
        for row in rows
    ]
    between: Sequence[object] = [_GAP] * len(headings)
    return table(headings, cut(cells, between, _FIRST, _LAST), words=(1,))


def _lines(records: Sequence[Mapping[str, Any]]) -> list[Line]:
    """A curve for each stage of scoring."""
    score = _score(records)
    stages = dict.fromkeys(stage for record in records for stage in record[score.name])
    lines = []
    for stage in stages:
        scored = [record for record in records if _mean(record, stage) is not None]
        values = [score.shown(_mean(record, stage) or 0.0) for record in scored]
        lines.append(Line(stage, [record["round"] for record in scored], values))
    return lines


def _mean(record: Mapping[str, Any], stage: str) -> float | None:
    found: float | None = record[main_score_of(record).name].get(stage, {}).get("mean")
    return found


def _score(records: Sequence[Mapping[str, Any]]) -> MainScore:
    return main_score_of(records[0] if records else ())


def _axis(records: Sequence[Mapping[str, Any]]) -> str:
    return f"test {_score(records).title_with_unit}, mean over clients"


def _shown(score: MainScore, value: float | None) -> str:
    return "" if value is None else score.text(value)
