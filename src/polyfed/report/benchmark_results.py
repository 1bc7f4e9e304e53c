"""The figures of a benchmark: one small JSON file per setting, and one with all processor time.

A setting's file holds what does not depend on the machine's speed or on interruptions: equal runs, equal files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from polyfed.errors import ConfigError
from polyfed.report.atomic_files import write_whole
from polyfed.report.comparison_formats import Table
from polyfed.report.comparison_rows import ComparisonRow
from polyfed.report.decomposition import Decomposition
from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import Paired
from polyfed.report.text_tables import finite, sum_of
from polyfed.results.fields import Count, Number, Record, Text, one_of, validated
from polyfed.results.main_score import ACCURACY, RMSE, MainScore
from polyfed.results.read import parse_json

__all__ = [
    "Gain",
    "Gains",
    "ProcessorTime",
    "RowResult",
    "SettingResult",
    "join_processor_time",
    "join_results",
    "processor_time",
    "read_processor_time",
    "read_result",
    "read_results",
    "setting_result",
    "write_result",
]

PROCESSOR_TIME = "processor-seconds.json"
_CONTROLS = ("", "alone", "longer", "pooled", "pooled-steps")  # in the order of rows

Seed = Annotated[str, Field(pattern=r"^\d+$")]


class RowResult(Record):
    """A row of a setting. accuracy: seed -> in [0, 1], after the last round. Bytes: of one run, mean over seeds."""

    name: Text
    method: Text
    control: Text
    stage: Text
    accuracy: dict[Seed, Number | None]
    bytes_up: Number | None
    bytes_down: Number | None

    @property
    def by_seed(self) -> dict[int, float | None]:
        """Seed -> accuracy."""
        return {int(seed): value for seed, value in self.accuracy.items()}


class Gain(Record):
    """A difference in accuracy, paired by seed: its mean and half its 95 % interval; None: not known."""

    mean: Number | None
    margin: Number | None

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval does."""
        return self.mean is not None and self.margin is not None and abs(self.mean) > self.margin


class Gains(Record):
    """A method's gain over Local, taken apart (`polyfed.report.decomposition`)."""

    name: Text
    gain: Gain
    alone: Gain
    federated: Gain
    way: Number | None


class SettingResult(Record):
    """What was measured in a setting.

    Attributes:
        score: what the rows' accuracies are: "accuracy", or "rmse" where numbers are predicted.
        tuned: method -> hyperparameter -> the value that validation chose.
    """

    setting: Text
    score: Annotated[Literal["accuracy", "rmse"], one_of("accuracy", "rmse")]
    caption: Text
    rounds: Count
    clients: Count
    tuned: dict[str, dict[str, Any]]
    versions: dict[str, Text]
    rows: list[RowResult]
    gains: list[Gains]

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


class ProcessorTime(Record):
    """Processor seconds of a setting's runs; None: not known.

    Attributes:
        tuning: method -> those of all its trials. runs: row -> seed -> those of a scored run.
    """

    tuning: dict[str, Number | None]
    runs: dict[str, dict[Seed, Number | None]]

    def of_row(self, name: str) -> list[float | None]:
        """Those of a row's runs."""
        return list(self.runs.get(name, {}).values())

    @property
    def scored(self) -> float:
        """Those of all scored runs."""
        return sum(value or 0.0 for by_seed in self.runs.values() for value in by_seed.values())

    @property
    def trials(self) -> float:
        """Those of all trials."""
        return sum(value or 0.0 for value in self.tuning.values())


def setting_result(setting: str, table: Table, tuned: Mapping[str, Mapping[str, Any]]) -> SettingResult:
    """The figures of a comparison.

    Raises:
        ConfigError: the comparison has several tables, as its runs cannot be compared.
    """
    if len(table.sections) != 1:
        raise ConfigError(f"{setting}: expected runs that one table can hold, got {len(table.sections)} tables")
    section = table.sections[0]
    return SettingResult(
        setting=setting,
        score=section.score.name,
        caption=section.caption,
        rounds=section.facts.rounds,
        clients=section.facts.clients,
        tuned={method: dict(values) for method, values in tuned.items()},
        versions=dict(section.versions),
        rows=[_row(row) for row in section.rows],
        gains=[_gains(one) for one in section.decompositions],
    )


def processor_time(table: Table, trials: Mapping[str, Iterable[RunRecord]]) -> ProcessorTime:
    """What the runs of a setting have used. table: of one section. trials: method -> its runs for tuning."""
    runs = {
        row.name: {str(run.seed): run.processor_seconds for run in row.runs}
        for section in table.sections
        for row in section.rows
    }
    tuning = {name: sum_of([trial.result.processor_seconds for trial in tried]) for name, tried in trials.items()}
    return ProcessorTime(tuning=tuning, runs=runs)


def _row(row: ComparisonRow) -> RowResult:
    return RowResult(
        name=row.name,
        method=row.method,
        control=row.control,
        stage=row.stage,
        accuracy={str(run.seed): finite(run.accuracy) for run in row.runs},
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
    )


