"""The page of a benchmark, in Markdown: ranks over settings, federated gains, a table per setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from polyfed.escaping import markdown_text
from polyfed.report.atomic_files import write_whole
from polyfed.report.benchmark_figures import gains_figure
from polyfed.report.benchmark_gains import gain_between, gain_text, gains_of
from polyfed.report.benchmark_overview import overview
from polyfed.report.benchmark_ranks import Ranking, rank
from polyfed.report.benchmark_results import (
    ProcessorTime,
    RowResult,
    SettingResult,
    read_processor_time,
    read_results,
)
from polyfed.report.decomposition import GainParts
from polyfed.report.run_records import format_setting
from polyfed.report.statistics import Paired, ci_half_width, is_distinguishable
from polyfed.report.text_tables import (
    Column,
    format_mean_std,
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

__all__ = ["Wanted", "ranking", "to_markdown", "to_text", "write_page"]

PAGE = "benchmark.md"

_NOTHING = ProcessorTime(tuning={}, runs={})


@dataclass(frozen=True)
class Wanted:
    """What a setting is to have.

    methods: names of rows. seeds: of each of them. longer: the row of a Local for longer; "" where none was asked for.
    controls: method -> the rows of its controls; Local's are those that all methods share.
    as_many_steps: whether each method has a Local of as many steps beside it.
    """

    methods: Sequence[str]
    seeds: Sequence[int]
    longer: str = ""
    controls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    as_many_steps: bool = False


def write_page(
    folder: Path, title: str, wanted: Mapping[str, Wanted]
) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
    """Make the page of the figures that a folder has; none where it has none.

    Args:
        wanted: setting -> what it is to have; what it lacks is told.

    Returns:
        The figures, and the files that were written.

    Raises:
        ConfigError: a file is no such figures.
    """
    found = read_results(folder, list(wanted))
    if not found:
        return (), ()
    ranked = ranking(found)
    figure = gains_figure(_gains_by_setting(found), [*ranked.ranks, *ranked.unranked])
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
    parts += overview(found, gains, longer)
    parts += _about_ranks(found)
    if has_figure:
        parts.append("![Gain over Local and federated gain, by method and setting](gains.png)")
    parts += _about_gains(found, gains)
    parts += _over_other_targets(found)
    parts += _over_longer(found, longer)
    parts += _over_tuned(found)
    for one in found:
        parts += [*_about_setting(one, gains[one.setting], spent.get(one.setting, _NOTHING))]
    scored_runs = sum(one.scored for one in spent.values())
    trials = sum(one.trials for one in spent.values())
    told = f"Processor time: {human_seconds(scored_runs)} of all scored runs, {human_seconds(trials)} of all trials."
    parts.append(told)
    return "\n\n".join(parts) + "\n"


def _lacking(found: Sequence[SettingResult], wanted: Mapping[str, Wanted]) -> Iterator[str]:
    """What is still to be run, a text for each setting: "tweets", "watch (fedgh, seeds 3, 4 of fd)"."""
    by_name = {one.setting: one for one in found}
    for setting, asked in wanted.items():
        if setting not in by_name:
            yield setting
        elif missing := list(_lacking_rows(by_name[setting], asked)):
            yield f"{setting} ({', '.join(missing)})"


def _lacking_rows(found: SettingResult, asked: Wanted) -> Iterator[str]:
    """Rows, or seeds of rows; controls of a method that is lacking itself are not told."""
    expected = list(asked.methods)
    for method in asked.methods:
        if found.row(method) is not None:
            expected += asked.controls.get(method, [])
    if asked.longer:
        expected.append(asked.longer)
    if asked.as_many_steps:
        expected += _rows_of_as_many_steps(found, asked.methods)
    for name in dict.fromkeys(expected):
        row = found.row(name)
        seeds = [] if row is None else [seed for seed in asked.seeds if seed not in row.by_seed]
        if row is None:
            yield name
        elif seeds:
            yield f"{_seeds_text(seeds)} of {name}"


def _rows_of_as_many_steps(found: SettingResult, methods: Sequence[str]) -> Iterator[str]:
    """The rows of a Local of as many steps as a method that is there takes; in words where its epochs are not known."""
    rows = {name: found.row(name) for name in methods}
    federated = [name for name, row in rows.items() if row is not None and row.method != "local"]
    unknown = [name for name in federated if name not in found.epochs_of_local]
    for name in federated:
        epochs = found.epochs_of_local.get(name, 0)
        if epochs > found.recipe["training"]["local_epochs"]:
            yield f"local-longer-{epochs}"
    if unknown:
        yield f"Local for as many steps as {', '.join(unknown)}"


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


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
    if ranked.left_out:
        yield f"Not ranked over, with less than half of the methods: {', '.join(ranked.left_out)}."
    if ranked.unranked:
        missing = (f"{method} ({', '.join(settings)})" for method, settings in ranked.unranked.items())
        yield f"Without a rank, as a setting lacks them: {', '.join(missing)}."


def _merits(one: SettingResult) -> dict[str, float]:
    """Method -> its mean score, of which more is better: an RMSE with the other sign."""
    means = {row.name: mean_of(list(row.accuracy.values())) for row in one.methods}
    sign = -1 if one.main_score.lower_is_better else 1
    return {name: sign * mean for name, mean in means.items() if mean is not None}


def _about_gains(found: Sequence[SettingResult], gains: Mapping[str, Mapping[str, GainParts]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for of_setting in gains.values() for name in of_setting))
    if not names:
        return
    yield "## Federated gains"
    columns = [Column("method", names, words=True)]
    for one in found:
        by_name = {name: parts.federated for name, parts in gains[one.setting].items()}
        columns.append(_gains_column(one, [by_name.get(name) for name in names]))
    yield markdown_table(columns)
    yield (
        "How much better together is than alone (every client a federation of its own): accuracy in percentage "
        "points, RMSE in the target's unit; paired by seed, with the 95 % interval; bold where that leaves out zero."
    )


def _over_other_targets(found: Sequence[SettingResult]) -> Iterator[str]:
    """How far methods lie above their variants that are told something else than what the others know."""
    pairs = {row.name: row.method for one in found for row in one.rows if row.control == "targets"}
    if not pairs:
        return
    yield "## Gains over other targets"
    columns = [Column("method - control", [f"{method} - {name}" for name, method in pairs.items()], words=True)]
    for one in found:
        columns.append(_gains_column(one, [gain_between(one, name, method) for name, method in pairs.items()]))
    yield markdown_table(columns)
    yield (
        "How much better a method is than its variant with something else in the place of what the others know, such "
        "as a client's own part of it."
    )


def _gains_column(one: SettingResult, gains: Sequence[Paired | None]) -> Column:
    """A setting's gains with their intervals; bold where these leave out zero."""
    bold = frozenset(at for at, gain in enumerate(gains) if gain is not None and is_distinguishable(gain))
    return Column(one.setting, [gain_text(gain, one.main_score) for gain in gains], bold=bold)


