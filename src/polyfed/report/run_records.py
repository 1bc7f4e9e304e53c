"""Run folders as they lie on disk: found, read, checked and named.

A run folder holds ``recipe.toml`` (resolved), ``rounds.jsonl`` (one object a round) and, once the run is finished,
``result.json``. Everything that a report shows is read from these three; no engine is needed. The records of rounds
are read one by one, and reduced as they come, as those of many clients are large.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from polyfed.errors import ConfigError
from polyfed.places import check_name, shown_place, without_places
from polyfed.records.fields import Record, validated
from polyfed.records.main_score import ACCURACY, MainScore
from polyfed.records.read import check_links, flat_table, parse_toml, unseal
from polyfed.records.schema import RoundRecord, RunResult, Summary
from polyfed.records.stored_files import StoredRecipe

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R", bound=Record)

# sections of a recipe whose settings may tell two runs of one method apart
EXPERIMENT = (
    *("training", "models", "pretraining", "availability", "privacy"),
    *("robust_aggregation", "adversaries", "devices", "secure_sums"),
)

# what did not count, as a record lists it -> in words
LOST = {"refused": "refused", "dropped": "dropped out", "stragglers": "too late"}
_COUNTED = ("clients", *LOST)  # lists in a round's record, of which the length is the figure
_NO_FIGURES = ("round", "seed", "accuracy_std", "accuracy_bottom_decile")  # the last two are in the summary, too
_OF_CLIENT = ("samples", "test_samples", "parameters", "bytes_up", "bytes_down", "simulated_seconds")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, read from its folder.

    Attributes:
        path: the run folder.
        stored: ``result.json``; None when the run is unfinished.
        lines: its figures, as `polyfed.report.frames.results` has them.
        recipe: ``recipe.toml``; empty when there is none.
        refusals: why uploads were refused, over all rounds, each reason with its number.
        name: the run's label or method, with the hyperparameters that tell it from the other runs found with it.
        notes: what was odd about the folder, for people.
        trusted: whether code that the folder names may be imported.
    """

    path: Path
    stored: RunResult | None
    lines: pd.DataFrame
    recipe: StoredRecipe = field(default_factory=StoredRecipe)
    refusals: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    notes: tuple[str, ...] = ()
    trusted: bool = False

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end and has a result."""
        return self.stored is not None

    @property
    def result(self) -> RunResult:
        """``result.json`` of a finished run.

        Raises:
            ConfigError: the run is unfinished.
        """
        if self.stored is None:
            raise ConfigError(f"expected the folder of a finished run, got {self.path}, which holds no result.json")
        return self.stored

    @property
    def method(self) -> str:
        """The method's name; "?" when an unfinished folder does not say."""
        named = "" if self.stored is None else self.stored.method
        return named or self.recipe.method_name or "?"

    @property
    def label_or_method(self) -> str:
        """The variant's name or, where it has none, what the run is a control for, or the method's."""
        label = None if self.stored is None else self.stored.label
        return label or self.recipe.run.control or self.method

    @property
    def control(self) -> str:
        """What the run is a control for: "alone", "own-...", "pooled" (`rows_of_pooled`); "" for a method's own run."""
        return "alone" if self.recipe.method.get("alone") else self.recipe.run.control or ""

    @property
    def is_local(self) -> bool:
        """Whether it is the run of Local that others are compared with."""
        return self.method == "local" and not self.control and not self.recipe.method.get("adapters")

    @property
    def seed(self) -> int:
        """The seed of a finished run."""
        return self.result.seed

    @functools.cached_property
    def figures(self) -> dict[tuple[str, str], float]:
        """(metric, stage) -> the figure of the whole run, of the method's own predictor over all clients."""
        lines = self.lines
        kept = lines[
            lines["round"].isna() & lines["client"].isna() & (lines["architecture"] + lines["predictor"] == "")
        ]
        return dict(zip(zip(kept["metric"], kept["stage"], strict=True), kept["value"], strict=True))

    @property
    def data_checksum(self) -> str | None:
        """Of a finished run's rows as assigned; None where it is not known, or each client has those of all."""
        return None if self.control.startswith("pooled") else self.result.made_of.data

    @property
    def stage(self) -> str:
        """The stage that the run's own evaluation scores."""
        return self.result.evaluation.stage

    @property
    def scaled_down(self) -> str:
        """How the run is smaller than the experiment that it stands for: its presets' note; empty where it is not."""
        return " ".join((self.recipe.run.preset_note or "").split()).rstrip(".")

    @property
    def overrides(self) -> tuple[str, ...]:
        """What ``--set`` has changed of the run's recipe, but for what is kept: ``"training.rounds=5"``."""
        return tuple(without_places(text) for text in self.recipe.run.overrides if not _changes_no_figure(text))

    @property
    def settings(self) -> dict[str, Any]:
        """What may tell two runs of one method apart: its hyperparameters, how clients trained, their networks. Not the
        seed.
        """
        hyperparameters = None if self.stored is None else self.stored.hyperparameters
        found = flat_table(
            hyperparameters or {key: value for key, value in self.recipe.method.items() if key != "name"}
        )
        for section in EXPERIMENT:
            for key, value in getattr(self.recipe, section).items():
                if key != "rounds":  # a different number of rounds makes a different table
                    found.setdefault(key, value)
        if self.control == "alone":
            found["alone"] = True
        if "personalize" in self.recipe.method:
            found["personalize"] = self.recipe.method["personalize"]
        return found

    def figure(self, metric: str) -> float | None:
        """A figure of the whole run, over all clients: of its own stage, if it is a score; None: not known.

        Whole numbers, such as bytes, are integers.
        """
        value = self.figures.get((metric, self.stage), self.figures.get((metric, "")))
        if value is None or not math.isfinite(value):
            return None
        return int(value) if metric.startswith("bytes_") else value

    def last(self, metric: str) -> float | None:
        """A figure of the last round; None where that has none."""
        lines = self.lines
        found = lines["value"][(lines["round"] == lines["round"].max()) & (lines["metric"] == metric)]
        return None if found.empty else float(found.iloc[0])

    def read_rounds(self) -> Iterator[RoundRecord]:
        """The whole lines of ``rounds.jsonl``, one by one."""
        return _read_rounds(self.path / "rounds.jsonl", [])


