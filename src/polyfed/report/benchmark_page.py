"""The page of a benchmark, in Markdown: what the others' data are worth and the primary comparisons, both of
`polyfed.report.benchmark_worth`; then what is only described: gains, and a table for each setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.escaping import markdown_text
from polyfed.markup import notes
from polyfed.records.main_score import MainScore
from polyfed.report.atomic_files import write_whole
from polyfed.report.benchmark_results import (
    NO_TIME,
    ProcessorTime,
    SettingResult,
    Tuning,
    read_processor_time,
    read_results,
)
from polyfed.report.benchmark_worth import (
    Comparison,
    Side,
    Worth,
    comparisons,
    gain_between,
    gains_of,
    worth_of,
)
from polyfed.report.findings import Gains
from polyfed.report.run_records import format_setting
from polyfed.report.statistics import LEVEL, Estimate, mean_of
from polyfed.report.text_tables import (
    NOT_KNOWN,
    Column,
    duration,
    format_mean_std,
    formatted,
    html_table,
    interval,
    markdown_table,
    scored,
    size,
    text_blocks,
    wrapped,
)
from polyfed.units import human_seconds

PAGE = "benchmark.md"
Pairs = Sequence[Sequence[str]]  # each the upper and the lower row of a difference


def write_page(
    folder: Path, title: str, settings: Sequence[str], primary: Pairs = ()
) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
    """Make the page of the figures that a folder has; none where it has none.

    Args:
        settings: of the suite; the page names those without figures. primary: pairs of rows that are tested.

    Returns:
        The figures, and the files that were written.
    """
    found = read_results(folder, settings)
    if not found:
        return (), ()
    page = to_markdown(title, found, read_processor_time(folder), settings, primary)
    return tuple(found), (write_whole(folder / PAGE, page.encode()),)


def to_markdown(
    title: str,
    found: Sequence[SettingResult],
    spent: Mapping[str, ProcessorTime],
    settings: Sequence[str] = (),
    primary: Pairs = (),
) -> str:
    """The page. spent: by setting. settings, primary: see `write_page`."""
    parts = [f"# {markdown_text(title)}"]
    if lacking := sorted(set(settings) - {one.setting for one in found}, key=settings.index):
        parts.append(f"Not begun: {markdown_text(', '.join(lacking))}.")
    gains = {one.setting: gains_of(one) for one in found}
    worth = [worth_of(one) for one in found]
    parts += ["## What the others' data are worth", markdown_table(_worth_columns(worth))]
    parts += map(markdown_text, _about_worth(worth))
    parts += _primary(comparisons(found, primary))
    parts += _federated_gains(found, gains)
    parts += _over_tuned_locals(found)
    for one in found:
        parts += _about_setting(one, gains[one.setting], spent.get(one.setting, NO_TIME))
    scored_runs = human_seconds(sum(one.scored for one in spent.values()))
    trials = human_seconds(sum(one.trials for one in spent.values()))
    parts.append(f"Processor time: {scored_runs} of all scored runs, {trials} of all trials.")
    return "\n\n".join(parts) + "\n"


# what the others' data are worth -----------------------------------------------------------------------------------


def _worth_columns(worth: Sequence[Worth]) -> list[Column]:
    columns = [
        Column("setting", [one.setting for one in worth], words=True),
        Column("best federated", [_picked(one.federated, one.score) for one in worth], words=True),
        Column("best without the others", [_picked(one.without, one.score) for one in worth], words=True),
        Column("difference", [gain_text(one.gain, one.score) for one in worth]),
        Column("best pooled", [_picked(one.pooled, one.score) for one in worth], words=True),
        Column("pooled minus without", [gain_text(one.gain_of_pooled, one.score) for one in worth]),
        Column("closed form", [scored(one.closed_form, one.score) for one in worth]),
        Column("closed form alone", [scored(one.closed_form_alone, one.score) for one in worth]),
    ]
    return [column for column in columns if not column.is_empty]


def _picked(side: Side, score: MainScore) -> str:
    """``"fedgh 52.16 (of 9)"``."""
    if side.best is None:
        return NOT_KNOWN
    return f"{side.best.name} {scored(mean_of(list(side.best.by_seed.values())), score)} (of {side.of})"


def _about_worth(worth: Sequence[Worth]) -> Iterator[str]:
    """How the rows were picked, a paragraph each."""
    if any(one.closed_form is not None for one in worth):
        closed = " The closed form, a linear model on common random features, stands apart."
    else:
        closed = ""
    yield (
        "The best row of each kind is picked by its mean validation score over the scored seeds, never by test; beside "
        "its name its mean test score, in brackets of how many rows it was picked. Federated: methods that send. "
        "Without the others: Local, also tuned, methods with every client a federation of its own, and "
        "controls that make no use of what is sent. Pooled: networks trained on the rows of all clients. Differences "
        f"are paired by seed, with 95 % intervals.{closed}"
    )
    if any(side.of and side.best is None for one in worth for side in (one.federated, one.without, one.pooled)):
        yield "Where rows have no validation scores, none of their kind is picked."


@dataclass(frozen=True)
class WorthTable:
    """What the others' data are worth, a row for each setting."""

    rows: tuple[Worth, ...]

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return html_table(_worth_columns(self.rows)) + notes(_about_worth(self.rows))


