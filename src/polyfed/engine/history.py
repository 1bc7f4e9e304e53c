"""What happened in a run: one record per round, and the result made from the records alone."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polyfed.version import __version__


def best_by_validation(records: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    """Test accuracy of the (first) round with the best validation accuracy; None without validation data."""
    candidates = [r for r in records if r["validation"] is not None and stage in r["accuracy"]]
    if not candidates:
        return None
    best = max(candidates, key=lambda r: r["validation"])
    return float(best["accuracy"][stage]["mean"])


def result_of(records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """`result.json`: the run's facts, and what its records add up to. A resumed run gives the same.

    Args:
        records: one per round, in order.
        facts: method, knobs, dataset, clients, rounds, seed, evaluation, label.
    """
    last = next((r for r in reversed(records) if r["evaluated"]), None)
    stage = facts["evaluation"]["stage"]
    main = {} if last is None else last["accuracy"].get(stage, {})
    seconds = sum(r["seconds"] for r in records)
    samples = sum(r["samples"] for r in records)
    return {
        **facts,
        "accuracy": main.get("mean"),
        "accuracy_std": main.get("std"),
        "accuracy_best_by_validation": best_by_validation(records, stage),
        "accuracy_by_stage": {} if last is None else last["accuracy"],
        "accuracy_per_client": [] if last is None else last["accuracy_per_client"],
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up_as_in_paper": sum(r["bytes_up_as_in_paper"] for r in records),
        "bytes_down_as_in_paper": sum(r["bytes_down_as_in_paper"] for r in records),
        "refused": sum(len(r["refused"]) for r in records),
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "polyfed": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