def _changes_no_figure(override: str) -> bool:
    """Whether it says only what is kept of a run; the best round that is kept is the reported one, too."""
    key, _, value = override.partition("=")
    return key.strip() == "run.keep" and "best" not in value


def load_runs(paths: str | Path | Iterable[str | Path], trust: bool = False) -> list[RunRecord]:
    """Read every run folder at or below the given paths; a folder met twice counts once.

    Unfinished runs (no ``result.json`` yet) come after the finished ones, ``finished`` is false and a note says so;
    tables and curves leave them out and list them.

    Args:
        paths: run folders, or folders somewhere above them.
        trust: whether code that the folders name may be imported, by those who build something of the runs. Nothing
            is, here.

    Returns:
        The runs, finished first, otherwise in the order of the paths given and of their names below.

    Raises:
        ConfigError: a path is missing, nothing was found, a file is broken (names the file), or a part of a run
            folder is a link.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    records: dict[Path, RunRecord] = {}
    for path in given:
        check_name(path)
        if not path.is_dir():
            raise ConfigError(f"{path} is {'not a folder' if path.exists() else 'not there'}; give run folders")
        for folder in _run_folders(path):
            key = folder.resolve()
            if key not in records:
                records[key] = replace(_read(folder), trusted=trust)
    if not records:
        raise ConfigError(
            f"no run folder (one holding result.json) in {', '.join(map(str, given)) or 'no path at all'}"
        )
    finished = [record for record in records.values() if record.finished]
    unfinished = [replace(record, name=record.method) for record in records.values() if not record.finished]
    return [*_named(finished), *unfinished]


def frame_of(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """The frame of finished runs, as `polyfed.report.frames.results` gives it."""
    import pandas as pd

    return pd.concat(map(_with_facts, runs), ignore_index=True)


def _with_facts(run: RunRecord) -> pd.DataFrame:
    """A run's lines with what they have in common."""
    folder = "" if run.path == Path() else str(run.path)
    facts: dict[str, Any] = {"run": folder, "name": run.name, "method": run.method, "control": run.control}
    facts |= {"seed": run.seed, "main_stage": run.stage}
    return run.lines.assign(**facts)[
        [*facts, "round", "stage", "predictor", "client", "architecture", "metric", "value"]
    ]