def to_text(table: WorthTable, width: int = 120) -> str:
    """For a terminal. width: its columns."""
    lines = [wrapped(text, width) for text in _about_worth(table.rows)]
    return "\n\n".join([text_blocks(_worth_columns(table.rows), width), *lines])


def _primary(found: Sequence[Comparison]) -> Iterator[str]:
    """The comparisons that are tested; nothing where none was named."""
    if not found:
        return
    adjusted = [one.adjusted for one in found]
    shown = frozenset(at for at, p in enumerate(adjusted) if p is not None and p < 1 - LEVEL)
    yield "## Primary comparisons"
    yield markdown_table(
        [
            Column("comparison", [f"{one.upper} - {one.lower}" for one in found], words=True),
            Column("setting", [one.setting for one in found], words=True),
            Column("difference", [gain_text(one.gain, one.score) for one in found], bold=shown),
            Column("p", [formatted(one.gain.p_value, ".2g") for one in found]),
            Column("adjusted p", [formatted(p, ".2g") for p in adjusted], bold=shown),
        ]
    )
    tested = sum(p is not None for p in adjusted)
    yield (
        f"These were named before the runs. p: paired t-test over seeds; adjusted by Holm for all {tested} tests of "
        "this table; bold below 0.05. All that follows is described, not tested."
    )


def gain_text(gain: Estimate, score: MainScore) -> str:
    """``"+2.39 [+1.02, +3.76]"``, without an interval ``"+2.39"``."""
    known = "" if gain.margin is None else f" {interval(gain, score)}"
    return scored(gain.mean, score, "+") + known


# over settings ------------------------------------------------------------------------------------------------------


def _federated_gains(found: Sequence[SettingResult], gains: Mapping[str, Mapping[str, Gains]]) -> Iterator[str]:
    """How much better together is than alone, per method and setting; nothing where no method ran alone."""
    names = list(dict.fromkeys(name for of_setting in gains.values() for name in of_setting))
    columns = [Column("method", names, words=True)]
    for one in found:
        apart = [gains[one.setting].get(name) for name in names]
        cells = [NOT_KNOWN if parts is None else gain_text(parts.federated, one.main_score) for parts in apart]
        columns.append(Column(one.setting, cells, italic=_in_vain(apart)))
    if names:
        yield "## Federated gains"
        yield markdown_table(columns)
        yield (
            "How much better together is than alone (every client a federation of its own): accuracy in percentage "
            "points, RMSE in the target's unit; paired by seed, with the 95 % interval. In italics: together is better "
            "than alone, but worse than Local, and so no gain by the others."
        )


