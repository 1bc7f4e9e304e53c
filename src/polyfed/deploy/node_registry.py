"""Which node is which client, the facts that it gave about itself, and the event log of nodes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from polyfed.config.recipe import Recipe
from polyfed.data.transforms import Prepare
from polyfed.deploy import wait_on
from polyfed.deploy.protocol import ClientHello, Envelope, NodeError, TaskRequest, other_classes, parse, shared_config
from polyfed.engine.run_folder import append_line, explain_disk_errors
from polyfed.errors import ConfigError, PolyfedError, RunError
from polyfed.records.read import atomic_write, parse_json

EVENT_LOG = "nodes.jsonl"
LONGEST = 1.0  # seconds between two looks for answers
LARGEST_ANSWER = 2_048_000_000  # bytes of the body
REST = 30.0  # seconds before a node that was turned away is asked again
_INPUT = 2**22  # numbers of an input, at most
_HEAD = 2**24  # numbers of a head, a linear layer, at most
_REASON = 1000  # characters of the reason why a node is turned away
_EXPERIMENT = re.compile("[0-9a-f]{16}")
Answer = Envelope | NodeError


class Transport(Protocol):
    """Carries envelopes to nodes and back. Nodes have numbers, which are not those of clients."""

    def nodes(self) -> set[int]:
        """Nodes that can be reached now."""
        ...

    def send(self, envelopes: Sequence[tuple[int, Envelope]], seconds: float) -> list[str]:
        """Send each envelope to its node, to be answered within so many seconds; a name for each, for `collect`.

        "" where it could not be sent.
        """
        ...

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        """The answers that are there now, by the names of their requests; each is given once."""
        ...


class EventLog:
    """`nodes.jsonl` of a run folder: a line for the experiment, and one for each event of nodes.

    Lines wait until `open`, as nothing is written before a run begins. Tokens are stored as digests.

    Args:
        path: the file. resume: go on with the file that is there.

    Attributes:
        experiment: under this name nodes keep their states. round: of the events to come.
        introductions: client -> its last. nodes: client -> the registration that its number belongs to.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self.introductions: dict[int, ClientHello] = {}
        self.nodes: dict[int, int] = {}
        self.round = 0
        self.experiment = secrets.token_hex(8)
        self._waiting: list[Mapping[str, Any]] | None = [{"event": "experiment", "experiment": self.experiment}]
        if resume and path.exists():
            self._waiting = self._read()

    def _read(self) -> list[Mapping[str, Any]]:
        try:
            *whole, _ = self._path.read_bytes().split(b"\n")  # a line without end was cut off by a kill
            lines = [parse_json(line) for line in whole]
            self.experiment = str(lines[0]["experiment"])
            if not _EXPERIMENT.fullmatch(self.experiment):
                raise ValueError("no experiment's name in the first line")
            for line in lines:
                if line["event"] == "hello":
                    hello = parse(ClientHello, line["claims"])
                    if type(line["node"]) is not int:
                        raise ValueError(f"no number of a node: {line['node']!r}")
                    self.introductions[hello.client], self.nodes[hello.client] = hello, line["node"]
        except (OSError, ValueError, KeyError, IndexError, TypeError, RunError) as error:
            raise ConfigError(f"expected the event log of nodes in {self._path}, got something else: {error}") from None
        return lines

    def welcome(self, hello: ClientHello, node: int) -> None:
        """A node is a client: the number is that node's from now on."""
        number = hello.client
        if (self.introductions.get(number), self.nodes.get(number)) != (hello, node):
            self.introductions[number], self.nodes[number] = hello, node
            self.note("hello", client=number, node=node, claims=hello.model_dump())

    def note(self, event: str, **facts: Any) -> None:
        """One line more."""
        line = {"event": event, "round": self.round, "time": round(time.time(), 3), **facts}
        if self._waiting is not None:
            self._waiting.append(line)
            return
        with explain_disk_errors(self._path.parent):
            append_line(self._path, json.dumps(line).encode() + b"\n")

    def open(self) -> None:
        """Write the lines that wait, and later ones at once."""
        if self._waiting is None:
            return
        with explain_disk_errors(self._path.parent):
            atomic_write(self._path, "".join(json.dumps(line) + "\n" for line in self._waiting).encode())
        self._waiting = None


