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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import PublicData
from polyfed.core.message import ADDENDS, flatten
from polyfed.core.releases import Release
from polyfed.core.upload_forms import UploadContext
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.deploy.answer_limits import AnswerLimits, scores_with_job
from polyfed.deploy.masked_sums import Participant
from polyfed.deploy.node import Node, NodeTask
from polyfed.deploy.node_config import NodeConfig, data_of_node
from polyfed.deploy.protocol import TaskRequest, decode_body, shared_config
from polyfed.deploy.server import check_recipe
from polyfed.engine.evaluation import figures_of
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.plugin import Plugin
from polyfed.engine.privacy_ledger import UNITS, compute_epsilon, group_releases
from polyfed.engine.round_state import Round
from polyfed.engine.scoring import COUNTS, score_to_json
from polyfed.engine.uploads import largest_nbytes
from polyfed.errors import RunError
from polyfed.experiments.build import assign_architectures, build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.trial_rounds import TrialRounds
from polyfed.report.text_tables import NOT_KNOWN, Column, formatted, render_text, size, wrapped

__all__ = ["Answer", "AnswerTable", "answer_table", "facts_nbytes"]

_NUMBER = 8  # bytes
_FIGURES = ("loss", "steps", "samples", "whether weights are new", "why nothing counts")  # beside an upload
_SHOWN = 6  # names of an answer's tensors, and of its figures
_WIDTH = 120  # columns


@dataclass(frozen=True)
class Answer:
    """A kind of answer.

    Attributes:
        name: "training, round 1", say.
        usual: how many a run of the recipe asks for, at most. most: how many different ones the node gives, over all
            restarts and runs of this recipe; None: any number, as they tell of no rows.
        tensors: name, shape and type of each. figures: names of all else.
        nbytes: of one, at most.
        rows: how many it tells of; 0: none. part: which those are.
        hidden_by: what hides rows in the tensors.
        epsilon: by unit, of the usual answers; empty without noise. epsilon_at_most: of all.
    """

    name: str
    usual: int
    most: int | None
    tensors: tuple[str, ...]
    figures: tuple[str, ...]
    nbytes: int
    rows: int = 0
    part: str = ""
    hidden_by: tuple[str, ...] = ()
    epsilon: Mapping[str, float] = field(default_factory=dict)
    epsilon_at_most: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes_at_most(self) -> int | None:
        """Of all answers together."""
        return None if self.most is None else self.nbytes * self.most

    @property
    def bits_per_row(self) -> float | None:
        """Of all answers together, at most, as if each bit told of rows; None: it tells of none."""
        return 8 * self.nbytes_at_most / self.rows if self.rows and self.nbytes_at_most is not None else None

    def fields(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "bits_per_row": self.bits_per_row}


@dataclass(frozen=True)
class AnswerTable:
    """All kinds of answers of a node. ``str(table)`` is a page for people.

    Attributes:
        title: whose. answers: one for each kind. delta: at which epsilon is told. epsilon, epsilon_at_most: of all
            answers together, by unit; empty without noise.
    """

    title: str
    answers: tuple[Answer, ...]
    delta: float
    epsilon: Mapping[str, float]
    epsilon_at_most: Mapping[str, float]

    def __str__(self) -> str:
        return "\n".join(_page(self))


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


