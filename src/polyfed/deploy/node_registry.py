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
from typing import Any, NamedTuple, Protocol

from polyfed.config.recipe import Recipe
from polyfed.data.transforms import Prepare
from polyfed.deploy import wait_on
from polyfed.deploy.protocol import ClientHello, Envelope, NodeError, TaskRequest, other_classes, parse, shared_config
from polyfed.engine.plugin import Plugin
from polyfed.engine.round_state import Round
from polyfed.engine.run_folder import append_line, atomic_write, explain_disk_errors
from polyfed.errors import ConfigError, RunError
from polyfed.results.read import parse_json

EVENT_LOG = "nodes.jsonl"
LONGEST = 1.0  # seconds between two looks for answers
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


class Owner(NamedTuple):
    """The owner of a client's number. node: its registration. token: digest of the token that identifies it."""

    node: int
    token: str


class EventLog:
    """`nodes.jsonl` of a run folder: a line for the experiment, and one for each event of nodes.

    Lines wait until `open`, as nothing is written before a run begins. Tokens are stored as digests.

    Args:
        path: the file. resume: go on with the file that is there.

    Attributes:
        experiment: under this name nodes keep their states. introductions: client -> its last. owners: client -> owner.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path, self._whole = path, ""
        self.introductions: dict[int, ClientHello] = {}
        self.owners: dict[int, Owner] = {}
        self.experiment = secrets.token_hex(8)
        self.round = 0
        self._open = False
        if resume and path.exists():
            self._read()
        else:
            self._whole = json.dumps({"event": "experiment", "experiment": self.experiment}) + "\n"

    def _read(self) -> None:
        try:
            *whole, _ = self._path.read_bytes().split(b"\n")  # a line without end was cut off by a kill
            lines = [parse_json(line) for line in whole]
            self.experiment = str(lines[0]["experiment"])
            if not _EXPERIMENT.fullmatch(self.experiment):
                raise ValueError("no experiment's name in the first line")
            for line in lines:
                self._take(line)
        except (OSError, ValueError, KeyError, IndexError, TypeError, RunError) as error:
            raise ConfigError(f"expected the event log of nodes in {self._path}, got something else: {error}") from None
        self._whole = "".join(json.dumps(line) + "\n" for line in lines)

    def _take(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "hello":
            known = parse(ClientHello, line["claims"])
            node = line["node"]
            if type(node) is not int:
                raise ValueError(f"no number of a node: {node!r}")
            self.introductions[known.client] = known
            self.owners[known.client] = Owner(node, known.token)

    def welcome(self, hello: ClientHello, node: int) -> None:
        """A node is a client: the number is that node's from now on."""
        owner = Owner(node, hello.token)
        if self.introductions.get(hello.client) == hello and self.owners.get(hello.client) == owner:
            return
        self.introductions[hello.client] = hello
        self.owners[hello.client] = owner
        self.note("hello", client=hello.client, node=node, claims=hello.model_dump())

    def note(self, event: str, **facts: Any) -> None:
        """One line more."""
        line = json.dumps({"event": event, "round": self.round, "time": round(time.time(), 3), **facts}) + "\n"
        if not self._open:
            self._whole += line
        else:
            with explain_disk_errors(self._path.parent):
                append_line(self._path, line.encode())

    def open(self) -> None:
        """Write the lines that wait, and later ones at once."""
        if not self._open:
            with explain_disk_errors(self._path.parent):
                atomic_write(self._path, self._whole.encode())
            self._whole = ""
            self._open = True


class NodeRegistry:
    """The clients whose nodes have introduced themselves.

    Args:
        recipe: the same as theirs. wire: reaches them. deadline: seconds that a node has for an answer.
        event_log: for events. count: clients of the federation. say: receives lines on the progress.

    Attributes:
        known: by number of client, also those of an earlier process whose nodes are not back. node_of: their nodes.
        class_names: those of the task, once the first nodes are there.
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
        self._settings = shared_config(recipe)
        self.wire = wire
        self.deadline = deadline
        self.event_log = event_log
        self.count = count
        self._say = say
        self.known = {i: hello for i, hello in event_log.introductions.items() if i < count}
        self.node_of: dict[int, int] = {}
        self.class_names = recipe.data.class_names or next((hello.class_names for hello in self.known.values()), None)
        self._asked: dict[str, int] = {}  # greetings under way
        self._resting: dict[int, tuple[float, str]] = {}  # node -> not asked before, why

    def request(
        self, envelopes: Sequence[tuple[int | None, Envelope]], done: Callable[[int], None] = lambda _: None
    ) -> list[Answer]:
        """The answers to envelopes to nodes (None: of an unknown node), in their order.

        Args:
            done: called with the number of answers, whenever there are more.
        """
        online = self.wire.nodes()
        found: list[Answer | None] = [
            None if node in online else NodeError("its node is not there") for node, _ in envelopes
        ]
        sent = [
            (p, node, envelopes[p][1]) for p, (node, _) in enumerate(envelopes) if node is not None and not found[p]
        ]
        names = self.wire.send([(node, envelope) for _, node, envelope in sent], self.deadline) if sent else []
        waiting: dict[str, int] = {}
        for name, (index, _, _) in zip(names, sent, strict=True):
            if name:
                waiting[name] = index
            else:
                found[index] = NodeError("its node could not be written to")
        since = time.monotonic()
        while waiting:
            if answers := self.wire.collect(list(waiting)):
                for name, answer in answers.items():
                    found[waiting.pop(name)] = answer
                done(len(envelopes) - len(waiting))
            elif time.monotonic() > since + self.deadline:
                break
            else:
                wait_on(since, LONGEST)
        silent = NodeError(f"no answer within {self.deadline:g} s")
        return [silent if answer is None else answer for answer in found]

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
            envelope = Envelope("hello", TaskRequest(**self.task_facts()).model_dump())
            sent = self.wire.send([(node, envelope) for node in fresh], self.deadline)
            self._asked |= {name: node for name, node in zip(sent, fresh, strict=True) if name}
            self._hear()

    def _hear(self) -> None:
        if not self._asked:
            return
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
        except (RunError, ConfigError) as error:
            self._turn_away(node, str(error))
            return
        except Exception as error:  # the introduction is another party's
            self._turn_away(node, f"its introduction cannot be read: {type(error).__name__}")
            return
        self.known[hello.client], self.node_of[hello.client] = hello, node
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
        other = self.node_of.get(hello.client)
        if number >= self.count:
            raise ConfigError(f"expected a client-id below {self.count}, got {number}")
        if other is not None and other != node and other in self.wire.nodes():
            raise ConfigError(f"client-id {number} is taken by node {other}")
        owner = self.event_log.owners.get(number)
        if owner is not None and node != owner.node and hello.token != owner.token:
            raise ConfigError(
                f"client-id {number} belongs to the node registered as {owner.node}, got another; where a machine is "
                "replaced, its state-dir moves with it"
            )
        before = self.known.get(number)
        if before is not None and before.architecture != hello.architecture:
            raise ConfigError(f"client {number} was '{before.architecture}' before, got '{hello.architecture}'")

    def task_facts(self) -> Mapping[str, Any]:
        """The facts of every task: the experiment, the settings, the classes' names."""
        return {"experiment": self.event_log.experiment, "settings": self._settings, "class_names": self.class_names}


class NodePresence(Plugin):
    """Looks before every round for nodes that were started again."""

    name = "nodes"

    def __init__(self, registry: NodeRegistry) -> None:
        super().__init__()
        self._registry = registry

    def select(self, round: Round) -> None:
        """Greet them."""
        if not round.final:
            self._registry.poll()
