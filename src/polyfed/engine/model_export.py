"""Clients' networks, as they are scored: handed out, and written into a run folder with what their users must know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polyfed.core.client import Client, to_float
from polyfed.core.message import Message, clone, freeze
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.modules import copy_network, export_state
from polyfed.data.samples import TableColumns, own_means
from polyfed.data.transforms import Prepare
from polyfed.engine.evaluation import ScoredClient, kept_stages, scored_views
from polyfed.engine.executors.client_work import working_copy
from polyfed.engine.personal_predictor import PersonalPredictor
from polyfed.engine.plugin import Setup
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.scoring import uses_default_predict
from polyfed.engine.task import Task
from polyfed.errors import ConfigError


def export(setup: Setup, client_id: int, stage: str = "") -> nn.Module:
    """A copy of the client's network at a stage, "received" or "personal", on the CPU; "": at the main one.

    It is the client's network; a `PersonalPredictor` where the method predicts by more than the network's output.

    Raises:
        ConfigError: there is no such client, or it has not joined yet.
    """
    numbers = [client.id for client in clients_with_models(setup)]
    if client_id not in numbers:
        raise ConfigError(f"expected a client that is present ({', '.join(map(str, numbers))}), got {client_id}")
    stage = stage or kept_stages(setup.stages)[0]
    view = scored_views(setup, setup.clients[client_id], [stage])[stage]
    worker = at_work(view, setup.method, setup.model_factory, setup.server.round)
    network = copy_network(setup.method.personal_model(worker.model))
    if not uses_default_predict(setup.method):
        network = PersonalPredictor(setup.method, network, clone(worker.state))
    return network.cpu().eval()


def write_models(setup: Setup, folder: RunFolder) -> None:
    """Write the models of everybody present into the run folder."""
    vocabulary = setup.task.vocabulary
    with folder.models() as write:
        words = None if vocabulary is None else folder.write_vocabulary(vocabulary.words)
        for client in clients_with_models(setup):
            views = scored_views(setup, client, kept_stages(setup.stages))
            made = {
                id(view): parts_of(at_work(view, setup.method, setup.model_factory, setup.server.round), setup.method)
                for view in views.values()
            }
            kept = {stage: made[id(view)] for stage, view in views.items()}
            write(client.id, kept, entry_of(setup, client, words))


def clients_with_models(setup: Setup) -> list[Client]:
    """Who is scored or could be: the clients in the federation now, and those that take no part or are held out."""
    there = setup.server.clients.keys() | setup.excluded.keys() | setup.held_out
    return [client for client in setup.clients if client.id in there]


def entry_of(setup: Setup, client: Client, words: str | None) -> dict[str, Any]:
    """See `model_entry`."""
    entry = model_entry(
        client,
        setup.method,
        setup.task,
        setup.settings,
        setup.facts["method"],
        named=setup.settings.get("models") is not None or client.architecture in setup.by_name,
        model_factory=setup.model_factory,
        variant=scored_views(setup, client, ["personal"])["personal"].variant,
        round=setup.server.round,
        words=words,
    )
    return {**entry, "stage": setup.stages[0]}


def at_work(view: ScoredClient, method: Method, model_factory: ModelFactory, round: int) -> Client:
    """A working copy of the client with the network and the state by which it is scored."""
    worker = working_copy(view.client, view.variant, model_factory)
    worker.round = round
    if view.message is not None:
        method.receive(worker, freeze(view.message))
    return worker


def parts_of(worker: Client, method: Method) -> tuple[Mapping[str, Tensor], Message]:
    """The weights of a client at work, in main memory, and what beside them has a say in its predictions."""
    weights = export_state(method.personal_model(worker.model))
    state = {} if uses_default_predict(method) else worker.state
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}, state


def model_entry(
    client: Client,
    method: Method,
    task: Task,
    settings: Mapping[str, Any],
    method_name: str,
    *,
    named: bool,
    model_factory: ModelFactory,
    variant: str,
    round: int,
    words: str | None = None,
) -> dict[str, Any]:
    """What somebody who has neither the data nor the recipe must know to use the client's model.

    Args:
        client: with its data. task: its class names have been filled in. settings: of the run folder's recipe.
        method_name: by which it can be made again. named: whether a recipe can name the client's architecture.
        model_factory: with the auxiliary model. variant: of the network. round: of the weights. words: of texts, the
            checksum of the file of words.
    """
    chosen, beside = model_factory.chosen, model_factory.frozen_network
    models = settings.get("models")
    data = settings.get("data", {})
    x = client.data.train.x
    prepare = client.prepare
    modules = settings.get("run", {}).get("modules")
    texts = task.vocabulary
    normalized = dataclasses.asdict(prepare) if isinstance(prepare, Prepare) else None
    plain = "plain" if prepare is to_float else None
    own = client.columns
    columns = task.columns if own is None else own.table
    table: dict[str, Any] | None = None
    if isinstance(prepare, Prepare) and columns != TableColumns():
        fill = own_means(x, columns, prepare.mean)
        table = {"categories": columns.categories, "flags": columns.flags, "fill": fill}
        if own is not None:
            table["spelling"] = {name: how for name, how in data.get("features", {}).items() if name in own.names}
    return {
        "architecture": client.architecture,
        "classes": client.classes,
        "class_names": list(client.class_names or task.class_names or ()),
        **({} if task.classes else {"target": dataclasses.asdict(client.data.train.scale)}),
        "feature_names": list(task.feature_names if own is None else own.names),
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
        **({"personalize": method.personalize} if method.personalize else {}),
        **({} if method.adapters is None else {"adapters": method.adapters.model_dump()}),
        "variant": variant,
        "auxiliary_model": None if chosen is None else chosen.network,
        **({} if beside is None else {"frozen": {"seed": client.seed, "sha256": beside.checksum}}),
        "round": round,
        **({} if modules is None else {"modules": modules}),
        **({} if table is None else {"table": table}),
    }
