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
    **hyperparameters: Any,
) -> dict[str, Any]:
    """A row with a test score for each seed, and the same validation score and bytes each way of each."""
    scores = dict(enumerate(test))
    return {
        "name": name,
        "method": method or name.removesuffix("-alone"),
        "control": kind,
        "hyperparameters": hyperparameters,
        "stage": "personal",
        "accuracy": {str(seed): value for seed, value in scores.items()},
        "validation": {} if validation is None else {str(seed): validation for seed in scores},
        "bytes_up": sent * len(scores),
        "bytes_down": sent * len(scores),
    }


def setting(
    rows: Sequence[dict[str, Any]], score: str = "accuracy", name: str = "one", **further: Any
) -> SettingResult:
    """A setting with these rows."""
    told = {"setting": name, "score": score, "about": "By hand", "scored_on": "on test data", "changes": ""}
    made = {"rounds": 2, "clients": 3, "recipe": {}, "tuning": {}, "versions": []}
    return validated(SettingResult, {**told, **made, "rows": list(rows), **further})
