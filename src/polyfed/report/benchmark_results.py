"""The figures of a benchmark: one small JSON file per setting, and one with all processor time.

A setting's file says what was run: the recipe, and each row's hyperparameters and seeds. It holds what does not depend
on the machine's speed or on interruptions: equal runs, equal files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from polyfed.errors import ConfigError
from polyfed.escaping import json_text
from polyfed.records.fields import Count, Number, Record, Text, one_of, validated
from polyfed.records.main_score import ACCURACY, RMSE, MainScore
from polyfed.records.read import parse_json
from polyfed.report.atomic_files import write_whole
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import RunRecord, rows_of_pooled
from polyfed.report.statistics import sum_of

PROCESSOR_TIME = "processor-seconds.json"
CONTROLS = ("", "targets", "alone", "pooled", "pooled-shares", "pooled-tuned")  # in the order of rows
Seed = Annotated[str, Field(pattern=r"^\d+$")]


class RowResult(Record):
    """A row of a setting.

    Attributes:
        name: the method's or variant's. method: its registered name.
        control: what the row is a control for; "" for a method itself (`polyfed.report.comparison`); "targets": a
            variant of its method that puts something else in the place of what the others know (`Method.is_control`).
        hyperparameters: as the recipe of its runs has them in ``[method]``, all of them; also "training.NAME", where
            a setting of ``[training]`` was chosen for the row by validation.
        stage: that it is scored in.
        accuracy: seed -> in [0, 1], reported round. validation: likewise, on validation rows; empty: not known.
        best: seed -> accuracy in the round with the best validation score; empty: not known.
        rounds: seed -> how many were run; empty: not known.
        bytes_up, bytes_down: of all seeds together; None: not known.
    """

    name: Text
    method: Text
    control: Annotated[str, one_of(*CONTROLS)]
    hyperparameters: dict[str, Any]
    stage: Text
    accuracy: dict[Seed, Number | None]
    validation: dict[Seed, Number | None] = Field({})
    best: dict[Seed, Number | None] = Field({})
    rounds: dict[Seed, Count] = Field({})
    bytes_up: Number | None
    bytes_down: Number | None

    @property
    def by_seed(self) -> dict[int, float | None]:
        """Seed -> accuracy."""
        return {int(seed): value for seed, value in self.accuracy.items()}

    @property
    def bytes_of_run(self) -> float | None:
        """All that is sent in one run, mean over seeds."""
        total = sum_of([self.bytes_up, self.bytes_down])
        return None if total is None or not self.accuracy else total / len(self.accuracy)


class Tuning(Record):
    """How a method's hyperparameters were chosen.

    Attributes:
        tried: hyperparameter -> its values; all combinations were tried. seeds: with each of these.
        chosen: hyperparameter -> the value that validation chose.
        widened: hyperparameter -> the value beyond these that was tried, too, as one at an end was chosen first.
    """

    tried: dict[str, list[Any]]
    seeds: list[Count]
    chosen: dict[str, Any]
    widened: dict[str, Any] = Field({})


class SettingResult(Record):
    """What was measured in a setting.

    Attributes:
        score: what the rows' accuracies are: "accuracy", or "rmse" where numbers are predicted.
        about: data, clients and rounds, in words. scored_on: whose test data, and which mean. changes: presets and
            changes laid over the recipe; "" where there are none.
        recipe: the resolved recipe but for ``[method]`` and ``[run]``. data: seed -> checksum of the assigned rows
            (`polyfed.records.schema.MadeOf`); what was made before there was one has none.
        tuning: by method.
        versions: of what the numbers depend on; several where rows were made in several places.
    """

    setting: Text
    score: Annotated[Literal["accuracy", "rmse"], one_of("accuracy", "rmse")]
    about: Text
    scored_on: Text
    changes: Text
    rounds: Count
    clients: Count
    recipe: dict[str, Any]
    data: dict[Seed, Text] = Field({})
    tuning: dict[str, Tuning]
    versions: list[dict[str, Text]]
    rows: list[RowResult]

    def row(self, name: str) -> RowResult | None:
        """The row of a name."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def main_score(self) -> MainScore:
        """The score that methods are compared by."""
        return RMSE if self.score == RMSE.name else ACCURACY

    @property
    def methods(self) -> list[RowResult]:
        """The rows that are no controls; Local is among them."""
        return [row for row in self.rows if not row.control]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all rows."""
        return sorted({seed for row in self.rows for seed in row.by_seed})


class ProcessorTime(Record):
    """Processor seconds of a setting's runs; None: not known.

    Attributes:
        tuning: method -> those of all its trials. runs: row -> seed -> those of a scored run.
    """

    tuning: dict[str, Number | None]
    runs: dict[str, dict[Seed, Number | None]]

    @property
    def scored(self) -> float:
        """Those of all scored runs."""
        return sum(value or 0.0 for by_seed in self.runs.values() for value in by_seed.values())

    @property
    def trials(self) -> float:
        """Those of all trials."""
        return sum(value or 0.0 for value in self.tuning.values())


NO_TIME = ProcessorTime(tuning={}, runs={})

# rows of finished runs ------------------------------------------------------------------------------------------------


def rows_of(
    name: str, runs: Sequence[RunRecord], hyperparameters: Mapping[str, Any], is_control: bool = False
) -> list[RowResult]:
    """The row of finished runs, one for each seed; of runs on pooled data all that come of them, called as controls.

    Args:
        name, hyperparameters: see `RowResult`. is_control: whether their method is one (`Method.is_control`).
    """
    if runs[0].control != "pooled":
        return [_row(name, runs, hyperparameters, "targets" if is_control else "")]
    every = rows_of_pooled(runs)
    controls = dict.fromkeys(run.control for run in every)
    return [_row(one, [run for run in every if run.control == one], hyperparameters, "") for one in controls]


def _row(name: str, runs: Sequence[RunRecord], hyperparameters: Mapping[str, Any], control: str) -> RowResult:
    runs = sorted(runs, key=lambda run: run.seed)
    first = runs[0]
    score = first.result.main_score.name
    return RowResult(
        name=name,
        method=first.method,
        control=first.control or control,
        hyperparameters=dict(hyperparameters),
        stage=first.stage,
        accuracy={str(run.seed): run.figure(score) for run in runs},
        validation={str(run.seed): run.figure("validation") for run in runs},
        best={str(run.seed): run.figure(f"{score}_best_by_validation") for run in runs},
        rounds={str(run.seed): run.result.stopped_after or run.result.rounds for run in runs},
        bytes_up=sum_of([run.figure("bytes_up") for run in runs]),
        bytes_down=sum_of([run.figure("bytes_down") for run in runs]),
    )


def add_result(
    folder: Path,
    setting: str,
    rows: Sequence[RowResult],
    runs: Mapping[str, Sequence[RunRecord]],
    *,
    recipe: Mapping[str, Any],
    tuning: Mapping[str, Tuning],
    trials: Mapping[str, Sequence[RunRecord]],
    order: Sequence[str],
) -> None:
    """Write rows into the figures of a setting, in the place of those of the same names.

    Args:
        rows: of `rows_of`. runs: row -> the runs that it was made of.
        recipe: see `SettingResult`. tuning: of these rows. trials: row -> the runs of its tuning.
        order: of methods in tables; others follow.

    Raises:
        ConfigError: the runs cannot stand in one table, or the folder cannot be written to.
    """
    every = [run for own in runs.values() for run in own]
    result = next(iter(read_results(folder, [setting])), None) or _empty(setting, every, recipe)
    versions = list(result.versions)
    for run in every:
        if dict(run.result.versions) not in versions:
            versions.append(dict(run.result.versions))
    data = result.data | {str(run.seed): run.data_checksum for run in every if run.data_checksum}
    by_name = {row.name: row for row in (*result.rows, *rows)}
    known = list(dict.fromkeys([*order, *map(_subject, by_name.values())]))

    def place(row: RowResult) -> tuple[int, int, str]:
        return CONTROLS.index(row.control), known.index(_subject(row)), row.name

    tuned = result.tuning | dict(tuning)
    update = {
        "data": {seed: data[seed] for seed in sorted(data, key=int)},
        "tuning": {name: tuned[name] for one in known for name in (one, f"{one}-alone") if name in tuned},
        "versions": versions,
        "rows": sorted(by_name.values(), key=place),
    }
    before = read_processor_time(folder).get(setting, NO_TIME)
    scored = {name: {str(run.seed): run.figure("processor_seconds") for run in own} for name, own in runs.items()}
    searched = {name: sum_of([trial.figure("processor_seconds") for trial in tried]) for name, tried in trials.items()}
    spent = ProcessorTime(tuning=before.tuning | searched, runs=before.runs | scored)
    write_result(result.model_copy(update=update), spent, folder)


def _empty(setting: str, runs: Sequence[RunRecord], recipe: Mapping[str, Any]) -> SettingResult:
    """The figures of a setting before its first rows."""
    groups, _ = group_runs(runs)
    if len(groups) != 1:
        raise ConfigError(f"{setting}: expected runs that one table can hold, got those of {len(groups)} tables")
    (group,) = groups
    return SettingResult(
        setting=setting,
        score=group.score.name,
        about=group.about,
        scored_on=group.on_what(),
        changes=group.preset_text().strip(),
        rounds=runs[0].result.rounds,
        clients=runs[0].result.clients,
        recipe=dict(recipe),
        tuning={},
        versions=[],
        rows=[],
    )


def _subject(row: RowResult) -> str:
    """The name of the row's method; a control's own, but that of who is alone."""
    return row.name.removesuffix("-alone") if row.control == "alone" else row.name


# files --------------------------------------------------------------------------------------------------------------


def write_result(result: SettingResult, spent: ProcessorTime, folder: Path) -> None:
    """Write ``SETTING.json``, and the setting's entry of ``processor-seconds.json``, whose names are sorted."""
    _write(folder / f"{result.setting}.json", result.model_dump(mode="json"))
    known = read_processor_time(folder) | {result.setting: spent}
    times = {name: one.model_dump(mode="json") for name, one in known.items()}
    _write(folder / PROCESSOR_TIME, times, sort_keys=True)


