"""The data that recipes ask for, kept between recipes that ask for the same; and a data set partitioned in Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyfed.config.recipe import Recipe
from polyfed.core.client import PublicData
from polyfed.core.randomness import numpy_generator
from polyfed.data.dataset import DatasetSource, public_inputs, with_declared
from polyfed.data.datasets import load_dataset, load_source
from polyfed.data.federated_dataset import FederatedDataset, build_federated_dataset
from polyfed.data.options import PartitionSettings, as_settings
from polyfed.data.partition import Generators, Partition, check_integer
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare, resize
from polyfed.engine.run_folder import other_clients
from polyfed.errors import ConfigError, described
from polyfed.models.third_party import pretrained_normalization
from polyfed.registry import PARTITIONS

__all__ = ["DataCache", "federate", "input_normalization"]


class DataCache:
    """Data as recipes want them; of each kind the last is kept, as a comparison asks for the same often."""

    def __init__(self) -> None:
        self._source: tuple[object, DatasetSource] | None = None
        self._federated: tuple[object, FederatedDataset] | None = None
        self._public: tuple[object, LabeledSamples] | None = None

    def source(self, recipe: Recipe) -> DatasetSource:
        """The recipe's data set, cut to some rows, drawn, and resized where the recipe says so."""
        data, seed = recipe.data, recipe.run.seed
        options = data.source_options(recipe.beside)
        limits = (data.limit_train, data.limit_test)
        drawn = (*limits, seed) if any(limits) else None
        key = (options, data.class_names, data.mean, data.std, drawn)
        if self._source is None or self._source[0] != key:
            whole = load_source(options)
            if data.limit_test is not None and whole.test is None:
                raise ConfigError(f"data.limit_test: expected no value, as '{data.dataset}' has no official test side")
            cut = whole.limited(*limits, data_generators(seed))
            train = resize(cut.train, data.image_size)
            test = None if cut.test is None else resize(cut.test, data.image_size)
            resized_source = replace(cut, train=train, test=test)
            self._source = (key, with_declared(resized_source, data.class_names, data.mean, data.std))
        return self._source[1]

    def federated(self, recipe: Recipe) -> FederatedDataset:
        """The data set as the clients have it: a function of ``[data]``, the seed, and whether noise of ``[privacy]``
        hides rows, never of the method.
        """
        data, seed = recipe.data, recipe.run.seed
        private = recipe.privacy.hides_rows
        key = (data, data.model_fields_set, private, recipe.beside, seed)
        if self._federated is None or self._federated[0] != key:
            found = build_federated_dataset(self.source(recipe), data, data_generators(seed), private)
            self._federated = (key, found)
        federated = self._federated[1]
        kept = recipe.run.client_names  # of the run that kept the recipe: each client has the number that it had there
        if kept and (difference := other_clients(kept, federated.names)):
            raise ConfigError(
                f"run.client_names: the data no longer have the clients of the run: {difference}; put that right or, "
                "for a run of its own, leave client_names out of the recipe"
            )
        return federated

    def public(self, recipe: Recipe) -> PublicData | None:
        """What everybody may see: inputs of ``data.public_dataset`` where there is one, else the hold-out, if there is
        any.
        """
        data, seed = recipe.data, recipe.run.seed
        if data.public_dataset is None and not data.holdout:
            return None
        federated = self.federated(recipe)
        prepare = input_normalization(federated.source, recipe)
        if data.public_dataset is None:
            return PublicData(federated.holdout, prepare)
        key = (data, recipe.beside, seed)
        if self._public is None or self._public[0] != key:
            other = load_dataset(data.public_dataset, data.root, image_size=data.image_size, beside=recipe.beside)
            drawn = public_inputs(other, federated.source, data.public_samples, numpy_generator(seed, "data public"))
            self._public = (key, drawn)
        return PublicData(self._public[1], prepare, origin="other")


def data_generators(seed: int) -> Generators:
    """Purpose of a draw of data -> its generator, derived from the run's seed."""
    return lambda purpose: numpy_generator(seed, f"data {purpose}")


def federate(
    source: DatasetSource,
    num_clients: int | None = None,
    partition: str | Partition | Any = None,
    *,
    seed: int = 0,
    **how: Any,
) -> FederatedDataset:
    """Deal a data set to clients, as a recipe with these keys in ``[data]`` and this seed deals it.

    Args:
        source: what `load_dataset`, `from_tensors` or `from_frame` gave.
        num_clients: how many; None: 10, or with partition "by_group" one per value.
        partition: a name, or a function of your own (labels, clients, generator) -> each client's rows; None: "iid", or
            by the column that was given to `from_frame` as the clients'.
        seed: every draw is derived from it.
        how: the further keys, ``classes_per_client=2, split="8:1:1"``; see `polyfed.data.options.PartitionSettings`.

    Raises:
        ConfigError: settings that cannot be, or rows that cannot be partitioned so.
    """
    if not isinstance(source, DatasetSource):
        write = "polyfed.from_tensors((x, y))"
        raise ConfigError(f"source: expected what polyfed.load_dataset or {write} gives, got {described(source)}")
    seed = check_integer("seed", seed, 0)
    if partition is None and num_clients is None and "group_by" not in how and source.client_column is not None:
        partition = "by_group"
        how["group_by"] = source.client_column
    if num_clients is not None:
        how["num_clients"] = num_clients
    if partition is not None:
        how["partition"] = next((name for name, function in PARTITIONS.items() if partition is function), partition)
    return build_federated_dataset(source, PartitionSettings(**as_settings(how)), data_generators(seed))


def input_normalization(source: DatasetSource, recipe: Recipe) -> Prepare:
    """How stored inputs become what networks take: as pre-trained weights want it, else as the data set says.

    One way for everybody, as clients' networks are compared on inputs that they share. For images of other than three
    channels it is the mean of the channels' values.

    Raises:
        ConfigError: pre-trained weights that want it in several ways, or cannot be asked.
    """
    names = [*recipe.models.architectures]
    beside = recipe.chosen_method.auxiliary_model
    if beside is not None and beside.frozen:
        names.append(beside.network)
    asked = {name: pretrained_normalization(name) for name in dict.fromkeys(names)}
    stated = {name: wanted for name, wanted in asked.items() if wanted is not None}
    if not stated or source.train.x.dtype != torch.uint8:
        return source.prepare
    (first, wanted), *others = stated.items()
    for other, another in others:
        if another != wanted:
            raise ConfigError(
                f"expected pre-trained networks that want images normalized alike, got '{first}' (mean {wanted[0]}, "
                f"std {wanted[1]}) and '{other}' (mean {another[0]}, std {another[1]}); choose weights that agree"
            )
    channels = source.train.x.shape[1]
    mean, std = (tuple(v) if len(v) == channels else (sum(v) / len(v),) * channels for v in wanted)
    return Prepare(mean, std)
