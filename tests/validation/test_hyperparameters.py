"""Tables of a method's settings: in Python, in a recipe, on the command line, in a run's folder, in what is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from polyfed.config.recipe import Recipe
from polyfed.core.method import Method
from polyfed.errors import ConfigError
from polyfed.methods import FedHeNN
from polyfed.methods.building_blocks.alignment_data import AlignmentData
from polyfed.methods.building_blocks.mean_kernel import MeanKernel
from polyfed.validation.effect import ActsWith
from polyfed.validation.settings import flat_settings, hyperparameters, table
from tests.helpers.refusals import refusal

TEXT = """
[data]
dataset = "digits"
num_clients = 4
holdout = 40

[models]
architectures = ["digits-cnn1"]

[method]
name = "fedhenn"
eta0 = 0.1

[methods.fedhenn.alignment_data]
size = 30

[methods.fedhenn.kernel]
norm = "fro"

[presets.few.methods.fedhenn.alignment_data]
batch = 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(TEXT)
    return file


def test_python_takes_a_table_or_an_object() -> None:
    method = FedHeNN(kernel={"rank": 4}, alignment_data=AlignmentData(size=20))  # type: ignore[arg-type]
    assert method == FedHeNN(kernel=MeanKernel(rank=4), alignment_data={"size": 20})  # type: ignore[arg-type]
    assert repr(method) == "FedHeNN(alignment_data=AlignmentData(size=20), kernel=MeanKernel(rank=4))"
    assert dataclasses.asdict(method)["kernel"]["rank"] == 4
    assert flat_settings(method)["alignment_data.size"] == 20
    assert len({method, FedHeNN()}) == 2


def test_tables_are_joined_key_by_key(path: Path) -> None:
    method = Recipe.load(path, ["method.alignment_data.every=3", "method.kernel.rank=9"], preset="few").chosen_method
    assert method.alignment_data == AlignmentData(size=30, batch=8, every=3)
    assert method.kernel == MeanKernel(norm="fro", rank=9)
    assert method.eta0 == 0.1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method.kernel.nrm=fro"], "unknown key 'method.kernel.nrm'; did you mean 'norm'?"),
        (["method.kernl.norm=fro"], "unknown key 'method.kernl'; did you mean 'kernel'?"),
        (["method.alignment_data.size=1"], "method.alignment_data.size: expected at least 2, got 1"),
        (["method.kernel=3"], "method.kernel: expected a table, got 3"),
        (["method.eta0.x=3"], "unknown key 'method.eta0.x'"),
        (["method.kernel.width=2.0"], "method.kernel: width = 2.0 does nothing beside similarity = 'linear'"),
    ],
)
def test_what_is_wrong_in_a_table_is_one_line(path: Path, settings: list[str], said: str) -> None:
    assert said in refusal(lambda: Recipe.load(path, settings))


@hyperparameters
class Pull:
    kind: str = "none"
    strength: Annotated[float, Field(ge=0), ActsWith("kind", ("far",))] = 1.0
    reach: Annotated[int, ActsWith("steps")] = 2  # of the method's own


@hyperparameters
class Mine(Method):
    """A method with a table."""

    steps: int = 0
    pull: Annotated[Pull, table(Pull)] = Pull()


def test_a_table_of_ones_own() -> None:
    assert Mine(steps=1, pull=Pull(reach=3)).pull.reach == 3
    with pytest.raises(ConfigError, match=r"mine: pull\.reach = 3 does nothing beside steps = 0; set steps above 0"):
        Mine(pull=Pull(reach=3))
    with pytest.raises(ConfigError, match=r"Pull: strength = 2\.0 does nothing beside kind = 'none'"):
        Pull(strength=2.0)
