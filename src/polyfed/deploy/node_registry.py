"""Who is there: which node is which client, what it said of itself, and the event log of what happened to nodes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from polyfed.config.recipe import Recipe
from polyfed.data.transforms import Prepare
from polyfed.deploy.protocol import ClientHello, Envelope, NodeError, TaskRequest, parse, shared_config
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.run_folder import append_line, atomic_write, explain_disk_errors, lock_folder
from polyfed.errors import ConfigError, RunError
from polyfed.results.read import check_links, parse_json

EVENT_LOG, _RELEASED = "nodes.jsonl", "released"
PAUSE = 0.2  # seconds between two looks for answers
REST = 30.0  # seconds before a node that could not say who it is, or was turned away, is asked again
_DOUBLINGS = 8  # of that, at most
_INPUT = 2**22
_HEAD = 2**24  # numbers that an input may have, and a head in all
_FEW = 5  # names that are told of many
_REASON = 1000  # characters that are told of why somebody is turned away
_EXPERIMENT = re.compile("[0-9a-f]{16}")
Answer = Envelope | NodeError


class Transport(Protocol):
    """Carries envelopes to nodes and back. Nodes have numbers, which are not those of clients."""

    def nodes(self) -> set[int]:
        """Who can be written to now."""
        ...

    def send(self, envelopes: Sequence[tuple[int, Envelope]], seconds: float) -> list[str]:
        """Send each envelope to its node, to be answered within so many seconds; a name for each, for `collect`.

        "" where it could not be sent.
        """
        ...

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        """The answers that are there, at once, by the names of what they answer; each is given once."""
        ...


class Owner(NamedTuple):
    """Whose a client's number is. node: as which it came. token: digest of that by which it is known again."""

    node: int
    token: str


class EventLog:
    """`nodes.jsonl` of a run folder: a line for the experiment, and one for whatever happens to nodes.

    Lines wait until `open`, as nothing is written before a run begins.

    Args:
        path: the file. resume: go on with what is there.

    Attributes:
        experiment: under this name nodes keep what is theirs. introductions: what clients last said of themselves.
        owners: number of client -> whose it is.
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
            *whole, _ = self._path.read_bytes().split(b"\n")  # what comes last has no end: it was cut off by a kill
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
        """What a line says of who is which client."""
        if line["event"] == "hello":
            known = parse(ClientHello, line["said"])
            node = line["node"]
            if type(node) is not int:
                raise ValueError(f"no number of a node: {node!r}")
            self.introductions[known.client] = known
            self.owners[known.client] = Owner(node, known.token)
        elif line["event"] in ("turned away", _RELEASED):
            self.forget(line.get("client", -1))

    def forget(self, client: int) -> None:
        """A client's number is nobody's any more; -1 is no client."""
        self.introductions.pop(client, None)
        self.owners.pop(client, None)

    def welcome(self, said: ClientHello, node: int) -> None:
        """Somebody is a client: its number is that node's from now on."""
        owner = Owner(node, said.token)
        if self.introductions.get(said.client) == said and self.owners.get(said.client) == owner:
            return
        self.introductions[said.client] = said
        self.owners[said.client] = owner
        self.note("hello", client=said.client, node=node, said=said.model_dump())

    def note(self, event: str, **facts: Any) -> None:
        """One line more."""
        line = json.dumps({"event": event, "round": self.round, "time": round(time.time(), 3), **facts}) + "\n"
        if not self._open:
            self._whole += line
        else:
            with explain_disk_errors(self._path.parent):
                append_line(self._path, line.encode())

    def open(self) -> None:
        """Write what waits, and from now on at once."""
        if not self._open:
            with explain_disk_errors(self._path.parent):
                atomic_write(self._path, self._whole.encode())
            self._whole = ""
            self._open = True


def release(folder: str | Path, client: int) -> Owner:
    """By the keeper's word a client's number belongs to nobody: the next node that comes with it has it.

    Args:
        folder: of the run, which is not at work.

    Returns:
        Whose it was.

    Raises:
        ConfigError: the folder has no event log of nodes, the number is nobody's, or a part of the folder is a link.
    """
    check_links(Path(folder))
    path = Path(folder) / EVENT_LOG
    if not path.is_file():
        raise ConfigError(f"expected a run folder of a deployment with its {EVENT_LOG}, got {folder}")
    with lock_folder(Path(folder)):
        event_log = EventLog(path, resume=True)
        owner = event_log.owners.get(client)
        if owner is None:
            taken = ", ".join(map(str, sorted(event_log.owners))) or "none"
            raise ConfigError(f"expected a client whose number belongs to a node ({taken}), got {client}")
        event_log.open()
        event_log.note(_RELEASED, client=client, node=owner.node)
    return owner


