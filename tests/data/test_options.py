"""[data] of a recipe: new keys reach the deal, keys without effect are left out, wrong ones are one line; its page."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.config.schema import Data
from polyfed.registry import DATASETS, PARTITIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
ALWAYS = {"dataset", "num_clients", "partition", "split", "test", "holdout"}


def recipe(seed: int = 0, **data: Any) -> Recipe:
    models = {"architectures": ["digits-cnn1", "digits-cnn2"]}
    settings = {"data": {"dataset": "digits", **data}, "models": models, "method": {"name": "local"}}
    return Recipe.from_dict({**settings, "run": {"seed": seed}})


def kept(**data: Any) -> dict[str, Any]:
    settings = recipe(**data).to_dict()["data"]
    assert Recipe.from_dict({**recipe(**data).to_dict()}).to_dict()["data"] == settings
    return settings


def test_keys_without_effect_are_left_out() -> None:
    assert set(kept(num_clients=3)) == ALWAYS
    assert set(kept(partition="quantity")) == ALWAYS | {"dirichlet_alpha", "min_samples"}
    by_user = {"partition": "by_group", "group_by": "user"}
    assert set(kept(**by_user)) == ALWAYS - {"num_clients"} | {"group_by"}
    assert kept(**by_user, num_clients=10)["num_clients"] == 10
    assert kept(**by_user, min_samples=10)["min_samples"] == 10
    assert recipe(**by_user).data.partition_options.min_samples is None
    assert set(kept(feature_shift="noise")) == ALWAYS | {"feature_shift", "feature_shift_strength"}
    assert kept(partition="flwr:Any", partitioner={"alpha": 0.5})["partitioner"] == {"alpha": 0.5}
    assert set(kept(partition="flwr:Any")) == ALWAYS
    assert set(kept(train_splits=["train", "extra"], public_dataset="plants")) == ALWAYS | {
        "train_splits",
        "public_dataset",
    }
    assert kept(dataset="hub:a/b", config="s", revision="r")["config"] == "s"


# docs/data.md --------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_the_recipes_on_the_page_are_valid(block: str) -> None:
    rest = {"models": {"architectures": ["digits-cnn1"]}, "method": {"name": "local"}}
    given = tomllib.loads(block)
    read = Recipe.from_dict({**given, **rest})
    assert read.data.model_fields_set >= given.get("data", {}).keys()


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if line.strip()])
def test_the_commands_on_the_page_run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    assert words[0] in {"polyfed", "pip"}
    if words[0] == "polyfed":
        assert cli.status(words[1:]) == 0


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_code_on_the_page_runs(number: int) -> None:
    exec(compile(blocks("python")[number], "docs/data.md", "exec"), {})


def test_the_page_names_every_set_partition_and_key() -> None:
    for name in [*DATASETS, *PARTITIONS, *Data.model_fields]:
        assert f"`{name}`" in PAGE, name
