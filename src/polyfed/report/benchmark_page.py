"""The page of a benchmark, in Markdown: an overview, ranks over settings, gains over several rivals, a table a setting.

Ranks: mean ranks, Friedman's test, Nemenyi's critical difference (Demsar, JMLR 2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed.escaping import markdown_text
from polyfed.report.atomic_files import write_whole
from polyfed.report.benchmark_results import (
    ProcessorTime,
    SettingResult,
    read_processor_time,
    read_results,
)
from polyfed.report.comparison_tables import way_text
from polyfed.report.findings import Gains, take_apart
from polyfed.report.plot_style import WIDTH, FigureWithData, add_colorbar, canvas, inches
from polyfed.report.run_records import format_setting
from polyfed.report.statistics import LEVEL, Estimate, mean_of
from polyfed.report.text_tables import (
    NOT_KNOWN,
    Column,
    duration,
    format_mean_std,
    interval,
    interval_of_score,
    markdown_table,
    scored,
    size,
    text_blocks,
    wrapped,
)
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.units import human_seconds

PAGE = "benchmark.md"
_NO_TIME = ProcessorTime(tuning={}, runs={})
_METHODS = 3  # fewer have no Friedman test
_SETTINGS = 2
_PARTS = {"gain": "gain over Local", "federated": "federated gain"}  # attribute of `Gains` -> panel of the figure
_MOST = 10.0  # percentage points from which on the figure's color is full
_DARK = 6.5  # percentage points from which on its text is white
_SIZE = 8  # points of it
_ROW, _COLUMN = 0.25, 0.5  # inches of a cell


@dataclass(frozen=True)
class Wanted:
    """What a setting is to have: these methods with these seeds, and a row of a Local for longer, or ""."""

    methods: Sequence[str]
    seeds: Sequence[int]
    longer: str = ""


def write_page(
    folder: Path, title: str, wanted: Mapping[str, Wanted]
) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
    """Make the page of the figures that a folder has; none where it has none.

    Args:
        wanted: setting -> what it is to have; the page names what it lacks.

    Returns:
        The figures, and the files that were written.
    """
    found = read_results(folder, list(wanted))
    if not found:
        return (), ()
    ranked = ranking(found)
    by_setting = {one.setting: gains_of(one) for one in found if one.main_score == ACCURACY}  # an RMSE has another unit
    known = {setting: gains for setting, gains in by_setting.items() if gains}
    figure = gains_figure(known, [*ranked.ranks, *ranked.unranked])
    drawn = [] if figure is None else figure.write(folder)
    page = to_markdown(title, found, read_processor_time(folder), wanted, has_figure=figure is not None)
    return tuple(found), (write_whole(folder / PAGE, page.encode()), *drawn)


def to_markdown(
    title: str,
    found: Sequence[SettingResult],
    spent: Mapping[str, ProcessorTime],
    wanted: Mapping[str, Wanted] = MappingProxyType({}),
    has_figure: bool = False,
) -> str:
    """The page. spent: by setting. wanted: see `write_page`."""
    parts = [f"# {markdown_text(title)}"]
    if lacking := list(_lacking(found, wanted)):
        parts.append(f"Not finished: {markdown_text('; '.join(lacking))}.")
    longer = {name: asked.longer for name, asked in wanted.items() if asked.longer}
    gains = {one.setting: gains_of(one) for one in found}
    ranked = ranking(found)
    parts += _overview(found, gains, longer)
    parts += ["## Mean ranks", markdown_table(_rank_columns(ranked)), *map(markdown_text, _about_ranks(ranked))]
    if has_figure:
        parts.append("![Gain over Local and federated gain, by method and setting](gains.png)")
    parts += _federated_gains(found, gains)
    parts += _over_other_targets(found)
    parts += _over_other_locals(found, longer)
    for one in found:
        parts += _about_setting(one, gains[one.setting], spent.get(one.setting, _NO_TIME))
    scored_runs = human_seconds(sum(one.scored for one in spent.values()))
    trials = human_seconds(sum(one.trials for one in spent.values()))
    parts.append(f"Processor time: {scored_runs} of all scored runs, {trials} of all trials.")
    return "\n\n".join(parts) + "\n"


# what is still to be run --------------------------------------------------------------------------------------------


def _lacking(found: Sequence[SettingResult], wanted: Mapping[str, Wanted]) -> Iterator[str]:
    """What is still to be run, a text for each setting: "tweets", "watch (fedgh, seeds 3, 4 of fd)"."""
    by_name = {one.setting: one for one in found}
    for setting, asked in wanted.items():
        if setting not in by_name:
            yield setting
        elif missing := list(_lacking_rows(by_name[setting], asked)):
            yield f"{setting} ({', '.join(missing)})"


def _lacking_rows(found: SettingResult, asked: Wanted) -> Iterator[str]:
    """Rows, or seeds of rows."""
    for name in filter(None, (*asked.methods, asked.longer)):
        row = found.row(name)
        seeds = [] if row is None else [seed for seed in asked.seeds if seed not in row.by_seed]
        if row is None:
            yield name
        elif seeds:
            yield f"{_seeds_text(seeds)} of {name}"


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


# gains of a setting -------------------------------------------------------------------------------------------------


def gains_of(setting: SettingResult) -> dict[str, Gains]:
    """Method -> its gains, of the methods that also ran alone, in the order of the rows; none without Local."""
    local = setting.row("local")
    if local is None:
        return {}
    row = setting.row("pooled-tuned")
    pooled = {} if row is None else row.by_seed
    found = {}
    for row in setting.methods:
        alone = setting.row(f"{row.name}-alone")
        if alone is not None and alone.control == "alone":
            found[row.name] = take_apart(row.by_seed, alone.by_seed, local.by_seed, pooled, setting.main_score)
    return found


def gain_between(setting: SettingResult, lower: str, upper: str) -> Estimate:
    """How far the row `upper` lies above the row `lower`, paired by seed; not known where either is lacking."""
    below = setting.row(lower)
    above = setting.row(upper)
    if below is None or above is None:
        return Estimate()
    return Estimate.gain(above.by_seed, below.by_seed, setting.main_score)


def gain_text(gain: Estimate, score: MainScore) -> str:
    """``"+2.39 [+1.02, +3.76]"``, without an interval ``"+2.39"``."""
    known = "" if gain.margin is None else f" {interval(gain, score)}"
    return scored(gain.mean, score, "+") + known


# over settings ------------------------------------------------------------------------------------------------------


def _overview(
    found: Sequence[SettingResult], gains: Mapping[str, Mapping[str, Gains]], longer: Mapping[str, str]
) -> Iterator[str]:
    """In each setting, how many methods gain, and how many by the other clients; nothing without any interval."""
    counted = [one for one in found if any(parts.gain.margin is not None for parts in gains[one.setting].values())]
    if not counted:
        return
    yield "## Overview"
    rows = [_overview_cells(one, gains[one.setting], longer.get(one.setting, "")) for one in counted]
    columns = [Column(title, [row[title] for row in rows]) for title in rows[0]]
    names = Column("setting", [one.setting for one in counted], words=True)
    yield markdown_table([names, *(column for column in columns if not column.is_empty)])
    has_longer = any(one.row(longer.get(one.setting, "")) is not None for one in counted)
    also = ", and above a Local that trains for longer" if has_longer else ""
    yield (
        f"Of the methods that also ran with each client alone, how many lie distinguishably above Local{also}, and how "
        "many gain or lose by the other clients (together minus alone), by their 95 % intervals. If nothing made a "
        "difference, one in forty would on either side."
    )


def _overview_cells(one: SettingResult, gains: Mapping[str, Gains], longer: str) -> dict[str, str]:
    """A setting's cells by column. longer: its row of a Local for longer."""
    above_longer = [gain_between(one, longer, name) for name in gains]
    federated = [parts.federated for parts in gains.values()]
    return {
        "methods": str(len(gains)),
        "above Local": _count(parts.gain for parts in gains.values()),
        "above a longer Local": NOT_KNOWN if one.row(longer) is None else _count(above_longer),
        "gain by the others": _count(federated),
        "lose by the others": _count(federated, sign=-1),
        "longer Local over Local": gain_text(gain_between(one, "local", longer), one.main_score),
        **{
            f"{name} over Local": gain_text(gain_between(one, "local", name), one.main_score)
            for name in ("pooled", "pooled-shares", "pooled-tuned")
        },
    }


