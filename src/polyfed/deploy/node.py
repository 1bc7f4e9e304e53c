"""A node: one client with its own data, network and disk, which does what the server's letters ask.

What it does with a job is what workers do with theirs (`executors.carry_out`), so that the numbers are the same. It
keeps nothing in memory: every letter may come to another process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, read_only
from polyfed.core.method import Method, uses_default_predict
from polyfed.core.modules import exported, split
from polyfed.deploy.answer_ledger import Ledger
from polyfed.deploy.node_checkpoints import Kept, Shelf, secret, token
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_data import auxiliary_network, data_of_node, renumbered
from polyfed.deploy.protocol import (
    Introduction,
    Letter,
    Report,
    Task,
    agreed,
    difference,
    joined,
    pack,
    read,
    score_told,
    unpack,
)
from polyfed.engine.architectures import architectures_of
from polyfed.engine.arguments import plugins_of
from polyfed.engine.compatibility import check_fit
from polyfed.engine.device import parse_device
from polyfed.engine.evaluation import Memory
from polyfed.engine.executors.base import Job, Outcome, Scores, Scoring, at_work, carry_out, score_parts
from polyfed.engine.model_readme import Guide
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.run_loop import one_thread
from polyfed.engine.weight_store import Store, row_of
from polyfed.errors import ConfigError, RunError
from polyfed.experiments.build import assign_architectures, auxiliary_candidates
from polyfed.experiments.data_cache import DataCache, input_normalization
from polyfed.models.zoo import build
from polyfed.registry import is_own
from polyfed.results.stored_files import check_nodes_entry

_ANSWERS = {True: 1, False: 10}  # whether noise hides rows -> different requests of a kind that are answered in a round
_SCORINGS = 4  # of a client in a round: as it stands and after receiving, before and after a last exchange
_UNSEEN = ("experiment", "settings", "about")  # what of a request changes nothing in the answer


class Node:
    """One client's node.

    Args:
        recipe: the same experiment as the server's. place: what is this node's own.
        data: where data are kept between letters that come to one process.

    Raises:
        ConfigError: its data or its network cannot be had.
    """

    def __init__(self, recipe: Recipe, place: NodeConfig, data: DataCache | None = None) -> None:
        self._place = place
        self._data = data or DataCache()
        if place.root is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": place.root})})
        self._recipe = recipe.with_run(device=place.device or recipe.run.device)

    def answer(self, letter: Letter) -> Letter:
        """What the node says to a letter.

        Raises:
            PolyfedError: it cannot do what is asked; says why.
        """
        task = read(Task, letter.facts)
        if found := difference(task.settings, agreed(self._recipe)):
            raise ConfigError(f"expected the server's recipe at client {self._place.client}, but {found}")
        with one_thread():
            turn = Turn(self._recipe, self._place, self._data, task)
            if letter.kind == "hello":
                return Letter("hello", turn.introduction().model_dump())
            self._count(letter, task, turn)
            message = unpack(letter.body)[0] if task.has_message else None
            if letter.kind == "train":
                return turn.train(message or {})
            return turn.score(message) if letter.kind == "score" else turn.finish(message, self._place.share)

    def _count(self, letter: Letter, task: Task, turn: Turn) -> None:
        """Note that this is answered.

        Raises:
            ConfigError: there is no such round in this node's recipe. RunError: too much was answered already.
        """
        rounds = self._recipe.training.rounds
        last = rounds + 1 if turn.closes else rounds  # the closing round has a number of its own
        trains = letter.kind == "train" and not task.closing
        if task.round > last or (trains and not 1 <= task.round <= rounds):
            raise ConfigError(f"expected a round from 1 to {rounds}, as in this node's recipe, got {task.round}")
        own = json.dumps(agreed(self._recipe), sort_keys=True).encode()
        ledger = Ledger(self._place.state / "answered" / f"{hashlib.sha256(own).hexdigest()[:16]}.jsonl")
        privacy = self._recipe.privacy
        most = self._place.answers or _ANSWERS[bool(privacy.upload_noise_multiplier or privacy.noise_multiplier)]
        if letter.kind == "train":
            when = "the closing round" if task.closing else f"round {task.round}"  # which comes once in a run
            ledger.count(f"training in {when}, passage {task.place}", turn.request(letter), most)
        elif letter.kind == "score":
            ledger.count(f"scores in round {task.round}", turn.request(letter), _SCORINGS * most)
        else:
            ledger.count(f"the model after round {task.round}", turn.request(letter), most)


class Turn:
    """The client at the time of one letter.

    Args:
        recipe: the experiment. place: which client it is. data: where data are kept. task: what is asked.

    Attributes:
        client: see `Client`; as it begins, until `become`.
    """

    def __init__(self, recipe: Recipe, place: NodeConfig, data: DataCache, task: Task) -> None:
        self._task = task
        self._place = place
        self._recipe = recipe
        self._method: Method = recipe.chosen_method
        dealt, number = data_of_node(recipe, place, data)
        self._source, source = dealt.source, dealt.source
        self._names = list(source.class_names) if task.class_names is None else task.class_names
        count = recipe.data.client_count or max(len(dealt.clients), place.client + 1)
        self._name = place.architecture or assign_architectures(recipe, count)[place.client]
        self._prepare = input_normalization(source, recipe.models.architectures)
        self.client = Client(self._name, dealt.clients[number].train, prepare=self._prepare)
        self.client.id = place.client
        self.client.classes = len(self._names)
        self.client.seed = recipe.run.seed
        self.client.training = recipe.training
        self.client.public = data.public(recipe)
        self.client.privacy = recipe.privacy
        plugins = plugins_of(recipe.build_plugins())
        self.client.plugins = plugins
        if place.secret and (recipe.privacy.upload_noise_multiplier or recipe.privacy.max_grad_norm):
            self.client.secret = secret(place.state)
        self.client.data = renumbered(dealt.clients[number], source.class_names, self._names)
        for plugin in plugins:
            plugin.prepare_client(self.client, count)
        shape = tuple(source.train.x.shape[1:])
        width = recipe.models.feature_dim
        self._beside = beside = auxiliary_network(recipe, self._method, task.auxiliary_model or self._name, self._name)
        builders = {
            name: functools.partial(build, name, shape, len(self._names), width, source.words, beside=recipe.beside)
            for name in {self._name, beside, *auxiliary_candidates(self._method)}
        }
        self._architectures = architectures_of(
            self._method,
            {self._name: builders[self._name]},
            recipe.run.seed,
            parse_device(recipe.run.device),
            others=builders,
            auxiliary=beside,
            precision=recipe.run.precision,
        )
        self._store = Store(self._architectures, [self._name])
        self._folder = place.state / (task.experiment or "none")
        self._shelf = Shelf(self._folder / f"client-{place.client:03d}")

    @property
    def closes(self) -> bool:
        """Whether the method has a closing round."""
        return bool(self._method.final_exchanges())

    def introduction(self) -> Introduction:
        """Who this node is; its data and its network can carry the method.

        Raises:
            ConfigError: they cannot.
        """
        client, source = self.client, self._source
        check_fit(self._method, [client], self._architectures, client.public)
        self._check_statistics()
        model = split(self._architectures.as_built(self._name))
        x = client.data.train.x
        augment = client.training.augmentation
        if augment != "none" and x.dim() != 4:
            raise ConfigError(f"training.augmentation '{augment}' expects images, client {client.id} has none")
        words = -1 if isinstance(source.words, Tensor) else source.words or 0
        return Introduction(
            client=client.id,
            token=token(self._place.state, self._task.experiment),
            dataset=source.name,
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
            architecture=self._name,
            feature_dim=model.feature_dim,
            head={name: list(tensor.shape) for name, tensor in model.head.state_dict().items()},
            linear=isinstance(model.head, nn.Linear) and model.head.bias is not None,
        )

    def _check_statistics(self) -> None:
        """Where [privacy] bounds what leaves the node, mean and spread of its own rows do not.

        Raises:
            ConfigError: they would.
        """
        privacy, own = self._recipe.privacy, self._source.prepare
        of_rows = any(own.mean) or any(value != 1 for value in own.std)
        computed = self._recipe.data.mean is None and self._prepare == own and of_rows
        if self._place.data is not None and computed and (privacy.upload_clip_norm or privacy.max_grad_norm):
            raise ConfigError(
                f"expected data.mean and data.std in the recipe, as with [privacy] mean and spread of client "
                f"{self.client.id}'s own rows are not sent, got neither"
            )

    def request(self, letter: Letter) -> str:
        """What tells a letter from others: all that the answer depends on, the client's own state with it."""
        asked = {key: value for key, value in letter.facts.items() if key not in _UNSEEN}
        parts = (json.dumps(asked, sort_keys=True).encode(), letter.body, self._shelf.stored(self._task.base))
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def train(self, message: Message) -> Letter:
        """One job, as a worker does it; what the client then is goes to the disk before the answer leaves."""
        task, client = self._task, self.client
        self._take_up()
        self._shelf.go_back(task.base)
        done, new = self.carry_out(message)
        kept: Scores = {}
        if done.counts:
            row = row_of(client)
            self._shelf.write(task.mark, Kept("" if row is None else row.variant, row, client.state), task.base)
            kept = self.scores(None)
        return Letter("train", reported(task, done, new, kept).model_dump(), pack(done.message))

    def carry_out(self, message: Message) -> tuple[Outcome, bool]:
        """What comes of the job, which the client then is if it counts; and whether it has new weights."""
        task = self._task
        client = self.client
        method = self._method
        exchanges = method.final_exchanges() if task.closing else method.exchanges(task.round)
        if task.place >= len(exchanges):
            raise RunError(f"expected one of {len(exchanges)} passages in round {task.round}, got {task.place}")
        exchange = exchanges[task.place]
        job = Job(
            client, read_only(message), task.variant, exchange, task.round, task.scores, task.from_scores, task.closing
        )
        fresh = functools.partial(self._store.fresh, self._name, task.variant)
        done = carry_out(job, method, self._architectures, fresh)
        new = done.counts and done.weights is not client.weights
        if done.counts:
            client.weights, client.state = done.weights, done.state
        return done, new

    def score(self, message: Message | None) -> Letter:
        """The scores asked for, of the client as it stands or after receiving a message; nothing is kept."""
        self._take_up()
        return Letter("score", {part: score_told(score) for part, score in self.scores(message).items()})

    def finish(self, message: Message | None, share: bool) -> Letter:
        """Write the client's personal model to the disk, and hand it out if this node shares it."""
        about = self._entry()
        self._take_up()
        task = self._task
        client = self.client
        method = self._method
        keeper = at_work(client, task.variant, self._architectures)
        keeper.round = task.round
        if message is not None:
            method.receive(keeper, read_only(message))
        weights = {
            name: tensor.detach().cpu() for name, tensor in exported(method.personal_model(keeper.model)).items()
        }
        state = {} if uses_default_predict(method) else keeper.state
        folder = RunFolder(self._folder)
        guide = Guide(self._architectures)
        self._folder.mkdir(parents=True, exist_ok=True)
        with folder.models() as write:
            write(client.id, weights, state, about)
            guide.add(client.id, weights, about)
        folder.write_guide(guide.text())
        return Letter("finish", {"shared": share}, pack(joined(weights, state)) if share else b"")

    def _entry(self) -> Mapping[str, Any]:
        """What the server says of the personal model, for the list of models beside it.

        All that names code or files, which whoever loads the model would import or open, is this node's own.

        Raises:
            RunError: it is no such entry, or one of another network or method than this client's.
        """
        about, x = self._task.about, self.client.data.train.x
        method = self._recipe.method.name
        settings = self._recipe.to_dict()
        hyperparameters: dict[str, Any] = (
            dataclasses.asdict(self._method) if dataclasses.is_dataclass(self._method) else {}
        )
        own = {
            "method": method if is_own(method) else self._method.name,
            "hyperparameters": json.loads(json.dumps(hyperparameters)),
            "architecture": self._name,
            "classes": len(self._names),
            "class_names": self._names,
            "feature_dim": self._recipe.models.feature_dim,
            "input": {"shape": list(x.shape[1:]), "type": str(x.dtype).removeprefix("torch.")},
        }
        try:
            check_nodes_entry(about)
            if about["auxiliary_model"] not in (None, self._beside):
                raise ValueError(f"'auxiliary_model' is {about['auxiliary_model']!r:.60}, not {self._beside!r:.60}")
            for key, value in own.items():
                if about[key] != value:
                    raise ValueError(f"'{key}' is {about[key]!r:.60}, not {value!r:.60}")
        except ValueError as error:
            raise RunError(f"expected the entry of this client's model, got another: {error}") from None
        modules = settings["run"].get("modules")
        found = {key: value for key, value in about.items() if key != "modules"}
        found |= {"vectors": settings["data"].get("word_vectors")}
        return found if modules is None else {**found, "modules": modules}

    def scores(self, message: Message | None) -> Scores:
        """Of the parts asked for that the client has rows of, as it stands or after receiving a message."""
        task = self._task
        parts = [part for part in task.parts if len(getattr(self.client.data, part))]
        asked = Scoring(self.client, task.variant, message, task.round, parts)
        return score_parts(asked, self._method, self._architectures, Memory(task.from_scores)) if parts else {}

    def _take_up(self) -> None:
        """Be what the client was when it last counted."""
        base = self._task.base
        if self._place.anew and base not in self._shelf.marks():
            base = ""
        self.become(self._shelf.read(base))

    def become(self, kept: Kept) -> None:
        """Be the client that this is.

        Raises:
            RunError: its weights are of another network.
        """
        client = self.client
        client.state = kept.state
        if kept.weights is not None:
            try:
                client.weights = self._store.kept(0, self._name, kept.variant, kept.weights)
            except (ValueError, KeyError) as error:
                where = f"client {client.id} ('{self._name}')"
                raise RunError(f"{where}: what its disk holds is not of this network: {error}") from None


def reported(task: Task, done: Outcome, new: bool, kept: Scores) -> Report:
    """What a node tells of a job besides the message; see `Report`."""
    return Report(
        mark=task.mark if done.counts else "",
        variant=task.variant,
        steps=done.trained.steps,
        samples=done.trained.samples,
        loss=float(done.trained.loss),
        bytes_up=done.bytes_up,
        sums=done.sums,
        refused=done.refused,
        new=new,
        score=None if done.score is None else score_told(done.score),
        kept={part: score_told(score) for part, score in kept.items()},
    )
