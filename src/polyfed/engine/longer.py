"""Whether a run can go on for more rounds than it was begun with: those that are done must be the longer run's, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]


def rounds_of(settings: Table) -> int:
    """How many rounds are planned, as a recipe or a run folder has it; 0 where it does not say."""
    rounds = settings.get("training", {}).get("rounds")
    return rounds if isinstance(rounds, int) else 0


def why_not_longer(asked: Table, result: Table | None, planned: str) -> str | None:
    """Why the rounds that are done are lost or would have been others, or none would follow; None: they go on.

    Args:
        asked: settings with more rounds, otherwise those of the run.
        result: of the run so far, if it has one.
        planned: what of the method depends on the number of rounds (`Method.planned`).
    """
    if result is not None and asked.get("run", {}).get("keep") == "nothing":
        return "it kept no weights (keep = 'nothing')"
    if asked.get("training", {}).get("lr_schedule") == "cosine":
        return "the learning rates of training.lr_schedule = 'cosine' depend on the number of rounds"
    if asked.get("privacy", {}).get("target_epsilon"):
        return "the noise for privacy.target_epsilon depends on the number of rounds"
    if planned:
        return f"{planned} depends on the number of rounds"
    if result is not None and result.get("stopped_after") is not None:
        why = {"budget": "privacy.max_epsilon"}.get(result.get("stopped_by", ""), "evaluation.patience")
        return f"it stopped early, after round {result['stopped_after']} ({why}), and would stop there again"
    return None
