"""A node: one client with its own data, network and disk, which answers the server's envelopes.

It runs a job by the workers' function (`executors.client_work.run_job`), so that the numbers are the same. It keeps
nothing in memory: every envelope may reach another process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.message import ADDENDS, Message
from polyfed.core.method import Method
from polyfed.core.model_factory import with_columns
from polyfed.core.modules import as_split_model
from polyfed.core.randomness import keep_global_rng
from polyfed.core.server import ClientInfo, Server
from polyfed.data.samples import checksum_of
from polyfed.data.transforms import Prepare
from polyfed.deploy.answer_limits import AnswerLimits, scores_with_job
from polyfed.deploy.node_config import NodeConfig, auxiliary_network, data_of_node
from polyfed.deploy.node_disk import ClientSnapshot, NodeCheckpoints, checkpoint_id, load_or_create_key, token
from polyfed.deploy.protocol import (
    JOB_FACTS,
    OF_SUMS,
    SHARED,
    ClientHello,
    Envelope,
    TaskRequest,
    TaskResult,
    parse,
    read_message,
    shared_config,
)
from polyfed.deploy.sums import NodeSum
from polyfed.engine.architectures import build_model_factory
from polyfed.engine.arguments import plugins_of
from polyfed.engine.compatibility import check_compatibility
from polyfed.engine.device import parse_device, single_threaded
from polyfed.engine.evaluation import ScoredClient, figures_of, kept_stages
from polyfed.engine.executors.client_scores import score_batch
from polyfed.engine.executors.client_work import has_weights, run_job
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, Scores, make_job
from polyfed.engine.model_export import at_work, model_entry, parts_of
from polyfed.engine.run_folder import RunFolder, first_difference
from polyfed.engine.scoring import ScoreCache, score_to_json
from polyfed.engine.weight_store import WeightStore, kept_weights
from polyfed.engine.wire import encode
from polyfed.errors import ConfigError, RunError
from polyfed.experiments.build import (
    assign_architectures,
    auxiliary_candidates,
    builder_of_columns,
    check_normalization,
    make_client,
    make_task,
    network_builders,
)
from polyfed.experiments.data_cache import DataCache
from polyfed.places import make_private, without_places
from polyfed.plugins.secure_sums import SecureSummation
from polyfed.registry import is_own

_UNSEEN = ("experiment", "settings", "best", "sum")  # keys of a request without influence on the answer


class Node:
    """One client's node.

    recipe: the same experiment as the server's; as an attribute with what the node's own configuration changes in it.
    data: keeps data between envelopes of one process. ConfigError: its folder is not its own.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig, data: DataCache | None = None) -> None:
        make_private(config.state)
        self._config = config
        self._data = data or DataCache()
        if config.root is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": config.root})})
        self.recipe = recipe.with_run(device=config.device or recipe.run.device)

    def answer(self, envelope: Envelope) -> Envelope:
        """The node's answer.

        Raises:
            PolyfedError: there is none; the reason.
        """
        task = parse(TaskRequest, envelope.facts)
        if found := first_difference(task.settings, shared_config(self.recipe)):
            key, theirs, own = found
            raise ConfigError(
                f"expected the server's recipe at client {self._config.client_id}, but {key} is {theirs!r} at the "
                f"server and {own!r} here"
            )
        with single_threaded():
            turn = NodeTask(self.recipe, self._config, self._data, task)
            if envelope.kind == "hello":
                return Envelope("hello", turn.introduction().model_dump())
            limits = AnswerLimits(self.recipe, self._config, turn.client.n)
            limits.check(envelope.kind, task)
            if envelope.kind in OF_SUMS:
                return NodeSum(self.recipe, self._config, task, limits).answer(envelope.kind)
            turn.check_variant()
            turn.take_up()
            is_scored = envelope.kind == "train" and scores_with_job(self.recipe, task)
            is_scored = limits.count(envelope.kind, task, turn.request(envelope), is_scored)
            message = read_message(envelope.body) if envelope.body else None
            if envelope.kind == "train":
                return turn.train(message or {}, is_scored, limits)
            if envelope.kind == "score":
                scores = turn.scores(message, task.parts)
                return Envelope("score", {part: score_to_json(score) for part, score in scores.items()})
            return turn.finish(message)


