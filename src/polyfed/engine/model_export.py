"""Clients' personal models: handed out, and written into a run folder with what their users must know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from polyfed.core.client import Client, to_float
from polyfed.core.message import Message, freeze
from polyfed.core.method import Method, uses_default_predict
from polyfed.core.model_factory import ModelFactory
from polyfed.core.modules import copy_network, export_state
from polyfed.core.server import Server
from polyfed.data.table_columns import TableColumns, own_means
from polyfed.data.transforms import Prepare
from polyfed.engine.executors.working_copy import has_weights, working_copy
from polyfed.engine.model_readme import ModelReadme
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Task
from polyfed.errors import ConfigError


class ModelExport:
    """Hands out the personal models of a federation.

    Args:
        clients: by number. task: its class names have been filled in. settings: of the run folder's recipe.
        facts: of the method, "method" and "hyperparameters". by_name: architectures that a recipe can name.
    """

    def __init__(
        self,
        method: Method,
        clients: Sequence[Client],
        server: Server,
        model_factory: ModelFactory,
        task: Task,
        settings: Mapping[str, Any],
        facts: Mapping[str, Any],
        by_name: Mapping[str, object],
    ) -> None:
        self._method = method
        self._clients = clients
        self._server = server
        self._model_factory = model_factory
        self._task = task
        self._settings = settings
        self._facts, self._by_name = facts, by_name

    def export(self, client_id: int) -> nn.Module:
        """A copy of the client's personal model, on the CPU; where it has none yet, what it would receive now.

        Raises:
            ConfigError: there is no such client, or it has not joined yet.
        """
        if client_id not in self._server.clients:
            here = ", ".join(map(str, self._server.clients))
            raise ConfigError(f"expected a client that is present ({here}), got {client_id}")
        return copy_network(self._method.personal_model(self._personal_client(client_id).model)).cpu().eval()

    def write(self, folder: RunFolder) -> None:
        """Write the models of everybody present into the run folder, and a guide to them."""
        alone = uses_default_predict(self._method)  # else what clients keep may have a say
        guide = ModelReadme(self._model_factory, alone)
        vocabulary = self._task.vocabulary
        with folder.models() as write:
            words = None if vocabulary is None else folder.write_vocabulary(vocabulary.words)
            for client in self.present():
                personal = self._personal_client(client.id)
                weights = export_state(self._method.personal_model(personal.model))
                about = self.about(client, words)
                state = {} if alone else personal.method_state
                write(client.id, weights, state, about)
                guide.add(client.id, weights, about)
        folder.write_readme(guide.text())

    def present(self) -> list[Client]:
        """The clients in the federation now."""
        return [client for client in self._clients if client.id in self._server.clients]

    def _personal_client(self, client_id: int) -> Client:
        """A working copy of the client with what it keeps; where that is nothing, after what it would receive now."""
        client = self._clients[client_id]
        variant = self._method.variant(self._server, client_id)
        message: Message | None = None
        if not has_weights(client, variant, self._model_factory):
            message = self._method.broadcast(self._server, client_id)
        worker = working_copy(client, variant, self._model_factory)
        worker.round = self._server.round
        if message is not None:
            self._method.receive(worker, freeze(message))
        return worker

    def about(self, client: Client, words: str | None) -> dict[str, Any]:
        """What somebody who has neither the data nor the recipe must know to use the client's model.

        words: of texts, the checksum of the file of words.
        """
        models = self._settings.get("models")
        x = client.data.train.x
        prepare = client.prepare
        modules = self._settings.get("run", {}).get("modules")
        texts = self._task.vocabulary
        normalized = dataclasses.asdict(prepare) if isinstance(prepare, Prepare) else None
        plain = "plain" if prepare is to_float else None
        columns = self._task.columns
        table = None
        if isinstance(prepare, Prepare) and columns != TableColumns():
            fill = own_means(x, columns, prepare.mean)
            table = {"categories": columns.categories, "flags": columns.flags, "fill": fill}
            table |= {"decimal": columns.cells.decimal, "missing_words": columns.cells.missing}
        return {
            "architecture": client.architecture,
            "classes": client.classes,
            "class_names": list(client.class_names or self._task.class_names or ()),
            **({} if self._task.classes else {"target": dataclasses.asdict(client.data.train.scale)}),
            "feature_names": list(self._task.feature_names),
            "label_column": self._task.label_column,
            "vocabulary": None if texts is None else texts.most,
            "texts": None if texts is None else {"column": texts.column, "sha256": words, "tokens": texts.tokens},
            "vectors": self._settings.get("data", {}).get("word_vectors"),
            "samples": client.n,
            **({"name": client.name} if client.name else {}),
            "zoo": models is not None or client.architecture in self._by_name,
            "feature_dim": None if models is None else models.get("feature_dim"),
            "input": {"shape": list(x.shape[1:]), "type": str(x.dtype).removeprefix("torch.")},
            "image_size": self._settings.get("data", {}).get("image_size"),
            "prepare": normalized or plain,
            "method": self._facts["method"],
            "hyperparameters": self._facts["hyperparameters"],
            **({} if self._method.adapters is None else {"adapters": self._method.adapters.model_dump()}),
            "variant": self._method.variant(self._server, client.id),
            "auxiliary_model": None if self._model_factory.chosen is None else self._model_factory.chosen.network,
            "round": self._server.round,
            **({} if modules is None else {"modules": modules}),
            **({} if table is None else {"table": table}),
        }