def _in_vain(apart: Sequence[Gains | None]) -> frozenset[int]:
    return frozenset(at for at, parts in enumerate(apart) if parts is not None and parts.rises_below_local)


def _over_tuned_locals(found: Sequence[SettingResult]) -> Iterator[str]:
    """How far methods lie above variants of Local that were tuned."""
    for local in dict.fromkeys(row.name for one in found for row in one.methods if row.method == "local" != row.name):
        having = [one for one in found if one.row(local) is not None]
        names = list(dict.fromkeys(row.name for one in having for row in one.methods if row.method != "local"))
        columns = [Column("method", names, words=True)]
        columns += [
            Column(one.setting, [gain_text(gain_between(one, local, name), one.main_score) for name in names])
            for one in having
        ]
        yield f"## {markdown_text(f'Gains over {local}')}"
        yield markdown_table(columns)
        yield markdown_text(f"As far as each method lies above {local}, Local with what validation chose for it.")


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
    rounds = [mean_of(list(row.rounds.values())) for row in one.rows]
    columns = [
        Column("method", [row.name for row in one.rows], words=True),
        Column(score.title, format_mean_std(scores, score=score)),
        Column("best by validation", [scored(mean_of(list(row.best.values())), score) for row in one.rows]),
        Column("gain over Local", [gain_text(gain, score) for gain in over]),
        Column("smallest shown", [scored(gain.smallest_shown, score) for gain in over]),
        Column("= alone", [NOT_KNOWN if parts is None else scored(parts.alone.mean, score, "+") for parts in apart]),
        Column(
            "+ federated",
            [NOT_KNOWN if parts is None else scored(parts.federated.mean, score, "+") for parts in apart],
            italic=_in_vain(apart),
        ),
        Column("rounds", [formatted(number, ".4g") for number in rounds]),
        Column("bytes", list(map(size, sent))),
        Column("processor time", list(map(duration, spent))),
    ]
    yield markdown_table([column for column in columns if not column.is_empty])
    yield (
        "Best by validation: the mean of rounds with the best validation score; the others are of last rounds, or, "
        "with evaluation.patience, of the same ones. Smallest shown: the smallest gain over Local that as many seeds "
        "of this spread would tell from zero four times in five; a smaller one cannot be excluded."
    )
    if one.tuning:
        yield markdown_table(_tuning_columns(one.tuning))
        yield "Chosen by validation of all that was tried."


def _caption(one: SettingResult) -> str:
    """What was measured, and how it was scored."""
    stages = list(dict.fromkeys(row.stage for row in one.rows))
    stage = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
    seeds = f"seed{'s' if len(one.seeds) > 1 else ''} {', '.join(map(str, one.seeds))}"
    parts = [f"{one.about}, {seeds}.", one.main_score.of_it(f"Accuracy: {stage}, {one.scored_on}.")]
    parts += [one.changes] if one.changes else []
    if fewer := [f"{row.name} {', '.join(row.accuracy)}" for row in one.rows if len(row.accuracy) < len(one.seeds)]:
        parts.append(f"Fewer seeds: {'; '.join(fewer)}.")
    return " ".join(parts)


def _tuning_columns(tuning: Mapping[str, Tuning]) -> list[Column]:

    def listed(values: Mapping[str, Sequence[Any]]) -> str:
        return "; ".join(f"{name} {', '.join(map(format_setting, each))}" for name, each in values.items())

    tried = [
        {name: [*values, *([one.widened[name]] if name in one.widened else [])] for name, values in one.tried.items()}
        for one in tuning.values()
    ]
    chosen = [{name: [value] for name, value in one.chosen.items()} for one in tuning.values()]
    return [
        Column("row", list(tuning), words=True),
        Column("tried", list(map(listed, tried)), words=True),
        Column("chosen", list(map(listed, chosen)), words=True),
    ]