class RequestBroker:
    """Sends envelopes and waits for what comes back.

    Args:
        wire: what carries them. deadline: seconds that a node has for an answer.
    """

    def __init__(self, wire: Transport, deadline: float) -> None:
        self.wire, self.deadline = wire, deadline

    def request(
        self, envelopes: Sequence[tuple[int | None, Envelope]], done: Callable[[int], None] = lambda _: None
    ) -> list[Answer]:
        """The answers to envelopes to nodes (None: nobody knows where it is), in their order.

        Args:
            done: called with how many are through, whenever there are more.
        """
        online = self.wire.nodes()
        found: list[Answer | None] = [
            None if node in online else NodeError("its node is not there") for node, _ in envelopes
        ]
        places = [place for place, answer in enumerate(found) if answer is None]
        to_send = [envelopes[place] for place in places]
        sent = [(node, envelope) for node, envelope in to_send if node is not None]
        names = self.wire.send(sent, self.deadline) if sent else []
        for place in (place for name, place in zip(names, places, strict=True) if not name):
            found[place] = NodeError("its node could not be written to")
        waiting = {name: place for name, place in zip(names, places, strict=True) if name}
        late = time.monotonic() + self.deadline
        while waiting:
            if answers := self.wire.collect(list(waiting)):
                for name, answer in answers.items():
                    found[waiting.pop(name)] = answer
                done(len(envelopes) - len(waiting))
            elif time.monotonic() > late:
                break
            else:
                time.sleep(PAUSE)
        silent = NodeError(f"no answer within {self.deadline:g} s")
        return [silent if answer is None else answer for answer in found]


