"""What a node sends at most by its own recipe, as a table for whoever operates it, before it joins.

All of it is computed. How often is what `AnswerLimits` enforces. What an answer has, and its bytes, are those of the
node's own introduction, of two trial rounds and a final one with its rows, and of its scores and its model after them;
an upload has the largest size that its form allows. Other clients of the trial have the recipe's rows, or the node's
own again.

Bytes are those of tensors and of the characters of words; a number beside tensors has 8. Names of entries, and what
carries an answer, are not counted: they are the same whatever the rows are.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import PublicData
from polyfed.core.message import ADDENDS, flatten
from polyfed.core.releases import Release
from polyfed.core.upload_forms import UploadContext
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.deploy.answer_limits import AnswerLimits
from polyfed.deploy.masked_sums import KEYS, SEALED, SHARE
from polyfed.deploy.node import Node, NodeTask
from polyfed.deploy.node_config import NodeConfig, data_of_node
from polyfed.deploy.protocol import TaskRequest, decode_body, shared_config
from polyfed.deploy.server import check_recipe
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.plugin import Plugin
from polyfed.engine.privacy_ledger import UNITS, compute_epsilon, group_releases
from polyfed.engine.round_state import Round
from polyfed.engine.scoring import score_to_json
from polyfed.engine.uploads import largest_nbytes
from polyfed.errors import RunError
from polyfed.experiments.build import assign_architectures, build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.trial_rounds import TrialRounds
from polyfed.report.text_tables import NOT_KNOWN, Column, render_text, size, wrapped

__all__ = ["Answer", "AnswerTable", "answer_table", "facts_nbytes"]

_NUMBER = 8  # bytes
_FIGURES = ("loss", "steps", "samples", "whether weights are new", "why nothing counts")  # beside an upload
_FINAL = "final round"
_SHOWN = 6  # names of what an answer has
_IN_TOTAL = f"'{ADDENDS}' in a total"
_WIDTH = 120  # columns


@dataclass(frozen=True)
class Answer:
    """A kind of answer.

    Attributes:
        name: "training, round 1", say.
        tensors: name, shape and type of each. figures: names of all else.
        nbytes: of one, at most.
        usual: how many a run of the recipe asks for, at most. most: how many different ones the node gives, over all
            restarts and runs of this recipe.
        rows: which it tells of. hidden_by: what hides them in the tensors.
    """

    name: str
    tensors: tuple[str, ...]
    figures: tuple[str, ...]
    nbytes: int
    usual: int = 1
    most: int = 1
    rows: str = ""
    hidden_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerTable:
    """All kinds of answers of a node. ``str(table)`` is a page for people.

    Attributes:
        title: whose. answers: one for each kind. delta: at which epsilon is told.
        epsilon, epsilon_at_most: of the usual answers and of all, by unit; empty without noise.
    """

    title: str
    answers: tuple[Answer, ...]
    delta: float
    epsilon: Mapping[str, float]
    epsilon_at_most: Mapping[str, float]

    def __str__(self) -> str:
        answers = self.answers
        columns = [
            Column("answer", [one.name for one in answers], words=True),
            Column("in a run", [str(one.usual) for one in answers]),
            Column("at most", [str(one.most) for one in answers]),
            Column("bytes\nof one", [size(one.nbytes) for one in answers]),
            Column("bytes\nat most", [size(one.nbytes * one.most) for one in answers]),
            Column("of rows", [one.rows or NOT_KNOWN for one in answers], words=True),
            Column("hidden by", [", ".join(one.hidden_by) or "nothing" for one in answers], words=True),
        ]
        lines = [self.title, "", render_text(columns, _WIDTH), ""]
        for one in answers:
            parts = [*_shortened(one.tensors, "tensors"), *_shortened(one.figures, "figures")]
            lines.append(wrapped(f"{one.name}: {'; '.join(parts)}", _WIDTH))
        for unit, value in self.epsilon.items():
            most = f"{value:.3g} in a run, {self.epsilon_at_most[unit]:.3g} of all answers"
            lines.append(wrapped(f"epsilon of a {unit} at delta {self.delta:g}: {most}", _WIDTH))
        return "\n".join(lines)


def answer_table(recipe: Recipe, config: NodeConfig) -> AnswerTable:
    """What a node with this recipe and configuration sends at most. Nothing of it is kept.

    Raises:
        ConfigError: its data or its network do not fit, or nodes cannot follow the recipe.
        RunError: the method fails.
    """
    check_recipe(recipe)
    with tempfile.TemporaryDirectory() as folder:  # for the secrets that an introduction needs
        return _Trial(recipe, config.model_copy(update={"state_dir": folder})).table()


def facts_nbytes(value: Any) -> int:
    """Bytes of what an envelope says beside tensors: 8 for each number, those of words in UTF-8."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Mapping):
        return sum(map(facts_nbytes, value.values()))
    return sum(map(facts_nbytes, value)) if isinstance(value, Sequence) else _NUMBER


