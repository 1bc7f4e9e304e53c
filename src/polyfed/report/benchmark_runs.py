"""The figures of finished runs of a setting, as its file has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.benchmark_results import ProcessorTime, RowResult, SettingResult, Tuning
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import RunRecord
from polyfed.report.text_tables import finite, sum_of

__all__ = ["RowRuns", "processor_time", "setting_result"]


@dataclass(frozen=True)
class RowRuns:
    """A row's finished runs, one for each seed, and what their recipe says (`RowResult`).

    is_control: whether their method is (`Method.is_control`).
    """

    name: str
    runs: Sequence[RunRecord]
    hyperparameters: Mapping[str, Any]
    is_control: bool = False


def setting_result(
    setting: str,
    found: Sequence[RowRuns],
    recipe: Mapping[str, Any],
    tuning: Mapping[str, Tuning],
    epochs: Mapping[str, int],
) -> SettingResult:
    """The figures of some rows. recipe, tuning, epochs of Local: see `SettingResult`.

    Raises:
        ConfigError: the runs cannot stand in one table.
    """
    runs = [run for row in found for run in row.runs]
    groups, _ = group_runs(runs)
    if len(groups) != 1:
        raise ConfigError(f"{setting}: expected runs that one table can hold, got those of {len(groups)} tables")
    (group,) = groups
    versions: list[dict[str, str]] = []
    for run in runs:
        if dict(run.result.versions) not in versions:
            versions.append(dict(run.result.versions))
    return SettingResult(
        setting=setting,
        score=group.score.name,
        about=group.about,
        scored_on=group.on_what(),
        changes=group.preset_text().strip(),
        rounds=runs[0].result.rounds,
        clients=runs[0].result.clients,
        recipe=dict(recipe),
        data={str(run.seed): run.data_checksum for run in runs if run.data_checksum},
        tuning=dict(tuning),
        epochs_of_local=dict(epochs),
        versions=versions,
        rows=[_row(row) for row in found],
    )


def _row(found: RowRuns) -> RowResult:
    runs = sorted(found.runs, key=lambda run: run.seed)
    first = runs[0]
    return RowResult(
        name=found.name,
        method=first.method,
        control=first.control or ("targets" if found.is_control else ""),
        hyperparameters=dict(found.hyperparameters),
        stage=first.stage,
        accuracy={str(run.seed): finite(run.result.mean_accuracy(first.stage)) for run in runs},
        bytes_up=sum_of([run.result.bytes_up for run in runs]),
        bytes_down=sum_of([run.result.bytes_down for run in runs]),
    )


def processor_time(found: Sequence[RowRuns], trials: Mapping[str, Sequence[RunRecord]]) -> ProcessorTime:
    """What runs have used. trials: method -> its runs for tuning."""
    runs = {row.name: {str(run.seed): finite(run.result.processor_seconds) for run in row.runs} for row in found}
    tuning = {name: sum_of([trial.result.processor_seconds for trial in tried]) for name, tried in trials.items()}
    return ProcessorTime(tuning=tuning, runs=runs)
