"""The page of a benchmark, in Markdown, made of its files alone.

First what the others' data are worth. In each setting the best row of those that need the other clients, of those that
need nobody, and of those on pooled data are picked by their mean validation score over the scored seeds, never by test.
Then the primary comparisons, which are named before the runs; their p-values are adjusted for their number (Holm,
Scandinavian Journal of Statistics 1979). What follows is only described: gains, and a table for each setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.escaping import markdown_text
from polyfed.records.main_score import MainScore
from polyfed.records.read import flat_table, write_whole
from polyfed.report.benchmark_results import PARTS, RowResult, SettingResult, read_results
from polyfed.report.findings import Kind, Pick, best_of_kinds, kind_of_row
from polyfed.report.run_records import format_setting
from polyfed.report.statistics import LEVEL, Estimate, about_resplit, holm, mean_of, sum_of
from polyfed.report.text_tables import (
    NOT_KNOWN,
    Column,
    NotedTable,
    duration,
    format_mean_std,
    formatted,
    interval,
    markdown_table,
    scored,
    size,
)
from polyfed.units import human_seconds

PAGE = "benchmark.md"
CLOSED_FORM = "closed-form"  # a linear model: neither a network of the one side nor of the other
Pairs = Sequence[Sequence[str]]  # each the upper and the lower row of a difference


def write_page(
    folder: Path, title: str, settings: Sequence[str], primary: Pairs = (), seen_before: str | None = None
) -> tuple[tuple[SettingResult, ...], tuple[Path, ...]]:
    """Make the page of the figures that a folder has; none where it has none.

    Args:
        settings: of the suite; the page names those without figures. primary: pairs of rows that are tested.
        seen_before: what was known of these settings and seeds when the protocol was written.

    Returns:
        The figures, and the files that were written.
    """
    found = read_results(folder, settings)
    if not found:
        return (), ()
    page = to_markdown(title, found, settings, primary, seen_before)
    return tuple(found), (write_whole(folder / PAGE, page.encode()),)


def to_markdown(
    title: str,
    found: Sequence[SettingResult],
    settings: Sequence[str] = (),
    primary: Pairs = (),
    seen_before: str | None = None,
) -> str:
    """The page. settings, primary, seen_before: see `write_page`."""
    parts = [f"# {markdown_text(title)}"]
    if seen_before:
        parts.append(markdown_text(f"Seen before the runs: {seen_before}"))
    if lacking := sorted(set(settings) - {one.setting for one in found}, key=settings.index):
        parts.append(f"Not begun: {markdown_text(', '.join(lacking))}.")
    parts += ["## What the others' data are worth", worth_of(found).to_markdown()]
    parts += _primary(found, primary)
    for one in found:
        parts += _about_setting(one)
    rows = [row for one in found for row in one.rows]
    runs = sum(seconds or 0.0 for row in rows for seconds in row.figures.get("processor_seconds", {}).values())
    trials = sum(row.tuning.processor_seconds or 0.0 for row in rows if row.tuning)
    parts.append(f"Processor time: {human_seconds(runs)} of all scored runs, {human_seconds(trials)} of all trials.")
    return "\n\n".join(parts) + "\n"


# what the others' data are worth -----------------------------------------------------------------------------------


def picks(one: SettingResult) -> dict[Kind, Pick]:
    """Kind of rows -> the best of them by the mean validation score over all seeds."""
    validation = {row.name: row.figures.get("validation", {}) for row in one.rows}
    means = {name: mean_of([own.get(str(seed)) for seed in one.seeds]) for name, own in validation.items()}
    return best_of_kinds({row.name: (_kind(row), means[row.name]) for row in one.rows}, one.main_score)


def _kind(row: RowResult) -> Kind:
    if row.method == CLOSED_FORM:
        return ""
    sends = any(row.figures.get("bytes_up", {"": None}).values())
    return kind_of_row(row.control, flat_table(row.hyperparameters), sends)


def worth_of(found: Sequence[SettingResult]) -> NotedTable:
    """What the others' data are worth, a row for each setting."""
    picked = [picks(one) for one in found]

    def best(kind: Kind) -> list[str]:
        own = [(one, kinds[kind]) for one, kinds in zip(found, picked, strict=True)]
        return [f"{pick.row} {_mean(one, pick.row)} (of {pick.of})" if pick.row else NOT_KNOWN for one, pick in own]

    def over(kind: Kind) -> list[str]:
        rows = [(one, kinds[kind].row, kinds["without"].row) for one, kinds in zip(found, picked, strict=True)]
        return [gain_text(one.gain(upper, lower), one.main_score) for one, upper, lower in rows]

    closed = [_mean(one, CLOSED_FORM) for one in found]
    columns = [
        Column("setting", [one.setting for one in found], words=True),
        Column("best federated", best("federated"), words=True),
        Column("best without the others", best("without"), words=True),
        Column("difference", over("federated")),
        Column("best pooled", best("pooled"), words=True),
        Column("pooled minus without", over("pooled")),
        Column("closed form", closed),
        Column("closed form alone", [_mean(one, f"{CLOSED_FORM}-alone") for one in found]),
    ]
    about = (
        "The best row of each kind is picked by its mean validation score over the scored seeds, never by test; beside "
        "its name its mean test score, in brackets of how many rows it was picked. Federated: methods that send. "
        "Without the others: Local, also tuned, other models on each client's own rows, methods with every client a "
        "federation of its own, and controls that make no use of what is sent. Pooled: networks trained on the rows of "
        "all clients. Differences are paired by seed, with 95 % intervals. Early stopping, and methods that fit a "
        "weight or a temperature to validation rows, have used the rows by which they are picked, so that their "
        "validation scores are rather too high."
    )
    if set(closed) != {NOT_KNOWN}:
        about += " The closed form, a linear model on features that nobody trains, stands apart."
    notes = [about]
    if any(pick.of and not pick.row for kinds in picked for pick in kinds.values()):
        notes.append("Where rows have no validation scores, none of their kind is picked.")
    return NotedTable(tuple(column for column in columns if not column.is_empty), tuple(notes))