def _over_longer(found: Sequence[SettingResult], longer: Mapping[str, str]) -> Iterator[str]:
    """How far methods lie above a Local that trains for longer. longer: setting -> its row."""
    below = {one.setting: one.row(longer.get(one.setting, "")) for one in found}
    told = ", ".join(f"{setting} {row.name}" for setting, row in below.items() if row is not None)
    yield from _over_another_local(
        found,
        below,
        "Gains over a longer Local",
        f"As far as each method lies above a Local that trains more epochs a round ({told}), with the epochs of the "
        "recipe itself; where it lies below, training longer alone gains more than the method does.",
    )


def _over_tuned(found: Sequence[SettingResult]) -> Iterator[str]:
    """How far methods lie above variants of Local, of which settings of [training] were tuned."""
    names = dict.fromkeys(row.name for one in found for row in one.methods if _is_tuned_local(row))
    for name in names:
        yield from _over_another_local(
            found,
            {one.setting: one.row(name) for one in found},
            f"Gains over {name}",
            f"As far as each method lies above {name}, Local with what validation chose for it.",
        )


def _is_tuned_local(row: RowResult) -> bool:
    return row.method == "local" and row.name != "local"


def _over_another_local(
    found: Sequence[SettingResult], below: Mapping[str, RowResult | None], title: str, about: str
) -> Iterator[str]:
    """A section with how far methods lie above a row; nothing where no setting has it. below: setting -> the row."""
    compared = {setting: row for setting, row in below.items() if row is not None}
    having = [one for one in found if one.setting in compared]
    names = dict.fromkeys(row.name for one in having for row in one.methods if row.method != "local")
    if not names:
        return
    yield f"## {markdown_text(title)}"
    columns = [Column("method", list(names), words=True)]
    for one in having:
        columns.append(_gains_column(one, [gain_between(one, compared[one.setting].name, name) for name in names]))
    yield markdown_table(columns)
    yield markdown_text(about)


