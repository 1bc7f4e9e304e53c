"""Who is there: which node is which client, what it said of itself, and the diary of what happened to nodes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from polyfed.config.recipe import Recipe
from polyfed.data.transforms import Prepare
from polyfed.deploy.protocol import Introduction, Letter, Task, Trouble, agreed, read
from polyfed.engine.run_folder import held, write_atomically, writing
from polyfed.errors import ConfigError, RunError
from polyfed.results.read import check_links, parse_json

DIARY, _RELEASED = "nodes.jsonl", "released"
PAUSE = 0.2  # seconds between two looks for answers
REST = 30.0  # seconds before a node that could not say who it is, or was turned away, is asked again
_INPUT = 2**22
_HEAD = 2**24  # numbers that an input may have, and a head in all
_FEW = 5  # names that are told of many
_REASON = 1000  # characters that are told of why somebody is turned away
_EXPERIMENT = re.compile("[0-9a-f]{16}")
Answer = Letter | Trouble


class Wire(Protocol):
    """Carries letters to nodes and back. Nodes have numbers, which are not those of clients."""

    def nodes(self) -> set[int]:
        """Who can be written to now."""
        ...

    def send(self, letters: Sequence[tuple[int, Letter]], seconds: float) -> list[str]:
        """Send each letter to its node, to be answered within so many seconds; a name for each, for `collect`.

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


class Diary:
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
        self.introductions: dict[int, Introduction] = {}
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
            raise ConfigError(f"expected the diary of nodes in {self._path}, got something else: {error}") from None
        self._whole = "".join(json.dumps(line) + "\n" for line in lines)

    def _take(self, line: Mapping[str, Any]) -> None:
        """What a line says of who is which client."""
        if line["event"] == "hello":
            known = read(Introduction, line["said"])
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

    def welcome(self, said: Introduction, node: int) -> None:
        """Somebody is a client: its number is that node's from now on."""
        self.introductions[said.client] = said
        self.owners[said.client] = Owner(node, said.token)
        self.note("hello", client=said.client, node=node, said=said.model_dump())

    def note(self, event: str, **facts: Any) -> None:
        """One line more."""
        line = json.dumps({"event": event, "round": self.round, "time": round(time.time(), 3), **facts}) + "\n"
        self._whole += line
        if self._open:
            with writing(self._path.parent), self._path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())

    def open(self) -> None:
        """Write what waits, and from now on at once."""
        if not self._open:
            with writing(self._path.parent):
                write_atomically(self._path, self._whole.encode())
            self._open = True


def release(folder: str | Path, client: int) -> Owner:
    """By the keeper's word a client's number belongs to nobody: the next node that comes with it has it.

    Args:
        folder: of the run, which is not at work.

    Returns:
        Whose it was.

    Raises:
        ConfigError: the folder has no diary of nodes, the number is nobody's, or a part of the folder is a link.
    """
    check_links(Path(folder))
    path = Path(folder) / DIARY
    if not path.is_file():
        raise ConfigError(f"expected a run folder of a deployment with its {DIARY}, got {folder}")
    with held(Path(folder)):
        diary = Diary(path, resume=True)
        owner = diary.owners.get(client)
        if owner is None:
            taken = ", ".join(map(str, sorted(diary.owners))) or "none"
            raise ConfigError(f"expected a client whose number belongs to a node ({taken}), got {client}")
        diary.open()
        diary.note(_RELEASED, client=client, node=owner.node)
    return owner


class Office:
    """Sends letters and waits for what comes back.

    Args:
        wire: what carries them. deadline: seconds that a node has for an answer.
    """

    def __init__(self, wire: Wire, deadline: float) -> None:
        self.wire, self.deadline = wire, deadline

    def ask(
        self, letters: Sequence[tuple[int | None, Letter]], done: Callable[[int], None] = lambda _: None
    ) -> list[Answer]:
        """The answers to letters to nodes (None: nobody knows where it is), in their order.

        Args:
            done: called with how many are through, whenever there are more.
        """
        online = self.wire.nodes()
        found: list[Answer | None] = [
            None if node in online else Trouble("its node is not there") for node, _ in letters
        ]
        places = [place for place, answer in enumerate(found) if answer is None]
        to_send = [letters[place] for place in places]
        sent = [(node, letter) for node, letter in to_send if node is not None]
        names = self.wire.send(sent, self.deadline) if sent else []
        for place in (place for name, place in zip(names, places, strict=True) if not name):
            found[place] = Trouble("its node could not be written to")
        waiting = {name: place for name, place in zip(names, places, strict=True) if name}
        late = time.monotonic() + self.deadline
        while waiting:
            if answers := self.wire.collect(list(waiting)):
                for name, answer in answers.items():
                    found[waiting.pop(name)] = answer
                done(len(letters) - len(waiting))
            elif time.monotonic() > late:
                break
            else:
                time.sleep(PAUSE)
        silent = Trouble(f"no answer within {self.deadline:g} s")
        return [silent if answer is None else answer for answer in found]


