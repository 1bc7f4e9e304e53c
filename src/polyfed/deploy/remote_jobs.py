"""A client's work as a letter that anybody can do who has the recipe: it says which client, and holds all that it is.

Those who do it keep nothing but the data: weights and state go there and back. `work` is their side, the rest that of
whoever asks. What is done is what workers do (`executors.carry_out`), so that the numbers are the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed import profiling
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, in_plain_order, read_only
from polyfed.core.method import Trained
from polyfed.deploy.node import Turn, reported
from polyfed.deploy.node_checkpoints import Kept
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.protocol import (
    Count,
    Letter,
    Report,
    Task,
    joined,
    pack,
    parted,
    read,
    score_read,
    score_told,
    unpack,
)
from polyfed.engine.evaluation import Score
from polyfed.engine.executors.base import Job, Outcome, Scores, Scoring
from polyfed.engine.run_loop import one_thread
from polyfed.engine.weight_store import Store, row_of
from polyfed.errors import PolyfedError, RequestError, RunError
from polyfed.experiments.data_cache import DataCache

__all__ = ["asked", "outcome", "scores", "work"]

_SAID = "message "  # before the names of what a method sends, beside what a client is
_DATA = DataCache()  # of this process; what lies in it is read once


class Errand(Task):
    """A task, and whose. client: its number. held: variant of its network, whose weights come along; None: it has none.

    timed: whether the answer tells where the time went.
    """

    client: Count
    held: str | None = None
    timed: bool = False


# whoever asks -------------------------------------------------------------------------------------------------------


def asked(what: Job | Scoring, companion: str, auc: bool) -> Letter:
    """The letter for a job, or for a client's scores.

    Args:
        companion: network beside the clients' own, "" without one. auc: scores come with the area under the ROC curve.
    """
    row = row_of(what.client)
    facts: dict[str, Any] = {
        "client": what.client.id,
        "held": None if row is None else row.variant,
        "timed": profiling.watched(),
        "companion": companion,
        "round": what.round,
        "variant": what.variant,
        "has_message": what.message is not None,
        "auc": auc,
    }
    if isinstance(what, Job):
        facts |= {"place": what.place, "closing": what.closing, "scores": what.scores}
    else:
        facts |= {"parts": list(what.parts)}
    kind: Any = "train" if isinstance(what, Job) else "score"
    return Letter(kind, Errand(**facts).model_dump(), _packed(what.message or {}, row, what.client.state))


def outcome(job: Job, answer: Letter, store: Store) -> Outcome:
    """What came of a job.

    Args:
        store: where the client's new weights go.

    Raises:
        PolyfedError: what the one who did it raised.
    """
    _check(answer)
    report = read(Report, answer.facts["report"])
    client = job.client
    message, weights, state = _unpacked(answer.body)
    fresh = functools.partial(store.fresh, client.architecture, job.variant)
    return Outcome(
        client.id,
        read_only(message),
        fresh().write(weights) if report.new else client.weights,
        in_plain_order(state),
        Trained(report.steps, report.samples, report.loss),
        report.bytes_up,
        report.sums,
        None if report.score is None else _score(report.score, client, "test"),
        report.refused,
    )


def scores(what: Scoring, answer: Letter) -> Scores:
    """The scores asked for.

    Raises:
        PolyfedError: as `outcome`.
    """
    _check(answer)
    return {part: _score(told, what.client, part) for part, told in answer.facts["scores"].items()}


def _score(told: Mapping[str, Any], client: Client, part: str) -> Score:
    """Counts by whoever did the work, for whom others are named by the same method."""
    return score_read(told, client.classes, len(getattr(client.data, part)), told.get("others", {}))


def _check(answer: Letter) -> None:
    """Count its time; whether it is not an error."""
    profiling.include(answer.facts.get("timings"))
    if "failed" in answer.facts:
        error = RequestError if answer.facts["request"] else RunError
        raise error(answer.facts["failed"])


# whoever does it ----------------------------------------------------------------------------------------------------


def work(settings: str, letter: Letter) -> Letter:
    """Do an errand.

    Args:
        settings: of the recipe, in JSON. letter: see `asked`.

    Returns:
        For `outcome` or `scores`; an error is an answer, too.
    """
    try:
        errand = read(Errand, letter.facts)
        with one_thread(), profiling.watching(errand.timed, "messages") as watch:
            facts, body = _done(_recipe(settings), errand, letter)
        return Letter(letter.kind, {**facts, "timings": None if watch is None else watch.seconds}, body)
    except Exception as error:  # whatever it is: whoever says nothing has died
        text = str(error) if isinstance(error, PolyfedError) else f"{type(error).__name__}: {error}"
        return Letter(letter.kind, {"failed": text, "request": isinstance(error, RequestError)})


@functools.lru_cache(maxsize=1)
def _recipe(settings: str) -> Recipe:
    return Recipe.from_dict(json.loads(settings))


def _done(recipe: Recipe, errand: Errand, letter: Letter) -> tuple[dict[str, Any], bytes]:
    message, weights, state = _unpacked(letter.body)
    turn = Turn(recipe, NodeConfig(errand.client, Path()), _DATA, errand)
    turn.become(Kept(errand.held or "", None if errand.held is None else weights, state))
    if letter.kind == "score":
        found = turn.scores(message if errand.has_message else None)
        return {"scores": {part: score_told(score) for part, score in found.items()}}, b""
    done, new = turn.carry_out(message)
    report = reported(errand, done, new, {})
    return {"report": report.model_dump()}, _packed(done.message, row_of(turn.client) if new else None, done.state)


# bodies -------------------------------------------------------------------------------------------------------------


def _packed(message: Message, weights: Group | None, state: State) -> bytes:
    said = {f"{_SAID}{name}": value for name, value in message.items()}
    return pack({**said, **joined(weights or {}, state)})


def _unpacked(body: bytes) -> tuple[Message, Group, State]:
    content, _ = unpack(body)
    said = {name.removeprefix(_SAID): value for name, value in content.items() if name.startswith(_SAID)}
    weights, state = parted({name: value for name, value in content.items() if not name.startswith(_SAID)})
    return said, weights, state
