"""What of a gain over Local needs the other clients.

What federation is worth:

    gain over Local = gain alone + federated gain
    accuracy together - Local = (accuracy alone - Local) + (accuracy together - accuracy alone)

"Alone" is the row of the same method with the same hyperparameters in which every client is a federation of its own.
All three differences are paired by seed, on the seeds that together, alone and Local have, so that the sum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from polyfed.records.main_score import MainScore
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import Estimate, mean_of, scores_by_seed

Kind = Literal["federated", "without", "pooled", ""]
_NEEDS_NOBODY = ("own", "uniform", "labels", "pseudo-labels", "permuted")  # of `control`: uploads are of no use


def kind_of_row(control: str, settings: Mapping[str, Any], sends: bool) -> Kind:
    """Whether a row needs the other clients: "federated", "without" them, or their rows, "pooled"; "": other controls.

    Args:
        control: see `RunRecord.control`. settings: hyperparameters by their names, flat. sends: whether anything is.
    """
    if control.startswith("pooled"):
        return "pooled"
    ignores_uploads = any(key.split(".")[-1] == "control" and value in _NEEDS_NOBODY for key, value in settings.items())
    if control == "alone" or not sends or ignores_uploads:
        return "without"
    return "" if control else "federated"


class Pick(NamedTuple):
    """The row of a kind with the best validation score, and how many it was picked of.

    It is "" where there is none, or some row lacks such scores, as that could be the better one.
    """

    row: str = ""
    of: int = 0


def best_of_kinds(rows: Mapping[str, tuple[Kind, float | None]], score: MainScore) -> dict[Kind, Pick]:
    """Kind of rows -> the best of them.

    Args:
        rows: name -> its kind, and its mean validation score over seeds.
    """
    found: dict[Kind, Pick] = {"federated": Pick(), "without": Pick(), "pooled": Pick()}
    for kind in found:
        means = {name: mean for name, (own, mean) in rows.items() if own == kind}
        known = {name: mean for name, mean in means.items() if mean is not None}
        best = score.best(known.values()) if known and len(known) == len(means) else None
        found[kind] = Pick(next((name for name in known if known[name] == best), ""), len(means))
    return found


def best_by_validation(group: Group) -> dict[Kind, Pick]:
    """Kind of rows -> the best of them by the mean validation score over seeds."""
    kinds: dict[str, tuple[Kind, float | None]] = {}
    for name, runs in group.rows.items():
        sends = any(run.figures.get(("bytes_up", "")) for run in runs)
        validation = [run.figures.get(("validation", run.stage)) for run in runs]
        kinds[name] = kind_of_row(runs[0].control, runs[0].settings, sends), mean_of(validation)
    return best_of_kinds(kinds, group.score)


# what federation is worth -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gains:
    """A gain over Local, taken apart. Accuracies and differences in [0, 1]; None is "not known".

    Attributes:
        local: Local's mean accuracy on the seeds that all three have.
        gain: together minus Local. alone: alone minus Local. federated: together minus alone.
        pooled: Local's mean accuracy plus the mean difference of pooled-tuned to it, on the seeds that both have.
    """

    local: float | None
    gain: Estimate
    alone: Estimate
    federated: Estimate
    pooled: float | None


def decompose(group: Group) -> dict[str, Gains]:
    """Row -> its gains, of all methods that also ran alone; none without a single row of Local.

    All are on the seeds that together, alone and Local have.
    """
    rows, stages, score, resplit = group.rows, group.stages, group.score, group.resplit
    local = [runs for runs in rows.values() if runs[0].is_local]
    if len(local) != 1:
        return {}
    pooled = next((runs for runs in rows.values() if runs[0].control == "pooled-tuned"), ())
    found = {}
    for name, runs in rows.items():
        alone = next((other for other in rows if _is_alone(rows[other][0], runs[0])), None)
        if alone is None or runs[0].control:
            continue
        every = [
            _by_seed(runs, stages[name]),
            _by_seed(rows[alone], stages[alone]),
            _by_seed(local[0], stages[name]),
        ]
        shared = [seed for seed in every[0] if all(seed in scores for scores in every)]
        mine, separate, base = ({seed: scores[seed] for seed in shared} for scores in every)
        most = Estimate.gain(_by_seed(pooled, stages[name]), base, score, resplit)
        level = mean_of(list(base.values()))
        found[name] = Gains(
            local=level,
            gain=Estimate.gain(mine, base, score, resplit),
            alone=Estimate.gain(separate, base, score, resplit),
            federated=Estimate.gain(mine, separate, score, resplit),
            pooled=None if level is None or most.mean is None else score.improved(level, most.mean),
        )
    return found


def _is_alone(other: RunRecord, run: RunRecord) -> bool:
    is_same = other.method == run.method and other.settings == {**run.settings, "alone": True}
    return is_same and other.control == "alone"


def _by_seed(runs: Sequence[RunRecord], stage: str) -> dict[int, float | None]:
    """Seed -> accuracy in the stage; in the runs' own where they were not scored in it."""
    found = scores_by_seed(runs, stage)
    return scores_by_seed(runs, runs[0].stage) if None in found.values() else found


def remarks(found: Mapping[str, Gains]) -> list[str]:
    """What may be said of the gains, for the notes below a table."""
    if not found:
        return []
    about = (
        "alone: the same method with every client a federation of its own; gain over Local = gain alone + federated "
        "gain (together minus alone)"
    )
    lines = [about]
    if all(one.federated.is_distinguishable is None for one in found.values()):
        return [*lines, "federated gains: nothing can be claimed of them below three seeds"]
    sides = [
        f"{name} ({'above' if (one.federated.mean or 0) > 0 else 'below'} zero)"
        for name, one in found.items()
        if one.federated.is_distinguishable
    ]
    return [*lines, f"federated gains whose 95 % interval leaves out zero: {', '.join(sides) or 'none'}"]