class NodeRegistry:
    """The clients that have said who they are.

    Args:
        recipe: what they must have, too. broker: asks them. event_log: where it is noted. count: clients of the
            federation. say: told what somebody who waits should know.

    Attributes:
        count: see above.
        known: by number of client, also those of an earlier process whose nodes are not back. node_of: their nodes.
        class_names: those of the task, once the first have come.
    """

    def __init__(
        self, recipe: Recipe, broker: RequestBroker, event_log: EventLog, count: int, say: Callable[[str], None]
    ) -> None:
        self._settings = shared_config(recipe)
        self._broker = broker
        self._event_log = event_log
        self.count = count
        self._say = say
        self.known = {i: said for i, said in event_log.introductions.items() if i < count}
        self.node_of: dict[int, int] = {}
        told = recipe.data.class_names
        self.class_names = told or next((said.class_names for said in self.known.values()), None)
        self._asked: dict[str, int] = {}  # greetings under way
        self._resting: dict[int, tuple[float, str]] = {}  # who is not asked before when, and why
        self._rejections = Counter[int]()  # of a node: how often a federation was tried in vain with it

    def wait_for_clients(self, wanted: int) -> None:
        """Wait until so many clients are there; the first of them settle what the classes are called."""
        told = -1
        while True:
            self.poll()
            if len(self.node_of) >= wanted and self.class_names is None:
                self._settle()
            if told != len(self.node_of):
                told = len(self.node_of)
                self._say(f"{told} of {wanted} clients are there")
            if told >= wanted:
                return
            time.sleep(PAUSE)

    def poll(self) -> bool:
        """Greet nodes that are new, take in what greeted ones say; whether somebody is a client that was not known."""
        before = set(self.known)
        self._hear()
        online = self._broker.wire.nodes()
        now = time.monotonic()
        self._resting = {
            node: rest for node, rest in self._resting.items() if node in online or self._rejections[node] > 1
        }
        resting = {node for node, (until, _) in self._resting.items() if now < until}
        if fresh := sorted(online - {*self.node_of.values(), *self._asked.values()} - resting):
            envelope = self._greeting()
            sent = self._broker.wire.send([(node, envelope) for node in fresh], self._broker.deadline)
            self._asked |= {name: node for name, node in zip(sent, fresh, strict=True) if name}
            self._hear()
        return bool(set(self.known) - before)

    def _greeting(self) -> Envelope:
        return Envelope("hello", TaskRequest(**self.task_facts()).model_dump())

    def _hear(self) -> None:
        if not self._asked:
            return
        for name, answer in self._broker.wire.collect(list(self._asked)).items():
            self._take(self._asked.pop(name), answer)

    def _take(self, node: int, answer: Answer) -> None:
        """A node's answer to a greeting."""
        try:
            if isinstance(answer, NodeError):
                raise RunError(answer)
            said = parse(ClientHello, answer.facts)
            said = said.model_copy(update={"token": hashlib.sha256(said.token.encode()).hexdigest()})
            self._check(said, node)
        except (RunError, ConfigError) as error:
            self._turn_away(node, str(error))
            return
        except Exception as error:  # whatever somebody else has said
            self._turn_away(node, f"its introduction cannot be read: {type(error).__name__}")
            return
        self.known[said.client], self.node_of[said.client] = said, node
        self._event_log.welcome(said, node)

    def reject(self, client: int, reason: str) -> None:
        """Turn somebody away that has said hello, as the others' federation has no place for it.

        To find that out takes time; so it rests twice as long after each time.
        """
        del self.known[client]
        self._event_log.forget(client)
        node = self.node_of.pop(client)
        self._rejections[node] += 1
        self._turn_away(node, reason, client=client)

    def _turn_away(self, node: int, reason: str, **more: int) -> None:
        reason = reason[:_REASON]
        if self._resting.get(node, (0.0, ""))[1] != reason:  # else it is an old story
            self._event_log.note("turned away", node=node, reason=reason, **more)
            self._say(f"node {node} is no client: {reason}")
        doubled = min(max(self._rejections[node] - 1, 0), _DOUBLINGS)
        self._resting[node] = (time.monotonic() + REST * 2**doubled, reason)

    def _check(self, said: ClientHello, node: int) -> None:
        """Whether this can be a client.

        Raises:
            ConfigError: it cannot; says why.
        """
        plain = said.feature_dim * (len(said.class_names) + 1)  # numbers of a linear layer
        head = max(sum(math.prod(shape) for shape in said.head.values()), plain if said.linear else 0)
        if math.prod(said.shape) > _INPUT:
            raise ConfigError(f"expected at most {_INPUT} numbers in an input, got the shape {said.shape}")
        if head > _HEAD:
            raise ConfigError(f"expected at most {_HEAD} numbers in a head, got {head}")
        if self.class_names is not None and said.class_names != self.class_names:
            raise ConfigError(f"expected the classes {_listed(self.class_names)}, got {_listed(said.class_names)}")
        Prepare(tuple(said.mean), tuple(said.std), table=said.table)
        number = said.client
        other = self.node_of.get(said.client)
        if number >= self.count:
            raise ConfigError(f"expected a client-id below {self.count}, got {number}")
        if other is not None and other != node and other in self._broker.wire.nodes():
            raise ConfigError(f"client-id {number} is taken by node {other}")
        owner = self._event_log.owners.get(number)
        if owner is not None and node != owner.node and said.token != owner.token:
            raise ConfigError(
                f"client-id {number} belongs to the node that came as {owner.node}, got another; where "
                f"its keeper wants it so: polyfed deploy release RUN {number}"
            )
        before = self.known.get(number)
        if before is not None and (before.architecture, before.head) != (said.architecture, said.head):
            raise ConfigError(f"client {number} was '{before.architecture}' before, got as '{said.architecture}'")

    def _settle(self) -> None:
        """One numbering of classes, where the recipe has none: that of most of the first clients, or of the first.

        The others are asked again, as they may have some of these classes.
        """
        said = Counter(tuple(one.class_names) for _, one in sorted(self.known.items()))
        self.class_names = list(said.most_common(1)[0][0])
        others = [i for i, one in sorted(self.known.items()) if one.class_names != self.class_names]
        answers = self._broker.request([(self.node_of[i], self._greeting()) for i in others]) if others else []
        for number, answer in zip(others, answers, strict=True):
            del self.known[number]
            self._take(self.node_of.pop(number), answer)

    def task_facts(self) -> Mapping[str, Any]:
        """What every task tells: the experiment, the settings, the classes' names."""
        return {"experiment": self._event_log.experiment, "settings": self._settings, "class_names": self.class_names}


class NodePresence(Plugin):
    """Who of those that the settings let be there has ever said hello.

    Args:
        known: their numbers. look: called before every round.
    """

    name = "nodes"

    def __init__(self, known: Collection[int], look: Callable[[], None]) -> None:
        super().__init__()
        self._known = frozenset(known)
        self._look = look
        self._unknown: frozenset[int] = frozenset()

    def validate(self, setup: Setup) -> None:
        """Whom nobody knows yet."""
        self._unknown = frozenset(client.id for client in setup.clients) - self._known

    def absent(self, number: int) -> Collection[int]:
        """Whose node has not said hello."""
        return self._unknown

    def select(self, round: Round) -> None:
        """See who has come."""
        if not round.final:
            self._look()


def _listed(names: Sequence[str]) -> str:
    """The first few of them, in a line."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(repr(name[:40]) for name in names[:_FEW]) + more
