"""What is a node's own: its configuration, and its rows, those of the recipe's data set or of a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from polyfed.config.recipe import Recipe
from polyfed.core.method import Method
from polyfed.core.model_factory import BY_SIZE
from polyfed.core.settings import Positive, Settings
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.options import SourceSettings
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import MODELS, suggest

_Text = Annotated[str, Field(min_length=1)]
# the keys of [data] by which a node's own rows are read
_OF_ROWS = {*SourceSettings.model_fields} - {"dataset", "config", "revision"} | {
    *("class_names", "mean", "std", "split", "max_rows_per_client", "max_train_per_client", "max_test_per_client")
}


def hyphenated(key: str) -> str:
    """How Flower's commands call a setting."""
    return key.replace("_", "-")


class NodeConfig(Settings):
    """A node's configuration, whose keys docs/deployment-settings.md explains.

    Raises:
        ConfigError: an unknown key, a wrong type, no client or no folder.
    """

    model_config = ConfigDict(alias_generator=hyphenated)
    _place = ("node-config",)

    client_id: Annotated[int, Field(ge=0)]
    state_dir: _Text
    data: _Text | None = None
    root: _Text | None = None
    architecture: _Text | None = None
    device: _Text | None = None
    secret_noise: bool | None = None
    share_model: bool = False
    answers: Positive | None = None

    @property
    def state(self) -> Path:
        """The folder on this node's disk."""
        return Path(self.state_dir)

    @property
    def has_secret(self) -> bool:
        """Whether noise is drawn by a secret of this node; by default with data of its own."""
        return self.data is not None if self.secret_noise is None else self.secret_noise


def data_of_node(recipe: Recipe, config: NodeConfig, cache: DataCache) -> tuple[FederatedDataset, int]:
    """A data set, and which of its clients has this node's rows.

    Raises:
        ConfigError: a deployment cannot use such data, or the node's own rows would not fit those of others.
    """
    if config.data is None:
        data = cache.federated(recipe)
        number = config.client_id
        if number >= len(data.clients):
            raise ConfigError(f"expected a client-id below {len(data.clients)}, got {number}")
    else:
        data = _own_rows(recipe, config.data, config.client_id, cache)
        number = 0
    if recipe.data.label_space == "own":
        raise ConfigError("deployment: expected one label space, got data.label_space 'own'")
    return data, number


def _own_rows(recipe: Recipe, dataset: str, client: int, cache: DataCache) -> FederatedDataset:
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
    if loose := set(recipe.data.category_columns or ()) - {*(recipe.data.categories or {})}:
        raise ConfigError(
            f"node-config: expected data.categories in the recipe with all categories of column '{min(loose)}', as all "
            f"must number them alike, got '{dataset}' without"
        )
    if len(data.clients) != 1:
        raise ConfigError(f"node-config: expected the rows of one client as data, got {len(data.clients)} clients'")
    return data


def auxiliary_network(recipe: Recipe, method: Method, name: str, own: str) -> str:
    """The auxiliary model's network. Of names that a server sends, only those in the recipe are imported."""
    wanted = method.auxiliary_model
    known = {own}
    if wanted is not None:  # of one by its size the server knows the name, from all clients' networks
        known |= {*MODELS, *recipe.models.architectures} if wanted.network in BY_SIZE else {wanted.network}
    if name not in known:
        raise ConfigError(f"expected an auxiliary model that the recipe knows, got '{name}'{suggest(name, known)}")
    return name