def _count(gains: Iterable[Estimate], sign: int = 1) -> str:
    """How many lie distinguishably above zero; with sign -1, below."""
    return str(sum(bool(gain.is_distinguishable) and sign * (gain.mean or 0.0) > 0 for gain in gains))


def _gains_section(
    title: str,
    rows: Mapping[str, str],
    found: Sequence[SettingResult],
    gain: Callable[[SettingResult, str], Estimate],
    about: str,
    heading: str = "method",
) -> Iterator[str]:
    """A section with a gain per row and setting; bold where its interval leaves out zero. Nothing without rows.

    rows: what a row is called -> what `gain` takes for it.
    """
    if not rows:
        return
    columns = [Column(heading, list(rows), words=True)]
    for one in found:
        gains = [gain(one, name) for name in rows.values()]
        bold = frozenset(at for at, each in enumerate(gains) if each.is_distinguishable)
        columns.append(Column(one.setting, [gain_text(each, one.main_score) for each in gains], bold=bold))
    yield from (f"## {markdown_text(title)}", markdown_table(columns), markdown_text(about))


def _federated_gains(found: Sequence[SettingResult], gains: Mapping[str, Mapping[str, Gains]]) -> Iterator[str]:
    names = dict.fromkeys(name for of_setting in gains.values() for name in of_setting)

    def federated(one: SettingResult, name: str) -> Estimate:
        parts = gains[one.setting].get(name)
        return Estimate() if parts is None else parts.federated

    yield from _gains_section(
        "Federated gains",
        {name: name for name in names},
        found,
        federated,
        "How much better together is than alone (every client a federation of its own): accuracy in percentage points, "
        "RMSE in the target's unit; paired by seed, with the 95 % interval; bold where that leaves out zero.",
    )