class NodeTask:
    """The client at the time of one envelope.

    Attributes:
        client: see `Client`; as it begins, until `take_up`. task: what is asked for.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig, data: DataCache, task: TaskRequest) -> None:
        self.task = task
        self._recipe, self._config = recipe, config
        self._method: Method = recipe.chosen_method
        self._stages = recipe.evaluation.stages(self._method.evaluation_stage)
        self._figures = figures_of(recipe.evaluation, {})
        dataset, place = data_of_node(recipe, config, data)
        self._source, rows = dataset.source, dataset.clients[place]
        self._names = list(self._source.class_names)
        self._data = checksum_of((rows.train, rows.validation, rows.test), [self._names, self._source.feature_names])
        self._count = recipe.data.client_count or max(len(dataset.clients), config.client_id + 1)
        network = config.architecture or assign_architectures(recipe, self._count)[config.client_id]
        columns = rows.columns
        name = network if columns is None else with_columns(network, columns.names)
        self._prepare = check_normalization(recipe, self._source)
        self.client = client = make_client(name, rows, self._prepare)
        self._client_task = make_task(recipe, dataset, data)
        plugins = plugins_of(recipe.build_plugins())
        self._client_task.assign(client, config.client_id, recipe.run.seed, recipe.training, plugins)
        client.privacy = recipe.privacy
        for plugin in plugins:
            if isinstance(plugin, SecureSummation):
                plugin.rows = task.sum.all_rows
        if config.has_secret and recipe.privacy.effective():
            client.secret = load_or_create_key(config.state)
        self._auxiliary = auxiliary_network(recipe, self._method, task.auxiliary_model or network, network)
        networks = [network, self._auxiliary, *auxiliary_candidates(self._method)]
        builders = network_builders(recipe, self._source, networks, dataset.classes)
        if columns is not None:
            builders[name] = builder_of_columns(recipe, network, columns, dataset.classes)
        self._model_factory = build_model_factory(
            self._method,
            {name: builders[name]},
            recipe.run.seed,
            parse_device(recipe.run.device),
            others=builders,
            auxiliary=self._auxiliary,
        )
        self._store = WeightStore(self._model_factory, [name])
        self._folder = config.state / (task.experiment or "none")
        self._checkpoints = NodeCheckpoints(self._folder / f"client-{config.client_id:03d}")

    def introduction(self) -> ClientHello:
        """The facts about this node.

        Raises:
            ConfigError: its data or its network do not fit the method.
        """
        client, source = self.client, self._source
        check_compatibility(self._method, [client], self._model_factory, client.public)
        self._check_statistics()
        model = as_split_model(self._model_factory.build_raw(client.architecture))
        x = client.data.train.x
        columns = client.columns
        prepare = self._prepare
        if columns is not None:  # nobody else has inputs like these, and what they are on average stays here
            prepare = Prepare((0.0,) * len(columns.names), (1.0,) * len(columns.names), table=True)
        return ClientHello(
            client=client.id,
            token=token(self._config.state, self.task.experiment),
            dataset=without_places(source.name),
            train=client.n,
            validation=len(client.data.validation),
            test=len(client.data.test),
            class_names=self._names,
            feature_names=list(source.feature_names if columns is None else columns.names),
            shape=list(x.shape[1:]),
            dtype=str(x.dtype).removeprefix("torch."),
            mean=list(prepare.mean),
            std=list(prepare.std),
            table=prepare.table,
            words=-1 if isinstance(source.words, Tensor) else source.words or 0,
            categories=list(client.categories),
            architecture=client.architecture,
            feature_dim=model.feature_dim,
            linear=isinstance(model.head, nn.Linear) and model.head.bias is not None,
            columns=[] if columns is None else list(columns.places),
        )

    def _check_statistics(self) -> None:
        """Where [privacy] bounds uploads, mean and spread of the node's own rows must not leave it."""
        privacy, prepare = self._recipe.privacy, self._prepare
        of_rows = any(prepare.mean) or any(value != 1 for value in prepare.std)
        computed = self._recipe.data.mean is None and prepare == self._source.prepare and of_rows
        bounded = privacy.upload_clip_norm or privacy.max_grad_norm or privacy.noise_multiplier
        if self._config.data is not None and computed and bounded:
            raise ConfigError(
                f"expected data.mean and data.std in the recipe, as with [privacy] mean and spread of client "
                f"{self.client.id}'s own rows are not sent, got neither"
            )

    def request(self, envelope: Envelope) -> str:
        """A digest of all that the answer depends on: the node's own recipe, rows and client's state, too."""
        asked = {key: value for key, value in envelope.facts.items() if key not in _UNSEEN}
        own = [shared_config(self._recipe), self._recipe.run.device, self.client.architecture, self._data]
        facts = json.dumps([asked, own], sort_keys=True).encode()
        parts = (facts, envelope.body, self._checkpoints.stored(self.task.base))
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def check_variant(self) -> None:
        """Whether the network that is asked for is the one that the node's own recipe gives its client in the round.

        Raises:
            ConfigError: it is not.
        """
        task, client, recipe = self.task, self.client, self._recipe
        server = Server(
            {number: ClientInfo(client.architecture, client.n) for number in range(self._count)},
            self._model_factory,
            rounds=recipe.training.rounds,
            classes=client.classes,
            seed=recipe.run.seed,
        )
        server.round = task.round
        own = self._method.variant(server, client.id)
        if task.variant != own:
            raise ConfigError(
                f"expected the variant '{own}' of client {client.id}'s network in round {task.round}, as this node's "
                f"recipe has it for {self._count} clients, got '{task.variant[:60]}'"
            )

    def take_up(self) -> None:
        """Restore the client's state when it last counted.

        Raises:
            ConfigError: the client's rows are no longer those of that state.
            RunError: its weights are of another network.
        """
        client = self.client
        kept = self._checkpoints.read(self.task.base)
        if kept.data not in ("", self._data):
            raise ConfigError(
                "expected the rows that this node has begun the run with, got others: rows, or names of classes or "
                "features, have changed; put them back"
            )
        client.state = kept.state
        if kept.weights is not None:
            try:
                client.weights = self._store.restore(0, client.architecture, kept.variant, kept.weights)
            except (ValueError, KeyError) as error:
                where = f"client {client.id} ('{client.architecture}')"
                raise RunError(f"{where}: the state on its disk is not of this network: {error}") from None

    def train(self, message: Message, is_scored: bool, limits: AnswerLimits) -> Envelope:
        """One job, as a worker does it; the client's new state is on the disk before the answer leaves.

        is_scored: right after local training. limits: raise where the upload must not leave.
        """
        task, client, method = self.task, self.client, self._method
        if not task.is_final:  # which may begin from the best round; a longer run then goes on from the last one
            self._checkpoints.rollback(task.base)
        job = make_job(
            method,
            client,
            message,
            **task.model_dump(include=JOB_FACTS),
            scores=is_scored,
            figures=self._figures,
        )
        with keep_global_rng():
            done = run_job(job, method, self._model_factory, self._store)
        limits.count_release(task, done.message)
        upload = done.message
        if ADDENDS in upload and task.sum.name:
            upload = NodeSum(self._recipe, self._config, task, limits).mask(upload, message)
        elif ADDENDS in upload:  # there is no sum that they could be part of
            upload = {name: value for name, value in upload.items() if name != ADDENDS}
        new = done.counts and done.weights is not client.weights
        if done.counts:
            client.weights, client.state = done.weights, done.state
            own = kept_weights(client)
            snapshot = ClientSnapshot("" if own is None else own.variant, own, client.state, self._data)
            self._checkpoints.write(checkpoint_id(task.round, task.exchange_index), snapshot, (task.base, task.best))
        result = TaskResult(
            steps=done.trained.steps,
            samples=done.trained.samples,
            loss=float(done.trained.loss),
            sums=done.sums,
            refused=done.refused,
            new=new,
            score=None if done.score is None else score_to_json(done.score),
        )
        return Envelope("train", result.model_dump(), encode(upload))

    def scores(self, message: Message | None, parts: Sequence[str]) -> Scores:
        """Of those parts that the client has rows of, as it stands or after receiving a message."""
        task = self.task
        there = [part for part in parts if len(getattr(self.client.data, part))]
        batch = EvalBatch([EvalJob(self.client, task.variant, message, task.round, there)])
        return score_batch(batch, self._method, self._model_factory, ScoreCache(self._figures))[0] if there else {}

    def finish(self, message: Message | None) -> Envelope:
        """Write the client's networks to the disk, as they are scored, and send them if this node shares them.

        What the server's own folder needs of a table goes with them: how missing values and categories became numbers.
        """
        task, client, method = self.task, self.client, self._method
        own = has_weights(client, task.variant, self._model_factory)
        made = {}
        for stage in kept_stages(self._stages):
            view = ScoredClient(client, task.variant, message if stage == "received" or not own else None)
            made[stage] = parts_of(at_work(view, method, self._model_factory, task.round), method)
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(self._folder)
        with folder.models() as write:
            words = None if self._source.vocabulary is None else folder.write_vocabulary(self._source.vocabulary.words)
            entry = self._entry(words)
            write(client.id, made, entry)
        if not self._config.share_model:
            return Envelope("finish", {"shared": False})
        facts = {"shared": True, **{key: entry[key] for key in SHARED if key in entry}}
        return Envelope("finish", facts, encode(made))

    def _entry(self, words: str | None) -> Mapping[str, Any]:
        """The entry of the personal model in the list of models beside it, of this node's own recipe and data.

        words: of texts, the checksum of their file.
        """
        named = self._recipe.method.name
        entry = model_entry(
            self.client,
            self._method,
            self._client_task,
            self._recipe.to_dict(),
            named if is_own(named) else self._method.name,
            named=True,
            model_factory=self._model_factory,
            variant=self.task.variant,
            round=self.task.round,
            words=words,
        )
        return {**entry, "stage": self._stages[0]}
