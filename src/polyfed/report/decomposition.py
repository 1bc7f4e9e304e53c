"""How much of a method's gain over Local needs the other clients, and how far it is on the way to pooled data.

    gain over Local = gain alone + federated gain
    accuracy together - Local = (accuracy alone - Local) + (accuracy together - accuracy alone)

"Alone" is the row of the same method with the same hyperparameters in which every client is a federation of its own.
All three differences are paired by seed, on the seeds that together, alone and Local have, so that the sum is exact.
The way to pooled is the mean gain over the mean difference of pooled data to Local, on the seeds that all three have;
it is told where that difference is distinguishable from zero, as a share of what may be chance says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import Paired, is_distinguishable, paired_difference
from polyfed.report.text_tables import finite, finite_ones, mean_of
from polyfed.results.main_score import ACCURACY, MainScore

__all__ = ["BySeed", "Decomposition", "GainParts", "decompose", "gain_over", "remarks", "take_apart"]

_Rows = Mapping[str, Sequence[RunRecord]]
BySeed = Mapping[int, float | None]


@dataclass(frozen=True)
class GainParts:
    """A gain over Local, taken apart. Accuracies and differences in [0, 1]; None is "not known".

    Attributes:
        local: Local's mean accuracy on the seeds that all three have.
        gain: together minus Local. alone: alone minus Local. federated: together minus alone.
        pooled: Local's mean accuracy plus the mean difference of pooled data to it.
        way: the share of the way from Local to pooled; None where pooled data are not distinguishably above Local.
    """

    local: float | None
    gain: Paired
    alone: Paired
    federated: Paired
    pooled: float | None
    way: float | None


@dataclass(frozen=True)
class Decomposition(GainParts):
    """One method's gain over Local, taken apart.

    Attributes:
        name, alone_name: the rows.
        longer: together minus a Local that takes as many steps; of no seeds where there is no such row.
    """

    name: str
    alone_name: str
    longer: Paired


def take_apart(
    together: BySeed, alone: BySeed, local: BySeed, pooled: BySeed, score: MainScore = ACCURACY
) -> GainParts:
    """The parts of a gain, on the seeds that together, alone and Local have.

    Args:
        together, alone, local, pooled: seed -> accuracy; `pooled` is empty where no pooled data were trained on.
        score: the main score; what lowers the RMSE is a gain above zero.
    """
    shared = [seed for seed in together if seed in alone and seed in local]
    mine, separate, base = (_only(scores, shared) for scores in (together, alone, local))
    ceiling = gain_over(pooled, base, score)
    level = mean_of(list(base.values()))
    return GainParts(
        local=level,
        gain=gain_over(mine, base, score),
        alone=gain_over(separate, base, score),
        federated=gain_over(mine, separate, score),
        pooled=None if level is None or ceiling.mean is None else score.improved(level, ceiling.mean),
        way=_share(gain_over(mine, _only(base, ceiling.seeds), score), ceiling),
    )


def gain_over(mine: BySeed, other: BySeed, score: MainScore) -> Paired:
    """How much better than another a row is, paired by seed."""
    return paired_difference(other, mine) if score.lower_is_better else paired_difference(mine, other)


def decompose(rows: _Rows, stages: Mapping[str, str], score: MainScore = ACCURACY) -> tuple[Decomposition, ...]:
    """The decompositions of all methods that also ran alone; none without a single row of Local.

    Args:
        rows: name -> runs, one per seed. stages: name -> the stage that is scored there. score: the main score; what
            lowers the RMSE is a gain above zero.
    """
    local = [runs for runs in rows.values() if runs[0].is_local]
    if len(local) != 1:
        return ()
    found = []
    for name, runs in rows.items():
        other = _alone_row(rows, runs) if not runs[0].control else None
        if other is not None:
            found.append(_decomposition(name, other, rows, stages, local[0], score))
    return tuple(found)


def _decomposition(
    name: str,
    alone_name: str,
    rows: _Rows,
    stages: Mapping[str, str],
    local: Sequence[RunRecord],
    score: MainScore,
) -> Decomposition:
    stage = stages[name]
    together = _by_seed(rows[name], stage)
    alone = _by_seed(rows[alone_name], stages[alone_name])
    pooled = _by_seed(_controls(rows)["pooled"], stage) if "pooled" in _controls(rows) else {}
    parts = take_apart(together, alone, _by_seed(local, stage), pooled, score)
    compared = _only(together, parts.gain.seeds)
    longer = _against_longer(name, rows, stages, compared)
    return Decomposition(**vars(parts), name=name, alone_name=alone_name, longer=longer)


def _share(gain: Paired, ceiling: Paired) -> float | None:
    """The gain as a share of that of pooled data."""
    if gain.mean is None or ceiling.mean is None or ceiling.mean <= 0 or not is_distinguishable(ceiling):
        return None
    return gain.mean / ceiling.mean


def _against_longer(name: str, rows: _Rows, stages: Mapping[str, str], together: BySeed) -> Paired:
    """Together minus the Local that was made for this row's steps."""
    for runs in rows.values():
        if runs[0].control == "longer" and name in runs[0].recipe.run.control_of:
            return paired_difference(together, _by_seed(runs, stages[name]))
    return Paired()


def _alone_row(rows: _Rows, runs: Sequence[RunRecord]) -> str | None:
    """The row of the same method and settings in which clients are alone; None where there is none."""
    for name, others in rows.items():
        is_same = others[0].method == runs[0].method and others[0].settings == {**runs[0].settings, "alone": True}
        if is_same and others[0].control == "alone":
            return name
    return None


def _controls(rows: _Rows) -> _Rows:
    """The rows of controls by what they are; of several, the first."""
    return {runs[0].control: runs for runs in reversed(list(rows.values())) if runs[0].control}


def _by_seed(runs: Sequence[RunRecord], stage: str) -> dict[int, float | None]:
    """Seed -> accuracy in the stage; in the runs' own where they were not scored in it."""
    found = {run.seed: finite(run.result.mean_accuracy(stage)) for run in runs}
    if len(finite_ones(found.values())) == len(found):
        return found
    return {run.seed: finite(run.result.mean_accuracy(run.stage)) for run in runs}


def _only(scores: BySeed, seeds: Sequence[int]) -> dict[int, float | None]:
    return {seed: scores[seed] for seed in seeds if seed in scores}


def remarks(found: Sequence[Decomposition]) -> list[str]:
    """What may be said of the decompositions, for the notes below a table."""
    if not found:
        return []
    lines = [
        "alone: the same method with every client a federation of its own; gain over Local = gain alone + federated "
        "gain (together minus alone); way to pooled: the gain as a share of what training on all clients' rows gains"
    ]
    known = [one for one in found if is_distinguishable(one.federated) is not None]
    if not known:
        return [*lines, "federated gains: nothing can be claimed of them below three seeds"]
    sure = [one for one in known if is_distinguishable(one.federated)]
    sides = [f"{one.name} ({'above' if (one.federated.mean or 0) > 0 else 'below'} zero)" for one in sure]
    told = ", ".join(sides) or "none"
    return [*lines, f"federated gains whose 95 % interval leaves out zero: {told}"]
