"""Every key that a run writes is explained in docs/records.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf

PAGE = (Path(__file__).parents[1] / "docs" / "records.md").read_text(encoding="utf-8")
RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "max_train": 20, "max_test": 10},
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedavg", "aggregation": "same-shape"},
    "training": {"rounds": 3},
    "evaluation": {"metrics": ["balanced_accuracy", "f1", "auc", "confusion"], "patience": 5, "every": 2},
    "availability": {"late": 0.5, "joiners": 1},
    "privacy": {"clip": 1.0, "noise": 0.01},
    "compression": {"precision": "int8"},
    "devices": {"names": ["laptop"], "deadline": 100.0},
    "defence": {"rule": "krum"},
    "hostile": {"label_flip": 0.1},
}
FREE = {  # so many levels below these, keys are names of clients, stages, networks, classes, figures, knobs or files
    **dict.fromkeys(("epsilon", "epsilon_of"), 1),
    **dict.fromkeys(("accuracy", "accuracy_by_stage", "accuracy_per_architecture"), 1),
    **dict.fromkeys(("bytes_by_client", "simulated_by_client"), 1),
    "accuracy_by_predictor": 2,
    **dict.fromkeys(("knobs", "labels", "sums", "server", "sha256", "timings"), 1),
    **dict.fromkeys(("availability", "privacy", "compression", "defence", "hostile", "hostile_clients"), 1),
    "devices": 3,
    "metrics": 2,
}
FILES = {"rounds.jsonl": 0, "result.json": 0, "models/index.json": 1}


def section(name: str) -> str:
    """A section of the page; those of the files also explain what the figures are."""
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1]


def keys(entry: Any, free: int = 0) -> Iterator[str]:
    """All keys, but for those that are names."""
    if isinstance(entry, dict):
        for key, inner in entry.items():
            if not free:
                yield key
            yield from keys(inner, free - 1 if free else FREE.get(key, 0))
    elif isinstance(entry, list):
        for inner in entry:
            yield from keys(inner)


def written(file: str, folder: Path) -> set[str]:
    """The keys of a file of the run folder."""
    text = (folder / file).read_text()
    entries = text.splitlines() if file.endswith("l") else [text]
    return {key for entry in entries for key in keys(json.loads(entry), FILES[file])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = pf.run(pf.Recipe.from_dict(RECIPE), out=tmp_path_factory.mktemp("runs") / "one", timings=True).path
    assert path is not None
    return path


@pytest.mark.parametrize("file", FILES)
def test_every_key_is_on_the_page(file: str, folder: Path) -> None:
    explained = set(re.findall(r"`([a-z_0-9]+)`", section(file) + section("Figures")))
    found = written(file, folder)
    assert len(found) > 10
    assert found - explained == set()


@pytest.mark.parametrize("file", FILES)
def test_the_page_explains_no_key_that_is_not_written(file: str, folder: Path) -> None:
    rows = re.findall(r"^\| (`.*?) \|", section(file), flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} - written(file, folder) == set()