def _over_other_targets(found: Sequence[SettingResult]) -> Iterator[str]:
    """How far methods lie above their variants with something else in the place of what the others know."""
    methods = {row.name: row.method for one in found for row in one.rows if row.control == "targets"}
    yield from _gains_section(
        "Gains over other targets",
        {f"{method} - {name}": name for name, method in methods.items()},
        found,
        lambda one, name: gain_between(one, name, methods[name]),
        "How much better a method is than its variant with something else in the place of what the others know, such "
        "as a client's own part of it.",
        heading="method - control",
    )


def _over_other_locals(found: Sequence[SettingResult], longer: Mapping[str, str]) -> Iterator[str]:
    """How far methods lie above a Local that trains for longer, and above variants of Local that were tuned.

    longer: setting -> its row of a Local for longer.
    """
    there = {one.setting: longer.get(one.setting, "") for one in found if one.row(longer.get(one.setting, ""))}
    named = ", ".join(f"{setting} {name}" for setting, name in there.items())
    yield from _over_another_local(
        found,
        there,
        "Gains over a longer Local",
        f"As far as each method lies above a Local that trains more epochs a round ({named}), with the epochs of the "
        "recipe itself; where it lies below, training longer alone gains more than the method does.",
    )
    tuned = dict.fromkeys(row.name for one in found for row in one.methods if row.method == "local" != row.name)
    for name in tuned:
        yield from _over_another_local(
            found,
            {one.setting: name for one in found if one.row(name) is not None},
            f"Gains over {name}",
            f"As far as each method lies above {name}, Local with what validation chose for it.",
        )


def _over_another_local(
    found: Sequence[SettingResult], below: Mapping[str, str], title: str, about: str
) -> Iterator[str]:
    """below: setting -> the row, of the settings that have it."""
    having = [one for one in found if one.setting in below]
    names = dict.fromkeys(row.name for one in having for row in one.methods if row.method != "local")
    yield from _gains_section(
        title,
        {name: name for name in names},
        having,
        lambda one, name: gain_between(one, below[one.setting], name),
        about,
    )


# ranks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Methods by mean rank, best first.

    Attributes:
        settings: those ranked over, in which every method has a score.
        left_out: settings that have less than half as many methods as the one with most, such as one just begun: they
            would leave few methods to be ranked.
        ranks: method -> its rank in each setting, 1 the best; ties share the mean of theirs.
        p_value: of Friedman's test, corrected for ties, that all methods are equal; None with fewer than three methods
            or two settings, and where all are equal throughout.
        critical_difference: mean ranks that differ by less cannot be told apart (95 %, Nemenyi); None with so few.
        unranked: method -> the settings that lack it, of methods without a rank.
    """

    settings: tuple[str, ...]
    left_out: tuple[str, ...]
    ranks: Mapping[str, tuple[float, ...]]
    p_value: float | None
    critical_difference: float | None
    unranked: Mapping[str, tuple[str, ...]]

    def mean(self, method: str) -> float:
        """A method's mean rank."""
        found = self.ranks[method]
        return sum(found) / len(found)


def ranking(found: Sequence[SettingResult]) -> Ranking:
    """The methods, ranked over settings by their mean score."""
    merits: dict[str, dict[str, float]] = {}
    for one in found:
        sign = -1 if one.main_score.lower_is_better else 1
        means = {row.name: mean_of(list(row.accuracy.values())) for row in one.methods}
        merits[one.setting] = {name: sign * mean for name, mean in means.items() if mean is not None}
    return rank(merits)


