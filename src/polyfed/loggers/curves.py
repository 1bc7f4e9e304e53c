"""The numbers of a round's record under the names that curves have, in TensorBoard and in experiment trackers alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from polyfed.results.main_score import main_score_of

_FEW = 10  # clients that have a curve each


class Curves:
    """Names and values of one record after the other; trackers group curves by what is before the last slash.

    ``train/loss``, ``train/lr``, ``train/samples``, ``train/refused``; means over clients: ``accuracy/<stage>``,
    ``accuracy/validation`` (of regression ``rmse/...``), ``architecture/<name>``, ``metrics/<metric>/<stage>``,
    ``predictor/<name>/<stage>``, ``classes/<which>/<stage>``, ``held_out/<stage>``; ``spread/<stage>/std``, min, max,
    bottom_decile and n; ``client/<number>``, where there are few; ``bytes/up``, ``bytes/down``, ``bytes/total_up``,
    ``bytes/total_down``; ``time/seconds``, ``time/simulated``; the method's own ``method/<name>`` and
    ``server/<name>``.

    Args:
        up, down: bytes of the rounds before.
    """

    def __init__(self, up: int = 0, down: int = 0) -> None:
        self._totals = {"up": up, "down": down}

    def of(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Those of the next record; what is not a finite number is left out."""
        for way in self._totals:
            self._totals[way] += int(record.get(f"bytes_{way}") or 0)
        score = main_score_of(record).name
        scores: Mapping[str, Any] = record.get(score) or {}
        clients = record.get(f"{score}_per_client") or ()
        train = {"loss": record.get("train_loss"), "refused": len(record.get("refused") or ())}
        tree = {
            "train": {**train, "lr": record.get("lr"), "samples": record.get("samples")},
            score: {**_means(scores), "validation": record.get("validation")},
            "spread": {stage: {k: v for k, v in summary.items() if k != "mean"} for stage, summary in scores.items()},
            "architecture": _means(record.get(f"{score}_per_architecture")),
            "client": dict(enumerate(clients)) if len(clients) <= _FEW else None,
            "metrics": _by_name(record.get("metrics")),
            "predictor": _by_name(record.get(f"{score}_by_predictor")),
            "classes": _by_name(record.get("accuracy_by_classes")),
            "held_out": _means(record.get("held_out")),
            "bytes": {
                **{way: record.get(f"bytes_{way}") for way in self._totals},
                **{f"total_{way}": total for way, total in self._totals.items()},
            },
            "time": {"seconds": record.get("seconds"), "simulated": record.get("simulated_seconds")},
            "method": record.get("sums"),
            "server": record.get("server"),
        }
        return {
            name: float(value)
            for name, value in leaves(tree, "/")
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }


def _means(summaries: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: summary.get("mean") for name, summary in (summaries or {}).items()}


def _by_name(by_stage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Means of stage -> name -> summary, the names outside."""
    means = {stage: _means(summaries) for stage, summaries in (by_stage or {}).items()}
    names = dict.fromkeys(name for found in means.values() for name in found)
    return {name: {stage: found.get(name) for stage, found in means.items()} for name in names}


def leaves(entry: Any, between: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """What a tree of mappings holds, each with the names on the way to it.

    >>> dict(leaves({"training": {"rounds": 3}}, "."))
    {'training.rounds': 3}
    """
    if not isinstance(entry, Mapping):
        yield name, entry
        return
    for key, inner in entry.items():
        yield from leaves(inner, between, f"{name}{between}{key}" if name else str(key))
