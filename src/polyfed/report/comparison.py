"""The comparison of runs: a row for each method or variant, a section for each set of comparable runs.

Runs of one name are averaged over their seeds. "±" is the sample standard deviation over seeds (n - 1) and is left
blank with one seed: a spread over one run is unknown, not zero. The best round is the one best on validation data,
never on test data. `polyfed.report.comparison_tables` shows and writes all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from polyfed.report import paper_results
from polyfed.report.client_scores import scores_of_clients, verdicts
from polyfed.report.comparison_tables import ComparisonGroup, Table
from polyfed.report.findings import Gains, decompose, remarks
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import RunRecord, rows_of_pooled
from polyfed.report.statistics import (
    SEEDS,
    BySeed,
    Estimate,
    finite,
    leader,
    mean_of,
    parse_target,
    scores_by_seed,
    to_target,
)
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.results.neighbors import neighbors
from polyfed.results.schema import FigureSummary, Summary

Row = dict[str, Any]  # a line of `ComparisonGroup.rows`
_EPSILON = {
    "client": "of the bounded entries of all uploads of a client, for whether it takes part",
    "sample": "of what a client's uploads reveal of what one of its rows holds; the runs' records name those uploads",
}


def compare_runs(runs: Iterable[RunRecord], stage: str | None = None, target: str | float | None = None) -> Table:
    """Compare runs, grouped by name over seeds; different data, clients or rounds give separate tables.

    Args:
        runs: from ``load_runs``.
        stage: which stage to compare; by default each run's own evaluation.
        target: an accuracy, 0.6 or "60 %": also give the rounds, bytes and seconds that it took.

    Raises:
        ConfigError: no finished run, two runs with the same name and seed, a run without the stage, or a target that
            is none.
    """
    wanted = None if target is None else parse_target(target)
    groups, notes = group_runs(rows_of_pooled(runs), stage)
    return Table(tuple(_Section(group, stage).build(wanted) for group in groups), notes)


class _Section:
    """One table in the making: the main scores of all rows, read once, and the notes so far."""

    def __init__(self, group: Group, stage: str | None) -> None:
        self.group = group
        self.stage = stage
        self.stages = group.stages(stage)
        self.score = group.score
        self.scores = {name: scores_by_seed(runs, self.stages[name]) for name, runs in group.rows.items()}
        self.notes: list[str] = []
        local = [name for name, runs in group.rows.items() if runs[0].is_local]
        if len(local) > 1:
            self.notes.append(f"several Local rows ({', '.join(local)}): no difference to Local is shown")
        self.local = local[0] if len(local) == 1 else None

    def build(self, target: float | None) -> ComparisonGroup:
        """The section, with all of its notes."""
        group = self.group
        if target is not None and self.score is not ACCURACY:
            self.notes.append("no target: it is of accuracies, and numbers are predicted here")
            target = None
        gains = decompose(group.rows, self.stages, self.score)
        frame = pd.DataFrame([self._row(name, target, gains.get(name)) for name in group.rows], dtype=object)
        frame = frame.where(frame.notna(), None)
        rows = frame.to_dict("records")
        leaders = self._leaders()
        clients = scores_of_clients(group, self.local)
        footnotes = dict.fromkeys(name for row in rows for one in row["published"] for name in one.printed.footnotes)
        numbers = {name: number for number, name in enumerate(footnotes, start=1)}
        notes = [
            _about_columns(rows, self.score, group.evaluation.when),
            *group.notes,
            *self.notes,
        ]
        notes += [*_about_epsilon(group, rows), *_about_scores(rows), *self._about_leaders(leaders), *remarks(gains)]
        notes += verdicts(clients, self.score, bool(group.runs[0].result.client_names))
        if target is not None:
            notes.append(_about_target(target, group))
        notes += _about_published(group, rows)
        notes += [f"[{number}] {paper_results.footnote(name)}" for name, number in numbers.items()]
        first = group.runs[0]
        scored = self.score.of_it(f"Accuracy: {group.scoring(self.stage)}")
        return ComparisonGroup(
            caption=f"{group.about}, {group.seeds_text()}. {scored}.{group.preset_text()}",
            facts={
                "dataset": first.result.dataset,
                "clients": first.result.clients,
                "rounds": first.result.rounds,
                "seeds": list(group.seeds),
                "test": group.evaluation.test,
                "mean": group.evaluation.weighting,
                "preset": first.recipe.run.preset,
            },
            rows=frame,
            notes=tuple(notes),
            models=first.recipe.architectures,
            versions=dict(first.result.versions),
            published=tuple(first.recipe.run.paper_tables),
            footnotes=numbers,
            leaders=leaders,
            score=self.score,
            clients=clients,
        )

    def _row(self, name: str, target: float | None, gains: Gains | None) -> dict[str, Any]:
        runs = self.group.rows[name]
        stage = self.stages[name]
        results = [run.result for run in runs]
        scores = [_over_clients(run, stage) for run in runs]
        own = [run.result.accuracy_per_architecture if run.stage == stage else {} for run in runs]
        difference = self._difference(name)
        main = self.score.name
        row: dict[str, Any] = {"name": name, "method": runs[0].method, "control": runs[0].control, "stage": stage}
        row |= {"seeds": [run.seed for run in runs], **_estimate(main, Estimate.of(self.scores[name]))}
        best = Estimate.of({run.seed: _best(run, stage) for run in runs})
        row |= _estimate(f"{main}_best_by_validation", best)
        row |= _estimate("difference", difference) | {"difference_seeds": list(difference.seeds)}
        row |= {key: mean_of([one[key] for one in scores]) for key in scores[0]}
        of_runs = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
        row |= {key: mean_of([getattr(result, key) for result in results]) for key in of_runs}
        row[f"{main}_best_test_round"] = mean_of([result.accuracy_best_test_round for result in results])
        row["refused"] = sum(result.refused or 0 for result in results)
        row["nothing_learnt"] = sum(bool(result.nothing_learnt) for result in results)
        groups = {
            "by_stage": _means([result.accuracy_by_stage for result in results]),
            "by_predictor": _means([result.accuracy_by_predictor.get(stage, {}) for result in results]),
            "by_classes": _means([result.accuracy_by_classes.get(stage, {}) for result in results]),
            "held_out": _means([result.held_out for result in results]),
            "by_architecture": _means(own),
            "metric": _means([result.metrics.get(stage, {}) for result in results]),
            "epsilon": _largest([result.epsilon for result in results]),
        }
        row |= {f"{group}_{key}": value for group, found in groups.items() for key, value in found.items()}
        if target is not None:
            needed = to_target(runs, target, stage)
            of_target = vars(needed) | _estimate("rounds", needed.rounds) | _estimate("bytes_paper", needed.bytes_paper)
            row |= {f"target_{key}": value for key, value in of_target.items()}
        if gains is not None:
            row |= _estimate("gain", gains.gain) | _estimate("gain_alone", gains.alone)
            row |= _estimate("federated_gain", gains.federated) | {"way_to_pooled_tuned": gains.way}
        row["published"] = () if runs[0].control else paper_results.compare_with_paper(runs, stage)
        row["runs"] = [_one_run(run, self.scores[name][run.seed]) for run in runs]
        return row

    def _difference(self, name: str) -> Estimate:
        if self.local is None or name == self.local:
            return Estimate()
        local = self.group.rows[self.local]
        its = scores_by_seed(local, self.stages[name])
        if any(its[seed] is None for seed in self.scores[name] if seed in its):
            compared = local[0].stage
            its = scores_by_seed(local, compared)
            self.notes.append(f"{name}: its stage {self.stages[name]} is compared with Local's stage {compared}")
        return Estimate.difference(self.scores[name], its)

    def _leaders(self) -> dict[str, str]:
        """Who leads in the main score, in that of the best round, and in each stage; what nobody leads is left out.

        All rows compete but pooled data, which no federation has. Controls, and runs that learnt nothing, lead nowhere.
        """
        rows = {name: runs for name, runs in self.group.rows.items() if not _is_pooled(runs)}
        may_lead = [
            name
            for name, runs in rows.items()
            if not runs[0].control and not any(r.result.nothing_learnt for r in runs)
        ]
        columns: dict[str, dict[str, BySeed]] = {
            self.score.name: {name: self.scores[name] for name in rows},
            "best_by_validation": {
                name: {run.seed: _best(run, self.stages[name]) for run in runs} for name, runs in rows.items()
            },
        }
        for stage in dict.fromkeys(stage for runs in rows.values() for stage in runs[0].result.accuracy_by_stage):
            columns[stage] = {name: scores_by_seed(runs, stage) for name, runs in rows.items()}
        leaders = {column: leader(scores, may_lead, self.score.lower_is_better) for column, scores in columns.items()}
        return {column: name for column, name in leaders.items() if name is not None}

    def _about_leaders(self, leaders: Mapping[str, str]) -> Iterator[str]:
        """What is bold and why: of which column, as each stage has its own best."""
        if not leaders:
            return
        columns: dict[str, list[str]] = {}
        for column, name in leaders.items():
            is_stage = column not in (self.score.name, "best_by_validation")
            columns.setdefault(name, []).append(f"stage {column}" if is_stage else column.replace("_", " "))
        led = "; ".join(f"{name} ({', '.join(where)})" for name, where in columns.items())
        best = "lowest" if self.score.lower_is_better else "highest"
        aside = " (pooled data aside)" if any(map(_is_pooled, self.group.rows.values())) else ""
        yield (
            f"bold: the {best} of its column{aside}, where the 95 % interval of its difference to each other row, "
            f"paired by seed, leaves out zero: {led}"
        )


# of one row -------------------------------------------------------------------------------------------------------
def _estimate(name: str, one: Estimate) -> dict[str, float | None]:
    return {name: one.mean, f"{name}_std": one.std, f"{name}_margin": one.margin}


def _best(run: RunRecord, stage: str) -> float | None:
    """Test accuracy of the round that was best on validation data, which is known for the run's own stage alone."""
    return finite(run.result.accuracy_best_by_validation) if run.stage == stage else None


