"""The comparison of runs: a row for each method or variant, a section for each set of comparable runs.

Runs of one name are averaged over their seeds. "±" is the sample standard deviation over seeds (n - 1) and is left
blank with one seed: a spread over one run is unknown, not zero. The best round is the one best on validation data,
never on test data. `polyfed.report.comparison_tables` shows and writes all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from polyfed.errors import ConfigError
from polyfed.records import paper_tables
from polyfed.records.main_score import ACCURACY, MainScore
from polyfed.report import paper_results
from polyfed.report.client_scores import scores_of_clients, worth_for_clients
from polyfed.report.comparison_tables import ComparisonGroup, Table
from polyfed.report.findings import Gains, decompose, remarks
from polyfed.report.frames import round_frame
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import RunRecord, rows_of_pooled
from polyfed.report.statistics import (
    SEEDS,
    BySeed,
    Estimate,
    about_resplit,
    finite,
    leader,
    mean_of,
    scores_by_seed,
    to_target,
    whole,
)

_OF_CLIENTS = ("std_clients", "worst_client", "bottom_decile")
_OF_RUNS = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
_GROUPS = ("by_stage_", "by_predictor_", "by_classes_", "held_out_", "by_architecture_", "metric_")
_EPSILON = {
    "client": "of the bounded entries of all uploads of a client, for whether it takes part",
    "sample": "of what a client's uploads reveal of what one of its rows holds; the runs' records name those uploads",
}

# By what is released (`core.releases.Release.what`). Another row in a row's place takes one away and adds one: a sum of
# gradients changes by up to 2 C, sums of features by up to sqrt(0.95 * 4) = 1.95 times what a row has by itself, where
# the new features are the old ones' negative and class means are all that is sent (`functional.noisy_sums.add_noise`).
_NEIGHBORS = {
    "features": "another row in a row's place",
    "sums": "with or without a row (another in its place: up to 1.95 times the effect)",
    "training": "with or without a row (another in its place: up to 2 times the effect)",
    "upload": "a client's upload, or zeros",
}


def compare_runs(runs: Iterable[RunRecord], target: float | None = None) -> Table:
    """Compare runs, grouped by name over seeds; different data, clients or rounds give separate tables.

    Args:
        runs: from ``load_runs``.
        target: an accuracy, in (0, 1]: also give the rounds, bytes and seconds that it took.

    Raises:
        ConfigError: no finished run, two runs with the same name and seed, or no such target.
    """
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"target: expected an accuracy above 0 and at most 1, got {target:g}")
    groups, notes = group_runs(rows_of_pooled(runs))
    return Table(tuple(compare_group(group, target) for group in groups), notes)


def compare_group(group: Group, target: float | None = None) -> ComparisonGroup:
    """The section of comparable runs. target: an accuracy, in (0, 1]; see `compare_runs`."""
    return _Section(group).build(target)


class _Section:
    """One table in the making: the main scores of all rows, read once, and the notes so far."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.stages = group.stages
        self.score = group.score
        self.scores = {name: scores_by_seed(runs, self.stages[name]) for name, runs in group.rows.items()}
        self.best = {name: _best_by_validation(runs, self.stages[name]) for name, runs in group.rows.items()}
        self.notes: list[str] = []
        local = [name for name, runs in group.rows.items() if runs[0].is_local]
        if 1 < len(local) < len(group.rows):
            self.notes.append(f"several Local rows ({', '.join(local)}): no difference to Local is shown")
        self.local = local[0] if len(local) == 1 else None

    def build(self, target: float | None) -> ComparisonGroup:
        """The section, with all of its notes."""
        group = self.group
        if target is not None and self.score is not ACCURACY:
            self.notes.append("no target: it is of accuracies, and numbers are predicted here")
            target = None
        gains = decompose(group)
        figures = figures_of_runs(group)
        rows = self._rows(figures, target, gains)
        published = paper_results.compare_with_paper(group)
        records = rows.to_dict("records")
        leading = self._leader()
        clients = scores_of_clients(group, self.local)
        footnotes = dict.fromkeys(name for names in published["footnotes"] for name in names)
        numbers = {name: number for number, name in enumerate(footnotes, start=1)}
        notes = [
            _about_columns(records, self.score, group.evaluation.when),
            *filter(None, [about_resplit(group.resplit) if len(group.seeds) >= SEEDS else ""]),
            *group.notes,
            *self.notes,
        ]
        notes += [*_about_epsilon(group, rows), *_about_scores(rows), *self._about_leader(leading), *remarks(gains)]
        notes += worth_for_clients(group)
        if target is not None:
            notes.append(_about_target(target, group))
        notes += _about_published(group, published)
        texts = paper_tables.read_footnotes(paper_tables.SOURCE)
        notes += [f"[{number}] {texts[name]}" for name, number in numbers.items()]
        first = group.runs[0]
        scored = self.score.of_it(f"Accuracy: {group.scoring()}")
        return ComparisonGroup(
            group=group,
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
            rows=rows,
            published=published,
            notes=tuple(notes),
            footnotes=numbers,
            leader=leading,
            clients=clients,
        )

    def _rows(self, figures: pd.DataFrame, target: float | None, gains: Mapping[str, Gains]) -> pd.DataFrame:
        """`ComparisonGroup.rows`: the figures of runs, over seeds."""
        over_seeds = figures.groupby("name", sort=False).agg(mean_of).to_dict("index")
        largest = figures.filter(like="epsilon_").groupby("name").max()
        rounds = None if target is None else round_frame(self.group)
        found = []
        for name, runs in self.group.rows.items():
            means = over_seeds[name]
            own = figures.loc[name]
            difference = self._difference(name)
            row: dict[str, Any] = {
                "name": name,
                "method": runs[0].method,
                "control": runs[0].control,
                "stage": self.stages[name],
            }
            row |= {"seeds": [run.seed for run in runs]}
            row |= Estimate.of(self.scores[name], self.group.resplit).named(self.score.name)
            row |= Estimate.of(self.best[name], self.group.resplit).named(f"{self.score.name}_best_by_validation")
            row |= difference.named("difference") | {"difference_seeds": list(difference.seeds)}
            row |= {key: means[key] for key in _OF_CLIENTS}
            row |= {key: whole(means[key]) if key.startswith("bytes") else means[key] for key in _OF_RUNS}
            row[f"{self.score.name}_best_test_round"] = means[f"{self.score.name}_best_test_round"]
            row["refused"] = whole(own["refused"].sum())
            row["nothing_learnt"] = sum(bool(run.result.nothing_learnt) for run in runs)
            row |= {key: means[key] for group in _GROUPS for key in means if key.startswith(group)}
            row |= {key: finite(value) for key, value in largest.loc[name].items()}
            if rounds is not None and target is not None:
                row |= _target(target, to_target(rounds[rounds["name"] == name], row["seeds"], target))
            if name in gains:
                one = gains[name]
                row |= one.gain.named("gain") | one.alone.named("gain_alone")
                row |= one.federated.named("federated_gain")
            found.append(row)
        frame = pd.DataFrame(found, dtype=object)
        return frame.where(frame.notna(), None)

    def _difference(self, name: str) -> Estimate:
        if self.local is None or name == self.local:
            return Estimate()
        local = self.group.rows[self.local]
        its = scores_by_seed(local, self.stages[name])
        if any(its[seed] is None for seed in self.scores[name] if seed in its):
            compared = local[0].stage
            its = scores_by_seed(local, compared)
            self.notes.append(f"{name}: its stage {self.stages[name]} is compared with Local's stage {compared}")
        return Estimate.difference(self.scores[name], its, self.group.resplit)

    def _leader(self) -> str | None:
        """Who leads in the main score.

        All rows compete but pooled data, which no federation has. Controls, and runs that learnt nothing, lead nowhere.
        """
        rows = {name: runs for name, runs in self.group.rows.items() if not _is_pooled(runs)}
        may_lead = [
            name
            for name, runs in rows.items()
            if not runs[0].control and not any(r.result.nothing_learnt for r in runs)
        ]
        scores = {name: self.scores[name] for name in rows}
        return leader(scores, may_lead, self.score.lower_is_better, self.group.resplit)

    def _about_leader(self, leading: str | None) -> Iterator[str]:
        """What is bold and why."""
        if leading is None:
            return
        best = "lowest" if self.score.lower_is_better else "highest"
        aside = " (pooled data aside)" if any(map(_is_pooled, self.group.rows.values())) else ""
        yield (
            f"bold: the {best} {self.score.title}{aside}, where the 95 % interval of its difference to each other row, "
            "paired by seed, leaves out zero"
        )


