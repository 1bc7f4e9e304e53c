"""Accuracy client by client, from run folders: sorted, by architecture, by how much data a client has.

Always of each run's main stage, after the last round: that is what `result.json` holds for every client.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import (
    HEIGHT,
    WIDTH,
    FigureWithData,
    empty_figure,
    has_bands,
    inches,
    legend,
    line_style,
    shortened,
)
from polyfed.report.run_records import RunRecord
from polyfed.results.main_score import MainScore

__all__ = ["ReportedScore", "architectures", "by_architecture", "client_scores", "clients", "ranked", "sizes"]

_SIZE = 9  # points of an architecture's name
_LONG = 36  # letters of it
_MARK = 0.1  # inches across that a method's mark takes
_WIDEST = 12.0  # inches
_WIDE = 10  # numbers of samples are on a logarithmic axis where the largest is this many times the smallest


@dataclass(frozen=True)
class ReportedScore:
    """One client of one run. accuracy: in [0, 1]. samples: that it had to train on. None is "not recorded"."""

    name: str
    method: str
    seed: int
    client: int
    architecture: str | None
    samples: int | None
    accuracy: float


def client_scores(group: Group) -> list[ReportedScore]:
    """Every scored client of every run, row after row, seed after seed."""
    return [score for name, runs in group.rows.items() for run in runs for score in _scores(name, run)]


def _scores(name: str, run: RunRecord) -> list[ReportedScore]:
    table = run.result.clients_table
    known: list[tuple[int, str | None, int | None, float | None]]
    if table is None:  # only the accuracies were recorded
        known = [(number, None, None, accuracy) for number, accuracy in enumerate(run.result.accuracy_per_client)]
    else:
        known = [(row.id, row.architecture, row.samples, row.accuracy) for row in table]
    return [
        ReportedScore(name, run.method, run.seed, number, architecture, samples, accuracy)
        for number, architecture, samples, accuracy in known
        if accuracy is not None and math.isfinite(accuracy)
    ]


@dataclass(frozen=True)
class Ranked:
    """One row's clients from the lowest to the highest accuracy: at each rank mean, lowest and highest over seeds."""

    name: str
    method: str
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


def ranked(scores: Sequence[ReportedScore]) -> list[Ranked]:
    """Clients sorted within each run. Rank k over seeds is the mean of the k-th lowest clients, whoever they are.

    Where seeds scored different numbers of clients, as many ranks as all have.
    """
    found = []
    for name, mine in _by(scores, "name").items():
        columns = [sorted(score.accuracy for score in run) for run in _by(mine, "seed").values()]
        places = list(zip(*columns, strict=False))
        found.append(
            Ranked(
                name,
                mine[0].method,
                mean=tuple(map(statistics.fmean, places)),
                low=tuple(map(min, places)),
                high=tuple(map(max, places)),
                seeds=len(columns),
            )
        )
    return found


@dataclass(frozen=True)
class ByArchitecture:
    """One row's clients of one architecture, all seeds: mean, lowest and highest client, and how many there are."""

    name: str
    method: str
    architecture: str
    mean: float
    low: float
    high: float
    n: int


def by_architecture(scores: Sequence[ReportedScore]) -> list[ByArchitecture]:
    """Every row and architecture; clients of which no architecture is recorded are left out."""
    found = []
    for name, mine in _by([score for score in scores if score.architecture is not None], "name").items():
        for architecture, alike in _by(mine, "architecture").items():
            values = [score.accuracy for score in alike]
            mean = statistics.fmean(values)
            found.append(
                ByArchitecture(name, mine[0].method, architecture, mean, min(values), max(values), len(values))
            )
    return found


def _by(scores: Iterable[ReportedScore], key: str) -> dict[Any, list[ReportedScore]]:
    """In order of first appearance."""
    found: dict[Any, list[ReportedScore]] = {}
    for score in scores:
        found.setdefault(getattr(score, key), []).append(score)
    return found


# drawing ----------------------------------------------------------------------------------------------------------


def clients(runs: Iterable[RunRecord]) -> list[FigureWithData]:
    """``accuracy-per-client``: the clients of each method from the lowest to the highest accuracy.

    Raises:
        ConfigError: nothing is finished, or no client was scored.
    """
    return [_clients(group, scores, stem) for group, scores, stem in _scored(runs, "accuracy-per-client")]


