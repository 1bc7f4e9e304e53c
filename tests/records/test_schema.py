"""docs/records.md explains every key that a run writes: its tables are made of the models that check the files."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import RunError
from polyfed.records.fields import Record, validated
from polyfed.records.schema import RoundRecord, RunResult
from polyfed.records.stored_files import ModelEntry, Normalization
from tests.helpers.small_recipe import SMALL

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "record_tables.py"))
RECIPE: dict[str, Any] = {
    **SMALL,
    "data": {**SMALL["data"], "num_clients": 5, "partition": "by_class"},
    "method": {"name": "fedavg", "aggregation": "same-shape"},
    "training": {"rounds": 3},
    "evaluation": {
        "metrics": ["balanced_accuracy", "f1", "auc", "calibration_error", "confusion"],
        "missing_classes": True,
        "held_out": 1,
        "held_out_epochs": 1,
        "patience": 5,
        "every_n_rounds": 2,
    },
    "availability": {"dropout_rate": 0.2, "late_joiners": 1},
    "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 0.01},
    "devices": {"profiles": ["laptop"], "round_timeout": 100.0},
    "robust_aggregation": {"aggregator": "multi_krum"},
    "adversaries": {"label_flip_fraction": 0.1},
}
BUFFERED = {"devices": {"profiles": ["laptop"], "buffer_size": 2}}  # in a run of its own, as nothing is late in it
NOT_HERE = {  # a run without code of one's own, on images of common classes, networks trained whole, all clients scored
    "ClientRow.class_names",
    "ClientRow.last_evaluated",
    "ModelEntry.target",
    "RunResult.score",
    "ModelEntry.adapters",
    "ModelEntry.frozen",
    "ModelEntry.personalize",
    "ModelFiles.state",
    "MadeOf.code",
    "RunResult.pretraining",
    "ModelEntry.modules",
    "ModelEntry.name",
    "ModelEntry.table",
    "RunResult.client_names",
    "RoundRecord.plugins",
    "RoundRecord.secure_sums",
    "RunResult.secure_sums",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that adds keys to its files."""
    path = pf.run(pf.Recipe.from_dict(RECIPE), out=tmp_path_factory.mktemp("runs") / "one").path
    assert path is not None
    return path


@pytest.fixture(scope="module")
def buffered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose server does not wait for all."""
    shared = {section: RECIPE[section] for section in ("data", "models", "method", "training")}
    path = pf.run(pf.Recipe.from_dict({**shared, **BUFFERED}), out=tmp_path_factory.mktemp("runs") / "two").path
    assert path is not None
    return path


def objects(folder: Path) -> Iterator[tuple[type[Record], dict[str, Any]]]:
    """Every object in the run's files that a model describes."""
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        yield from parts(RoundRecord, json.loads(line))
    yield from parts(RunResult, json.loads((folder / "result.json").read_text()))
    for entry in json.loads((folder / "models" / "index.json").read_text()).values():
        yield from parts(ModelEntry, entry)
        yield Normalization, entry["prepare"]


def parts(model: type[Record], value: dict[str, Any]) -> Iterator[tuple[type[Record], dict[str, Any]]]:
    """An object and those in it; the models of these are found beside them in what was read."""
    yield model, value
    read = validated(model, value)
    for name, field in model.model_fields.items():
        yield from inner_parts(getattr(read, name), value.get(field.alias or name))


def inner_parts(read: Any, value: Any) -> Iterator[tuple[type[Record], dict[str, Any]]]:
    if value is None:
        return
    if isinstance(read, Record):
        yield from parts(type(read), value)
    elif isinstance(read, list):
        for one, other in zip(read, value, strict=True):
            yield from inner_parts(one, other)
    elif isinstance(read, dict):
        for key, one in read.items():
            yield from inner_parts(one, value[key])


def names(model: type[Record]) -> list[str]:
    """The keys that a model describes."""
    return [field.alias or name for name, field in model.model_fields.items()]


def test_the_tables_have_every_key() -> None:
    shown = {name: SCRIPT["tables"](name) for name in SCRIPT["TABLES"]}
    for name, model in SCRIPT["TABLES"].items():
        assert all(f"| `{key}` | " in shown[name] for key in names(model))
    assert "| `round` | integer | " in shown["round"]
    assert "\n\n`personal`" not in shown["summary"], "summaries are explained once"


def test_every_key_that_is_written_is_described_and_the_reverse(folder: Path, buffered: Path) -> None:
    seen = set()
    written_objects = [*objects(folder), *objects(buffered)]
    for model, value in written_objects:
        known = names(model)
        written = [key for key in value if key != "seal"]
        assert [key for key in written if key not in known] == [], model.__name__
        seen |= {f"{model.__name__}.{key}" for key in written}
    assert len(seen) > 100
    models = {model for model, _ in written_objects}
    described = {f"{model.__name__}.{name}" for model in models for name in names(model)}
    assert described - seen == NOT_HERE


def test_every_key_is_described() -> None:
    for model in SCRIPT["TABLES"].values():
        for field in model.model_fields.values():
            assert field.description


def test_what_no_report_could_read_is_not_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match="the record of round 1 cannot be written, as nothing could read it: 'lr'"):
        folder.append({"round": 1, "lr": "high"})
    with pytest.raises(RunError, match=r"the result cannot be written, as nothing could read it: .* 'method'"):
        folder.write_result({})
    assert list(tmp_path.iterdir()) == []


def test_a_figure_of_ones_own_may_be_infinite(tmp_path: Path) -> None:
    record = {"round": 1, "metrics": {"personal": {"odds": {"mean": float("inf"), "n": 2}}}}
    RunFolder(tmp_path).append(record)
    (line,) = RunFolder(tmp_path).records(sealed=False)
    assert line == record
