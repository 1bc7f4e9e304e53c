"""A name that no file can have is refused in one line, wherever a path is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.data.datasets import load_dataset
from polyfed.data.inference_inputs import InputSpec, read
from polyfed.data.labeled_texts import load_word_vectors
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import load
from polyfed.experiments.sweep import sweep
from polyfed.report.figures import plot
from polyfed.report.run_records import load_runs

RECIPE = """
[data]
dataset = "digits"
num_clients = 2
limit_train = 60
[models]
architectures = ["digits-cnn1"]
[method]
name = "local"
"""
USES: dict[str, Callable[[str], object]] = {
    "data": lambda name: load_dataset(name, "."),
    **{kind: lambda name, kind=kind: load_dataset(f"{kind}:{name}") for kind in ("csv", "npz", "images", "clients")},
    "root": lambda name: load_dataset("cifar10", name),
    "parquet": lambda name: load_dataset("cifar10", name),
    "vectors": lambda name: load_word_vectors(Path(name), {"a"}),
    "new inputs": lambda name: read(Path(name), InputSpec((2,), torch.float32, None, ("a", "b"))),
    "recipe": lambda name: pf.run(name),
    "model": lambda name: load(name, 0),
    "runs": lambda name: load_runs(name),
    "plot": lambda name: plot(name),
    "folder": lambda name: RunFolder(Path(name)).validate({}, False, False),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "name", ["n" * 300, "n/" * 3000, "a\0b", "\ud83d"], ids=["300 letters", "6000", "zero", "half"]
)
def test_a_name_that_no_file_has(use: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        USES[use](name)
    assert "\n" not in str(refused.value)


SETTINGS: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 4},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "local"},
    "training": {"rounds": 1},
}


@pytest.mark.usefixtures("unrendered")
def test_files_that_are_passed_on_name_no_folder_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only recipes do, which are to be run again."""
    home = tmp_path / "home" / "ana"
    (home / "hospital").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    rows = [f"{number},{number % 7},{'ab'[number % 2]}" for number in range(40)]
    (home / "hospital" / "rows.csv").write_text("one,two,label\n" + "\n".join(rows) + "\n")
    (home / "own.toml").write_text(
        f'[data]\ndataset = "csv:{home}/hospital/rows.csv"\nnum_clients = 2\nsplit = "6:2:2"\n'
        '[models]\narchitectures = ["mlp-16-32"]\n[method]\nname = "local"\n[training]\nrounds = 1\n'
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    changes = [f"data.dataset=csv:{home}/hospital/rows.csv"]
    pf.compare(home / "own.toml", ["local"], out=home / "study" / "compared", overrides=changes)
    (home / "study" / "begun").mkdir()
    shutil.copy(home / "study/compared/local/seed-0/recipe.toml", home / "study/begun")
    assert cli.status(["report", str(home / "study"), "--out", str(home / "report")]) == 0
    sweep(home / "own.toml", {"training.lr": [0.1, 0.2]}, out=home / "swept")
    made = [file for file in home.rglob("*.*") if file.suffix in (".json", ".jsonl", ".html", ".md", ".csv")]
    assert len(made) > 20
    for file in made:
        assert str(tmp_path) not in file.read_text(), file
    assert "csv:hospital/rows.csv" in (home / "report" / "report.html").read_text()


@pytest.mark.parametrize("key", ["run.seed", "training.rounds", "method.strength", "data.max_train_per_client"])
def test_a_whole_number_that_no_file_has_is_one_line(key: str) -> None:
    """The run would end, and its result could not be written."""
    section, name = key.split(".")
    for value in (2**63, -(2**63), 10**5000):
        with pytest.raises(ConfigError, match=rf"^{key}: expected a whole number below 2\^63, got one of \d+ bits$"):
            Recipe.from_dict({**SETTINGS, section: {**SETTINGS.get(section, {}), name: value}})
