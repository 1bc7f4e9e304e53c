"""What a comparison shows: a row for each method or variant, a section for each set of comparable runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.report.decomposition import Decomposition
from polyfed.report.paper_results import PaperComparison
from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import Paired, ToTarget
from polyfed.report.text_tables import finite, finite_ones
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.results.schema import Summary

__all__ = ["ComparisonGroup", "ComparisonRow", "Facts", "OneRun", "RunScore"]


@dataclass(frozen=True)
class ComparisonRow:
    """One method or variant over its seeds. Accuracies in [0, 1]; None is "not known". Means are over seeds.

    A margin is half the width of the 95 % interval of the mean (Student's t).

    Attributes:
        name: method or label, with the hyperparameters that tell variants apart.
        method: the method's registered name.
        control: what the row is a control for: "alone", "longer", "pooled", "pooled-steps"; "" for a method itself.
            A control leads nowhere, is nobody's rival, and stands beside no paper.
        stage: the stage that the accuracies were scored in.
        seeds: the seeds averaged over.
        accuracy: last round, mean over clients.
        accuracy_std_seeds: sample standard deviation over seeds; None with one seed.
        accuracy_margin: of the mean over seeds; None with fewer than three.
        accuracy_std_clients: standard deviation over clients.
        accuracy_min_client: the worst client.
        accuracy_bottom_decile: mean of the worst tenth of the clients.
        accuracy_best_by_validation: test accuracy in the round that was best on validation data.
        accuracy_best_std_seeds, accuracy_best_margin: of that, over seeds.
        accuracy_by_stage: every stage scored in all of the row's runs.
        accuracy_by_predictor: of the row's stage, by the method's other predictors, where all runs have them.
        accuracy_by_classes: of the row's stage, "own" and "missing": on the classes that clients have training samples
            of, and on the others, as far as all runs scored them.
        held_out: "received" and "after_training": accuracy of the clients that were held out of training.
        accuracy_per_architecture: mean over its clients, for every architecture in all of the row's runs; empty where
            another stage than the runs' own is shown.
        metrics: "balanced_accuracy", "f1", "auc": means over clients, as far as all of the row's runs recorded them.
        bytes_up: clients to server, one whole run; an int when all seeds agree.
        bytes_down: server to clients, likewise.
        seconds: one whole run.
        simulated_seconds: what it would have taken on the clients' devices; None where none are simulated.
        refused: uploads refused, summed over the runs.
        nothing_learnt: in how many of the runs no client's work ever counted.
        difference: accuracy minus Local's, paired on the seeds that both have.
        difference_std: sample standard deviation of those differences.
        difference_margin: of their mean.
        difference_seeds: the seeds paired.
        rival: the best other row but Local: of those that share most seeds with this one, the highest accuracy on
            these; "" where there is none.
        against_rival: accuracy minus the rival's, paired by seed.
        to_target: what it took to reach the target asked for; None where none was.
        epsilon: by unit (client, sample), of all that was released in a run; the largest over the runs.
        published: beside what a paper prints for the row.
        runs: what each run gave, with its folder.
    """

    name: str
    method: str
    control: str
    stage: str
    seeds: tuple[int, ...]
    accuracy: float | None
    accuracy_std_seeds: float | None
    accuracy_margin: float | None
    accuracy_std_clients: float | None
    accuracy_min_client: float | None
    accuracy_bottom_decile: float | None
    accuracy_best_by_validation: float | None
    accuracy_best_std_seeds: float | None
    accuracy_best_margin: float | None
    accuracy_by_stage: Mapping[str, float]
    accuracy_by_predictor: Mapping[str, float]
    accuracy_by_classes: Mapping[str, float]
    held_out: Mapping[str, float]
    accuracy_per_architecture: Mapping[str, float]
    metrics: Mapping[str, float]
    bytes_up: float | None
    bytes_down: float | None
    seconds: float | None
    simulated_seconds: float | None
    refused: int
    nothing_learnt: int
    difference: float | None
    difference_std: float | None
    difference_margin: float | None
    difference_seeds: tuple[int, ...]
    rival: str
    against_rival: Paired
    to_target: ToTarget | None
    epsilon: Mapping[str, float]
    published: tuple[PaperComparison, ...]
    runs: tuple[OneRun, ...]


@dataclass(frozen=True)
class OneRun:
    """What one run of a row gave. accuracy: in the row's stage. Bytes, seconds: of the whole run. None: not known.

    seconds: on the clock. processor_seconds: of the run's process and its workers.
    """

    seed: int
    path: str
    accuracy: float | None
    bytes_up: float | None
    bytes_down: float | None
    seconds: float | None
    processor_seconds: float | None
    refused: float | None
    hyperparameters: Mapping[str, Any] | None


@dataclass(frozen=True)
class RunScore:
    """The main score of one run's last evaluation in a stage, over clients; None is "not known"."""

    mean: float | None
    std: float | None
    worst: float | None
    bottom_decile: float | None

    @classmethod
    def of(cls, run: RunRecord, stage: str) -> RunScore:
        """As the run's result tells it."""
        result = run.result
        found = result.accuracy_by_stage.get(stage, Summary())
        std = finite(found.std)
        worst = finite(found.max if result.main_score.lower_is_better else found.min)
        if stage == run.stage:
            clients = finite_ones(result.accuracy_per_client)
            std = finite(result.accuracy_std) if std is None else std
            worst = result.main_score.worst(clients) if worst is None and clients else worst
        return cls(finite(result.mean_accuracy(stage)), std, worst, finite(found.bottom_decile))


@dataclass(frozen=True)
class Facts:
    """What all runs of a section have in common. test, mean: whose test data, and which mean over clients.

    held_out_group: the one group or client that is held out of training; None where there is none, or several are.
    """

    dataset: str
    clients: int
    rounds: int
    seeds: list[int]
    test: str | None
    mean: str | None
    preset: str | None
    held_out_group: str | None = None


@dataclass(frozen=True)
class ComparisonGroup:
    """One table: comparable runs under one caption.

    Attributes:
        finding: the result in words (`polyfed.report.findings`).
        caption: data, clients, rounds, seeds, what the accuracies are, and what is scaled down.
        facts: the same for machines.
        rows: Local first.
        notes: what the columns mean, what a reader must know about these runs, the papers' footnotes.
        models: the architectures of the clients, as far as recipes say.
        versions: of what the numbers depend on.
        published: the papers' tables that stand beside.
        footnotes: a footnote's name -> its number among the notes.
        leaders: "accuracy", "best_by_validation" or a stage -> the row that leads there
            (`polyfed.report.statistics.leader`); what nobody leads is left out.
        score: what the rows' accuracies are: where numbers are predicted, the RMSE.
        decompositions: of the gains of the methods that also ran alone (`polyfed.report.decomposition`).
    """

    finding: str
    caption: str
    facts: Facts
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    models: tuple[str, ...]
    versions: Mapping[str, str]
    published: tuple[str, ...]
    footnotes: Mapping[str, int]
    leaders: Mapping[str, str]
    decompositions: tuple[Decomposition, ...] = ()
    score: MainScore = ACCURACY

    @property
    def extra_stages(self) -> list[str]:
        """The stages that get a column of their own: all that were scored, less the one that every row shows anyway."""
        scored = dict.fromkeys(stage for row in self.rows for stage in row.accuracy_by_stage)
        own = {row.stage for row in self.rows}
        return [stage for stage in scored if own != {stage}]

    @property
    def predictors(self) -> list[str]:
        """The other predictors by which any row was scored, too."""
        return list(dict.fromkeys(name for row in self.rows for name in row.accuracy_by_predictor))

    @property
    def units(self) -> list[str]:
        """Those that an epsilon is told for."""
        return list(dict.fromkeys(unit for row in self.rows for unit in row.epsilon))