# the trial ----------------------------------------------------------------------------------------------------------

_Noted = tuple[Answer, tuple[Release, ...]]  # an upload, and what it releases with noise


class _Trial:
    """Trial rounds with a node's client, and the node after them.

    Args:
        recipe: the node's. config: its configuration, with a folder that may be written into.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig) -> None:
        self._recipe = Node(recipe, config).recipe
        self._method = self._recipe.chosen_method
        request = TaskRequest(settings=shared_config(self._recipe))
        self._hello = NodeTask(self._recipe, config, DataCache(), request).introduction().model_dump()
        federation = _federation(self._recipe, config)
        recorder = _Recorder(config.client_id)
        federation.plugins.append(recorder)
        TrialRounds(federation, config.client_id).play()
        self._noted, self._clients = recorder.noted, len(federation.clients)
        self._message = self._method.broadcast(federation.server, config.client_id) or None
        chosen = federation.model_factory.chosen
        facts = {
            "round": federation.server.round,
            "variant": self._method.variant(federation.server, config.client_id),
            "auxiliary_model": "" if chosen is None else chosen.network,
        }
        self._node = NodeTask(self._recipe, config, DataCache(), request.model_copy(update=facts))
        self._client = self._node.client
        trained = federation.clients[config.client_id]
        self._client.weights, self._client.state = trained.weights, trained.state
        self._limits = AnswerLimits(self._recipe, config, self._client.n)

    def table(self) -> AnswerTable:
        rows = ", ".join(f"{len(getattr(self._client.data, part))} {part}" for part in ("train", "validation", "test"))
        hello = Answer("introduction", (), tuple(self._hello), facts_nbytes(self._hello))
        sent = list(self._uploads())
        uploads = [upload for upload, _ in sent]
        return AnswerTable(
            f"What the node of client {self._client.id} sends at most ({self._method.name}; rows: {rows})",
            (hello, *uploads, *self._masks(uploads), self._scores(), self._model()),
            self._recipe.privacy.delta,
            self._epsilon([(releases, upload.usual) for upload, releases in sent], 1),
            self._epsilon([(releases, upload.most) for upload, releases in sent], self._limits.runs),
        )

    def _uploads(self) -> Iterator[_Noted]:
        """Those of round 1, of later rounds and of the final one, exchange by exchange."""
        method = self._method
        asked: Counter[tuple[str, str]] = Counter()
        for number in range(1, self._recipe.training.rounds + 1):
            asked.update((_when(number), exchange.name) for exchange in method.exchanges(number))
        asked.update((_FINAL, exchange.name) for exchange in method.final_exchanges())
        are_several = len({name for _, name in asked}) > 1
        for (when, name), usual in asked.items():
            places = [(when, name), (_when(1), name), (_when(2), name)]  # in one of them it may have diverged
            noted = next((self._noted[place] for place in places if place in self._noted), None)
            if noted is None:
                raise RunError(
                    f"expected an upload of client {self._client.id} in '{name}', got none: its work is refused"
                )
            most = self._limits.most("train", usual)
            place = f"{when}, '{name}'" if are_several else when
            yield replace(noted[0], name=f"training, {place}", usual=usual, most=most), noted[1]

    def _masks(self, uploads: Sequence[Answer]) -> Iterator[Answer]:
        """Answers by which clients agree on the masks of sums, and take them off the totals."""
        sums = sum(one.usual for one in uploads if _IN_TOTAL in one.hidden_by)
        if not sums:
            return
        everybody, begun, totals = self._clients, self._limits.most_sums(sums), self._limits.most_totals(sums)
        keys, sealed, opened = 2 * KEYS, everybody * 2 * SEALED, everybody * 2 * SHARE  # characters of bytes in hex
        yield Answer("keys of a sum", (), ("public keys",), keys, sums, begun)
        yield Answer("shares of masks", (), ("encrypted ones",), sealed, sums, begun)
        yield Answer("opening a total", (), ("shares of masks",), opened, sums, totals)

    def _scores(self) -> Answer:
        """By test and validation rows: as often as `AnswerLimits` allows in a run, each with all of them."""
        found = self._node.scores(self._message, ["test", "validation"])
        data, classes = self._client.data, len(self._hello["class_names"])
        nbytes = facts_nbytes([score_to_json(replace(score, pairs=score.pairs[:0])) for score in found.values()])
        figures = [f"{name} of {part} rows" for part, score in found.items() for name in score.figures]
        figures += [f"the same by '{other}'" for score in found.values() for other in score.others]
        if any(len(score.pairs) for score in found.values()):
            nbytes += 3 * _NUMBER * min(len(data.test), classes**2)
            figures.append("counts of the pairs of classes")
        if "after_training" in self._recipe.evaluation.stages(self._method.evaluation_stage):
            nbytes *= 2
        most = self._limits.most("score", 0)
        usual = most // self._limits.runs
        return Answer("scores", (), tuple(dict.fromkeys(figures)), nbytes, usual, most, "test and validation")

    def _model(self) -> Answer:
        """The answer to the request to write its model."""
        told = self._node.finish(self._message)
        stages = decode_body(told.body) if told.body else {}
        made = [(stage, flatten(part)) for stage, parts in stages.items() for part in parts]
        tensors = {f"{stage} {name}": tensor for stage, part in made for name, tensor in part.items()}
        nbytes = facts_nbytes(told.facts) + sum(tensor.nbytes for tensor in tensors.values())
        most = self._limits.most("finish", 1)
        name, rows = ("model at the end", "training") if tensors else ("end, without a model", "")
        return Answer(name, _described(tensors), tuple(told.facts), nbytes, 1, most, rows)

    def _epsilon(self, sent: Sequence[tuple[Sequence[Release], int]], once: int) -> dict[str, float]:
        """By unit, of releases that are made so often. once: how often one with the same numbers can have others."""
        every = [replace(one, times=one.times * times) for releases, times in sent for one in releases]
        account = [replace(one, times=once if one.once else n) for one, n in group_releases(every).items()]
        by_unit = {unit: [one for one in account if one.unit == unit] for unit in UNITS}
        return {unit: compute_epsilon(found, self._recipe.privacy.delta) for unit, found in by_unit.items() if found}


def _federation(recipe: Recipe, config: NodeConfig) -> Federation:
    """The node's client with its rows and its network, among the recipe's other clients."""
    data = _TrialData(recipe, config)
    names = assign_architectures(recipe, len(data.federated(recipe).clients))
    names[config.client_id] = config.architecture or names[config.client_id]
    models = recipe.models.model_copy(update={"architectures": names, "assignment": "round_robin"})
    tried = recipe.model_copy(update={"models": models})
    return build_federation(tried.with_run(executor="serial", workers=1, loggers=[]), data=data)


class _TrialData(DataCache):
    """The clients' rows are the recipe's, or the node's own for each; public ones are the recipe's."""

    def __init__(self, recipe: Recipe, config: NodeConfig) -> None:
        super().__init__()
        self._recipes = DataCache()
        self._dataset, place = data_of_node(recipe, config, self._recipes)
        if config.data is not None:
            count = max(recipe.data.client_count or 0, config.client_id + 1)
            clients = (self._dataset.clients[place],) * count
            self._dataset = replace(self._dataset, clients=clients, names=())

    def federated(self, recipe: Recipe) -> FederatedDataset:
        """See `DataCache`."""
        return self._dataset

    def public(self, recipe: Recipe) -> PublicData | None:
        """See `DataCache`."""
        return self._recipes.public(recipe)


class _Recorder(Plugin):
    """Notes what one client sends: `noted`, by the round and the exchange's name."""

    name = "answers of a trial"

    def __init__(self, client: int) -> None:
        super().__init__()
        self._client = client
        self.noted: dict[tuple[str, str], _Noted] = {}
        self._counted: Counter[int] = Counter()  # round -> its releases so far

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Note what the client has sent in an exchange, and what the ledger has counted of it."""
        for job, left in zip(jobs, sent, strict=True):
            if left.client_id != self._client or not left.counts:
                continue
            released = round.notes["privacy"].get(self._client, [])
            releases = tuple(released[self._counted[round.number] :])
            self._counted[round.number] = len(released)
            known = UploadContext(round.method, round.server, self._client, job.message)
            figures = (*_FIGURES, *left.sums)
            nbytes = largest_nbytes(round.method.upload_form, left.message, known) + _NUMBER * len(figures)
            hidden = [f"noise on {one.what}" for one in releases] + [_IN_TOTAL] * (ADDENDS in left.message)
            told = _described(flatten(left.message))
            upload = Answer("", told, figures, nbytes, rows="training", hidden_by=(*dict.fromkeys(hidden),))
            when = _FINAL if job.is_final else _when(round.number)
            self.noted[when, job.exchange.name] = upload, releases


def _when(number: int) -> str:
    return "round 1" if number == 1 else "later rounds"


def _described(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Name, shape and type of each."""
    return tuple(
        f"{name} {'x'.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    )


def _shortened(names: Sequence[str], what: str) -> list[str]:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what} {', '.join(names[:_SHOWN])}{more}"] if names else []