def _is_pooled(runs: Sequence[RunRecord]) -> bool:
    return runs[0].control.startswith("pooled")


def _over_clients(run: RunRecord, stage: str) -> dict[str, float | None]:
    """Spread and extremes over clients of a run's main score, after its last evaluation."""
    result = run.result
    found = result.accuracy_by_stage.get(stage, Summary())
    worst = finite(found.max if result.main_score.lower_is_better else found.min)
    return {"std_clients": finite(found.std), "worst_client": worst, "bottom_decile": finite(found.bottom_decile)}


def _one_run(run: RunRecord, score: float | None) -> dict[str, Any]:
    """What one run of a row gave. Seconds: on the clock; processor_seconds: of the run's process and its workers."""
    figures = ("bytes_up", "bytes_down", "seconds", "processor_seconds", "refused")
    return {
        "seed": run.seed,
        "path": str(run.path),
        run.result.main_score.name: score,
        **{key: finite(getattr(run.result, key)) for key in figures},
        "hyperparameters": run.result.hyperparameters,
    }


def _means(summaries: Sequence[Mapping[str, Summary | FigureSummary]]) -> dict[str, float]:
    shared = [key for key in summaries[0] if all(key in other for other in summaries)]
    found = {key: mean_of([summary[key].mean for summary in summaries]) for key in shared}
    return {key: mean for key, mean in found.items() if mean is not None}


