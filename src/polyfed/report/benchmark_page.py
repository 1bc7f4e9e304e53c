"""The page of a benchmark, in Markdown: ranks over settings, federated gains, a table per setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polyfed.escaping import markdown_text
from polyfed.report.atomic_files import write_whole
from polyfed.report.benchmark_figures import gains_figure
from polyfed.report.benchmark_ranks import Ranking, rank
from polyfed.report.benchmark_results import (
    Gain,
    Gains,
    ProcessorTime,
    RowResult,
    SettingResult,
    read_processor_time,
    read_results,
)
from polyfed.report.run_records import format_setting
from polyfed.report.statistics import ci_half_width, paired_difference
from polyfed.report.text_tables import (
    Column,
    format_mean_std,
    interval,
    interval_of_score,
    markdown_table,
    mean_of,
    render_text,
    scored,
    std_of,
    wrap_columns,
    wrapped,
)
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.units import human_bytes, human_seconds

__all__ = ["ranking", "to_markdown", "to_text", "write_page"]

PAGE = "benchmark.md"

_NOTHING = ProcessorTime(tuning={}, runs={})


def write_page(folder: Path, title: str, settings: Sequence[str]) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
    """Make the page of the figures that a folder has; none where it has none.

    Returns:
        The figures, and the files that were written.

    Raises:
        ConfigError: a file is no such figures.
    """
    found = read_results(folder, settings)
    if not found:
        return (), ()
    missing = [name for name in settings if name not in {one.setting for one in found}]
    ranked = ranking(found)
    figure = gains_figure(_gains_by_setting(found), [*ranked.ranks, *ranked.unranked])
    drawn = [] if figure is None else figure.write(folder)
    page = to_markdown(title, found, read_processor_time(folder), missing, has_figure=figure is not None)
    return tuple(found), (write_whole(folder / PAGE, page.encode()), *drawn)


def to_markdown(
    title: str,
    found: Sequence[SettingResult],
    spent: Mapping[str, ProcessorTime],
    missing: Sequence[str] = (),
    has_figure: bool = False,
) -> str:
    """The page. spent: by setting. missing: settings of the suite without figures."""
    parts = [f"# {markdown_text(title)}"]
    if missing:
        parts.append(f"Not finished: {', '.join(map(markdown_text, missing))}.")
    parts += _about_ranks(found)
    if has_figure:
        parts.append("![Gain over Local and federated gain, by method and setting](gains.png)")
    parts += _about_gains(found)
    for one in found:
        parts += [*_about_setting(one, spent.get(one.setting, _NOTHING))]
    scored_runs = sum(one.scored for one in spent.values())
    trials = sum(one.trials for one in spent.values())
    told = f"Processor time: {human_seconds(scored_runs)} of all scored runs, {human_seconds(trials)} of all trials."
    parts.append(told)
    return "\n\n".join(parts) + "\n"


# over settings ------------------------------------------------------------------------------------------------------


def ranking(found: Sequence[SettingResult]) -> Ranking:
    """The methods, ranked over settings by their mean score."""
    return rank({one.setting: _merits(one) for one in found})


def _columns(ranked: Ranking) -> list[Column]:
    names = list(ranked.ranks)
    columns = [Column("method", names, words=True), Column("mean rank", [f"{ranked.mean(m):.2f}" for m in names])]
    for at, setting in enumerate(ranked.settings):
        columns.append(Column(setting, [f"{ranked.ranks[m][at]:g}" for m in names]))
    return columns


def to_text(ranked: Ranking, width: int = 120) -> str:
    """The ranks for a terminal. width: its columns."""
    blocks = [render_text(block, width) for block in wrap_columns(_columns(ranked), width)]
    return "\n\n".join([*blocks, *(wrapped(told, width) for told in _what_ranks_tell(ranked))])


def _about_ranks(found: Sequence[SettingResult]) -> Iterator[str]:
    ranked = ranking(found)
    yield "## Mean ranks"
    yield markdown_table(_columns(ranked))
    yield from map(markdown_text, _what_ranks_tell(ranked))


def _what_ranks_tell(ranked: Ranking) -> Iterator[str]:
    told = "Rank 1 is the best mean score of a setting, each method in its own evaluation stage."
    if ranked.p_value is None or ranked.critical_difference is None:
        yield f"{told} Too few methods or settings for a test."
    else:
        yield (
            f"{told} Friedman's test: p = {ranked.p_value:.2g}. Mean ranks that differ by less than "
            f"{ranked.critical_difference:.2f} cannot be told apart (Nemenyi, 95 %)."
        )
    if ranked.unranked:
        missing = (f"{method} ({', '.join(settings)})" for method, settings in ranked.unranked.items())
        yield f"Without a rank, as a setting lacks them: {', '.join(missing)}."


def _merits(one: SettingResult) -> dict[str, float]:
    """Method -> its mean score, of which more is better: an RMSE with the other sign."""
    means = {row.name: mean_of(list(row.accuracy.values())) for row in one.methods}
    sign = -1 if one.main_score.lower_is_better else 1
    return {name: sign * mean for name, mean in means.items() if mean is not None}


def _about_gains(found: Sequence[SettingResult]) -> Iterator[str]:
    names = list(dict.fromkeys(gains.name for one in found for gains in one.gains))
    if not names:
        return
    yield "## Federated gains"
    columns = [Column("method", names, words=True)]
    for one in found:
        by_name = {gains.name: gains.federated for gains in one.gains}
        cells = [_with_interval(by_name.get(name), one.main_score) for name in names]
        bold = frozenset(at for at, name in enumerate(names) if name in by_name and by_name[name].leaves_out_zero)
        columns.append(Column(one.setting, cells, bold=bold))
    yield markdown_table(columns)
    yield (
        "How much better together is than alone (every client a federation of its own): accuracy in percentage "
        "points, RMSE in the target's unit; paired by seed, with the 95 % interval; bold where that leaves out zero."
    )


def _gains_by_setting(found: Sequence[SettingResult]) -> dict[str, dict[str, Gains]]:
    """Setting -> method -> gains, of settings with gains in accuracy; an RMSE has another unit."""
    of_accuracy = [one for one in found if one.gains and one.main_score == ACCURACY]
    return {one.setting: {gains.name: gains for gains in one.gains} for one in of_accuracy}


def _with_interval(gain: Gain | None, score: MainScore) -> str:
    if gain is None or gain.mean is None:
        return "-"
    told = scored(gain.mean, score, "+")
    return told if gain.margin is None else f"{told} {interval(gain.mean, gain.margin, '+', score)}"


# a setting ----------------------------------------------------------------------------------------------------------


def _about_setting(one: SettingResult, time: ProcessorTime) -> Iterator[str]:
    yield f"## {markdown_text(one.setting)}"
    yield markdown_text(one.caption)
    local = next((row for row in one.rows if row.method == "local" and not row.control), None)
    gains = {gain.name: gain for gain in one.gains}
    score = one.main_score
    scores = [list(row.accuracy.values()) for row in one.rows]
    over = [_gain(row, local, score) for row in one.rows]
    spent = [mean_of(time.of_row(row.name)) for row in one.rows]
    sent = [_bytes(row) for row in one.rows]
    columns = [
        Column("method", [row.name for row in one.rows], words=True),
        Column(score.title, format_mean_std([(mean_of(found), std_of(found)) for found in scores], score=score)),
        Column("95 % interval", [interval_of_score(mean_of(found), ci_half_width(found), score) for found in scores]),
        Column("gain over Local", [_with_interval(gain, score) for gain in over]),
        Column("= alone", [_gain_of(gains.get(row.name), "alone", score) for row in one.rows]),
        Column("+ federated", [_gain_of(gains.get(row.name), "federated", score) for row in one.rows]),
        Column("way to pooled", [_way(gains.get(row.name)) for row in one.rows]),
        Column("bytes", ["-" if count is None else human_bytes(count) for count in sent]),
        Column("processor time", ["-" if value is None else human_seconds(value) for value in spent]),
        Column("gain per MiB", [_per(gain, count, 2**20, score) for gain, count in zip(over, sent, strict=True)]),
        Column("per processor minute", [_per(gain, value, 60, score) for gain, value in zip(over, spent, strict=True)]),
    ]
    yield markdown_table(columns)
    yield "The last two columns: the gain over Local per MiB sent and per processor minute, if its interval is above 0."
    if one.tuned:
        told = "; ".join(f"{method}: {_settings(values)}" for method, values in one.tuned.items())
        yield f"Chosen by validation: {markdown_text(told)}."


def _gain(row: RowResult, local: RowResult | None, score: MainScore) -> Gain | None:
    """How much better than Local a row is, paired by seed."""
    if local is None or row is local:
        return None
    pair = (local, row) if score.lower_is_better else (row, local)
    found = paired_difference(pair[0].by_seed, pair[1].by_seed)
    return Gain(mean=found.mean, margin=found.margin)


def _per(gain: Gain | None, cost: float | None, unit: float, score: MainScore) -> str:
    """A gain by each unit of its cost, where it can be told from none and costs anything."""
    if gain is None or gain.mean is None or gain.mean <= 0 or not gain.leaves_out_zero or not cost:
        return "-"
    return scored(gain.mean * unit / cost, score, "+")


def _gain_of(gains: Gains | None, part: str, score: MainScore) -> str:
    return "-" if gains is None else scored(getattr(gains, part).mean, score, "+")


def _way(gains: Gains | None) -> str:
    return "-" if gains is None or gains.way is None else f"{100 * gains.way:.0f} %"


def _bytes(row: RowResult) -> float | None:
    """All that is sent in a run."""
    if row.bytes_up is None or row.bytes_down is None:
        return None
    return row.bytes_up + row.bytes_down


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {format_setting(value)}" for name, value in values.items())
