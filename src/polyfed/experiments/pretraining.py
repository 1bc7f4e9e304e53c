"""Networks that begin with trained weights: ``[pretraining]`` trains each architecture on the hold-out rows.

All but the head is kept: heads begin as they would without. What comes out is a function of rows, settings, network and
seed, is trained once, and is then read from the cache of data sets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client, PublicData
from polyfed.core.model_factory import Builder
from polyfed.core.modules import as_split_model, load_state
from polyfed.core.settings import Evaluation, Training
from polyfed.data.cache import cache_key, compute_checksum, load_entry, save_entry
from polyfed.engine.federation import Federation
from polyfed.engine.plugin import Plugin
from polyfed.engine.task import Execution, Task
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.methods.local import Local

__all__ = ["PretrainedNetworks", "pretrain"]


class PretrainedNetworks(Plugin):
    """Tells a run's result what its networks began with."""

    name = "pretraining"

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self._kept = dict(facts)

    def facts(self) -> dict[str, Any]:
        """The settings, the rows, and the seconds that it took."""
        return {self.name: self._kept}


def pretrain(
    recipe: Recipe, builders: Mapping[str, Builder], data: DataCache, train: bool = True
) -> tuple[dict[str, Builder], PretrainedNetworks]:
    """Builders of the same networks with trained weights, and who tells of it.

    Args:
        builders: of the clients' architectures. data: kept between calls.
        train: False: leave weights as drawn, for who only asks what a run costs.

    Raises:
        ConfigError: there are no hold-out rows, or no classes that all clients share.
    """
    federated = data.federated(recipe)
    if federated.source.is_regression or recipe.data.label_space == "own":
        raise ConfigError("pretraining.epochs: expected classes that all clients share, got others")
    public = data.public(recipe)
    if public is None or public.origin != "holdout":
        raise ConfigError(
            "pretraining.epochs: expected hold-out rows to train on, got none; set data.holdout, and no public_dataset"
        )
    facts: dict[str, Any] = {**recipe.pretraining.effective(), "rows": len(public)}
    if not train:
        return dict(builders), PretrainedNetworks(facts)
    made: dict[str, Builder] = {}
    seconds = 0.0
    for name, builder in builders.items():
        weights, took = _trained(recipe, name, builder, public, federated.classes)
        made[name] = functools.partial(_build_with, builder, weights)
        seconds += took
    return made, PretrainedNetworks({**facts, "seconds": round(seconds, 1)})


def _build_with(builder: Builder, weights: Mapping[str, Tensor]) -> nn.Module:
    model = builder()
    load_state(model, weights)
    return model


def _trained(
    recipe: Recipe, name: str, builder: Builder, public: PublicData, classes: int
) -> tuple[dict[str, Tensor], float]:
    """Trained weights but the head's, and the seconds that training them took, now or when they were cached."""
    settings = recipe.pretraining
    rows = compute_checksum({"x": public.samples.x, "y": public.samples.y}, {})
    width = f"{recipe.models.feature_dim} {recipe.models.feature_pool}"
    facts = [settings.model_dump_json(), rows, repr(public.prepare), name, width]
    key = cache_key(["pretraining", *facts, str(recipe.run.seed), str(recipe.run.device), torch.__version__])
    kept = load_entry(key)
    if kept is not None:
        return kept[0], float(kept[1]["seconds"])
    began = time.perf_counter()
    federation = Federation(
        [Client(name, train=public.samples, prepare=public.prepare)],
        Local(),
        Training(
            rounds=settings.epochs,
            batch_size=settings.batch_size,
            optimizer=settings.optimizer,
            lr=settings.lr,
            lr_schedule="cosine",
        ),
        Evaluation(every_n_rounds=settings.epochs),
        task=Task(classes=classes),
        executor=Execution(executor="serial", device=recipe.run.device),
        seed=recipe.run.seed,
        builders={name: builder},
    )
    federation.run()
    model = as_split_model(federation.export(0))
    weights = {
        part: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for part, tensor in model.state_dict().items()
        if model.part_of(part) != "head"
    }
    seconds = round(time.perf_counter() - began, 1)
    save_entry(key, weights, {"seconds": str(seconds)})
    return weights, seconds