def _largest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: max(one[key] for one in found if key in one) for key in dict.fromkeys(k for one in found for k in one)}


# notes ------------------------------------------------------------------------------------------------------------
def _about_columns(rows: Sequence[Row], score: MainScore, when: str) -> str:
    several = any(len(row["seeds"]) > 1 for row in rows)
    what = "accuracy in %" if score.is_share else f"{score.title} (low is good)"
    note = f"{what} {when}"
    note += "; ± is the sample standard deviation over seeds" if several else ""
    if any(row["difference"] is not None for row in rows if row["method"] != "local"):
        facts = ["paired by seed"] if several else []
        facts += ["in percentage points"] if score.is_share else ["below zero where it is better"]
        note += f"; the difference to Local is {' and is '.join(facts)}"
    worst = "max" if score.lower_is_better else "min"
    over_clients = f"std and {worst} are over clients" + (" (mean over seeds)" if several else "")
    return f"{note}; {over_clients}; bytes of one whole run"


def _about_epsilon(group: Group, rows: Sequence[Row]) -> Iterator[str]:
    """What each unit's epsilon is of, and at which delta."""
    deltas = sorted({run.result.delta for run in group.runs if run.result.delta is not None})
    for unit in [unit for unit in _EPSILON if f"epsilon_{unit}" in rows[0]]:
        of = neighbors(kind for run in group.runs for kind in run.result.epsilon_of.get(unit, ()))
        yield f"epsilon {unit}: {_EPSILON[unit]}, at delta {', '.join(f'{delta:g}' for delta in deltas)}; {of}"