def _mean(one: SettingResult, row: str) -> str:
    return scored(mean_of(list(one.scores.get(row, {}).values())), one.main_score)


def _primary(found: Sequence[SettingResult], primary: Pairs) -> Iterator[str]:
    """The comparisons that are tested, of the settings that have both rows; nothing where none was named."""
    compared = [
        (one, upper, lower, one.gain(upper, lower))
        for upper, lower in primary
        for one in found
        if {upper, lower} <= set(one.names)
    ]
    if not compared:
        return
    p_values = [gain.p_value for *_, gain in compared]
    adjusted = holm(p_values)
    shown = frozenset(at for at, p in enumerate(adjusted) if p is not None and p < 1 - LEVEL)
    yield "## Primary comparisons"
    yield markdown_table(
        [
            Column("comparison", [f"{upper} - {lower}" for _, upper, lower, _ in compared], words=True),
            Column("setting", [one.setting for one, *_ in compared], words=True),
            Column("difference", [gain_text(gain, one.main_score) for one, _, _, gain in compared], bold=shown),
            Column("p", [formatted(p, ".2g") for p in p_values]),
            Column("adjusted p", [formatted(p, ".2g") for p in adjusted], bold=shown),
        ]
    )
    tested = sum(p is not None for p in adjusted)
    yield (
        "These were named before the runs. p: paired t-test over seeds, with the standard error of the setting's "
        f"intervals; adjusted by Holm for all {tested} tests of this table; bold below 0.05. All that follows is "
        "described, not tested."
    )


def gain_text(gain: Estimate, score: MainScore) -> str:
    """``"+2.39 [+1.02, +3.76]"``, without an interval ``"+2.39"``."""
    known = "" if gain.margin is None else f" {interval(gain, score)}"
    return scored(gain.mean, score, "+") + known


# a setting ----------------------------------------------------------------------------------------------------------


