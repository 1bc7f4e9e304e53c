"""The figures of a benchmark: one small JSON file per setting, and one with all processor time.

A setting's file says what was run: the recipe, and each row's hyperparameters and seeds. So a benchmark goes on from
its figures, wherever they were made: a row that has a seed does not need it again.

The file holds what does not depend on the machine's speed or on interruptions: equal runs, equal files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from polyfed.errors import ConfigError
from polyfed.escaping import json_text
from polyfed.report.atomic_files import write_whole
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import RunRecord, rows_of_pooled
from polyfed.report.statistics import finite, sum_of
from polyfed.results.fields import Count, Number, Record, Text, one_of, validated
from polyfed.results.main_score import ACCURACY, RMSE, MainScore
from polyfed.results.read import parse_json

PROCESSOR_TIME = "processor-seconds.json"
CONTROLS = ("", "targets", "alone", "pooled", "pooled-shares", "pooled-tuned")  # in the order of rows

_DIGITS = 6  # of a curve's points

Seed = Annotated[str, Field(pattern=r"^\d+$")]
Round = Seed


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
        curve: evaluated round -> mean accuracy over seeds; one that has stopped early counts with its last accuracy.
        bytes_up, bytes_down: of all seeds together, so that rows can be joined; None: not known.
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
    curve: dict[Round, Number] = Field({})
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
            (`polyfed.results.schema.MadeOf`); what was made before there was one has none.
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


# rows of finished runs ------------------------------------------------------------------------------------------------


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
) -> SettingResult:
    """The figures of some rows. recipe, tuning: see `SettingResult`.

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
        versions=versions,
        rows=[_row(row) for one in found for row in _with_rows_of_pooled(one)],
    )


def _with_rows_of_pooled(found: RowRuns) -> list[RowRuns]:
    """The row; of runs on pooled data, all that come of them, each called as its control."""
    if found.runs[0].control != "pooled":
        return [found]
    by_control: dict[str, list[RunRecord]] = {}
    for run in rows_of_pooled(found.runs):
        by_control.setdefault(run.control, []).append(run)
    return [replace(found, name=control, runs=runs) for control, runs in by_control.items()]


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
        validation={str(run.seed): finite(run.result.validation) for run in runs},
        best={str(run.seed): finite(run.result.accuracy_best_by_validation) for run in runs},
        rounds={str(run.seed): run.result.stopped_after or run.result.rounds for run in runs},
        curve=mean_curve([(_curve_of(run), 1) for run in runs]),
        bytes_up=sum_of([run.result.bytes_up for run in runs]),
        bytes_down=sum_of([run.result.bytes_down for run in runs]),
    )


def _curve_of(run: RunRecord) -> dict[str, float]:
    """Evaluated round -> accuracy in the run's own stage."""
    scores = {str(record.round): finite(record.mean(run.stage)) for record in run.rounds if record.evaluated}
    return {number: score for number, score in scores.items() if score is not None}


def mean_curve(curves: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """The mean of curves, round -> accuracy; each goes on with its last accuracy to the end of the longest.

    curves: each with the number of seeds that it is of. Empty where one of them is.
    """
    if not all(curve for curve, _ in curves):
        return {}
    begin = max(min(map(int, curve)) for curve, _ in curves)
    seeds = sum(count for _, count in curves)
    found = {}
    for number in sorted({int(key) for curve, _ in curves for key in curve}):
        if number >= begin:
            total = sum(count * curve[str(_last_round(curve, number))] for curve, count in curves)
            found[str(number)] = float(f"{total / seeds:.{_DIGITS}g}")
    return found


def _last_round(curve: Mapping[str, float], number: int) -> int:
    """The last round of a curve up to this one."""
    return max(known for known in map(int, curve) if known <= number)


def processor_time(found: Sequence[RowRuns], trials: Mapping[str, Sequence[RunRecord]]) -> ProcessorTime:
    """What runs have used. trials: method -> its runs for tuning."""
    runs = {row.name: {str(run.seed): finite(run.result.processor_seconds) for run in row.runs} for row in found}
    tuning = {name: sum_of([trial.result.processor_seconds for trial in tried]) for name, tried in trials.items()}
    return ProcessorTime(tuning=tuning, runs=runs)


# rows from several places -------------------------------------------------------------------------------------------


def join_results(stored: SettingResult, found: SettingResult, order: Sequence[str]) -> SettingResult:
    """A setting's stored figures with those that were found since.

    A row of the same hyperparameters gets the further seeds; any other row is added, or replaces that of its name.
    Stored figures of other data, which all are made again, are left out.

    Args:
        order: of methods in tables; others follow.
    """
    if any(stored.data.get(seed, checksum) != checksum for seed, checksum in found.data.items()):
        return found
    rows = {row.name: row for row in stored.rows}
    for row in found.rows:
        rows[row.name] = _join_rows(rows.get(row.name), row)
    tuning = stored.tuning | found.tuning
    known = list(dict.fromkeys(["local", *order, *map(_subject, rows.values())]))
    new_versions = [versions for versions in found.versions if versions not in stored.versions]
    return stored.model_copy(
        update={
            "data": dict(sorted((stored.data | found.data).items(), key=lambda entry: int(entry[0]))),
            "rows": sorted(rows.values(), key=lambda row: (CONTROLS.index(row.control), known.index(_subject(row)))),
            "tuning": {name: tuning[name] for one in known for name in (one, f"{one}-alone") if name in tuning},
            "versions": [*stored.versions, *new_versions],
        }
    )


def _join_rows(stored: RowResult | None, found: RowResult) -> RowResult:
    if stored is None or stored.hyperparameters != found.hyperparameters or stored.accuracy.keys() & found.accuracy:
        return found
    return found.model_copy(
        update={
            "accuracy": _by_seed(stored.accuracy | found.accuracy),
            "validation": _by_seed(stored.validation | found.validation),
            "best": _by_seed(stored.best | found.best),
            "rounds": _by_seed(stored.rounds | found.rounds),
            "curve": mean_curve([(row.curve, len(row.accuracy)) for row in (stored, found)]),
            "bytes_up": sum_of([stored.bytes_up, found.bytes_up]),
            "bytes_down": sum_of([stored.bytes_down, found.bytes_down]),
        }
    )


def _by_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {seed: values[seed] for seed in sorted(values, key=int)}


def join_processor_time(stored: ProcessorTime, found: ProcessorTime, rows: Sequence[RowResult]) -> ProcessorTime:
    """The same for processor time. rows: as they are joined; times of other runs are left out."""
    runs = {}
    for row in rows:
        spent = stored.runs.get(row.name, {}) | found.runs.get(row.name, {})
        runs[row.name] = {seed: spent.get(seed) for seed in row.accuracy}
    return ProcessorTime(tuning=stored.tuning | found.tuning, runs=runs)


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
