"""The figures of a benchmark: one small JSON file per setting.

A file says what was run: the recipe, each row's hyperparameters and how they were chosen; and each row's figures, by
metric and seed. Apart from processor seconds, equal runs give equal files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from polyfed.errors import ConfigError
from polyfed.escaping import json_text
from polyfed.records.fields import Count, Number, Record, Text, validated
from polyfed.records.main_score import ACCURACY, RMSE, MainScore
from polyfed.records.read import parse_json, write_whole
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import RunRecord, rows_of_pooled
from polyfed.report.statistics import Estimate, finite, mean_of, resplit_ratio

Control = Literal[  # in the order of rows
    "", "targets", "alone", "own-linear", "own-boosting", "own-forest", "pooled", "pooled-shares", "pooled-tuned"
]
METRICS = ("{score}", "validation", "{score}_best_by_validation", "bytes_up", "bytes_down", "processor_seconds")
Part = Literal["training", "validation", "test"]
PARTS: dict[Part, str] = {  # of a client's rows, as a run records them
    "training": "samples",
    "validation": "validation_samples",
    "test": "test_samples",
}
Seed = Annotated[str, Field(pattern=r"^\d+$")]


class Tuning(Record):
    """How a row's hyperparameters were chosen.

    Attributes:
        tried: hyperparameter -> its values; all combinations were tried. seeds: with each of these.
        chosen: hyperparameter -> the value that validation chose. processor_seconds: of all trials; None: not known.
    """

    tried: dict[str, list[Any]]
    seeds: list[Count]
    chosen: dict[str, Any]
    processor_seconds: Number | None = None


class RowResult(Record):
    """A row of a setting.

    Attributes:
        name: the method's or variant's. method: its registered name.
        control: what the row is a control for; "" for a method itself (`polyfed.report.comparison`); "targets": a
            variant of its method that puts something else in the place of what the others know (`Method.is_control`).
        hyperparameters: as the recipe of its runs has them in ``[method]``, all of them; also "training.NAME", where
            a setting of ``[training]`` is another than in the setting's recipe.
        stage: that it is scored in. tuning: None for a row that is not tuned for itself.
        figures: metric -> seed -> that of a run: "rounds", how many were run, and `METRICS`, called as in
            `polyfed.results`.
    """

    name: Text
    method: Text
    control: Control
    hyperparameters: dict[str, Any]
    stage: Text
    tuning: Tuning | None = None
    figures: dict[str, dict[Seed, Number | None]]


class SettingResult(Record):
    """What was measured in a setting.

    Attributes:
        score: the metric that rows are compared by: "accuracy", or "rmse" where numbers are predicted.
        about: data, clients and rounds. scored_on: whose test data, which mean. changes: of the recipe, in words.
        rounds: planned. recipe: resolved, without method, run and the place of data.
        data: seed -> checksum of its rows as assigned. client_rows: seed -> `PARTS` -> rows of all clients together,
            where runs have recorded them. versions: each set of versions that rows were made with.
    """

    setting: Text
    score: Literal["accuracy", "rmse"]
    about: Text
    scored_on: Text
    changes: Text
    rounds: Count
    clients: Count
    recipe: dict[str, Any]
    data: dict[Seed, Text] = Field({})
    client_rows: dict[Seed, dict[Part, Count]] = Field({})
    versions: list[dict[str, Any]]
    rows: list[RowResult]

    @property
    def main_score(self) -> MainScore:
        """What the rows are compared by."""
        return RMSE if self.score == RMSE.name else ACCURACY

    @property
    def names(self) -> list[str]:
        """Those of all rows."""
        return [row.name for row in self.rows]

    @property
    def seeds(self) -> list[int]:
        """The scored seeds of all rows."""
        return sorted({seed for own in self.scores.values() for seed in own})

    def rows_per_client(self, *parts: Part) -> float | None:
        """Of these `PARTS` together, mean over clients and seeds; None where it is not known."""
        return mean_of([sum(rows[part] for part in parts) / self.clients for rows in self.client_rows.values()])

    def runs_at_limit(self, row: RowResult) -> int:
        """How many runs of a row the limit of rounds has ended, where validation may end runs; else 0."""
        if not self.recipe.get("evaluation", {}).get("patience"):
            return 0
        return sum((rounds or 0) >= self.rounds for rounds in row.figures.get("rounds", {}).values())

    def means(self, metric: str) -> list[float | None]:
        """A metric's mean over the seeds of each row; None where that of a seed is not known."""
        return [mean_of([*row.figures.get(metric, {}).values()]) for row in self.rows]

    @property
    def scores(self) -> dict[str, dict[int, float | None]]:
        """Row -> seed -> its score."""
        return {
            row.name: {int(seed): finite(value) for seed, value in row.figures.get(self.score, {}).items()}
            for row in self.rows
        }

    @property
    def resplit(self) -> float:
        """By how much seeds that split the same rows anew widen intervals (`polyfed.report.statistics`)."""
        return resplit_ratio(self.recipe.get("data", {}))

    def gain(self, upper: str, lower: str = "local") -> Estimate:
        """How far a row lies above another one, paired by seed; not known where either is lacking."""
        return Estimate.gain(self.scores.get(upper, {}), self.scores.get(lower, {}), self.main_score, self.resplit)


# rows of finished runs ------------------------------------------------------------------------------------------------