def rank(scores: Mapping[str, Mapping[str, float]]) -> Ranking:
    """Rank methods in each setting, and over all.

    Args:
        scores: setting -> method -> mean score, the higher the better. Methods that a setting lacks have no rank.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range  # comes with scikit-learn

    most = max(map(len, scores.values()), default=0)
    settings = [name for name, found in scores.items() if found and 2 * len(found) >= most]
    left_out = tuple(name for name, found in scores.items() if found and name not in settings)
    methods = dict.fromkeys(method for found in scores.values() for method in found)
    lacking = {method: tuple(name for name in settings if method not in scores[name]) for method in methods}
    everywhere = [method for method, without in lacking.items() if not without]
    unranked = {method: without for method, without in lacking.items() if without}
    columns = {name: rankdata([-scores[name][method] for method in everywhere]) for name in settings}
    ranks = {m: tuple(float(columns[name][at]) for name in settings) for at, m in enumerate(everywhere)}
    ordered = dict(sorted(ranks.items(), key=lambda item: sum(item[1])))
    if len(everywhere) < _METHODS or len(settings) < _SETTINGS:
        return Ranking(tuple(settings), left_out, ordered, None, None, unranked)
    p_value = None  # where all are equal in every setting
    if any(len(set(column)) > 1 for column in columns.values()):
        by_method = ([scores[name][method] for name in settings] for method in everywhere)
        p_value = float(friedmanchisquare(*by_method).pvalue)
    count = len(everywhere)
    quantile = float(studentized_range.ppf(LEVEL, count, math.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(count * (count + 1) / (6 * len(settings)))
    return Ranking(tuple(settings), left_out, ordered, p_value, critical, unranked)


def _rank_columns(ranked: Ranking) -> list[Column]:
    names = list(ranked.ranks)
    columns = [Column("method", names, words=True), Column("mean rank", [f"{ranked.mean(m):.2f}" for m in names])]
    return columns + [
        Column(setting, [f"{ranked.ranks[m][at]:g}" for m in names]) for at, setting in enumerate(ranked.settings)
    ]


def to_text(ranked: Ranking, width: int = 120) -> str:
    """The ranks for a terminal. width: its columns."""
    lines = [wrapped(text, width) for text in _about_ranks(ranked)]
    return "\n\n".join([text_blocks(_rank_columns(ranked), width), *lines])


def _about_ranks(ranked: Ranking) -> Iterator[str]:
    """What the ranks show, a paragraph each."""
    start = "Rank 1 is the best mean score of a setting, each method in its own evaluation stage."
    if ranked.p_value is None or ranked.critical_difference is None:
        yield f"{start} Too few methods or settings for a test."
    else:
        yield (
            f"{start} Friedman's test: p = {ranked.p_value:.2g}. Mean ranks that differ by less than "
            f"{ranked.critical_difference:.2f} cannot be told apart (Nemenyi, 95 %)."
        )
    if ranked.left_out:
        yield f"Not ranked over, with less than half of the methods: {', '.join(ranked.left_out)}."
    if ranked.unranked:
        missing = (f"{method} ({', '.join(settings)})" for method, settings in ranked.unranked.items())
        yield f"Without a rank, as a setting lacks them: {', '.join(missing)}."


# a setting ----------------------------------------------------------------------------------------------------------


def _about_setting(one: SettingResult, gains: Mapping[str, Gains], time: ProcessorTime) -> Iterator[str]:
    yield f"## {markdown_text(one.setting)}"
    yield markdown_text(_caption(one))
    score = one.main_score
    scores = [Estimate.of(row.by_seed) for row in one.rows]
    over = [Estimate() if row.name == "local" else gain_between(one, "local", row.name) for row in one.rows]
    spent = [mean_of(list(time.runs.get(row.name, {}).values())) for row in one.rows]
    sent = [row.bytes_of_run for row in one.rows]
    apart = [gains.get(row.name) for row in one.rows]
    columns = [
        Column("method", [row.name for row in one.rows], words=True),
        Column(score.title, format_mean_std(scores, score=score)),
        Column("95 % interval", [interval_of_score(found, score) for found in scores]),
        Column("gain over Local", [gain_text(gain, score) for gain in over]),
        Column("= alone", [NOT_KNOWN if parts is None else scored(parts.alone.mean, score, "+") for parts in apart]),
        Column(
            "+ federated", [NOT_KNOWN if parts is None else scored(parts.federated.mean, score, "+") for parts in apart]
        ),
        Column("way to pooled-tuned", [NOT_KNOWN if parts is None else way_text(parts.way) for parts in apart]),
        Column("bytes", list(map(size, sent))),
        Column("processor time", list(map(duration, spent))),
        Column("gain per MiB", [_per(gain, count, 2**20, score) for gain, count in zip(over, sent, strict=True)]),
        Column("per processor minute", [_per(gain, cost, 60, score) for gain, cost in zip(over, spent, strict=True)]),
    ]
    yield markdown_table(columns)
    yield "The last two columns: the gain over Local per MiB sent and per processor minute, if its interval is above 0."
    if one.tuning:
        chosen = {
            method: ", ".join(f"{name} = {format_setting(value)}" for name, value in tuned.chosen.items())
            for method, tuned in one.tuning.items()
        }
        listed = "; ".join(f"{method}: {values}" for method, values in chosen.items())
        yield f"Chosen by validation: {markdown_text(listed)}."


def _caption(one: SettingResult) -> str:
    """What was measured, and how it was scored."""
    stages = list(dict.fromkeys(row.stage for row in one.rows))
    stage = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
    parts = [f"{one.about}, {_seeds_text(one.seeds)}.", one.main_score.of_it(f"Accuracy: {stage}, {one.scored_on}.")]
    parts += [one.changes] if one.changes else []
    if fewer := [f"{row.name} {', '.join(row.accuracy)}" for row in one.rows if len(row.accuracy) < len(one.seeds)]:
        parts.append(f"Fewer seeds: {'; '.join(fewer)}.")
    return " ".join(parts)


def _per(gain: Estimate, cost: float | None, unit: float, score: MainScore) -> str:
    """A gain by each unit of its cost, where it lies distinguishably above zero and costs anything."""
    if gain.mean is None or gain.mean <= 0 or not gain.is_distinguishable or not cost:
        return NOT_KNOWN
    return scored(gain.mean * unit / cost, score, "+")


# the figure ---------------------------------------------------------------------------------------------------------


def gains_figure(
    by_setting: Mapping[str, Mapping[str, Gains]], methods: Sequence[str], stem: str = "gains"
) -> FigureWithData | None:
    """Every method's gain over Local and its federated gain: a map each, with a row per method, a column per setting.

    Args:
        by_setting: setting -> method -> its gains in accuracy. methods: the rows, from the top; those without a gain
            anywhere are left out.

    Returns:
        The figure with its data; None where there are no gains.
    """
    names = [method for method in methods if any(method in gains for gains in by_setting.values())]
    if not names:
        return None
    about = (
        "Percentage points, paired by seed: together minus Local, and together minus alone (every client a federation "
        "of its own). Bold: the 95 % interval excludes zero."
    )
    width = 1.6 + inches(names, _SIZE) + len(_PARTS) * len(by_setting) * _COLUMN
    height = _ROW * len(names) + 0.5 + 0.71 * inches(by_setting, _SIZE)
    figure, (panels,) = canvas("Gains by setting", about, height, columns=2, width=max(WIDTH, width), sharey=True)
    rows = []
    for axes, (part, title) in zip(panels, _PARTS.items(), strict=True):
        cells = {
            (x, y): getattr(gains[method], part)
            for x, gains in enumerate(by_setting.values())
            for y, method in enumerate(names)
            if method in gains
        }
        shown = _map(axes, cells, len(by_setting), len(names))
        axes.set_title(title, size=_SIZE + 1)
        axes.set_xticks(range(len(by_setting)), list(by_setting), size=_SIZE, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names, size=_SIZE)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_parse_math(False)
        settings = list(by_setting)
        rows += [
            {"setting": settings[x], "method": names[y], "part": part, "mean": gain.mean, "margin": gain.margin}
            for (x, y), gain in cells.items()
        ]
    add_colorbar(figure, shown, panels, "percentage points")
    return FigureWithData(stem, figure, {"gains": rows}, rows)


def _map(axes: Any, cells: Mapping[tuple[int, int], Estimate], columns: int, rows: int) -> Any:
    """The cells as colors (red: a loss), with their figures; a cell without one stays white."""
    points = [[math.nan] * columns for _ in range(rows)]
    for (x, y), gain in cells.items():
        if gain.mean is None:
            continue
        points[y][x] = 100 * gain.mean
        color = "white" if abs(points[y][x]) > _DARK else "black"
        weight = "bold" if gain.is_distinguishable else "normal"
        axes.text(x, y, f"{points[y][x]:+.1f}", ha="center", va="center", size=_SIZE, color=color, weight=weight)
    return axes.imshow(points, cmap="RdBu", vmin=-_MOST, vmax=_MOST, aspect="auto", interpolation="nearest")
