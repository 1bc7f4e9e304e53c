"""polyfed on Flower: any registered method over its message API. Only this file and Flower's two programs know it.

The server half of a Flower app is

    server_app = make_server_app("recipe.toml")

and nodes answer by `supernode`, which runs no app.

docs/deployment-settings.md lists the keys of node and run configuration. Envelopes travel as one record: plain facts as
JSON, a message as bytes, so that any type survives. Nothing is unpickled. Flower sends each part of a record by a
request of its own: a small message lies beside the facts, a large one is an array, of which equal ones travel once.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from polyfed.config.recipe import Recipe
from polyfed.core.settings import AboveZero, Settings
from polyfed.deploy import SHORTEST, require_package
from polyfed.deploy.node_config import hyphenated
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Count, Envelope, Kind, NodeError
from polyfed.deploy.server import serve
from polyfed.errors import PolyfedError, RunError
from polyfed.loggers.console import Console
from polyfed.records.read import parse_json

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp import Grid, ServerApp

_TYPES: Mapping[Kind, str] = {
    "hello": "query.hello",
    "train": "train",
    "score": "evaluate",
    "finish": "query.finish",
    "keys": "query.keys",
    "shares": "query.shares",
    "unmask": "query.unmask",
}
_LONGEST = 1000  # characters of a node's trouble
_SMALL = 2**16  # bytes of a message that lies beside the facts
MAX_FACTS_BYTES = 2**24  # bytes of an envelope's facts: read, JSON takes twenty times as much
RECORD = "polyfed"
FACTS = "facts"
_BODY = "body"
_TROUBLE = "trouble"


class RunConfig(Settings):
    """A run's settings, which Flower lets each run change; docs/deployment-settings.md explains them."""

    model_config = ConfigDict(alias_generator=hyphenated)
    _place = ("run-config",)

    out: str = ""  # the recipe's own
    resume: bool = False
    overwrite: bool = False
    clients: Count = 0  # as in the recipe
    deadline: AboveZero = 600.0


def make_server_app(recipe: str | Path | Recipe, loggers: Sequence[object] = ()) -> ServerApp:
    """The server half of a Flower app.

    Args:
        recipe: a TOML file, read when the app runs, or a `Recipe`.
        loggers: besides a `Console` on standard error.

    Raises:
        ConfigError: Flower is not installed.
    """
    require_package("flwr", "polyfed.deploy.flower_transport")
    from flwr.serverapp import ServerApp
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.superlink.grid import http_grid

    # an answer is announced before all of it is there; Flower waits a second before it asks again
    http_grid.pull_objects = functools.partial(pull_objects, initial_backoff=SHORTEST)

    def run(grid: Grid, context: Context) -> None:
        config = RunConfig(**context.run_config)
        own = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
        serve(own, FlowerTransport(grid), **config.model_dump(), loggers=[Console(), *loggers])

    app = ServerApp()
    app.main()(run)
    return app


def answering(answer: Callable[[Envelope], Envelope]) -> Callable[[Message], Message]:
    """What answers Flower's messages as `answer` does envelopes.

    An error is an answer, too. Of one that is not polyfed's the server gets the kind alone, as its text may hold a row.
    """
    from flwr.app import Message as FlowerMessage

    def answered(message: Message) -> Message:
        try:
            content = _record(answer(_envelope(message)))
        except PolyfedError as error:
            logging.getLogger("polyfed").error("%s", error)  # the node's own output
            content = _record(NodeError(error))
        except Exception as error:
            logging.getLogger("polyfed").exception("a message was answered with an error")
            content = _record(NodeError(type(error).__name__))
        return FlowerMessage(content, reply_to=message)

    return answered


class FlowerTransport:
    """Envelopes as Flower's messages, one per node."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> set[int]:
        """See `Transport`."""
        return set(self._grid.get_node_ids())

    def send(self, envelopes: Sequence[tuple[int, Envelope]], seconds: float) -> list[str]:
        """See `Transport`; the seconds are the messages' time to live."""
        from flwr.app import Message as FlowerMessage

        names = []
        for node, envelope in envelopes:  # one by one, as a request may only be so large
            group = str(envelope.facts.get("round", 0))
            message = FlowerMessage(_record(envelope), node, _TYPES[envelope.kind], ttl=seconds, group_id=group)
            names.append(next(iter(self._grid.push_messages([message])), None) or "")
        return names

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        """See `Transport`; an error of Flower's own, or of the node's app, is a trouble."""
        answers: dict[str, Answer] = {}
        for message in self._grid.pull_messages(list(names)):
            answers[message.metadata.reply_to_message_id] = _answer(message)
        return answers


# records ------------------------------------------------------------------------------------------------------------


def _record(answer: Answer) -> RecordDict:
    """An envelope, or why there is none, as Flower carries it."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if isinstance(answer, NodeError):
        return RecordDict({RECORD: ConfigRecord({_TROUBLE: str(answer)})})
    facts = json.dumps({"kind": answer.kind, **answer.facts}, separators=(",", ":"))
    if len(answer.body) <= _SMALL:
        return RecordDict({RECORD: ConfigRecord({FACTS: facts, _BODY: answer.body})})
    record = RecordDict({RECORD: ConfigRecord({FACTS: facts})})
    record[_BODY] = ArrayRecord({_BODY: Array("uint8", (len(answer.body),), "polyfed", answer.body)})
    return record


def _envelope(message: Message) -> Envelope:
    try:
        records = message.content
        record = records.config_records[RECORD]
        data = str(record[FACTS]).encode()
        if len(data) > MAX_FACTS_BYTES:
            raise RunError(f"expected facts of at most {MAX_FACTS_BYTES} bytes, got {len(data)}")
        facts = parse_json(data)
        kind = facts.pop("kind")
        body = record[_BODY] if _BODY in record else records.array_records[_BODY][_BODY].data
        if not isinstance(body, bytes):
            raise TypeError(f"a body of type {type(body).__name__}")
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"expected an envelope of polyfed's, got something else: {error!r}") from None
    if kind not in _TYPES:
        raise RunError(f"expected an envelope of one of the kinds {', '.join(_TYPES)}, got '{kind}'")
    return Envelope(kind, facts, body)


def _answer(message: Message) -> Answer:
    if message.has_error():
        return NodeError(f"Flower's error {message.error.code}: {message.error.reason or 'no reason given'}")
    record: Mapping[str, Any] = message.content.config_records.get(RECORD, {})
    if _TROUBLE in record:
        return NodeError(str(record[_TROUBLE])[:_LONGEST])
    try:
        return _envelope(message)
    except RunError as error:
        return NodeError(error)
