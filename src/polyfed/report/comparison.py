"""The comparison table: methods down, accuracy, cost and the difference to Local across; one table per experiment.

Runs of one name are averaged over their seeds. "±" is the sample standard deviation over seeds (n - 1) and is left
blank with one seed: a spread over one run is unknown, not zero. The best round is the one best on validation data,
never on test data. Intervals, differences seed by seed and what a target took are `polyfed.report.statistics`, the
papers' numbers `polyfed.report.paper_results`; all of it is shown and written by `polyfed.report.comparison_formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from polyfed.errors import ConfigError
from polyfed.registry import suggest
from polyfed.report import paper_results
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.comparison_columns import sub_tables
from polyfed.report.comparison_formats import FORMATS, Table, to_csv, to_json, to_latex, to_markdown, to_text
from polyfed.report.comparison_rows import ComparisonGroup, ComparisonRow, Facts, OneRun, RunScore
from polyfed.report.decomposition import decompose, remarks
from polyfed.report.findings import finding
from polyfed.report.grouping import Group, group_runs
from polyfed.report.leave_one_out import leave_one_out_tables
from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import (
    SEEDS,
    Paired,
    Target,
    ci_half_width,
    leader,
    paired_difference,
    to_target,
)
from polyfed.report.text_tables import finite, mean_of, percent, std_of
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.results.schema import FigureSummary, Summary

__all__ = [
    "ComparisonGroup",
    "ComparisonRow",
    "Table",
    "compare_runs",
    "sub_tables",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_text",
    "write",
]


_EPSILON = {
    "client": "of the bounded entries of all uploads of a client, for whether it takes part",
    "sample": "of what a client's uploads tell of what one of its rows holds; see the runs' records for which of them",
}


# building -------------------------------------------------------------------------------------------------------
def compare_runs(
    runs: Iterable[RunRecord], stage: str | None = None, target: Target | str | float | None = None
) -> Table:
    """Compare runs, grouped by name over seeds; different data, clients or rounds give separate tables.

    Args:
        runs: from ``load_runs``.
        stage: which stage to compare; by default each run's own evaluation.
        target: an accuracy, as `Target.parse` takes it: also tell the rounds, bytes and seconds that it took.

    Raises:
        ConfigError: no finished run, two runs with the same name and seed, a run without the stage, or a target that
            is none.
    """
    wanted = target if target is None or isinstance(target, Target) else Target.parse(target)
    groups, notes = group_runs(runs, stage)
    return Table(tuple(_section(group, stage, wanted) for group in groups), notes, leave_one_out_tables(groups))


def _section(group: Group, stage: str | None, target: Target | None) -> ComparisonGroup:
    told: list[str] = []  # notes that building the rows comes upon
    local = _local_of(group, told)
    stages = group.stages(stage)
    scores = {name: _by_seed(runs, stages[name]) for name, runs in group.rows.items()}
    score = group.score
    if target is not None and score is not ACCURACY:
        told.append(f"no target: {target} is of accuracies, and numbers are predicted here")
        target = None
    wanted = _accuracy_of(target, scores, local, told)
    reference = () if local is None else group.rows[local]
    rows = tuple(
        _row(name, runs, stages[name], reference, told, _rival(name, group, scores), wanted)
        for name, runs in group.rows.items()
    )
    leaders = _leaders(group, stages, scores)
    footnotes = dict.fromkeys(name for row in rows for one in row.published for name in one.footnotes)
    numbers = {name: number for number, name in enumerate(footnotes, start=1)}
    notes = [_about_columns(rows, score), *_about_few_rows(group, stage), *group.notes, *told]
    notes += [*_about_epsilon(group, rows), *_about_scores(rows)]
    notes += _about_leaders(leaders, group)
    decompositions = decompose(group.rows, stages, score)
    notes += remarks(decompositions)
    if target is not None and wanted is not None:
        notes.append(_about_target(target, wanted, group))
    notes += _about_published(group, rows)
    notes += [f"[{number}] {paper_results.footnote(name)}" for name, number in numbers.items()]
    first = group.runs[0]
    scored = score.of_it(f"Accuracy: {group.scoring(stage)}")
    return ComparisonGroup(
        finding=finding(rows, score),
        caption=f"{group.about}, {group.seeds_text()}. {scored}.{group.preset_text()}",
        facts=_facts(group),
        rows=rows,
        notes=tuple(notes),
        models=first.recipe.architectures,
        versions=dict(first.result.versions),
        published=first.paper_tables,
        footnotes=numbers,
        leaders=leaders,
        decompositions=decompositions,
        score=score,
    )


def _local_of(group: Group, notes: list[str]) -> str | None:
    """The row of Local; None, and a note, where there are several."""
    local = [name for name, runs in group.rows.items() if runs[0].is_local]
    if len(local) > 1:
        notes.append(f"several Local rows ({', '.join(local)}): no difference to Local is shown")
    return local[0] if len(local) == 1 else None


def _facts(group: Group) -> Facts:
    first = group.runs[0]
    return Facts(
        dataset=first.result.dataset,
        clients=first.result.clients,
        rounds=first.result.rounds,
        seeds=list(group.seeds),
        test=group.evaluation.test,
        mean=group.evaluation.weighting,
        preset=first.preset or None,
        held_out_group=group.held_out,
    )


def _about_columns(rows: Sequence[ComparisonRow], score: MainScore) -> str:
    """What the columns of the table are."""
    several = any(len(row.seeds) > 1 for row in rows)
    what = "accuracy in %" if score.is_share else f"{score.title} (low is good)"
    told = f"{what} after the last round"
    told += "; ± is the sample standard deviation over seeds" if several else ""
    if any(row.difference is not None for row in rows if row.method != "local"):
        facts = ["paired by seed"] if several else []
        facts += ["in percentage points"] if score.is_share else ["below zero where it is better"]
        told += f"; the difference to Local is {' and is '.join(facts)}"
    worst = "max" if score.lower_is_better else "min"
    over_clients = f"std and {worst} are over clients" + (" (mean over seeds)" if several else "")
    return f"{told}; {over_clients}; bytes of one whole run"


def _about_few_rows(group: Group, stage: str | None) -> Iterator[str]:
    """Which clients have so few test rows that a single one weighs much in the mean, and what all rows alike give."""
    if group.evaluation.weighting != "clients" or group.evaluation.test != "client":
        return
    test_rows: dict[int, int] = {}
    for run in group.runs:
        for number, count, _ in _scored_rows(run):
            test_rows[number] = min(count, test_rows.get(number, count))
    line = group.score.about_few_rows(test_rows, group.runs[0].result.client_names)
    if not line:
        return
    yield line
    if len({*test_rows.values()}) > 1 and all(stage in (None, run.stage) for run in group.runs):
        means = {name: mean_of([_over_rows(run) for run in runs]) for name, runs in group.rows.items()}
        told = [f"{name} {group.score.text(mean)}" for name, mean in means.items() if mean is not None]
        yield f"the mean over all test rows (evaluation.weighting = 'samples') instead: {', '.join(told)}"


def _scored_rows(run: RunRecord) -> list[tuple[int, int, float]]:
    """Number, test rows and score of each client that is scored and in training."""
    return [
        (row.id, row.test_samples, row.accuracy)
        for row in run.result.clients_table or ()
        if row.test_samples and row.accuracy is not None and not row.held_out
    ]


def _over_rows(run: RunRecord) -> float | None:
    """The mean score that counts every test row alike, in the run's own stage."""
    scored = _scored_rows(run)
    total = sum(count for _, count, _ in scored)
    return sum(count * score for _, count, score in scored) / total if total else None