def _gains(found: Decomposition) -> Gains:
    return Gains(
        name=found.name,
        gain=_gain(found.gain),
        alone=_gain(found.alone),
        federated=_gain(found.federated),
        way=found.way,
    )


def _gain(found: Paired) -> Gain:
    return Gain(mean=found.mean, margin=found.margin)


# rows from several places -------------------------------------------------------------------------------------------


def join_results(
    stored: SettingResult, found: SettingResult, methods: Collection[str], order: Sequence[str]
) -> SettingResult:
    """A setting's stored figures with the rows of some methods, and of their controls, added or replaced.

    Args:
        methods: whose rows `found` has the last word on; of its other rows only those are taken that are not stored.
        order: of methods in tables; others follow.

    Raises:
        ConfigError: the two are not of the same rounds, clients or score.
    """
    for what in ("score", "rounds", "clients"):
        there = getattr(stored, what)
        here = getattr(found, what)
        if there != here:
            raise ConfigError(
                f"{found.setting}: expected stored figures with {what} = {here}, as here, got {there}; choose another "
                "--results"
            )
    new_rows = {row.name: row for row in found.rows if _subject(row) in methods}
    rows = {row.name: row for row in (*found.rows, *stored.rows)} | new_rows
    new_gains = {one.name: one for one in found.gains if one.name in methods}
    gains = {one.name: one for one in stored.gains} | new_gains
    tuned = stored.tuned | found.tuned
    known = list(dict.fromkeys(["local", *order, *map(_subject, rows.values())]))
    names_more_stages = max(stored, found, key=lambda one: len({row.stage for row in one.rows}))  # Local is in both
    return stored.model_copy(
        update={
            "caption": names_more_stages.caption,
            "rows": sorted(rows.values(), key=lambda row: (_CONTROLS.index(row.control), _order_in(row, known))),
            "gains": sorted(gains.values(), key=lambda one: known.index(one.name)),
            "tuned": {name: tuned[name] for name in known if name in tuned},
        }
    )


def join_processor_time(stored: ProcessorTime, found: ProcessorTime, methods: Collection[str]) -> ProcessorTime:
    """The same for processor time."""
    names = {*methods, *(f"{name}-alone" for name in methods)}
    new_runs = {row: by_seed for row, by_seed in found.runs.items() if row in names}
    return ProcessorTime(tuning=stored.tuning | found.tuning, runs=found.runs | stored.runs | new_runs)


def _subject(row: RowResult) -> str:
    """The name of the row's method; a control's own, but that of who is alone."""
    return row.name.removesuffix("-alone") if row.control == "alone" else row.name


def _order_in(row: RowResult, known: Sequence[str]) -> int:
    """Its place among rows of its kind: longer ones by their epochs, all others as methods are known."""
    return int(row.name.rpartition("-")[2]) if row.control == "longer" else known.index(_subject(row))


# files --------------------------------------------------------------------------------------------------------------


def write_result(result: SettingResult, spent: ProcessorTime, folder: Path) -> None:
    """Write ``SETTING.json``, and the setting's entry of ``processor-seconds.json``, whose names are sorted."""
    _write(folder / f"{result.setting}.json", result.model_dump(mode="json"))
    known = read_processor_time(folder) | {result.setting: spent}
    times = {name: one.model_dump(mode="json") for name, one in known.items()}
    _write(folder / PROCESSOR_TIME, times, sort_keys=True)


def _write(path: Path, content: Any, *, sort_keys: bool = False) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=sort_keys)
    write_whole(path, (text + "\n").encode())


def read_result(folder: Path, setting: str) -> SettingResult | None:
    """The figures of a setting, if a folder has them.

    Raises:
        ConfigError: the file is no such figures.
    """
    return next(iter(read_results(folder, [setting])), None)


def read_results(folder: Path, settings: Sequence[str]) -> list[SettingResult]:
    """The figures of the settings that a folder has, in this order.

    Raises:
        ConfigError: a file is no such figures.
    """
    there = [folder / f"{name}.json" for name in settings if (folder / f"{name}.json").is_file()]
    return [_read(path) for path in there]


def _read(path: Path) -> SettingResult:
    try:
        return validated(SettingResult, parse_json(path.read_bytes()))
    except (ValueError, OSError) as error:
        raise ConfigError(f"expected figures of a benchmark in {path}, got something else: {error}") from None


def read_processor_time(folder: Path) -> dict[str, ProcessorTime]:
    """Setting -> what its runs have used; empty where there are none.

    Raises:
        ConfigError: the file holds something else.
    """
    path = folder / PROCESSOR_TIME
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_bytes())
        return {str(setting): validated(ProcessorTime, spent) for setting, spent in found.items()}
    except (ValueError, AttributeError, OSError) as error:
        raise ConfigError(f"expected processor time of a benchmark in {path}, got something else: {error}") from None
