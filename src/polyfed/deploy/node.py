"""A node: one client with its own data, network and disk, which answers the server's envelopes.

It runs a job by the workers' function (`executors.client_work.run_job`), so that the numbers are the same. It keeps
nothing in memory: every envelope may reach another process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, freeze
from polyfed.core.method import Method
from polyfed.core.modules import as_split_model, export_state
from polyfed.core.randomness import keep_global_rng
from polyfed.data.samples import checksum_of
from polyfed.deploy.node_config import NodeConfig, auxiliary_network, data_of_node, renumbered
from polyfed.deploy.node_disk import ClientSnapshot, NodeCheckpoints, count_answer, load_or_create_key, token
from polyfed.deploy.protocol import (
    ClientHello,
    Envelope,
    TaskRequest,
    TaskResult,
    deserialize,
    first_difference,
    merge_client_state,
    parse,
    serialize,
    shared_config,
)
from polyfed.engine.architectures import build_model_factory
from polyfed.engine.arguments import plugins_of
from polyfed.engine.compatibility import check_compatibility
from polyfed.engine.device import parse_device
from polyfed.engine.executors.client_work import run_job, score_batch, working_copy
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, JobResult, Scores, TrainJob
from polyfed.engine.model_export import model_entry
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.run_loop import single_threaded
from polyfed.engine.scoring import ScoreCache, score_to_json, uses_default_predict
from polyfed.engine.task import Task
from polyfed.engine.weight_store import WeightStore, client_row
from polyfed.errors import ConfigError, RunError
from polyfed.experiments.build import assign_architectures, auxiliary_candidates
from polyfed.experiments.data_cache import DataCache, input_normalization
from polyfed.models.zoo import build
from polyfed.places import make_private, without_places
from polyfed.registry import is_own

_ANSWERS = {True: 1, False: 10}  # whether noise hides rows -> different requests of a kind, answered in a round
_SCORINGS = 4  # of a client in a round: as it stands and after receiving, before and after a last exchange
_UNSEEN = ("experiment", "settings")  # keys of a request without influence on the answer


class Node:
    """One client's node.

    Args:
        recipe: the same experiment as the server's. place: this node's configuration.
        data: keeps data between envelopes of one process.

    Raises:
        ConfigError: its folder is not its own.
    """

    def __init__(self, recipe: Recipe, place: NodeConfig, data: DataCache | None = None) -> None:
        make_private(place.state)
        self._place = place
        self._data = data or DataCache()
        if place.root is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": place.root})})
        self._recipe = recipe.with_run(device=place.device or recipe.run.device)

    def answer(self, envelope: Envelope) -> Envelope:
        """The node's answer.

        Raises:
            PolyfedError: there is none; the reason.
        """
        task = parse(TaskRequest, envelope.facts)
        if found := first_difference(task.settings, shared_config(self._recipe)):
            raise ConfigError(f"expected the server's recipe at client {self._place.client_id}, but {found}")
        with single_threaded():
            turn = NodeTask(self._recipe, self._place, self._data, task)
            if envelope.kind == "hello":
                return Envelope("hello", turn.introduction().model_dump())
            self._count(envelope, task, turn)
            message = deserialize(envelope.body)[0] if task.has_message else None
            if envelope.kind == "train":
                return turn.train(message or {})
            return turn.score(message) if envelope.kind == "score" else turn.finish(message, self._place.share_model)

    def _count(self, envelope: Envelope, task: TaskRequest, turn: NodeTask) -> None:
        """Count the answer to a request."""
        rounds, method = self._recipe.training.rounds, self._recipe.chosen_method
        last = rounds + 1 if method.final_exchanges() else rounds  # the final round has a number of its own
        trains = envelope.kind == "train" and not task.is_final
        if task.round > last or (trains and not 1 <= task.round <= rounds):
            raise ConfigError(f"expected a round from 1 to {rounds}, as in this node's recipe, got {task.round}")
        own = json.dumps(shared_config(self._recipe), sort_keys=True).encode()
        path = self._place.state / "answered" / f"{hashlib.sha256(own).hexdigest()[:16]}.jsonl"
        privacy = self._recipe.privacy
        most = self._place.answers or _ANSWERS[bool(privacy.upload_noise_multiplier or privacy.noise_multiplier)]
        kind = f"the model after round {task.round}"
        if envelope.kind == "train":
            when = "the final round" if task.is_final else f"round {task.round}"  # which comes once in a run
            kind = f"training in {when}, exchange {task.exchange_index}"
        elif envelope.kind == "score":
            kind = f"scores in round {task.round}"
            most *= _SCORINGS
        count_answer(path, kind, turn.request(envelope), most)


class NodeTask:
    """The client at the time of one envelope. client: see `Client`; as it begins, until `restore`."""

    def __init__(self, recipe: Recipe, place: NodeConfig, data: DataCache, task: TaskRequest) -> None:
        self._task = task
        self._place = place
        self._recipe = recipe
        self._method: Method = recipe.chosen_method
        shared, number = data_of_node(recipe, place, data)
        self._source, source = shared.source, shared.source
        self._names = list(source.class_names) if task.class_names is None else task.class_names
        count = recipe.data.client_count or max(len(shared.clients), place.client_id + 1)
        self._name = place.architecture or assign_architectures(recipe, count)[place.client_id]
        self._prepare = input_normalization(source, recipe.models.architectures)
        self.client = client = Client(self._name, shared.clients[number].train, prepare=self._prepare)
        client.id = place.client_id
        client.classes = len(self._names)
        client.seed = recipe.run.seed
        client.training = recipe.training
        client.public = data.public(recipe)
        client.words = 0 if source.vocabulary is None else source.vocabulary.size
        client.categories = source.columns.counts
        client.privacy = recipe.privacy
        client.plugins = plugins_of(recipe.build_plugins())
        privacy = recipe.privacy
        if place.has_secret and (privacy.upload_noise_multiplier or privacy.max_grad_norm or privacy.noise_multiplier):
            client.secret = load_or_create_key(place.state)
        client.data = renumbered(shared.clients[number], source.class_names, self._names)
        rows = (client.data.train, client.data.validation, client.data.test)
        self._data = checksum_of(rows, [self._names, source.feature_names])
        self._beside = beside = auxiliary_network(recipe, self._method, task.auxiliary_model or self._name, self._name)
        builders = {
            name: functools.partial(
                build,
                name,
                tuple(source.train.x.shape[1:]),
                len(self._names),
                recipe.models.feature_dim,
                source.words,
                beside=recipe.beside,
                categories=source.columns.counts,
                feature_pool=recipe.models.feature_pool,
            )
            for name in {self._name, beside, *auxiliary_candidates(self._method)}
        }
        self._model_factory = build_model_factory(
            self._method,
            {self._name: builders[self._name]},
            recipe.run.seed,
            parse_device(recipe.run.device),
            others=builders,
            auxiliary=beside,
            precision=recipe.run.precision,
        )
        self._store = WeightStore(self._model_factory, [self._name])
        self._folder = place.state / (task.experiment or "none")
        self._checkpoints = NodeCheckpoints(self._folder / f"client-{place.client_id:03d}")

    def introduction(self) -> ClientHello:
        """The facts about this node.

        Raises:
            ConfigError: its data or its network do not fit the method.
        """
        client, source = self.client, self._source
        check_compatibility(self._method, [client], self._model_factory, client.public)
        self._check_statistics()
        model = as_split_model(self._model_factory.build_raw(self._name))
        x = client.data.train.x
        augment = client.training.augmentation
        if augment != "none" and x.dim() != 4:
            raise ConfigError(f"training.augmentation '{augment}' expects images, client {client.id} has none")
        words = -1 if isinstance(source.words, Tensor) else source.words or 0
        return ClientHello(
            client=client.id,
            token=token(self._place.state, self._task.experiment),
            dataset=without_places(source.name),
            train=client.n,
            validation=len(client.data.validation),
            test=len(client.data.test),
            class_names=self._names,
            feature_names=list(source.feature_names),
            shape=list(x.shape[1:]),
            dtype=str(x.dtype).removeprefix("torch."),
            mean=list(self._prepare.mean),
            std=list(self._prepare.std),
            table=self._prepare.table,
            words=words,
            categories=list(source.columns.counts),
            architecture=self._name,
            feature_dim=model.feature_dim,
            linear=isinstance(model.head, nn.Linear) and model.head.bias is not None,
        )

    def _check_statistics(self) -> None:
        """Where [privacy] bounds uploads, mean and spread of the node's own rows must not leave it."""
        privacy, own = self._recipe.privacy, self._source.prepare
        of_rows = any(own.mean) or any(value != 1 for value in own.std)
        computed = self._recipe.data.mean is None and self._prepare == own and of_rows
        bounded = privacy.upload_clip_norm or privacy.max_grad_norm or privacy.noise_multiplier
        if self._place.data is not None and computed and bounded:
            raise ConfigError(
                f"expected data.mean and data.std in the recipe, as with [privacy] mean and spread of client "
                f"{self.client.id}'s own rows are not sent, got neither"
            )

    def request(self, envelope: Envelope) -> str:
        """A digest of all that the answer depends on, the client's own state included."""
        asked = {key: value for key, value in envelope.facts.items() if key not in _UNSEEN}
        parts = (json.dumps(asked, sort_keys=True).encode(), envelope.body, self._checkpoints.stored(self._task.base))
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def train(self, message: Message) -> Envelope:
        """One job, as a worker does it; the client's new state is on the disk before the answer leaves."""
        task, client = self._task, self.client
        self._take_up()
        self._checkpoints.rollback(task.base)
        done, new = self.run_job(message)
        kept: Scores = {}
        if done.counts:
            row = client_row(client)
            self._checkpoints.write(
                task.mark, ClientSnapshot("" if row is None else row.variant, row, client.state, self._data), task.base
            )
            kept = self.scores(None)
        return Envelope("train", to_result(task, done, new, kept).model_dump(), serialize(done.message))

    def run_job(self, message: Message) -> tuple[JobResult, bool]:
        """The job's result, which the client takes over if it counts; and whether it has new weights."""
        task = self._task
        client = self.client
        method = self._method
        exchanges = method.final_exchanges() if task.is_final else method.exchanges(task.round)
        if task.exchange_index >= len(exchanges):
            raise RunError(
                f"expected one of {len(exchanges)} exchanges in round {task.round}, got {task.exchange_index}"
            )
        exchange = exchanges[task.exchange_index]
        job = TrainJob(
            client, freeze(message), task.variant, exchange, task.round, task.scores, task.figures, task.is_final
        )
        fresh = functools.partial(self._store.allocate, self._name, task.variant)
        with keep_global_rng():
            done = run_job(job, method, self._model_factory, fresh)
        new = done.counts and done.weights is not client.weights
        if done.counts:
            client.weights, client.state = done.weights, done.state
        return done, new

    def score(self, message: Message | None) -> Envelope:
        """The scores of the client as it stands or after receiving a message; nothing is kept."""
        self._take_up()
        return Envelope("score", {part: score_to_json(score) for part, score in self.scores(message).items()})

    def finish(self, message: Message | None, share: bool) -> Envelope:
        """Write the client's personal model to the disk, and send it if this node shares it."""
        about = self._entry()
        self._take_up()
        task = self._task
        client = self.client
        method = self._method
        keeper = working_copy(client, task.variant, self._model_factory)
        keeper.round = task.round
        if message is not None:
            method.receive(keeper, freeze(message))
        weights = {
            name: tensor.detach().cpu() for name, tensor in export_state(method.personal_model(keeper.model)).items()
        }
        alone = uses_default_predict(method)
        state = {} if alone else keeper.method_state
        folder = RunFolder(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        with folder.models() as write:
            write(client.id, weights, state, about)
        return Envelope("finish", {"shared": share}, serialize(merge_client_state(weights, state)) if share else b"")

    def _entry(self) -> Mapping[str, Any]:
        """The entry of the personal model in the list of models beside it, of this node's own recipe and data."""
        source, chosen = self._source, self._model_factory.chosen
        named = self._recipe.method.name
        return model_entry(
            self.client,
            self._method,
            Task(
                classes=len(self._names),
                class_names=self._names,
                feature_names=source.feature_names,
                label_column=self._recipe.data.label_column,
            ),
            self._recipe.to_dict(),
            named if is_own(named) else self._method.name,
            named=True,
            auxiliary=None if chosen is None else chosen.network,
            variant=self._task.variant,
            round=self._task.round,
        )

    def scores(self, message: Message | None) -> Scores:
        """Of the task's parts that the client has rows of, as it stands or after receiving a message."""
        task = self._task
        parts = [part for part in task.parts if len(getattr(self.client.data, part))]
        batch = EvalBatch([EvalJob(self.client, task.variant, message, task.round, parts)])
        memory = ScoreCache(task.figures)
        return score_batch(batch, self._method, self._model_factory, memory)[0] if parts else {}

    def _take_up(self) -> None:
        """Restore the client's state when it last counted."""
        base = self._task.base
        if self._place.begin_anew and base not in self._checkpoints.marks():
            base = ""
        self.restore(self._checkpoints.read(base))

    def restore(self, kept: ClientSnapshot) -> None:
        """Take over a stored state.

        Raises:
            RunError: its weights are of another network.
        """
        client = self.client
        if kept.data not in ("", self._data):
            warnings.warn(f"client {client.id}: its rows are not those of its state in {self._folder}", stacklevel=2)
        client.state = kept.state
        if kept.weights is not None:
            try:
                client.weights = self._store.store(0, self._name, kept.variant, kept.weights)
            except (ValueError, KeyError) as error:
                where = f"client {client.id} ('{self._name}')"
                raise RunError(f"{where}: the state on its disk is not of this network: {error}") from None


def to_result(task: TaskRequest, done: JobResult, new: bool, kept: Scores) -> TaskResult:
    """The facts of a job's answer."""
    return TaskResult(
        mark=task.mark if done.counts else "",
        variant=task.variant,
        steps=done.trained.steps,
        samples=done.trained.samples,
        loss=float(done.trained.loss),
        bytes_up=done.bytes_up,
        sums=done.sums,
        refused=done.refused,
        new=new,
        score=None if done.score is None else score_to_json(done.score),
        kept={part: score_to_json(score) for part, score in kept.items()},
    )