def rows_of(
    name: str, runs: Sequence[RunRecord], recipe: Mapping[str, Any], is_control: bool, tuning: Mapping[str, Tuning]
) -> list[RowResult]:
    """The row of finished runs, one for each seed; of runs on pooled data all that come of them, called as controls.

    Args:
        recipe: see `SettingResult`. is_control: whether their method is one (`Method.is_control`). tuning: by row.
    """
    by_name: dict[str, list[RunRecord]] = {}
    for run in sorted(rows_of_pooled(runs), key=lambda run: run.seed):
        by_name.setdefault(run.control if run.control.startswith("pooled") else name, []).append(run)
    rows = []
    for row, own in by_name.items():
        control: Any = own[0].control or ("targets" if is_control else "")
        rows.append(
            RowResult(
                name=row,
                method=own[0].method,
                control=control,
                hyperparameters=_hyperparameters(own[0], recipe),
                stage=own[0].stage,
                tuning=tuning.get(row),
                figures=_figures_of(own),
            )
        )
    return rows


def _hyperparameters(run: RunRecord, recipe: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in run.recipe.method.items() if key != "name"}
    training = run.recipe.training
    common = recipe["training"]
    return own | {f"training.{key}": value for key, value in training.items() if common.get(key) != value}


def _figures_of(runs: Sequence[RunRecord]) -> dict[str, dict[str, float | None]]:
    metrics = [metric.format(score=runs[0].result.main_score.name) for metric in METRICS]
    figures = {metric: {str(run.seed): run.figure(metric) for run in runs} for metric in metrics}
    rounds: dict[str, float | None] = {str(run.seed): run.result.stopped_after or run.result.rounds for run in runs}
    return {**figures, "rounds": rounds}


def add_rows(
    folder: Path,
    setting: str,
    rows: Sequence[RowResult],
    runs: Sequence[RunRecord],
    recipe: Mapping[str, Any],
    order: Sequence[str],
) -> None:
    """Write rows into the file of a setting, in the place of those of the same names.

    Args:
        runs: that the rows were made of. recipe: see `SettingResult`. order: of methods in tables; others follow.

    Raises:
        ConfigError: the runs cannot stand in one table, or the folder cannot be written to.
    """
    stored = next(iter(read_results(folder, [setting])), None) or _without_rows(setting, runs, recipe)
    versions = list(stored.versions)
    for run in runs:
        if dict(run.result.versions) not in versions:
            versions.append(dict(run.result.versions))
    data = stored.data | {str(run.seed): run.data_checksum for run in runs if run.data_checksum}
    counted = stored.client_rows | {str(run.seed): own for run in runs if (own := _client_rows(run))}
    by_name = {row.name: row for row in (*stored.rows, *rows)}

    def place(row: RowResult) -> tuple[int, int, str]:
        method = row.name.removesuffix("-alone") if row.control == "alone" else row.name
        return get_args(Control).index(row.control), order.index(method) if method in order else len(order), row.name

    update = {
        "data": {seed: data[seed] for seed in sorted(data, key=int)},
        "client_rows": {seed: counted[seed] for seed in sorted(counted, key=int)},
        "versions": versions,
        "rows": sorted(by_name.values(), key=place),
    }
    write_result(stored.model_copy(update=update), folder)


def _client_rows(run: RunRecord) -> dict[Part, int]:
    """`PARTS` -> rows of all clients; {} where they are not recorded, or each client has those of all."""
    table = run.result.clients_table or ()
    if run.control.startswith("pooled") or any(row.validation_samples is None for row in table):
        return {}
    return {part: sum(getattr(row, key) or 0 for row in table) for part, key in PARTS.items()}


def _without_rows(setting: str, runs: Sequence[RunRecord], recipe: Mapping[str, Any]) -> SettingResult:
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
        versions=[],
        rows=[],
    )


# files --------------------------------------------------------------------------------------------------------------


def write_result(result: SettingResult, folder: Path) -> None:
    """Write ``SETTING.json``."""
    text = json_text(result.model_dump(mode="json"), indent=1)
    write_whole(folder / f"{result.setting}.json", (text + "\n").encode())


def read_results(folder: Path, settings: Sequence[str]) -> list[SettingResult]:
    """The figures of the settings that a folder has, in this order.

    Raises:
        ConfigError: a file is none of a benchmark's.
    """
    return [_read(folder / f"{name}.json") for name in settings if (folder / f"{name}.json").exists()]


def _read(path: Path) -> SettingResult:
    try:
        found = validated(SettingResult, parse_json(path.read_bytes()))
        _check(found, path.stem)
    except (ValueError, OSError) as error:
        raise ConfigError(f"expected figures of a benchmark in {path}, got something else: {error}") from None
    return found


def _check(found: SettingResult, setting: str) -> None:
    """Whether the figures are those of the setting, each row is there once, and scores can be."""
    if found.setting != setting:
        raise ValueError(f"expected the setting {setting}, got {found.setting}")
    if repeated := next((name for name in found.names if found.names.count(name) > 1), None):
        raise ValueError(f"expected each row once, got {repeated} again")
    highest = math.inf if found.score == RMSE.name else 1.0
    for row in found.rows:
        for seed, score in row.figures.get(found.score, {}).items():
            if score is not None and not 0 <= score <= highest:
                raise ValueError(f"{row.name}, seed {seed}: expected from 0 to {highest:g}, got {score:g}")