def rows_of_pooled(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs, with those that stand for the further rows of a run on pooled data (`polyfed.experiments.pooled`).

    Beside "pooled" these are "pooled-shares" and "pooled-tuned", which have scores only. All that the run took counts
    at "pooled", and as the data are in one place, nothing is sent.
    """
    rows: list[RunRecord] = []
    for run in runs:
        rows += _pooled_rows(run) if run.finished and run.control == "pooled" else [run]
    return rows


def _pooled_rows(run: RunRecord) -> Iterator[RunRecord]:
    """One run on pooled data: its rows, as far as it has scored them."""
    lines = run.lines
    of_run = lines["round"].isna()
    is_final = lines["round"].isin(lines["round"][(lines["metric"] == "final_round") & (lines["value"] == 1)])
    is_sent = lines["metric"].str.startswith("bytes_")
    lines = lines.assign(value=lines["value"].mask(is_sent, 0.0))
    yield replace(run, lines=_with_validation(lines[(lines["predictor"] == "") & ~is_final], run, "validation"))
    tuned = f"validation_after_{run.last('server.tuned_epochs') or 0:g}"
    for kind in lines["predictor"][of_run & (lines["predictor"] != "")].unique():
        in_round = is_final if kind == "tuned" else ~of_run & ~is_final
        if not in_round.any():
            continue
        kept = (lines["predictor"] == kind) & (of_run | in_round) | is_sent & of_run | (lines["stage"] == "") & in_round
        control = f"pooled-{kind}"
        validation = {"shares": "validation_by_shares", "tuned": tuned}[kind]
        yield replace(
            run,
            name=run.name.replace("pooled", control, 1),
            stored=run.result.model_copy(update={"label": control, "confusion": None}),
            lines=_with_validation(lines[kept].assign(predictor=""), run, validation),
            recipe=run.recipe.model_copy(update={"run": run.recipe.run.model_copy(update={"control": control})}),
        )


def _with_validation(lines: pd.DataFrame, run: RunRecord, name: str) -> pd.DataFrame:
    """The lines with the score on the validation rows of all clients together, where the server has recorded it."""
    value = run.last(f"server.{name}")
    if value is None:
        return lines
    import pandas as pd

    kept = lines[lines["round"].notna() | (lines["metric"] != "validation")]
    line = {"metric": "validation", "value": value, "stage": run.stage, "predictor": "", "architecture": ""}
    return pd.concat([kept, pd.DataFrame([line])], ignore_index=True).astype(lines.dtypes)


def _run_folders(path: Path) -> Iterator[Path]:
    """The run folders at or below ``path``; what lies inside a run folder (checkpoints, models) is not searched."""
    for folder, inner, files in os.walk(path):
        if "result.json" in files or "rounds.jsonl" in files:
            inner.clear()
            yield Path(folder)
            continue
        inner[:] = sorted((name for name in inner if not name.startswith(".")), key=_natural)
        begun = not inner or {"checkpoint", "tensorboard"} & set(inner)
        if "recipe.toml" in files and begun:  # stopped before its first round ended
            inner.clear()
            yield Path(folder)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts seed-2 before seed-10."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _read(folder: Path) -> RunRecord:
    check_links(folder)
    notes: list[str] = []
    recipe = StoredRecipe()
    result = None
    if (folder / "recipe.toml").exists():
        recipe = _parse(folder / "recipe.toml", parse_toml, StoredRecipe)
    if (folder / "result.json").exists():
        result = _parse(folder / "result.json", functools.partial(unseal, needed=False), RunResult)
    refusals: Counter[str] = Counter()
    lines = to_frame(_counted(_read_rounds(folder / "rounds.jsonl", notes), refusals), result)
    wanted = recipe.rounds
    if result is None or (wanted or 0) > result.rounds:
        of = f" of {wanted}" if wanted else ""
        why = "no result.json" if result is None else f"result.json is of {result.rounds}"
        notes.insert(0, f"{shown_place(folder)}: unfinished, {lines['round'].nunique()}{of} rounds done, {why}")
        result = None
    return RunRecord(folder, result, lines, recipe, refusals, notes=tuple(notes))


def _counted(records: Iterable[RoundRecord], refusals: Counter[str]) -> Iterator[RoundRecord]:
    """The records, one by one; reasons of refusals are counted meanwhile."""
    for record in records:
        refusals.update(upload.reason for upload in record.refused)
        yield record


def run_in_memory(path: Path | None, result: Mapping[str, Any], records: Sequence[RoundRecord]) -> RunRecord:
    """What has not been read from a folder, as one that has."""
    stored = validated(RunResult, result)
    return _named([RunRecord(path or Path(), stored, to_frame(records, stored))])[0]


def _parse(path: Path, parse: Callable[[bytes], Any], model: type[R]) -> R:
    try:
        return validated(model, parse(path.read_bytes()))
    except (OSError, ValueError) as error:  # JSON, TOML and UTF-8 errors are ValueErrors
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_rounds(path: Path, notes: list[str]) -> Iterator[RoundRecord]:
    for number, line in enumerate(_lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            record = validated(RoundRecord, unseal(line.rstrip(), needed=False))
        except ValueError as error:
            if not line.endswith(b"\n"):  # the writer was stopped in the middle
                notes.append(f"{shown_place(path)}: the last line is cut off and was ignored")
                break
            raise ConfigError(f"{path}, line {number}, cannot be read: {_one_line(error)}") from error
        yield record


def _lines_of(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    try:
        with path.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}") from error


def _named(records: list[RunRecord]) -> list[RunRecord]:
    """Names each run by its label or method, and by the settings in which runs of that name differ."""
    families: dict[str, list[dict[str, Any]]] = {}
    for run in records:
        families.setdefault(run.label_or_method, []).append(_identity(run))
    differing = {}
    for base, members in families.items():
        keys = dict.fromkeys(key for one in members for key in one)
        differing[base] = [key for key in keys if any(one.get(key) != members[0].get(key) for one in members)]
    found = []
    for run in records:
        mine = _identity(run)
        base = run.label_or_method
        shown = [f"{key}={format_setting(mine[key])}" for key in differing[base] if mine.get(key) is not None]
        found.append(replace(run, name=f"{base} ({', '.join(shown)})" if shown else base))
    return found


def _identity(run: RunRecord) -> dict[str, Any]:
    return {"method": run.method, "stage": run.stage, **run.settings}


def format_setting(value: Any) -> str:
    """A setting's value as a person would write it.

    >>> format_setting(0.01), format_setting(True), format_setting(["a", "b"])
    ('0.01', 'true', 'a+b')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "+".join(map(format_setting, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# the figures of records, a line each --------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of `polyfed.report.frames.results`, without the columns that are the same in a whole run."""

    metric: str
    value: float | None
    stage: str = ""
    predictor: str = ""
    client: int | None = None
    architecture: str = ""
    round: int | None = None


def to_frame(records: Iterable[RoundRecord], result: RunResult | None) -> pd.DataFrame:
    """The lines of a run, but for what single clients have in single rounds. result: None while it is unfinished."""
    import pandas as pd

    score = ACCURACY if result is None else result.main_score
    lines = [line._replace(round=record.round) for record in records for line in _of_round(record, score)]
    if result is not None:
        lines += _of_result(result)
    frame = pd.DataFrame(lines, columns=Line._fields).dropna(subset="value")
    return frame.astype({"round": "Int32", "client": "Int32", "value": "float64"})


def _of_round(record: RoundRecord, score: MainScore) -> Iterator[Line]:
    yield from _of_both(record, next(iter(record.accuracy), ""), score)
    for stage, summary in record.accuracy.items():
        yield from _of_clients(summary, score, stage)
    yield from (Line(key, len(getattr(record, key) or ())) for key in _COUNTED)
    for kind, found in {"sums": record.sums, "server": record.server}.items():
        yield from (Line(f"{kind}.{name}", value) for name, value in found.items() if isinstance(value, int | float))


def _of_result(result: RunResult) -> Iterator[Line]:
    main, score = result.evaluation.stage, result.main_score
    yield from _of_both(result, main, score)
    for stage, summary in result.accuracy_by_stage.items():
        found = _of_clients(summary, score, stage)
        yield from (line for line in found if line.metric != score.name or stage != main)  # that is `accuracy`
    for row in result.clients_table or ():
        yield Line(score.name, row.accuracy, main, "", row.id, row.architecture)
        yield from (Line(key, getattr(row, key), "", "", row.id, row.architecture) for key in _OF_CLIENT)
    if result.clients_table is None:  # only the scores were recorded
        yield from (Line(score.name, value, main, "", at) for at, value in enumerate(result.accuracy_per_client))


def _of_both(record: RoundRecord | RunResult, main: str, score: MainScore) -> Iterator[Line]:
    """What the record of a round and a result have in common. main: the stage of scores that name none."""
    for key, value in record:
        if isinstance(value, int | float) and key not in _NO_FIGURES:
            is_score = key == "validation" or key.startswith("accuracy")
            yield Line(key.replace("accuracy", score.name, 1), value, main if is_score else "")
    for stage, by_predictor in record.accuracy_by_predictor.items():
        for predictor, summary in by_predictor.items():
            yield from _of_clients(summary, score, stage, predictor)
    for stage, by_classes in record.accuracy_by_classes.items():
        yield from (Line(f"by_classes_{name}", one.mean, stage) for name, one in by_classes.items())
    for stage, metrics in record.metrics.items():
        yield from (Line(f"metric_{name}", one.mean, stage) for name, one in metrics.items())
    yield from (Line("held_out", summary.mean, stage) for stage, summary in record.held_out.items())
    yield from (Line(f"epsilon_{unit}", value) for unit, value in record.epsilon.items())
    for name, summary in record.accuracy_per_architecture.items():
        yield Line("by_architecture", summary.mean, main, architecture=name)


def _of_clients(summary: Summary, score: MainScore, stage: str, predictor: str = "") -> Iterator[Line]:
    """The main score over clients."""
    worst = summary.max if score.lower_is_better else summary.min
    found = {score.name: summary.mean, "std_clients": summary.std, "worst_client": worst}
    found["bottom_decile"] = summary.bottom_decile
    yield from (Line(metric, value, stage, predictor) for metric, value in found.items())
