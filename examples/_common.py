"""What the examples about representations share: a run folder's networks, and what they make of its test images."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.inference import representations
from polyfed.experiments.data_cache import DataCache, data_generators
from polyfed.experiments.prediction import ClientModel, load


def finished_run(text: str) -> Path:
    """For argparse: the folder of a finished run."""
    if not (Path(text) / "models" / "index.json").exists():
        raise argparse.ArgumentTypeError(f"expected the folder of a finished run, got {text}")
    return Path(text)


def personal_models(run: Path) -> list[ClientModel]:
    """Every client's personal model, in order of number."""
    index = json.loads((run / "models" / "index.json").read_text())
    return [load(run, number, stage="personal") for number in index]


def representations_of(run: Path, count: int) -> list[Tensor]:
    """Every client's (L, D) for so many drawn rows of the official test side, or of the training side without one."""
    recipe = Recipe.load(run / "recipe.toml")
    source = DataCache().source(recipe).limited(count, count, data_generators(recipe.run.seed))
    images = (source.test or source.train).x
    return [representations(model.network, images, model.prepare) for model in personal_models(run)]
