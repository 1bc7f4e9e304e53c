"""A run on both simulated GPUs, by a process of Ray's for each."""

from __future__ import annotations

import functools
import importlib.util
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu
import pytest

from polyfed.config.recipe import Recipe
from polyfed.engine.federation import Federation, Run
from polyfed.errors import ConfigError
from polyfed.experiments import build
from polyfed.testing.fixtures import all_state, difference
from tests.helpers.small_recipe import small_recipe

if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra 'ray' is not installed", allow_module_level=True)

rebuild_federation = build.rebuild_federation


def rebuild(folder: str, recipe: str) -> Federation:
    """In a process of Ray's: the federation, on the GPU that Ray shows it, of which a file tells."""
    gpu.enable()
    Path(folder, os.environ["CUDA_VISIBLE_DEVICES"]).touch()
    return rebuild_federation(recipe)


METHODS = {
    "fedgh": {"name": "fedgh"},
    "fedhenn": {"name": "fedhenn", "alignment_data": {"size": 20, "batch": 8}, "eta0": 0.1},
}


def ran(method: Mapping[str, Any], **run: Any) -> tuple[Federation, Run]:
    data = {"num_clients": 4, "holdout": 20}
    recipe = small_recipe(data=data, training={"rounds": 2}, method=method, run={"device": "cuda", **run})
    federation = build.build_federation(Recipe.from_dict(tomllib.loads(recipe)))
    return federation, federation.run()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_process_on_each_comes_to_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedHeNN's server has the workers do its passes over the RAD."""
    monkeypatch.setattr(build, "rebuild_federation", functools.partial(rebuild, str(tmp_path)))
    expected, one_by_one = ran(METHODS[name], executor="serial")
    found, run = ran(METHODS[name], executor="ray")
    assert run.result["workers"] == gpu.DEVICES, "as many as there are GPUs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "each has one of its own"
    assert difference(all_state(expected), all_state(found)) is None, "bit for bit"
    assert run.result["accuracy_per_client"] == one_by_one.result["accuracy_per_client"]


@pytest.mark.slow
def test_more_processes_than_gpus() -> None:
    with pytest.raises(ConfigError, match="expected at most 2 workers, as Ray has so many GPUs here, got 3"):
        ran(METHODS["fedgh"], executor="ray", workers=3)


def test_one_gpu_for_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected device 'cuda' with the executor 'ray', .* got 'cuda:1'"):
        ran(METHODS["fedgh"], executor="ray", device="cuda:1")