class Roster:
    """The clients that have said who they are.

    Args:
        recipe: what they must have, too. office: asks them. diary: where it is told. count: clients of the federation.
        say: told what somebody who waits should know.

    Attributes:
        count: see above.
        known: by number of client, also those of an earlier process whose nodes are not back. node_of: their nodes.
        class_names: those of the task, once the first have come.
    """

    def __init__(self, recipe: Recipe, office: Office, diary: Diary, count: int, say: Callable[[str], None]) -> None:
        self._settings = agreed(recipe)
        self._office = office
        self._diary = diary
        self.count = count
        self._say = say
        self.known = {i: said for i, said in diary.introductions.items() if i < count}
        self.node_of: dict[int, int] = {}
        told = recipe.data.class_names
        self.class_names = told or next((said.class_names for said in self.known.values()), None)
        self._asked: dict[str, int] = {}  # greetings under way
        self._resting: dict[int, tuple[float, str]] = {}  # who is not asked before when, and why

    def gather(self, wanted: int) -> None:
        """Wait until so many clients are there; the first of them settle what the classes are called."""
        told = -1
        while True:
            self.look()
            if len(self.node_of) >= wanted and self.class_names is None:
                self._settle()
            if told != len(self.node_of):
                told = len(self.node_of)
                self._say(f"{told} of {wanted} clients are there")
            if told >= wanted:
                return
            time.sleep(PAUSE)

    def look(self) -> bool:
        """Greet nodes that are new, take in what greeted ones say; whether somebody is a client that was not known."""
        before = set(self.known)
        self._hear()
        online = self._office.wire.nodes()
        now = time.monotonic()
        self._resting = {node: rest for node, rest in self._resting.items() if node in online}
        resting = {node for node, (until, _) in self._resting.items() if now < until}
        if fresh := sorted(online - {*self.node_of.values(), *self._asked.values()} - resting):
            letter = self._greeting()
            sent = self._office.wire.send([(node, letter) for node in fresh], self._office.deadline)
            self._asked |= {name: node for name, node in zip(sent, fresh, strict=True) if name}
            self._hear()
        return bool(set(self.known) - before)

    def _greeting(self) -> Letter:
        return Letter("hello", Task(**self.facts()).model_dump())

    def _hear(self) -> None:
        if not self._asked:
            return
        for name, answer in self._office.wire.collect(list(self._asked)).items():
            self._take(self._asked.pop(name), answer)

    def _take(self, node: int, answer: Answer) -> None:
        """A node's answer to a greeting."""
        try:
            if isinstance(answer, Trouble):
                raise RunError(answer)
            said = read(Introduction, answer.facts)
            said = said.model_copy(update={"token": hashlib.sha256(said.token.encode()).hexdigest()})
            self._check(said, node)
        except (RunError, ConfigError) as error:
            self._turn_away(node, str(error))
            return
        except Exception as error:  # whatever somebody else has said
            self._turn_away(node, f"its introduction cannot be read: {type(error).__name__}")
            return
        self.known[said.client], self.node_of[said.client] = said, node
        self._diary.welcome(said, node)

    def dismiss(self, client: int, reason: str) -> None:
        """Turn somebody away that has said hello, as the others' federation has no place for it."""
        del self.known[client]
        self._diary.forget(client)
        self._turn_away(self.node_of.pop(client), reason, client=client)

    def _turn_away(self, node: int, reason: str, **more: int) -> None:
        reason = reason[:_REASON]
        if self._resting.get(node, (0.0, ""))[1] != reason:  # else it is an old story
            self._diary.note("turned away", node=node, reason=reason, **more)
            self._say(f"node {node} is no client: {reason}")
        self._resting[node] = (time.monotonic() + REST, reason)

    def _check(self, said: Introduction, node: int) -> None:
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
        if other is not None and other != node and other in self._office.wire.nodes():
            raise ConfigError(f"client-id {number} is taken by node {other}")
        owner = self._diary.owners.get(number)
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
        answers = self._office.ask([(self.node_of[i], self._greeting()) for i in others]) if others else []
        for number, answer in zip(others, answers, strict=True):
            del self.known[number]
            self._take(self.node_of.pop(number), answer)

    def facts(self) -> Mapping[str, Any]:
        """What every task tells: the experiment, the settings, the classes' names."""
        return {"experiment": self._diary.experiment, "settings": self._settings, "class_names": self.class_names}


def _listed(names: Sequence[str]) -> str:
    """The first few of them, in a line."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(repr(name[:40]) for name in names[:_FEW]) + more