def _about_scores(rows: Sequence[Row]) -> Iterator[str]:
    """What further accuracies are of, and what so few seeds cannot show."""
    known = list(rows[0])
    if any(key.startswith("by_predictor_") for key in known):
        yield "by ...: the same models in the same stage, predicting in another of their method's ways"
    if any(key.startswith("by_classes_") for key in known):
        yield (
            "own classes: on those that each client has training samples of; missing classes: on the others, with the "
            "test samples of all clients, over the clients that lack some"
        )
    if any(key.startswith("held_out_") for key in known):
        epochs = " and after local training on it" if "held_out_after_training" in known else ""
        yield (
            "held out: clients that never trained, on their own test samples, with what they would receive if they "
            f"joined now{epochs}; all other figures are of the clients that train"
        )
    if few := [row["name"] for row in rows if len(row["seeds"]) < SEEDS]:
        yield f"fewer than three seeds, of which no interval is known: {', '.join(few)}"


def _about_target(target: float, group: Group) -> str:
    every = max(run.result.evaluation.every_n_rounds or 1 for run in group.runs)
    scored = f"; scored was every {every}th round" if every > 1 else ""
    return (
        f"target {100 * target:g} %: first scored round, counted from 1, with at least this accuracy; bytes (both "
        f"ways) and time are of all rounds up to it{scored}"
    )


def _about_published(group: Group, rows: Sequence[Row]) -> Iterator[str]:
    """What a reader must know of ours beside the papers'."""
    first = group.runs[0]
    if any(row["published"] for row in rows):
        yield (
            f"beside the paper: ours {group.evaluation.when}, {group.on_what()}; ± is the sample standard deviation "
            f"over seeds, the paper's as printed; '{paper_results.DIFFERS}': the difference is more than "
            f"{paper_results.SPREADS} spreads, each the root of the sum of both squares (the paper's alone for one "
            "seed)"
        )
        if first.scaled_down:
            yield "scaled down: not the paper's experiment at its size, so that no difference is marked"
        if any(each.mark == paper_results.OTHER_SETTINGS for row in rows for each in row["published"]):
            yield "other settings: not the paper's experiment, as --set has changed it, so that no difference is marked"
    if places := paper_results.missing_settings(first):
        yield f"{', '.join(places)} has no column for these data and settings, so that nothing stands beside"