def _clients(group: Group, scores: Sequence[ReportedScore], stem: str) -> FigureWithData:
    from matplotlib.ticker import MaxNLocator

    main = group.score
    lines = ranked(scores)
    band = "; band: lowest to highest seed" if has_bands(len(lines), len(group.seeds)) else ""
    more = f"Line: mean over seeds at each rank{band}." if len(group.seeds) > 1 else ""
    figure, axes = empty_figure(main.of_it("Accuracy per client, sorted"), _about(group, more))
    handles = []
    for line in lines:
        style = line_style(group.looks[line.name])
        at = range(1, len(line.mean) + 1)
        if has_bands(len(lines), line.seeds):
            low, high = (_shown(main, values) for values in (line.low, line.high))
            axes.fill_between(at, low, high, color=style["color"], alpha=0.15, lw=0)
        every = max(1, len(at) // 10)
        handles += axes.plot(
            at, _shown(main, line.mean), **style, markersize=5, markevery=every, gid=f"ranks {line.name}"
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"client, from the lowest to the highest {main.title}")
    axes.set_ylabel(main.axis)
    legend(axes, handles, [line.name for line in lines])
    rows = [
        {"name": line.name, "rank": rank, "mean": mean, "low": low, "high": high, "seeds": line.seeds}
        for line in lines
        for rank, (mean, low, high) in enumerate(zip(line.mean, line.low, line.high, strict=True), start=1)
    ]
    return FigureWithData(stem, figure, _data(group, more, lines), rows)


def architectures(runs: Iterable[RunRecord]) -> list[FigureWithData]:
    """``accuracy-by-architecture``: the mean of each architecture's clients, method beside method.

    Raises:
        ConfigError: nothing is finished, or no run says which client has which architecture.
    """
    drawn = []
    for group, scores, stem in _scored(runs, "accuracy-by-architecture"):
        if found := by_architecture(scores):
            drawn.append(_architectures(group, found, stem))
    if not drawn:
        raise ConfigError("nothing to draw: no result.json of these runs names its clients' architectures")
    return drawn


def _architectures(group: Group, found: Sequence[ByArchitecture], stem: str) -> FigureWithData:
    more = f"Mark: mean over clients{' and seeds' if len(group.seeds) > 1 else ''}; line: lowest to highest of them."
    main = group.score
    places = {name: place for place, name in enumerate(dict.fromkeys(one.architecture for one in found))}
    rows = dict.fromkeys(one.name for one in found)
    names = shortened(list(places), _LONG)
    width = min(_WIDEST, max(WIDTH, 0.8 + _MARK * (len(rows) + 1) * len(places)))
    long = inches(names, _SIZE) + 0.1 > (width - 0.8) / len(places)
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if long else {}
    below = 0.71 * inches(names, _SIZE) if long else 0.0
    figure, axes = empty_figure(main.of_it("Accuracy by architecture"), _about(group, more), HEIGHT + below, width)
    handles = []
    for number, name in enumerate(rows):
        mine = [one for one in found if one.name == name]
        aside = 0.7 * ((number + 0.5) / len(rows) - 0.5)
        at = [places[one.architecture] + aside for one in mine]
        means = _shown(main, [one.mean for one in mine])
        reach = [
            _shown(main, [one.mean - one.low for one in mine]),
            _shown(main, [one.high - one.mean for one in mine]),
        ]
        handles.append(
            axes.errorbar(at, means, yerr=reach, **_mark(group, name), elinewidth=1, capsize=2.5, gid=f"means {name}")
        )
    for place in range(1, len(places)):
        axes.axvline(place - 0.5, color="#999999", linewidth=0.7)
    axes.set_xticks(range(len(places)), names, fontsize=_SIZE, parse_math=False, **turned)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.grid(False, axis="x")
    axes.set_ylabel(main.axis)
    legend(axes, handles, rows)
    return FigureWithData(stem, figure, _data(group, more, found), [asdict(one) for one in found])


def sizes(runs: Iterable[RunRecord]) -> list[FigureWithData]:
    """``accuracy-by-size``: each client's accuracy against its number of training samples.

    Raises:
        ConfigError: nothing is finished, or no run says how much data its clients have.
    """
    drawn = []
    for group, scores, stem in _scored(runs, "accuracy-by-size"):
        if known := [score for score in scores if score.samples is not None]:
            drawn.append(_sizes(group, known, stem))
    if not drawn:
        raise ConfigError("nothing to draw: no result.json of these runs says how many samples its clients have")
    return drawn


def _sizes(group: Group, scores: Sequence[ReportedScore], stem: str) -> FigureWithData:
    main = group.score
    more = f"A mark per client{' and seed' if len(group.seeds) > 1 else ''}."
    figure, axes = empty_figure(main.of_it("Accuracy by the amount of a client's data"), _about(group, more))
    rows = dict.fromkeys(score.name for score in scores)
    handles = []
    for name in rows:
        mine = [score for score in scores if score.name == name]
        at = [score.samples for score in mine]
        values = _shown(main, [score.accuracy for score in mine])
        handles += axes.plot(at, values, **_mark(group, name), alpha=0.85, gid=f"marks {name}")
    numbers = [score.samples for score in scores if score.samples]
    if numbers and max(numbers) >= _WIDE * min(numbers):
        axes.set_xscale("log")
    axes.set_xlabel("training samples of the client")
    axes.set_ylabel(main.axis)
    legend(axes, handles, rows)
    return FigureWithData(stem, figure, _data(group, more, scores), [asdict(score) for score in scores])


def _scored(runs: Iterable[RunRecord], stem: str) -> list[tuple[Group, list[ReportedScore], str]]:
    """The groups with scored clients, and the name of each one's files."""
    groups, _ = group_runs(runs)
    every = [(group, client_scores(group)) for group in groups]
    found = [(group, scores) for group, scores in every if scores]
    if not found:
        raise ConfigError("nothing to draw: no client of these runs was scored")
    return [
        (group, scores, group.score.of_it(f"{stem}-{number}" if len(found) > 1 else stem).lower())
        for number, (group, scores) in enumerate(found, start=1)
    ]


def _mark(group: Group, name: str) -> dict[str, Any]:
    """A row's marker without a line; open, so that those below show."""
    bare = {key: value for key, value in line_style(group.looks[name]).items() if key != "linewidth"}
    return bare | {"linestyle": "none", "markersize": 5.5, "markerfacecolor": "none", "markeredgewidth": 1.3}


def _about(group: Group, more: str) -> str:
    return f"{group.about}, {group.seeds_text()}. {group.scoring(None).capitalize()}, after the last round. {more}"


def _data(group: Group, more: str, entries: Sequence[Any]) -> Mapping[str, Any]:
    return {"about": _about(group, more).strip(), "entries": [asdict(entry) for entry in entries]}


def _shown(score: MainScore, values: Iterable[float]) -> list[float]:
    return list(map(score.shown, values))