def _gains_by_setting(found: Sequence[SettingResult]) -> dict[str, dict[str, GainParts]]:
    """Setting -> method -> gains, of settings with gains in accuracy; an RMSE has another unit."""
    by_setting = {one.setting: gains_of(one) for one in found if one.main_score == ACCURACY}
    return {setting: gains for setting, gains in by_setting.items() if gains}


# a setting ----------------------------------------------------------------------------------------------------------


def _about_setting(one: SettingResult, gains: Mapping[str, GainParts], time: ProcessorTime) -> Iterator[str]:
    yield f"## {markdown_text(one.setting)}"
    yield markdown_text(_caption(one))
    score = one.main_score
    scores = [list(row.accuracy.values()) for row in one.rows]
    over = [None if row.name == "local" else gain_between(one, "local", row.name) for row in one.rows]
    spent = [mean_of(time.of_row(row.name)) for row in one.rows]
    sent = [row.bytes_of_run for row in one.rows]
    columns = [
        Column("method", [row.name for row in one.rows], words=True),
        Column(score.title, format_mean_std([(mean_of(found), std_of(found)) for found in scores], score=score)),
        Column("95 % interval", [interval_of_score(mean_of(found), ci_half_width(found), score) for found in scores]),
        Column("gain over Local", [gain_text(gain, score) for gain in over]),
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
    if one.tuning:
        told = "; ".join(f"{method}: {_settings(tuned.chosen)}" for method, tuned in one.tuning.items())
        yield f"Chosen by validation: {markdown_text(told)}."


def _caption(one: SettingResult) -> str:
    """What was measured, and how it was scored."""
    stages = list(dict.fromkeys(row.stage for row in one.rows))
    stage = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
    told = [f"{one.about}, {_seeds_text(one.seeds)}.", one.main_score.of_it(f"Accuracy: {stage}, {one.scored_on}.")]
    told += [one.changes] if one.changes else []
    if fewer := [f"{row.name} {', '.join(row.accuracy)}" for row in one.rows if len(row.accuracy) < len(one.seeds)]:
        told.append(f"Fewer seeds: {'; '.join(fewer)}.")
    return " ".join(told)


def _per(gain: Paired | None, cost: float | None, unit: float, score: MainScore) -> str:
    """A gain by each unit of its cost, where it can be told from none and costs anything."""
    if gain is None or gain.mean is None or gain.mean <= 0 or not is_distinguishable(gain) or not cost:
        return "-"
    return scored(gain.mean * unit / cost, score, "+")


def _gain_of(gains: GainParts | None, part: str, score: MainScore) -> str:
    return "-" if gains is None else scored(getattr(gains, part).mean, score, "+")


def _way(gains: GainParts | None) -> str:
    return "-" if gains is None or gains.way is None else f"{100 * gains.way:.0f} %"


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {format_setting(value)}" for name, value in values.items())