# of runs ----------------------------------------------------------------------------------------------------------


def figures_of_runs(group: Group) -> pd.DataFrame:
    """Row and seed -> its figures, a column each: those of the row's stage, and those of no stage.

    by_stage_NAME, held_out_NAME, by_architecture_NAME, by_predictor_NAME are the main score in other stages, and so on.
    What is not known is NaN.
    """
    frame = group.frame
    lines = frame[frame["round"].isna() & frame["client"].isna()]
    score = group.score.name
    is_score = lines["metric"] == score
    own = lines["stage"] == lines["name"].map(group.stages)
    plain = lines["predictor"] == ""
    columns = {
        "by_stage_": (plain & is_score, "stage"),
        "by_predictor_": (~plain & own & is_score, "predictor"),
        "held_out_": (lines["metric"] == "held_out", "stage"),
        "by_architecture_": (own & (lines["metric"] == "by_architecture"), "architecture"),
        "": (plain & (lines["architecture"] == "") & (own | (lines["stage"] == "")), "metric"),
    }
    index = pd.MultiIndex.from_tuples([(name, run.seed) for name, runs in group.rows.items() for run in runs])
    found = [
        lines[which]
        .pivot(index=["name", "seed"], columns=column, values="value")[lines[column][which].unique()]
        .add_prefix(prefix)
        for prefix, (which, column) in columns.items()
    ]
    figures = pd.concat(found, axis=1).reindex(index.set_names(["name", "seed"]))
    lacking = [key for key in (*_OF_CLIENTS, *_OF_RUNS, "refused", f"{score}_best_test_round") if key not in figures]
    return figures.assign(**dict.fromkeys(lacking, math.nan))


