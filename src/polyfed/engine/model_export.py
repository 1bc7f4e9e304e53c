"""Clients' personal models: handed out, and written into a run folder with what their users must know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from polyfed.core.client import Client, to_float
from polyfed.core.message import Message, clone, freeze
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.modules import copy_network, export_state
from polyfed.core.server import Server
from polyfed.data.samples import TableColumns, own_means
from polyfed.data.transforms import Prepare
from polyfed.engine.executors.client_work import has_weights, working_copy
from polyfed.engine.personal_predictor import PersonalPredictor
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.scoring import uses_default_predict
from polyfed.engine.task import Task
from polyfed.errors import ConfigError


@dataclass
class ModelExport:
    """Hands out the personal models of a federation.

    Attributes:
        clients: by number. task: its class names have been filled in. settings: of the run folder's recipe.
        facts: of the method, "method" and "hyperparameters". by_name: architectures that a recipe can name.
    """

    method: Method
    clients: Sequence[Client]
    server: Server
    model_factory: ModelFactory
    task: Task
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    by_name: Mapping[str, object]

    def export(self, client_id: int) -> nn.Module:
        """A copy of the client's personal model, on the CPU; where it has none yet, what it would receive now.

        It is the client's network; a `PersonalPredictor` where the method predicts by more than the network's output.

        Raises:
            ConfigError: there is no such client, or it has not joined yet.
        """
        if client_id not in self.server.clients:
            here = ", ".join(map(str, self.server.clients))
            raise ConfigError(f"expected a client that is present ({here}), got {client_id}")
        personal = self._personal_client(client_id)
        network = copy_network(self.method.personal_model(personal.model))
        if not uses_default_predict(self.method):
            network = PersonalPredictor(self.method, network, clone(personal.method_state))
        return network.cpu().eval()

    def write(self, folder: RunFolder) -> None:
        """Write the models of everybody present into the run folder."""
        alone = uses_default_predict(self.method)  # else what clients keep may have a say
        vocabulary = self.task.vocabulary
        with folder.models() as write:
            words = None if vocabulary is None else folder.write_vocabulary(vocabulary.words)
            for client in self.present():
                personal = self._personal_client(client.id)
                weights = export_state(self.method.personal_model(personal.model))
                state = {} if alone else personal.method_state
                write(client.id, weights, state, self.about(client, words))

    def present(self) -> list[Client]:
        """The clients in the federation now."""
        return [client for client in self.clients if client.id in self.server.clients]

    def _personal_client(self, client_id: int) -> Client:
        """A working copy of the client with what it keeps; where that is nothing, after what it would receive now."""
        client = self.clients[client_id]
        variant = self.method.variant(self.server, client_id)
        message: Message | None = None
        if not has_weights(client, variant, self.model_factory):
            message = self.method.broadcast(self.server, client_id)
        worker = working_copy(client, variant, self.model_factory)
        worker.round = self.server.round
        if message is not None:
            self.method.receive(worker, freeze(message))
        return worker

    def about(self, client: Client, words: str | None) -> dict[str, Any]:
        """See `model_entry`."""
        chosen = self.model_factory.chosen
        return model_entry(
            client,
            self.method,
            self.task,
            self.settings,
            self.facts["method"],
            named=self.settings.get("models") is not None or client.architecture in self.by_name,
            auxiliary=None if chosen is None else chosen.network,
            variant=self.method.variant(self.server, client.id),
            round=self.server.round,
            words=words,
        )


def model_entry(
    client: Client,
    method: Method,
    task: Task,
    settings: Mapping[str, Any],
    method_name: str,
    *,
    named: bool,
    auxiliary: str | None,
    variant: str,
    round: int,
    words: str | None = None,
) -> dict[str, Any]:
    """What somebody who has neither the data nor the recipe must know to use the client's model.

    Args:
        client: with its data. task: its class names have been filled in. settings: of the run folder's recipe.
        method_name: by which it can be made again. named: whether a recipe can name the client's architecture.
        auxiliary, variant: networks. round: of the weights. words: of texts, the checksum of the file of words.
    """
    models = settings.get("models")
    data = settings.get("data", {})
    x = client.data.train.x
    prepare = client.prepare
    modules = settings.get("run", {}).get("modules")
    texts = task.vocabulary
    normalized = dataclasses.asdict(prepare) if isinstance(prepare, Prepare) else None
    plain = "plain" if prepare is to_float else None
    columns = task.columns
    table = None
    if isinstance(prepare, Prepare) and columns != TableColumns():
        fill = own_means(x, columns, prepare.mean)
        table = {"categories": columns.categories, "flags": columns.flags, "fill": fill}
        table |= {"decimal": columns.cells.decimal, "missing_words": columns.cells.missing}
    return {
        "architecture": client.architecture,
        "classes": client.classes,
        "class_names": list(client.class_names or task.class_names or ()),
        **({} if task.classes else {"target": dataclasses.asdict(client.data.train.scale)}),
        "feature_names": list(task.feature_names),
        "label_column": task.label_column,
        "vocabulary": None if texts is None else texts.most,
        "texts": None if texts is None else {"column": texts.column, "sha256": words, "tokens": texts.tokens},
        "vectors": data.get("word_vectors"),
        "samples": client.n,
        **({"name": client.name} if client.name else {}),
        "zoo": named,
        "feature_dim": None if models is None else models.get("feature_dim"),
        "feature_pool": models is not None and models.get("feature_pool", False),
        "input": {"shape": list(x.shape[1:]), "type": str(x.dtype).removeprefix("torch.")},
        "image_size": data.get("image_size"),
        "prepare": normalized or plain,
        "method": method_name,
        "hyperparameters": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        **({} if method.card.adapters is None else {"adapters": method.card.adapters.model_dump()}),
        "variant": variant,
        "auxiliary_model": auxiliary,
        "round": round,
        **({} if modules is None else {"modules": modules}),
        **({} if table is None else {"table": table}),
    }