class _Trial:
    """Trial rounds with a node's client, and the node after them.

    Args:
        recipe: the node's. config: its configuration, with a folder that may be written into.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig) -> None:
        self._recipe = Node(recipe, config).recipe
        self._method = self._recipe.chosen_method
        self._number = config.client_id
        request = TaskRequest(settings=shared_config(self._recipe))
        self._hello = NodeTask(self._recipe, config, DataCache(), request).introduction().model_dump()
        federation = _federation(self._recipe, config)
        recorder = _Recorder(self._number)
        federation.plugins.append(recorder)
        TrialRounds(federation, self._number).play()
        self._uploads = recorder.uploads
        self._stages, self._clients = federation.stages, len(federation.clients)
        self._message = self._method.broadcast(federation.server, self._number) or None
        chosen = federation.model_factory.chosen
        facts = {
            "round": federation.server.round,
            "variant": self._method.variant(federation.server, self._number),
            "auxiliary_model": "" if chosen is None else chosen.network,
        }
        self._node = NodeTask(self._recipe, config, DataCache(), request.model_copy(update=facts))
        self._client = self._node.client
        trained = federation.clients[self._number]
        self._client.weights, self._client.state = trained.weights, trained.state
        self._limits = AnswerLimits(self._recipe, config, self._client.n)

    def table(self) -> AnswerTable:
        hello = Answer("introduction", 1, 1, (), tuple(self._hello), facts_nbytes(self._hello))
        sent = list(self._sent())
        data = self._client.data
        rows = ", ".join(f"{len(getattr(data, part))} {part}" for part in ("train", "validation", "test"))
        return AnswerTable(
            f"What the node of client {self._number} sends at most ({self._method.name}; rows: {rows})",
            (
                hello,
                *(self._training(*each) for each in sent),
                *self._masks(sum(times for _, upload, times in sent if upload.totals)),
                self._scores(),
                self._model(),
            ),
            self._recipe.privacy.delta,
            *self._epsilons([(upload, times) for _, upload, times in sent]),
        )

    def _sent(self) -> Iterator[tuple[str, _Upload, int]]:
        """When it is sent, an upload, and how often in a run, for exchanges of each name."""
        rounds = [[one.name for one in self._method.exchanges(n)] for n in range(1, self._recipe.training.rounds + 1)]
        counts = {name: sum(names.count(name) for names in rounds[1:]) for names in rounds for name in names}
        for name, times in counts.items():
            place = "" if len(counts) == 1 else f", '{name}'"
            first = self._uploads.get(("first", name))
            later = self._uploads.get(("later", name), first)  # a client that diverges in the trial sends nothing
            if later is None:
                raise RunError(
                    f"expected an upload of client {self._number} in '{name}', got none: its work is refused"
                )
            if first is not None and times and first.names == later.names:
                largest = max(first, later, key=lambda upload: (upload.nbytes, len(upload.sums)))
                yield f"training, each round{place}", largest, times + 1
                continue
            if first is not None:
                yield f"training, round 1{place}", first, 1
            if times:
                yield f"training, later rounds{place}", later, times
        for exchange in self._method.final_exchanges():
            yield f"training, final round, '{exchange.name}'", self._uploads["final", exchange.name], 1

    def _training(self, name: str, upload: _Upload, times: int) -> Answer:
        figures = (*_FIGURES, *upload.sums)
        return Answer(
            name,
            times,
            self._limits.most("train", times),
            upload.tensors,
            figures,
            upload.nbytes + _NUMBER * len(figures),
            self._client.n,
            "training",
            tuple(dict.fromkeys([*(f"noise on {one.what}" for one in upload.releases), *upload.totals])),
            *self._epsilons([(upload, times)]),
        )

    def _masks(self, sums: int) -> Iterator[Answer]:
        """Answers by which clients agree on the masks of so many sums, and take them off the totals."""
        if not sums:
            return
        own, other = (Participant(bytes(32), client, "trial") for client in (0, 1))
        keys = {0: own.keys(), 1: other.keys()}
        sealed = other.shares(keys, 2)[0]
        opened = own.unmask(keys, {1: sealed}, [1])[1]
        everybody, totals = self._clients, self._limits.most_totals(sums)
        yield Answer("keys of a sum", sums, None, (), ("public keys",), len(keys[0].hex()))
        yield Answer("shares of masks", sums, None, (), ("encrypted ones",), everybody * len(sealed.hex()))
        yield Answer("opening a total", sums, totals, (), ("shares of masks",), everybody * len(opened.hex()))

    def _scores(self) -> Answer:
        """By test and validation rows, right after training, too, where the recipe asks for that."""
        found = self._node.scores(self._message, ["test", "validation"])
        facts = {part: score_to_json(replace(score, pairs=score.pairs[:0])) for part, score in found.items()}
        nbytes = facts_nbytes(facts)
        figures = [f"{name} of {part} rows" for part, score in found.items() for name in score.figures]
        tests = {part: score for part, score in found.items() if part == "test"}
        figures += [f"the same by '{other}'" for score in tests.values() for other in score.others]
        classes = len(self._hello["class_names"])
        data = self._client.data
        if COUNTS in figures_of(self._recipe.evaluation, {}):
            nbytes += 3 * _NUMBER * min(len(data.test), classes**2)
            figures.append("counts of the pairs of classes")
        if "after_training" in self._stages:
            nbytes += nbytes - facts_nbytes(facts.get("validation", {}))
        usual = self._usual_scores()
        rows = len(data.test) + len(data.validation)
        most = self._limits.most("score", usual)
        return Answer("scores", usual, most, (), tuple(figures), nbytes, rows, "test and validation")

    def _usual_scores(self) -> int:
        """Answers with scores in a run: to jobs, and to requests to score what the client receives."""
        recipe, method = self._recipe, self._method
        rounds, final = recipe.training.rounds, method.final_exchanges()
        tasks = [
            TaskRequest(round=number, exchange_index=place)
            for number in range(1, rounds + 1)
            for place in range(len(method.exchanges(number)))
        ]
        tasks += [TaskRequest(round=rounds + 1, exchange_index=place, is_final=True) for place in range(len(final))]
        with_jobs = [scores_with_job(recipe, task) for task in tasks]
        count = sum(at_once or bool(parts) for at_once, parts in with_jobs)
        if "received" in self._stages:
            count += sum(recipe.evaluation.is_due(number, rounds, False) for number in range(1, rounds + 1))
            count += bool(final)
        return count

    def _model(self) -> Answer:
        """The answer to the request to write its model."""
        told = self._node.finish(self._message)
        sent = decode_body(told.body) if told.body else {}
        tensors = {
            f"{stage} {name}": tensor
            for stage, parts in sent.items()
            for part in parts
            for name, tensor in flatten(part).items()
        }
        return Answer(
            "model at the end" if tensors else "end, without a model",
            1,
            self._limits.most("finish", 1),
            _described(tensors),
            tuple(told.facts),
            sum(tensor.nbytes for tensor in tensors.values()) + facts_nbytes(told.facts),
            self._client.n if tensors else 0,
            "training" if tensors else "",
        )

    def _epsilons(self, sent: Sequence[tuple[_Upload, int]]) -> list[dict[str, float]]:
        """By unit, of uploads that are sent so often in a run; and of all that are answered at most."""
        most = [(upload, self._limits.most("train", times)) for upload, times in sent]
        return [self._epsilon(sent, 1), self._epsilon(most, self._limits.runs)]

    def _epsilon(self, sent: Sequence[tuple[_Upload, int]], once: int) -> dict[str, float]:
        """once: how often what is the same whenever it is sent can be another after all."""
        every = [replace(one, times=one.times * times) for upload, times in sent for one in upload.releases]
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


@dataclass(frozen=True)
class _Upload:
    """What leaves the client in an exchange, at most.

    sums: names of figures that the method adds up in training. totals: which of it only totals of all clients show.
    """

    tensors: tuple[str, ...]
    nbytes: int
    sums: tuple[str, ...]
    releases: tuple[Release, ...]
    totals: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Of its tensors, whose shapes may be others in another round."""
        return [tensor.rsplit(" ", 2)[0] for tensor in self.tensors]


