"""What a node answers at most: a server may ask what it likes, but gets no more than the node's own recipe needs.

Every answer is noted on the node's disk before it is given, over all restarts and runs; what is counted, and how much
of it there may be, is in docs/deployment-settings.md#request-limits. The same request asked again has the same answer,
bit for bit, and is not counted twice. Where `[privacy]` or the method adds noise, all recipes count together: noise
hides rows as long as few answers are drawn about them, whatever rounds, learning rate or method are now. And there the
numbers that leave are counted, too: if those of one request came out otherwise, on another device, they would have
other noise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.message import Message, to_bytes
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.protocol import OF_SUMS, Kind, TaskRequest, shared_config
from polyfed.engine.run_folder import lock_folder
from polyfed.errors import ConfigError, RunError
from polyfed.records.read import parse_json

_FOLDER = "answered"
_NOISY = "noise.jsonl"
_REQUESTS = {True: 1, False: 10}  # whether noise hides rows -> different requests of a kind
_SUMS = 10  # that a run may begin in an exchange
_STANDINGS = 2  # in which a client is scored: as it stands, and after receiving
_LENGTHS = "rounds of the recipe"  # no request: which this node's operator has set, one after the other


class AnswerLimits:
    """What a server may ask of one node, and how often.

    recipe: the node's own. rows: how many it trains on. runs: so many are answered where rows are told of by noise or
    by scores.
    """

    def __init__(self, recipe: Recipe, config: NodeConfig, rows: int) -> None:
        self._recipe, self._method, privacy = recipe, recipe.chosen_method, recipe.privacy
        self._is_one_release = self._method.bounds_rows and bool(privacy.noise_multiplier)
        self._has_noise = not self._is_one_release and bool(
            privacy.upload_noise_multiplier
            or privacy.noise_multiplier
            or self._method.privacy_releases(recipe.training, rows)
        )
        self._requests = config.answers or _REQUESTS[self._has_noise]
        self.runs = config.answers or 1
        shared = shared_config(recipe)
        shared["training"] = {**shared.get("training", {}), "rounds": 0}  # a recipe is one, however many rounds it has
        digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
        name = _NOISY if self._has_noise or self._is_one_release else f"{digest[:16]}.jsonl"
        self._count = functools.partial(count_answer, config.state / _FOLDER / name)

    def check(self, kind: Kind, task: TaskRequest) -> None:
        """Whether a request is one of the node's own recipe.

        Raises:
            ConfigError: it is not; which part of it.
        """
        recipe, method = self._recipe, self._method
        rounds, final = recipe.training.rounds, method.final_exchanges()
        trains = kind in ("train", *OF_SUMS) and not task.is_final
        last = rounds + 1 if final else rounds  # the final round has a number of its own
        if task.round > last or (trains and not 1 <= task.round <= rounds):
            raise ConfigError(f"expected a round from 1 to {rounds}, as in this node's recipe, got {task.round}")
        if kind not in ("train", *OF_SUMS):
            return
        exchanges = final if task.is_final else method.exchanges(task.round)
        if task.exchange_index >= len(exchanges):
            raise ConfigError(
                f"expected one of {len(exchanges)} exchanges in round {task.round}, got {task.exchange_index}"
            )

    def count(self, kind: Kind, task: TaskRequest, request: str, has_scores: bool) -> bool:
        """Note that a request is answered; whether with scores. request: identifies it.

        Raises:
            RunError: it would be one too many, or cannot be noted.
        """
        lengths = {int(rounds) for rounds in self._count(_LENGTHS, str(self._recipe.training.rounds), sys.maxsize)}
        if kind == "score":
            self._count("scores", request, self._most_scores(lengths))
        elif kind == "finish":
            self._count("the model at the end", request, self._requests * len(lengths))
        else:
            times = len(lengths) if task.is_final else 1
            self._count(f"training in {_when(task)}", request, self._requests * times)
            try:
                if has_scores:
                    self._count("scores", request, self._most_scores(lengths))
            except TooManyAnswers:  # the work is wanted all the same
                return False
        return has_scores

    def most(self, kind: Kind, times: int) -> int:
        """Different answers of a kind, over all restarts and runs of this recipe alone.

        times: how often a run of it may ask. For scores: of no effect.
        """
        return self._most_scores({self._recipe.training.rounds}) if kind == "score" else self._requests * times

    def count_release(self, task: TaskRequest, message: Message) -> None:
        """Note what is about to leave the node, where noise hides rows in it.

        Raises:
            RunError: as `count`; then it must not leave.
        """
        sent = {name: value for name, value in message.items() if not isinstance(value, Tensor) or value.dim()}
        if not sent or not (self._has_noise or self._is_one_release):
            return
        digest = hashlib.sha256(to_bytes(sent)).hexdigest()
        what = "sums of all rows" if self._is_one_release else f"noise in {_when(task)}"
        self._count(what, digest, self.runs)

    def count_sum(self, task: TaskRequest, name: str) -> None:
        """Note a sum with masks that the node takes part in; a server that is started again begins another one.

        name: of the sum, for which no other keys are used.

        Raises:
            RunError: it would be one too many, or cannot be noted.
        """
        self._count(f"sums in {_when(task)}", name, self.most_sums(1))

    def most_sums(self, times: int) -> int:
        """Sums that it takes part in, where a run of the recipe begins so many."""
        return _SUMS * self.runs * times

    def count_once(self, what: str, digest: str) -> None:
        """Note a list of a sum with masks: there is one of each kind.

        Raises:
            RunError: there is another one already, or it cannot be noted.
        """
        self._count(what, digest, 1)

    def count_total(self, task: TaskRequest, digest: str) -> None:
        """Note a total that is about to be opened. digest: of whose it is.

        Raises:
            RunError: it would be one too many of the same addends, or cannot be noted.
        """
        where = _when(task)
        if self._method.same_addends:  # those of a final round are those of the last exchange of any other
            names = [exchange.name for exchange in self._method.exchanges(task.round)]
            where = f"all rounds, '{names[-1 if task.is_final else task.exchange_index]}'"
        self._count(f"totals in {where}", digest, self.runs)

    def most_totals(self, times: int) -> int:
        """Totals that it helps to open, where a run of the recipe asks so many times."""
        names = {exchange.name for exchange in self._method.exchanges(1)}
        return self.runs * (len(names) if self._method.same_addends else times)

    def _most_scores(self, lengths: Collection[int]) -> int:
        """Answers with scores that the recipe's own schedule needs: of its evaluated rounds, and of a final one.

        lengths: numbers of rounds that it has had; each had a last round and a final one.
        """
        evaluation, n = self._recipe.evaluation, self._recipe.evaluation.every_n_rounds
        per_round = _STANDINGS
        if "after_training" in evaluation.stages(self._method.evaluation_stage):
            per_round += len(self._method.exchanges(1))
        evaluated = {*range(n, max(lengths) + 1, n), *lengths}
        return self.runs * per_round * (len(evaluated) + len(lengths))


def scores_with_job(recipe: Recipe, task: TaskRequest) -> bool:
    """Whether the recipe scores the client right after the local training of the job that is asked for."""
    method, evaluation = recipe.chosen_method, recipe.evaluation
    exchanges = method.final_exchanges() if task.is_final else method.exchanges(task.round)
    is_due = evaluation.is_due(task.round, recipe.training.rounds, task.is_final)
    is_asked = "after_training" in evaluation.stages(method.evaluation_stage)
    return is_due and is_asked and exchanges[task.exchange_index].trains


def _when(task: TaskRequest) -> str:
    """The final round comes once in a run, whatever its number."""
    return f"{'the final round' if task.is_final else f'round {task.round}'}, exchange {task.exchange_index}"


class TooManyAnswers(RunError):
    """A request that would be one too many of its kind."""


def count_answer(path: Path, kind: str, request: str, most: int) -> set[str]:
    """Note a request before it is answered, in a file with a line for each; those of the kind that it then has.

    path: of the file, which processes may share. request: identifies it. most: different ones of the kind.

    Raises:
        TooManyAnswers: it would be one too many; it must not be answered.
        RunError: the file cannot be read or written; likewise.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(path.parent, waits=True, needed=True):
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a line without end has no answer
            known = {asked for asked_kind, asked in map(parse_json, lines) if asked_kind == kind}
            if request in known:
                return known
            if len(known) >= most:
                raise TooManyAnswers(
                    f"expected at most {most} different requests for {kind} (answers, in this node's configuration), "
                    "got one more"
                )
            with path.open("ab") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
                file.write(json.dumps([kind, request]).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            return {*known, request}
    except OSError as error:
        raise RunError(f"expected to note what is answered in {path}, got {error.strerror}") from None
    except (ValueError, TypeError):
        raise RunError(f"expected a kind and a request in each line of {path}, got something else") from None
