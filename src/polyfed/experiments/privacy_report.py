"""What finished runs have cost in privacy, counted anew from their records, at any delta."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.releases import Release, Unit
from polyfed.engine.privacy_ledger import UNITS, compute_epsilon, from_record, group_releases
from polyfed.errors import ConfigError
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.report.text_tables import Column, percent, render_text, scored
from polyfed.results.main_score import MainScore
from polyfed.results.neighbors import neighbors

_DELTA = 1e-5


@dataclass(frozen=True)
class PrivacyCost:
    """What the client that has given away most has, in one run and of one unit.

    Attributes:
        run: its name. seed, accuracy: of the run; the accuracy in [0, 1], or None. score: what the accuracy is.
        unit: "client" (whether it takes part) or "sample" (what one of its rows holds).
        what: which releases it is about. client: whose. releases: how many.
        noise: of one of them, over the most that it can change; the least. drawn: share of the rows that it is about.
        delta: at which epsilon is reported.
        epsilon: an upper bound where rows are drawn, else exact.
    """

    run: str
    seed: int | None
    accuracy: float | None
    score: MainScore
    unit: Unit
    what: tuple[str, ...]
    client: int
    releases: int
    noise: float
    drawn: float
    delta: float
    epsilon: float


def privacy_costs(folders: Sequence[Path | str], delta: float | None = None) -> list[PrivacyCost]:
    """Of every finished run below these folders that has released anything with noise, a line for each unit.

    Args:
        delta: at which; None: as each run says.

    Raises:
        ConfigError: no such run, a delta that is none, or dp-accounting is not installed.
    """
    if delta is not None and not 0 < delta < 1:
        raise ConfigError(f"--delta: expected a number above 0 and below 1, got {delta:g}")
    found = [one for run in load_runs(folders) if run.finished for one in _of_run(run, delta)]
    if not found:
        raise ConfigError(
            "expected runs with noise on what clients send or in how they train ([privacy], a method's feature_clip), "
            "got none"
        )
    return found


def _of_run(run: RunRecord, delta: float | None) -> list[PrivacyCost]:
    accounts: dict[int, list[Release]] = {}
    for record in run.read_rounds():
        for client, releases in from_record([entry.model_dump() for entry in record.releases]).items():
            accounts.setdefault(client, []).extend(releases)
    at = delta or run.result.delta or _DELTA
    found = []
    for unit in UNITS:
        mine = {i: _merged([one for one in account if one.unit == unit]) for i, account in accounts.items()}
        if any(mine.values()):
            found.append(_line(run, unit, mine, at))
    return found


def _merged(releases: Sequence[Release]) -> tuple[Release, ...]:
    return tuple(dataclasses.replace(one, times=times) for one, times in group_releases(releases).items())


def _line(run: RunRecord, unit: Unit, accounts: dict[int, tuple[Release, ...]], delta: float) -> PrivacyCost:
    epsilons = {account: compute_epsilon(account, delta) for account in set(accounts.values())}
    client = max(accounts, key=lambda i: epsilons[accounts[i]])
    worst = accounts[client]
    loudest = min(worst, key=lambda one: one.noise)
    return PrivacyCost(
        run=run.name or run.method,
        seed=run.seed,
        accuracy=run.result.accuracy,
        score=run.result.main_score,
        unit=unit,
        what=tuple(sorted({one.what for one in worst})),
        client=client,
        releases=sum(one.times for one in worst),
        noise=loudest.noise,
        drawn=loudest.drawn / loudest.held if loudest.sampled else 1.0,
        delta=delta,
        epsilon=epsilons[worst],
    )


def _scores(lines: Sequence[PrivacyCost]) -> Iterator[Column]:
    """A column for each main score of the runs."""
    for score in dict.fromkeys(one.score for one in lines):
        cells = [scored(one.accuracy, score) if one.score is score else "-" for one in lines]
        yield Column(score.title, cells)


def to_text(lines: Sequence[PrivacyCost], width: int = 100) -> str:
    """A table, and what its numbers cover."""
    columns = [
        Column("run", [one.run for one in lines], words=True),
        Column("seed", ["-" if one.seed is None else str(one.seed) for one in lines]),
        *_scores(lines),
        Column("unit", [one.unit for one in lines], words=True),
        Column("of", [", ".join(one.what) for one in lines], words=True),
        Column("releases", [str(one.releases) for one in lines]),
        Column("noise", [f"{one.noise:.3g}" for one in lines]),
        Column("rows", [percent(one.drawn) for one in lines]),
        Column("epsilon", [f"{one.epsilon:.4g}" for one in lines]),
    ]
    deltas = ", ".join(f"{delta:g}" for delta in sorted({one.delta for one in lines}))
    notes = [
        f"epsilon at delta {deltas}, of the client that has given away most; noise over what it hides; rows drawn in %"
    ]
    notes.append(neighbors(kind for one in lines for kind in one.what))
    if any("features" in one.what and "training" not in one.what for one in lines):
        notes.append("features: for given weights, which were trained without noise and go up as they are")
    return "\n".join([render_text(columns, width), "", *notes])