def _about_epsilon(group: Group, rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """What each unit's epsilon is of, and at which delta."""
    deltas = sorted({run.result.delta for run in group.runs if run.result.delta is not None})
    for unit in dict.fromkeys(unit for row in rows for unit in row.epsilon):
        yield f"epsilon {unit}: {_EPSILON[unit]}, at delta {', '.join(f'{delta:g}' for delta in deltas)}"


def _about_scores(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """What other predictors are, and what so few seeds cannot tell."""
    if any(row.accuracy_by_predictor for row in rows):
        yield "by ...: the same models in the same stage, predicting in another of their method's ways"
    yield from _about_scored(rows)
    most = max(len(row.seeds) for row in rows)
    few = [row.name for row in rows if len(row.seeds) < SEEDS]
    if most == 1:
        yield "one seed: neither a spread nor an interval is known"
    elif most < SEEDS:
        yield "two seeds: no interval is told, which takes three"
    elif few:
        yield f"fewer than three seeds, of which no interval is told: {', '.join(few)}"


def _about_scored(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """What further accuracies are of."""
    if any(row.accuracy_by_classes for row in rows):
        yield (
            "own classes: on those that each client has training samples of; missing classes: on the others, with the "
            "test samples of all clients, over the clients that lack some"
        )
    if any(row.held_out for row in rows):
        epochs = " and after local training on it" if any("after_training" in row.held_out for row in rows) else ""
        yield (
            "held out: clients that never trained, on their own test samples, with what they would receive if they "
            f"joined now{epochs}; all other figures are of the clients that train"
        )


def _leaders(
    group: Group, stages: Mapping[str, str], scores: Mapping[str, Mapping[int, float | None]]
) -> dict[str, str]:
    """Who leads in the main score, in that of the best round, and in each stage; what nobody leads is left out.

    All rows compete but pooled data, which no federation has. Controls, and runs that learnt nothing, lead nowhere.
    """
    rows = {name: runs for name, runs in group.rows.items() if not _is_pooled(runs)}
    may_lead = [name for name, runs in rows.items() if _may_lead(runs)]
    columns = {group.score.name: {name: scores[name] for name in rows}}
    columns["best_by_validation"] = {
        name: {run.seed: _best(run, stages[name]) for run in runs} for name, runs in rows.items()
    }
    for stage in dict.fromkeys(stage for runs in rows.values() for stage in runs[0].result.accuracy_by_stage):
        columns[stage] = {name: _by_seed(runs, stage) for name, runs in rows.items()}
    found = {column: leader(of_rows, may_lead, group.score.lower_is_better) for column, of_rows in columns.items()}
    return {column: name for column, name in found.items() if name is not None}


def _is_pooled(runs: Sequence[RunRecord]) -> bool:
    return runs[0].control in ("pooled", "pooled-steps")


def _may_lead(runs: Sequence[RunRecord]) -> bool:
    """Whether a row is a method's own, and all of its runs have learnt something."""
    return not runs[0].control and not any(run.result.nothing_learnt for run in runs)


def _about_leaders(leaders: Mapping[str, str], group: Group) -> Iterator[str]:
    """What is bold and why: of which column, as each stage has its own best."""
    if not leaders:
        return
    columns: dict[str, list[str]] = {}
    for column, name in leaders.items():
        is_stage = column not in (group.score.name, "best_by_validation")
        columns.setdefault(name, []).append(f"stage {column}" if is_stage else column.replace("_", " "))
    told = "; ".join(f"{name} ({', '.join(where)})" for name, where in columns.items())
    best = "lowest" if group.score.lower_is_better else "highest"
    aside = " (pooled data aside)" if any(map(_is_pooled, group.rows.values())) else ""
    yield (
        f"bold: the {best} of its column{aside}, where the 95 % interval of its difference to each other row, paired "
        f"by seed, leaves out zero: {told}"
    )


def _by_seed(runs: Sequence[RunRecord], stage: str) -> dict[int, float | None]:
    return {run.seed: finite(run.result.mean_accuracy(stage)) for run in runs}


def _best(run: RunRecord, stage: str) -> float | None:
    """Test accuracy of the round that was best on validation data, which is told of the run's own stage alone."""
    return finite(run.result.accuracy_best_by_validation) if run.stage == stage else None


def _accuracy_of(
    target: Target | None, scores: Mapping[str, Mapping[int, float | None]], local: str | None, notes: list[str]
) -> float | None:
    """The accuracy to be reached; None, and a note, where it is a share of what is not known."""
    if target is None:
        return None
    means = {name: mean_of(list(found.values())) for name, found in scores.items()}
    known = [mean for mean in means.values() if mean is not None]
    wanted = target.accuracy(None if local is None else means[local], max(known, default=None))
    if wanted is None:
        notes.append(f"no target: {target} is not known, as there is no such accuracy")
    return wanted


def _about_target(target: Target, wanted: float, group: Group) -> str:
    every = max(run.result.evaluation.every_n_rounds or 1 for run in group.runs)
    scored = f"; scored was every {every}th round" if every > 1 else ""
    of = f", {percent(wanted)} %" if target.of else ""
    return (
        f"target {target}{of}: first scored round, counted from 1, with at least this accuracy; bytes (both ways) and "
        f"time are of all rounds up to it; below it again: seeds with a later round below the target{scored}"
    )


def _about_published(group: Group, rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """What a reader must know of ours beside the papers'."""
    first = group.runs[0]
    if any(row.published for row in rows):
        yield (
            f"beside the paper: ours after the last round, {group.on_what()}; ± is the sample standard deviation over "
            f"seeds, the paper's as printed; '{paper_results.DIFFERS}': the difference is more than "
            f"{paper_results.SPREADS} spreads, each the root of the sum of both squares (the paper's alone for one "
            "seed)"
        )
        if first.scaled_down:
            yield "scaled down: not the paper's experiment at its size, so that no difference is marked"
        if any(each.mark == paper_results.OTHER_SETTINGS for row in rows for each in row.published):
            yield "other settings: not the paper's experiment, as --set has changed it, so that no difference is marked"
    done = {run.label_or_method for run in group.runs}
    missing = dict.fromkeys(entry.method for entry in paper_results.numbers_for(first) if entry.method not in done)
    if missing:
        yield f"rows of the paper that were not run here: {', '.join(missing)}"
    if places := paper_results.missing_settings(first):
        yield f"{', '.join(places)} has no column for these data and settings, so that nothing stands beside"
    if quantities := paper_results.not_measured(first):
        yield f"printed there, and not measured here: {', '.join(quantities)}"


def _rival(name: str, group: Group, scores: Mapping[str, Mapping[int, float | None]]) -> tuple[str, Paired]:
    """The best other row but Local, and the difference to it: of those that share most seeds, the best on these."""
    none = ("", Paired())
    if group.rows[name][0].is_local or group.rows[name][0].control:
        return none
    mine = scores[name]
    found = []
    for other, runs in group.rows.items():
        shared = [scores[other][seed] for seed in mine if seed in scores[other]]
        mean = mean_of(shared)
        is_method = not runs[0].is_local and not runs[0].control
        if other != name and is_method and mean is not None:
            found.append((len(shared), -mean if group.score.lower_is_better else mean, other))
    if not found:
        return none
    best = max(found, key=lambda one: one[:2])[2]  # the first of equals
    return best, paired_difference(mine, scores[best])


def _row(
    name: str,
    runs: Sequence[RunRecord],
    stage: str,
    local: Sequence[RunRecord],
    notes: list[str],
    rival: tuple[str, Paired],
    target: float | None,
) -> ComparisonRow:
    scores = [RunScore.of(run, stage) for run in runs]
    accuracies = [score.mean for score in scores]
    results = [run.result for run in runs]
    architectures = [run.result.accuracy_per_architecture if run.stage == stage else {} for run in runs]
    difference = _difference(runs, stage, local, notes, name)
    best = [_best(run, stage) for run in runs]
    return ComparisonRow(
        name=name,
        method=runs[0].method,
        control=runs[0].control,
        stage=stage,
        seeds=tuple(run.seed for run in runs),
        accuracy=mean_of(accuracies),
        accuracy_std_seeds=std_of(accuracies),
        accuracy_margin=ci_half_width(accuracies),
        accuracy_std_clients=mean_of([score.std for score in scores]),
        accuracy_min_client=mean_of([score.worst for score in scores]),
        accuracy_best_by_validation=mean_of(best),
        accuracy_best_std_seeds=std_of(best),
        accuracy_best_margin=ci_half_width(best),
        accuracy_bottom_decile=mean_of([score.bottom_decile for score in scores]),
        accuracy_by_stage=_means([result.accuracy_by_stage for result in results]),
        accuracy_by_predictor=_means([result.accuracy_by_predictor.get(stage, {}) for result in results]),
        accuracy_by_classes=_means([result.accuracy_by_classes.get(stage, {}) for result in results]),
        held_out=_means([result.held_out for result in results]),
        accuracy_per_architecture=_means(architectures),
        metrics=_means([result.metrics.get(stage, {}) for result in results]),
        bytes_up=mean_of([result.bytes_up for result in results]),
        bytes_down=mean_of([result.bytes_down for result in results]),
        seconds=mean_of([result.seconds for result in results]),
        simulated_seconds=mean_of([result.simulated_seconds for result in results]),
        refused=sum(result.refused or 0 for result in results),
        nothing_learnt=sum(bool(result.nothing_learnt) for result in results),
        difference=difference.mean,
        difference_std=difference.std,
        difference_margin=difference.margin,
        difference_seeds=difference.seeds,
        rival=rival[0],
        against_rival=rival[1],
        to_target=None if target is None else to_target(runs, target, stage),
        epsilon=_largest([result.epsilon for result in results]),
        published=() if runs[0].control else paper_results.compare_with_paper(runs, stage),
        runs=tuple(_run_of(run, score) for run, score in zip(runs, scores, strict=True)),
    )


def _run_of(run: RunRecord, score: RunScore) -> OneRun:
    result = run.result
    return OneRun(
        seed=run.seed,
        path=str(run.path),
        accuracy=score.mean,
        bytes_up=finite(result.bytes_up),
        bytes_down=finite(result.bytes_down),
        seconds=finite(result.seconds),
        processor_seconds=finite(result.processor_seconds),
        refused=finite(result.refused),
        hyperparameters=result.hyperparameters,
    )


def _difference(
    runs: Sequence[RunRecord], stage: str, local: Sequence[RunRecord], notes: list[str], name: str
) -> Paired:
    """The row's main score minus Local's, seed by seed."""
    if not local or runs[0].is_local:
        return Paired()
    mine = _by_seed(runs, stage)
    compared = stage
    its = _by_seed(local, stage)
    if any(its[seed] is None for seed in mine if seed in its):
        compared = local[0].stage
        its = _by_seed(local, compared)
        notes.append(f"{name}: its stage {stage} is compared with Local's stage {compared}")
    return paired_difference(mine, its)


def _means(summaries: Sequence[Mapping[str, Summary | FigureSummary]]) -> dict[str, float]:
    """The means of every entry that all runs have, over the runs."""
    shared = [key for key in summaries[0] if all(key in other for other in summaries)]
    found = {key: mean_of([summary[key].mean for summary in summaries]) for key in shared}
    return {key: mean for key, mean in found.items() if mean is not None}


def _largest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of every entry that any run has."""
    return {key: max(one[key] for one in found if key in one) for key in dict.fromkeys(k for one in found for k in one)}


# files ----------------------------------------------------------------------------------------------------------
def write(
    table: Table, folder: str | Path, formats: Sequence[str] = ("md", "csv", "json", "tex"), name: str = "comparison"
) -> list[Path]:
    """Write ``<name>.<format>`` for each format into the folder (made if missing), each file whole or not at all.

    Args:
        table: from ``compare_runs``.
        folder: where to.
        formats: of md, csv, json, tex, txt.
        name: the files' name without its ending.

    Returns:
        The files written.

    Raises:
        ConfigError: unknown format, or the folder cannot be written to.
    """
    for form in formats:
        if form not in FORMATS:
            raise ConfigError(f"unknown table format '{form}'{suggest(form, FORMATS)}")
    path = make_folder(folder)
    return [write_whole(path / f"{name}.{form}", FORMATS[form](table).encode("utf-8")) for form in formats]
