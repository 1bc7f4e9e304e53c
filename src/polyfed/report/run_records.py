"""Run folders as they lie on disk: found, read, checked and named.

A run folder holds ``recipe.toml`` (resolved), ``rounds.jsonl`` (one object a round) and, once the run is finished,
``result.json``. Everything that a report shows is read from these three; no engine is needed. The records of rounds
are read one by one, and reduced as they come, as those of many clients are large.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from polyfed.errors import ConfigError, suggest
from polyfed.places import check_name, shown_place, without_places
from polyfed.report.round_figures import RoundFigures
from polyfed.results.fields import Record, validated
from polyfed.results.read import check_links, flat_table, parse_toml, unseal
from polyfed.results.schema import RoundRecord, RunResult, Summary
from polyfed.results.stored_files import StoredRecipe

R = TypeVar("R", bound=Record)

# sections of a recipe whose settings may tell two runs of one method apart
EXPERIMENT = (
    *("training", "models", "pretraining", "availability", "privacy", "compression"),
    *("robust_aggregation", "adversaries", "devices"),
)

# what is not recorded of a method's further predictors
_NOT_BY_PREDICTOR: Mapping[str, Any] = {
    "accuracy_per_client": [],
    **{key: {} for key in ("accuracy_per_architecture", "accuracy_by_classes", "accuracy_by_predictor", "metrics")},
    **dict.fromkeys(("accuracy_before_final_round", "accuracy_last_round")),
    **dict.fromkeys(("accuracy_best_by_validation", "accuracy_best_test_round")),
    **dict.fromkeys(("confusion", "seconds", "processor_seconds")),
}


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder.

    Attributes:
        path: the run folder.
        stored: ``result.json``; None when the run is unfinished.
        rounds: the figures of ``rounds.jsonl``.
        recipe: ``recipe.toml``; empty when there is none.
        name: the run's label or method, with the hyperparameters that tell it from the other runs found with it.
        notes: what was odd about the folder, for people.
        trusted: whether code that the folder names may be imported.
        server: the server's own metrics of the last round.
    """

    path: Path
    stored: RunResult | None
    rounds: Sequence[RoundFigures]
    recipe: StoredRecipe = field(default_factory=StoredRecipe)
    name: str = ""
    notes: tuple[str, ...] = ()
    trusted: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)

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
        """What the run is a control for: "alone", "pooled" (`rows_of_pooled`); "" for a method's own run."""
        return "alone" if self.recipe.method.get("alone") else self.recipe.run.control or ""

    @property
    def is_local(self) -> bool:
        """Whether it is the run of Local that others are compared with."""
        return self.method == "local" and not self.control and not self.recipe.method.get("adapters")

    @property
    def seed(self) -> int:
        """The seed of a finished run."""
        return self.result.seed

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
            for key, value in self.recipe.section(section).items():
                if key != "rounds":  # a different number of rounds makes a different table
                    found.setdefault(key, value)
        if self.control == "alone":
            found["alone"] = True
        if "personalize" in self.recipe.method:
            found["personalize"] = self.recipe.method["personalize"]
        return found

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


def only_rows(runs: Iterable[RunRecord], names: Sequence[str]) -> list[RunRecord]:
    """The runs of these rows.

    Raises:
        ConfigError: there is no row of a name.
    """
    by_name: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_name.setdefault(run.name or run.method, []).append(run)
    if odd := [name for name in names if name not in by_name]:
        raise ConfigError(f"--methods: expected rows of the table, got '{odd[0]}'{suggest(odd[0], by_name)}")
    return [run for name in names for run in by_name[name]]


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
    regular = [record for record in run.rounds if not record.final_round]
    plain = {"accuracy_by_predictor": {}, "bytes_up": 0, "bytes_down": 0, "final_round": False}
    plain["validation"] = _pooled_validation(run, "")
    yield replace(run, stored=run.result.model_copy(update=plain), rounds=regular)
    kinds = dict.fromkeys(kind for scores in run.result.accuracy_by_predictor.values() for kind in scores)
    final = run.rounds[len(regular) :]
    for kind in kinds:
        scored = final if kind == "tuned" else regular
        if not scored:
            continue
        name = f"pooled-{kind}"
        settings = run.recipe.run.model_copy(update={"control": name})
        yield replace(
            run,
            name=run.name.replace("pooled", name, 1),
            stored=_scored_by(run.result, kind, name, _pooled_validation(run, kind)),
            rounds=[_by_predictor(record, kind) for record in scored],
            recipe=run.recipe.model_copy(update={"run": settings}),
        )


def _pooled_validation(run: RunRecord, kind: str) -> float | None:
    """The score of a row of pooled data on the validation rows of all clients together; None where it is not known."""
    tuned = f"validation_after_{run.server.get('tuned_epochs')}"
    value: float | None = run.server.get({"": "validation", "shares": "validation_by_shares", "tuned": tuned}[kind])
    return run.result.validation if value is None and not kind else value


def _by_predictor(record: RoundFigures, kind: str) -> RoundFigures:
    scores = record.scores_by_predictor.get(kind, {})
    return replace(record, scores=scores, scores_by_predictor={}, validation=None, bytes_up=0, bytes_down=0)


def _scored_by(result: RunResult, kind: str, label: str, validation: float | None) -> RunResult:
    by_stage = {stage: scores[kind] for stage, scores in result.accuracy_by_predictor.items() if kind in scores}
    main = by_stage.get(result.evaluation.stage, Summary())
    clients = [row.model_copy(update={"accuracy": None}) for row in result.clients_table or ()]
    update = {
        "label": label,
        "accuracy": main.mean,
        "accuracy_std": main.std,
        "accuracy_bottom_decile": main.bottom_decile,
        "validation": validation,
        "accuracy_by_stage": by_stage,
        "clients_table": clients,
        "bytes_up": 0,
        "bytes_down": 0,
    }
    return result.model_copy(update={**update, **_NOT_BY_PREDICTOR})


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
    rounds = []
    server: Mapping[str, Any] = {}
    for record in _read_rounds(folder / "rounds.jsonl", notes):
        rounds.append(RoundFigures.of(record))
        server = record.server
    if (folder / "result.json").exists():
        result = _parse(folder / "result.json", functools.partial(unseal, needed=False), RunResult)
    wanted = recipe.rounds
    if result is None or (wanted or 0) > result.rounds:
        of = f" of {wanted}" if wanted else ""
        why = "no result.json" if result is None else f"result.json is of {result.rounds}"
        notes.insert(0, f"{shown_place(folder)}: unfinished, {len(rounds)}{of} rounds done, {why}")
        result = None
    return RunRecord(folder, result, rounds, recipe, notes=tuple(notes), server=server)


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