class NodeRegistry:
    """The clients whose nodes have introduced themselves.

    Args:
        recipe: the same as theirs. wire: reaches them. deadline: seconds that a node has for an answer.
        event_log: for events. count: clients of the federation. say: receives lines on the progress.

    Attributes:
        node_of: number of client -> its node, where it has introduced itself to this process.
        class_names: those of the task, once the first nodes are there. task_facts: of every task.
    """

    def __init__(
        self,
        recipe: Recipe,
        wire: Transport,
        deadline: float,
        event_log: EventLog,
        count: int,
        say: Callable[[str], None],
    ) -> None:
        self.task_facts: Mapping[str, Any] = {"experiment": event_log.experiment, "settings": shared_config(recipe)}
        self.wire = wire
        self.deadline = deadline
        self.event_log = event_log
        self.count = count
        self._say = say
        self.node_of: dict[int, int] = {}
        self.class_names = recipe.data.class_names or next((hello.class_names for hello in self.known.values()), None)
        self._asked: dict[str, int] = {}  # greetings under way
        self._resting: dict[int, tuple[float, str]] = {}  # node -> not asked before, why

    @property
    def known(self) -> dict[int, ClientHello]:
        """By number of client, also those of an earlier process whose nodes are not back."""
        return {number: hello for number, hello in self.event_log.introductions.items() if number < self.count}

    def request(
        self, envelopes: Sequence[tuple[int | None, Envelope]], done: Callable[[int], None] = lambda _: None
    ) -> list[Answer]:
        """The answers to envelopes to nodes (None: of an unknown one), in order. done: gets how many there are."""
        online = self.wire.nodes()
        reached = [(node, envelope) for node, envelope in envelopes if node is not None and node in online]
        names = iter(self.wire.send(reached, self.deadline) if reached else ())
        answers: list[Answer] = []
        waiting: dict[str, int] = {}  # name of a request -> its place
        for place, (node, _) in enumerate(envelopes):
            if node not in online:
                answers.append(NodeError("its node is not there"))
            elif name := next(names):
                answers.append(NodeError(f"no answer within {self.deadline:g} s"))
                waiting[name] = place
            else:
                answers.append(NodeError("its node could not be written to"))
        since = time.monotonic()
        while waiting:
            if found := self.wire.collect(list(waiting)):
                for name, answer in found.items():
                    if isinstance(answer, Envelope) and len(answer.body) > LARGEST_ANSWER:
                        answer = NodeError(f"expected at most {LARGEST_ANSWER} bytes, got {len(answer.body)}")
                    answers[waiting.pop(name)] = answer
                done(len(envelopes) - len(waiting))
            elif time.monotonic() > since + self.deadline:
                break
            else:
                wait_on(since, LONGEST)
        return answers

    def wait_for_clients(self) -> None:
        """Wait until all clients are there; for those that an earlier process knew no longer than for an answer."""
        shown = -1
        since = time.monotonic()
        while True:
            self.poll()
            if shown != len(self.node_of):
                shown = len(self.node_of)
                self._say(f"{shown} of {self.count} clients are there")
            are_known = len(self.known) == self.count
            if shown == self.count or (are_known and time.monotonic() > since + self.deadline):
                break
            wait_on(since, LONGEST)
        self.class_names = self.known[0].class_names

    def poll(self) -> None:
        """Greet new nodes, read introductions."""
        self._hear()
        online = self.wire.nodes()
        now = time.monotonic()
        self._resting = {node: rest for node, rest in self._resting.items() if node in online}
        resting = {node for node, (until, _) in self._resting.items() if now < until}
        if fresh := sorted(online - {*self.node_of.values(), *self._asked.values()} - resting):
            envelope = Envelope("hello", TaskRequest(**self.task_facts).model_dump())
            sent = self.wire.send([(node, envelope) for node in fresh], self.deadline)
            self._asked |= {name: node for name, node in zip(sent, fresh, strict=True) if name}
            self._hear()

    def _hear(self) -> None:
        if self._asked:
            for name, answer in self.wire.collect(list(self._asked)).items():
                self._take(self._asked.pop(name), answer)

    def _take(self, node: int, answer: Answer) -> None:
        """A node's answer to a greeting."""
        try:
            if isinstance(answer, NodeError):
                raise RunError(answer)
            hello = parse(ClientHello, answer.facts)
            hello = hello.model_copy(update={"token": hashlib.sha256(hello.token.encode()).hexdigest()})
            self._check(hello, node)
        except Exception as error:  # the introduction is another party's
            is_ours = isinstance(error, PolyfedError)
            self._turn_away(node, str(error) if is_ours else f"its introduction cannot be read: {type(error).__name__}")
            return
        self.node_of[hello.client] = node
        self.event_log.welcome(hello, node)

    def _turn_away(self, node: int, reason: str) -> None:
        reason = reason[:_REASON]
        if self._resting.get(node, (0.0, ""))[1] != reason:  # else it was noted before
            self.event_log.note("turned away", node=node, reason=reason)
            self._say(f"node {node} is no client: {reason}")
        self._resting[node] = (time.monotonic() + REST, reason)

    def _check(self, hello: ClientHello, node: int) -> None:
        """Check an introduction against bounds, the recipe and the owner of its number."""
        head = hello.feature_dim * (len(hello.class_names) + 1)
        if math.prod(hello.shape) > _INPUT:
            raise ConfigError(f"expected at most {_INPUT} numbers in an input, got the shape {hello.shape}")
        if head > _HEAD:
            raise ConfigError(f"expected at most {_HEAD} numbers in a head, got {head}")
        if self.class_names is not None and hello.class_names != self.class_names:
            raise ConfigError(other_classes(self.class_names, hello.class_names))
        Prepare(tuple(hello.mean), tuple(hello.std), table=hello.table)
        number = hello.client
        if number >= self.count:
            raise ConfigError(f"expected a client-id below {self.count}, got {number}")
        other = self.node_of.get(number)
        if other is not None and other != node and other in self.wire.nodes():
            raise ConfigError(f"client-id {number} is taken by node {other}")
        before = self.known.get(number)
        if before is None:
            return
        owner = self.event_log.nodes[number]
        if node != owner and hello.token != before.token:
            raise ConfigError(
                f"client-id {number} belongs to the node registered as {owner}, got another; where a machine is "
                "replaced, its state-dir moves with it"
            )
        if before.architecture != hello.architecture:
            raise ConfigError(f"client {number} was '{before.architecture}' before, got '{hello.architecture}'")