def _write(path: Path, content: Any, *, sort_keys: bool = False) -> None:
    text = json_text(content, indent=1, sort_keys=sort_keys)
    write_whole(path, (text + "\n").encode())


def read_results(folder: Path, settings: Sequence[str]) -> list[SettingResult]:
    """The figures of the settings that a folder has, in this order."""
    return [_read(folder, name) for name in settings if (folder / f"{name}.json").exists()]


def _read(folder: Path, setting: str) -> SettingResult:
    path = folder / f"{setting}.json"
    try:
        found = validated(SettingResult, parse_json(path.read_bytes()))
        _check(found, setting)
    except (ValueError, OSError) as error:
        raise ConfigError(f"expected figures of a benchmark in {path}, got something else: {error}") from None
    return found


def _check(found: SettingResult, setting: str) -> None:
    """Whether the figures are those of the setting, each row is there once, and scores can be."""
    if found.setting != setting:
        raise ValueError(f"expected the setting {setting}, got {found.setting}")
    names = [row.name for row in found.rows]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"expected each row once, got {repeated} again")
    highest = math.inf if found.score == RMSE.name else 1.0
    for row in found.rows:
        for seed, score in row.accuracy.items():
            if score is not None and not 0 <= score <= highest:
                raise ValueError(f"{row.name}, seed {seed}: expected from 0 to {highest:g}, got {score:g}")


def read_processor_time(folder: Path) -> dict[str, ProcessorTime]:
    """Setting -> what its runs have used; empty where there are none."""
    path = folder / PROCESSOR_TIME
    if not path.exists():
        return {}
    try:
        found = parse_json(path.read_bytes())
        return {str(setting): validated(ProcessorTime, spent) for setting, spent in found.items()}
    except (ValueError, AttributeError, OSError) as error:
        raise ConfigError(f"expected processor time of a benchmark in {path}, got something else: {error}") from None
