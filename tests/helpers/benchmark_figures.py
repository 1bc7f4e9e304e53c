"""Stored figures of a benchmark, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyfed.records.fields import validated
from polyfed.report.benchmark_results import SettingResult


def row(
    name: str,
    test: Sequence[float],
    kind: str = "",
    method: str = "",
    validation: float | None = None,
    sent: int = 512,
    score: str = "accuracy",
    **hyperparameters: Any,
) -> dict[str, Any]:
    """A row with a test score for each seed, and the same validation score and bytes each way of each."""
    seeds = [str(seed) for seed in range(len(test))]
    figures: dict[str, Any] = {score: dict(zip(seeds, test, strict=True))}
    if validation is not None:
        figures["validation"] = dict.fromkeys(seeds, validation)
    return {
        "name": name,
        "method": method or name.removesuffix("-alone"),
        "control": kind,
        "hyperparameters": hyperparameters,
        "stage": "personal",
        "figures": figures | {way: dict.fromkeys(seeds, sent) for way in ("bytes_up", "bytes_down")},
    }


def setting(
    rows: Sequence[dict[str, Any]], score: str = "accuracy", name: str = "one", **further: Any
) -> SettingResult:
    """A setting with these rows."""
    told = {"setting": name, "score": score, "about": "By hand", "scored_on": "on test data", "changes": ""}
    made = {"rounds": 2, "clients": 3, "recipe": {}, "versions": []}
    return validated(SettingResult, {**told, **made, "rows": list(rows), **further})


def without_times(stored: dict[str, Any]) -> dict[str, Any]:
    """A setting's file without the seconds, which equal runs do not share."""
    for row in stored["rows"]:
        row["figures"].pop("processor_seconds", None)
        if row["tuning"]:
            row["tuning"].pop("processor_seconds")
    return stored
