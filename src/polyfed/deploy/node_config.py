"""What is a node's own: its configuration, and its rows, those of the recipe's data set or of a file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyfed.config.recipe import Recipe
from polyfed.core.method import Method
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import MODELS, suggest

KEYS: Mapping[str, tuple[type, str]] = {
    "client-id": (int, "the number of this node's client, from 0 on"),
    "state-dir": (str, "folder on this node's disk for its client's weights, state and models"),
    "data": (str, "this node's own rows, as data.dataset has it; default: its client's part of the recipe's data"),
    "root": (str, "in place of the recipe's data.root"),
    "architecture": (str, "this node's own network, as models.architectures has it; default: the recipe's"),
    "device": (str, "where this node computes, in place of run.device"),
    "begin-anew": (bool, "whether its client begins again where this disk has lost what it was; default: false"),
    "secret-noise": (
        bool,
        "whether [privacy] upload noise is drawn by a secret of this node; default: with data of its own",
    ),
    "answers": (int, "how many different requests of a kind it answers in a round; default: 1 with noise, else 10"),
    "share-model": (bool, "whether its personal model goes into the server's run folder; default: false"),
}
_OF_ROWS = (  # the keys of [data] by which a node's own rows are read
    "image_column",
    "label_column",
    "feature_columns",
    "category_columns",
    "missing_values",
    "text_column",
    "vocab_size",
    "max_length",
    "word_vectors",
    "tokens",
    "class_names",
    "mean",
    "std",
    "root",
    "image_size",
    "split",
    "max_train_per_client",
    "max_test_per_client",
)


@dataclass(frozen=True)
class NodeConfig:
    """A node's configuration; see `KEYS`."""

    client: int
    state: Path
    data: str | None = None
    root: str | None = None
    architecture: str | None = None
    device: str | None = None
    share: bool = False
    anew: bool = False
    secret: bool = False
    answers: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> NodeConfig:
        """From Flower's node configuration.

        Raises:
            ConfigError: an unknown key, a wrong type, no client or no folder.
        """
        for key, value in config.items():
            if key not in KEYS:
                raise ConfigError(f"node-config: unknown key '{key}'{suggest(key, KEYS)}")
            kind, meaning = KEYS[key]
            if type(value) is not kind or value == "":
                raise ConfigError(f"node-config: expected {meaning} as '{key}' ({kind.__name__}), got {value!r}")
        number = config.get("client-id")
        if number is None or number < 0:
            raise ConfigError(f"node-config: expected client-id, {KEYS['client-id'][1]}, got {number}")
        if config.get("answers", 1) < 1:
            raise ConfigError(f"node-config: expected 1 or more as 'answers', got {config['answers']}")
        if "state-dir" not in config:
            raise ConfigError(f"node-config: expected state-dir, a {KEYS['state-dir'][1]}, which is missing")
        named = {key: config.get(key) for key in ("data", "root", "architecture", "device")}
        return cls(
            number,
            Path(config["state-dir"]),
            **named,
            share=config.get("share-model", False),
            anew=config.get("begin-anew", False),
            secret=config.get("secret-noise", "data" in config),
            answers=config.get("answers"),
        )


def data_of_node(recipe: Recipe, place: NodeConfig, cache: DataCache) -> tuple[FederatedDataset, int]:
    """A data set, and which of its clients has this node's rows.

    Raises:
        ConfigError: a deployment cannot use such data, or the node's own rows would not fit those of others.
    """
    if place.data is None:
        data = cache.federated(recipe)
        number = place.client
        if number >= len(data.clients):
            raise ConfigError(f"expected a client-id below {len(data.clients)}, got {number}")
    else:
        data = _own_rows(recipe, place.data, place.client, cache)
        number = 0
    if data.source.is_regression:
        raise ConfigError(
            f"deployment: expected classes as labels, got numbers to predict (regression) in '{data.source.name}'"
        )
    if recipe.data.label_space == "own":
        raise ConfigError("deployment: expected one label space, got data.label_space 'own'")
    return data, number


def _own_rows(recipe: Recipe, dataset: str, client: int, cache: DataCache) -> FederatedDataset:
    """A data set of one client."""
    if recipe.data.test == "global":
        raise ConfigError("node-config: expected the recipe's data, as data.test is 'global', got data of its own")
    settings = recipe.to_dict()
    kept = {key: value for key, value in settings["data"].items() if key in _OF_ROWS}
    caps = kept.get("max_train_per_client")
    if isinstance(caps, list):
        kept["max_train_per_client"] = caps[client % len(caps)]
    alone = {**settings, "data": {**kept, "dataset": dataset, "num_clients": 1}}
    data = cache.federated(Recipe.from_dict(alone, beside=recipe.beside))
    if data.source.vocabulary is not None and recipe.data.word_vectors is None:
        raise ConfigError(
            "node-config: expected data.word_vectors in the recipe for a node's own texts, as all must number words "
            f"alike, got '{dataset}' without"
        )
    if data.source.columns.counts:
        raise ConfigError(
            "node-config: expected the recipe's data with data.category_columns, as all must number categories alike, "
            f"got '{dataset}'"
        )
    if len(data.clients) != 1:
        raise ConfigError(f"node-config: expected the rows of one client as data, got {len(data.clients)} clients'")
    return data


def renumbered(data: ClientData, own: Sequence[str], names: Sequence[str]) -> ClientData:
    """The same rows with their classes numbered as in the task."""
    if list(own) == list(names):
        return data
    if missing := [name for name in own if name not in names]:
        raise ConfigError(f"expected the classes {', '.join(names)}, got '{missing[0]}' in this node's data")
    number = torch.tensor([names.index(name) for name in own])
    parts = (data.train, data.validation, data.test)
    train, validation, test = (LabeledSamples(part.x, number[part.y]) for part in parts)
    return ClientData(train, validation, test)


def auxiliary_network(recipe: Recipe, method: Method, name: str, own: str) -> str:
    """The auxiliary model's network. Of names that a server sends, only those in the recipe are imported."""
    wanted = method.auxiliary_model
    known = {own, *MODELS, *recipe.models.architectures, *([] if wanted is None else [wanted.network])}
    if name not in known:
        raise ConfigError(f"expected an auxiliary model that the recipe knows, got '{name}'{suggest(name, known)}")
    return name