def _about_setting(one: SettingResult) -> Iterator[str]:
    yield f"## {markdown_text(one.setting)}"
    yield markdown_text(_caption(one))
    score = one.main_score
    names = one.names
    over = [Estimate() if name == "local" else one.gain(name) for name in names]
    with_alone = [name if f"{name}-alone" in names else "" for name in names]
    alone = [one.gain(f"{name}-alone") for name in with_alone]
    federated = [one.gain(name, f"{name}-alone") for name in with_alone]
    ended = [(one.runs_at_limit(row), len(row.figures.get("rounds", {}))) for row in one.rows]
    at_limit = [f"{count} of {runs}" if count else NOT_KNOWN for count, runs in ended]
    sent = map(sum_of, zip(one.means("bytes_up"), one.means("bytes_down"), strict=True))
    columns = [
        Column("method", names, words=True),
        Column(score.title, format_mean_std([Estimate.of(own) for own in one.scores.values()], score=score)),
        Column("best by validation", [scored(mean, score) for mean in one.means(f"{score.name}_best_by_validation")]),
        Column("gain over Local", [gain_text(gain, score) for gain in over]),
        Column("= alone", [gain_text(gain, score) for gain in alone]),
        Column("+ federated", [gain_text(gain, score) for gain in federated]),
        Column("rounds", [formatted(number, ".4g") for number in one.means("rounds")]),
        Column("at the limit", at_limit),
        Column("bytes", [size(total) for total in sent]),
        Column("processor time", [duration(seconds) for seconds in one.means("processor_seconds")]),
    ]
    yield markdown_table([column for column in columns if not column.is_empty])
    yield (
        "Best by validation: the mean of rounds with the best validation score; the others are of last rounds, or, "
        "with evaluation.patience, of the same ones."
    )
    if any(with_alone):
        yield (
            "= alone, + federated: the gain over Local of the method with every client a federation of its own, and "
            "how much better together is."
        )
    if set(at_limit) != {NOT_KNOWN}:
        yield f"At the limit: how many runs {one.rounds} rounds have ended before validation did."
    tuned = {row.name: row.tuning for row in one.rows if row.tuning}
    if tuned:
        tried = [_listed(tuning.tried) for tuning in tuned.values()]
        chosen = [_listed({name: [value] for name, value in tuning.chosen.items()}) for tuning in tuned.values()]
        words = {"row": list(tuned), "tried": tried, "chosen": chosen}
        yield markdown_table([Column(heading, cells, words=True) for heading, cells in words.items()])
        yield "Chosen by validation of all that was tried."


def _listed(values: Mapping[str, Sequence[Any]]) -> str:
    """``"header_lr 0.01, 0.1; header_epochs 1, 10"``."""
    return "; ".join(f"{name} {', '.join(map(format_setting, each))}" for name, each in values.items())


def _caption(one: SettingResult) -> str:
    """What was measured, and how it was scored."""
    stages = list(dict.fromkeys(row.stage for row in one.rows))
    stage = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
    seeds = one.seeds
    listed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    parts = [f"{one.about}, {listed}.", one.main_score.of_it(f"Accuracy: {stage}, {one.scored_on}.")]
    parts += [one.changes] if one.changes else []
    labeled = one.rows_per_client("training", "validation")
    if labeled is not None:
        training, validation, test = (one.rows_per_client(part) for part in PARTS)
        parts.append(
            f"Rows per client, on average: {labeled:.4g} labeled, of them {training:.4g} for training and "
            f"{validation:.4g} for validation; {test:.4g} for tests."
        )
    if not one.recipe.get("evaluation", {}).get("patience"):
        parts.append("Validation ends no run: all have all rounds.")
    if fewer := [f"{name} {', '.join(map(str, own))}" for name, own in one.scores.items() if len(own) < len(seeds)]:
        parts.append(f"Fewer seeds: {'; '.join(fewer)}.")
    if why := about_resplit(one.resplit):
        parts.append(f"{why[0].upper()}{why[1:]}.")
    return " ".join(parts)