class _Recorder(Plugin):
    """Notes what one client sends.

    Attributes:
        uploads: by the round, "first", "later" or "final", and the exchange's name.
    """

    name = "answers of a trial"

    def __init__(self, client: int) -> None:
        super().__init__()
        self._client = client
        self.uploads: dict[tuple[str, str], _Upload] = {}
        self._counted = 0  # releases in the round

    def select(self, round: Round) -> None:
        """Begin a round."""
        self._counted = 0

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Note what the client has sent in an exchange, and what the ledger has counted of it."""
        for job, left in zip(jobs, sent, strict=True):
            if left.client_id != self._client or not left.counts:
                continue
            released = round.notes["privacy"].get(self._client, [])
            known = UploadContext(round.method, round.server, self._client, job.message)
            when = "final" if job.is_final else "first" if round.number == 1 else "later"
            self.uploads[when, job.exchange.name] = _Upload(
                _described(flatten(left.message)),
                largest_nbytes(round.method.upload_form, left.message, known),
                tuple(left.sums),
                tuple(released[self._counted :]),
                (f"'{ADDENDS}' in a total",) if ADDENDS in left.message else (),
            )
            self._counted = len(released)


def _described(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Name, shape and type of each."""
    return tuple(
        f"{name} {'x'.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    )


# the page -----------------------------------------------------------------------------------------------------------


def _page(table: AnswerTable) -> Iterator[str]:
    answers = table.answers
    columns = [
        Column("answer", [one.name for one in answers], words=True),
        Column("in a run", [str(one.usual) for one in answers]),
        Column("at most", ["any" if one.most is None else str(one.most) for one in answers]),
        Column("bytes\nof one", [size(one.nbytes) for one in answers]),
        Column("bytes\nat most", [size(one.nbytes_at_most) for one in answers]),
        Column("bits\na row", [formatted(one.bits_per_row, ",.0f") for one in answers]),
        Column("of rows", [one.part or NOT_KNOWN for one in answers], words=True),
        Column("hidden by", [", ".join(one.hidden_by) or "nothing" for one in answers], words=True),
        Column("epsilon", [_epsilons(one.epsilon, one.epsilon_at_most) for one in answers], words=True),
    ]
    yield table.title
    yield ""
    yield render_text(columns, _WIDTH)
    yield ""
    for one in answers:
        parts = [*_shortened(one.tensors, "tensors"), *_shortened(one.figures, "figures")]
        yield wrapped(f"{one.name}: {'; '.join(parts)}", _WIDTH)
    if table.epsilon:
        told = _epsilons(table.epsilon, table.epsilon_at_most)
        yield wrapped(f"epsilon of all answers, in a run and at most, with delta {table.delta:g}: {told}", _WIDTH)


def _shortened(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what} {', '.join(names[:_SHOWN])}{more}"]


def _epsilons(usual: Mapping[str, float], most: Mapping[str, float]) -> str:
    """``"3.2 to 6.5 (sample)"``, of a run and at most."""
    told = []
    for unit, value in usual.items():
        more = f" to {most[unit]:.3g}" if most[unit] > value else ""
        told.append(f"{value:.3g}{more} ({unit})")
    return "; ".join(told) or NOT_KNOWN
