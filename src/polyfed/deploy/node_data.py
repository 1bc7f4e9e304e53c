"""The data of a node: its client's share of the recipe's data set, or its own file, with the federation's classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyfed.config.recipe import Recipe
from polyfed.core.method import Method
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.deploy.node_config import NodeConfig
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import MODELS, suggest

_READING = (
    "image_column",
    "label_column",
    "feature_columns",
    "category_columns",
    "missing_values",
    "decimal",
    "missing_words",
    "text_column",
    "vocab_size",
    "max_length",
    "word_vectors",
    "tokens",
)
_TOLD = ("class_names", "mean", "std")
_BOUNDS = ("root", "image_size", "split", "max_train_per_client", "max_test_per_client")
_OF_ROWS = (*_READING, *_TOLD, *_BOUNDS)  # what of [data] own rows are read by


def data_of_node(recipe: Recipe, place: NodeConfig, data: DataCache) -> tuple[FederatedDataset, int]:
    """Rows dealt to clients, and whose of them are this node's."""
    dealt, number = _dealt(recipe, place, data)
    if dealt.source.is_regression:
        raise ConfigError(
            f"deployment: expected classes as labels, got numbers to predict (regression) in '{dealt.source.name}'"
        )
    if recipe.data.label_space == "own":
        raise ConfigError("deployment: expected one label space, got data.label_space 'own'")
    return dealt, number


def _dealt(recipe: Recipe, place: NodeConfig, data: DataCache) -> tuple[FederatedDataset, int]:
    if place.data is None:
        dealt = data.federated(recipe)
        if place.client >= len(dealt.clients):
            raise ConfigError(f"expected a client-id below {len(dealt.clients)}, got {place.client}")
        return dealt, place.client
    if recipe.data.test == "global":
        raise ConfigError("node-config: expected the recipe's data, as data.test is 'global', got data of its own")
    settings = recipe.to_dict()
    kept = {key: value for key, value in settings["data"].items() if key in _OF_ROWS}
    caps = kept.get("max_train_per_client")
    if isinstance(caps, list):
        kept["max_train_per_client"] = caps[place.client % len(caps)]
    alone = {**settings, "data": {**kept, "dataset": place.data, "num_clients": 1}}
    dealt = data.federated(Recipe.from_dict(alone, beside=recipe.beside))
    if dealt.source.vocabulary is not None and recipe.data.word_vectors is None:
        raise ConfigError(
            "node-config: expected data.word_vectors in the recipe for a node's own texts, as all must number words "
            f"alike, got '{place.data}' without"
        )
    if dealt.source.columns.counts:
        raise ConfigError(
            "node-config: expected the recipe's data with data.category_columns, as all must number categories alike, "
            f"got '{place.data}'"
        )
    if len(dealt.clients) != 1:
        raise ConfigError(f"node-config: expected the rows of one client as data, got {len(dealt.clients)} clients'")
    return dealt, 0


def renumbered(data: ClientData, own: Sequence[str], names: Sequence[str]) -> ClientData:
    """The same rows with their classes numbered as the task has them."""
    if list(own) == list(names):
        return data
    if missing := [name for name in own if name not in names]:
        raise ConfigError(f"expected the classes {', '.join(names)}, got '{missing[0]}' in this node's data")
    number = torch.tensor([names.index(name) for name in own])
    parts = (data.train, data.validation, data.test)
    train, validation, test = (LabeledSamples(part.x, number[part.y]) for part in parts)
    return ClientData(train, validation, test)


def auxiliary_network(recipe: Recipe, method: Method, told: str, own: str) -> str:
    """The auxiliary model's network. Of names that a server sends, only those in the recipe are imported."""
    wanted = method.auxiliary_model
    known = {own, *MODELS, *recipe.models.architectures, *([] if wanted is None else [wanted.network])}
    if told not in known:
        raise ConfigError(f"expected an auxiliary model that the recipe knows, got '{told}'{suggest(told, known)}")
    return told