def _best_by_validation(runs: Sequence[RunRecord], stage: str) -> dict[int, float | None]:
    """Seed -> test score of the round that was best on validation data, which is known for the run's own stage."""
    metric = f"{runs[0].result.main_score.name}_best_by_validation"
    return {run.seed: finite(run.figures.get((metric, stage))) for run in runs}


def _target(accuracy: float, needed: Mapping[str, BySeed]) -> dict[str, Any]:
    """The columns of a row that say what it took to reach an accuracy."""
    reached = [seed for seed, number in needed["rounds"].items() if number is not None]
    row: dict[str, Any] = {"target_accuracy": accuracy, "target_reached": len(reached)}
    row |= {"target_runs": len(needed["rounds"]), **Estimate.of(needed["rounds"]).named("target_rounds")}
    row |= {"target_bytes": mean_of(list(needed["bytes"].values()))}
    row |= Estimate.of(needed["bytes_paper"]).named("target_bytes_paper")
    return row | {f"target_{key}": mean_of(list(needed[key].values())) for key in ("seconds", "simulated_seconds")}


def _is_pooled(runs: Sequence[RunRecord]) -> bool:
    return runs[0].control.startswith("pooled")


# notes ------------------------------------------------------------------------------------------------------------
def _about_columns(rows: Sequence[Mapping[str, Any]], score: MainScore, when: str) -> str:
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


def _about_epsilon(group: Group, rows: pd.DataFrame) -> Iterator[str]:
    """What each unit's epsilon is of, and at which delta."""
    deltas = sorted({run.result.delta for run in group.runs if run.result.delta is not None})
    for unit in [unit for unit in _EPSILON if f"epsilon_{unit}" in rows]:
        of = neighbors(kind for run in group.runs for kind in run.result.epsilon_of.get(unit, ()))
        yield f"epsilon {unit}: {_EPSILON[unit]}, at delta {', '.join(f'{delta:g}' for delta in deltas)}; {of}"


def neighbors(what: Iterable[str]) -> str:
    """what: kinds of releases that an epsilon counts.

    >>> neighbors(["upload", "features"])
    "neighbors: another row in a row's place; a client's upload, or zeros"
    """
    asked = set(what)
    return f"neighbors: {'; '.join(said for kind, said in _NEIGHBORS.items() if kind in asked)}"


def _about_scores(rows: pd.DataFrame) -> Iterator[str]:
    """What further accuracies are of, and what so few seeds cannot show."""
    known = list(rows)
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
    if few := list(rows["name"][rows["seeds"].map(len) < SEEDS]):
        yield f"fewer than three seeds, of which no interval is known: {', '.join(few)}"


def _about_target(target: float, group: Group) -> str:
    every = max(run.result.evaluation.every_n_rounds or 1 for run in group.runs)
    scored = f"; scored was every {every}th round" if every > 1 else ""
    return (
        f"target {100 * target:g} %: first scored round, counted from 1, with at least this accuracy; bytes (both "
        f"ways) and time are of all rounds up to it{scored}"
    )


def _about_published(group: Group, published: pd.DataFrame) -> Iterator[str]:
    """What a reader must know of ours beside the papers'."""
    first = group.runs[0]
    if len(published):
        yield (
            f"beside the paper: ours {group.evaluation.when}, {group.on_what()}; ± is the sample standard deviation "
            f"over seeds, the paper's as printed; '{paper_results.DIFFERS}': the difference is more than "
            f"{paper_results.SPREADS} spreads, each the root of the sum of both squares (the paper's alone for one "
            "seed)"
        )
        if first.scaled_down:
            yield "scaled down: not the paper's experiment at its size, so that no difference is marked"
        if (published["mark"] == paper_results.OTHER_SETTINGS).any():
            yield "other settings: not the paper's experiment, as --set has changed it, so that no difference is marked"
    known = {entry.place for entry in paper_results.numbers_for(first)}
    if places := [place for place in first.recipe.run.paper_tables if place not in known]:
        yield f"{', '.join(places)} has no column for these data and settings, so that nothing stands beside"
