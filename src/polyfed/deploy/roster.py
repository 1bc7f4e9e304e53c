"""Who is there: which node is which client, what it said of itself, and the diary of what happened to nodes."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from polyfed.data.transforms import Prepare
from polyfed.deploy.letters import Introduction, Letter, Task, Trouble, agreed, read
from polyfed.errors import RequestError, RunError
from polyfed.recipe import Recipe
from polyfed.recorded import parse_json

PAUSE = 0.2  # seconds between two looks for answers
REST = 30.0  # seconds before a node that could not say who it is, or was turned away, is asked again
_LARGEST = 2**28  # numbers of a tensor that a node may speak of
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


class Diary:
    """`nodes.jsonl` of a run folder: a line for the experiment, and one for whatever happens to nodes.

    Lines wait until `open`, as nothing is written before a run begins.

    Args:
        path: the file. resume: go on with what is there.

    Attributes:
        experiment: under this name nodes keep what is theirs. introductions: what clients last said of themselves.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path, self._whole = path, ""
        self.introductions: dict[int, Introduction] = {}
        self.experiment, self.round, self._open = secrets.token_hex(8), 0, False
        if resume and path.exists():
            self._read()
        else:
            self._whole = json.dumps({"event": "experiment", "experiment": self.experiment}) + "\n"

    def _read(self) -> None:
        try:
            lines = [parse_json(line) for line in self._path.read_bytes().splitlines() if line]
            self.experiment = str(lines[0]["experiment"])
            for line in lines:
                if line["event"] == "hello":
                    known = read(Introduction, line["said"])
                    self.introductions[known.client] = known
                elif line["event"] == "turned away":
                    self.introductions.pop(line.get("client"), None)
        except (OSError, ValueError, KeyError, IndexError, TypeError, RunError) as error:
            raise RequestError(f"expected the diary of nodes in {self._path}, came something else: {error}") from None
        self._whole = "".join(json.dumps(line) + "\n" for line in lines)

    def note(self, event: str, **facts: Any) -> None:
        """One line more."""
        line = json.dumps({"event": event, "round": self.round, "time": round(time.time(), 3), **facts}) + "\n"
        self._whole += line
        if self._open:
            with self._path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())

    def open(self) -> None:
        """Write what waits, and from now on at once."""
        if not self._open:
            self._path.write_text(self._whole, encoding="utf-8")
            self._open = True


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
        sent = [(node, letters[place][1]) for place in places if (node := letters[place][0]) is not None]
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
        self._settings, self._office, self._diary, self.count, self._say = agreed(recipe), office, diary, count, say
        self.known = {i: said for i, said in diary.introductions.items() if i < count}
        self.node_of: dict[int, int] = {}
        self.class_names = next((said.class_names for said in self.known.values()), None)
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
        online, now = self._office.wire.nodes(), time.monotonic()
        self._resting = {node: rest for node, rest in self._resting.items() if node in online}
        resting = {node for node, (until, _) in self._resting.items() if now < until}
        if fresh := sorted(online - {*self.node_of.values(), *self._asked.values()} - resting):
            letter = self._greeting()
            sent = self._office.wire.send([(node, letter) for node in fresh], self._office.deadline)
            self._asked |= {name: node for name, node in zip(sent, fresh, strict=True) if name}
            self._hear()
        return bool(set(self.known) - before)

    def _greeting(self) -> Letter:
        return Letter("hello", Task(settings=self._settings, class_names=self.class_names).model_dump())

    def _hear(self) -> None:
        for name, answer in self._office.wire.collect(list(self._asked)).items() if self._asked else ():
            self._take(self._asked.pop(name), answer)

    def _take(self, node: int, answer: Answer) -> None:
        """A node's answer to a greeting."""
        try:
            if isinstance(answer, Trouble):
                raise RunError(answer)
            said = read(Introduction, answer.facts)
            self._check(said, node)
        except (RunError, RequestError) as error:
            self._turn_away(node, str(error))
            return
        self.known[said.client], self.node_of[said.client] = said, node
        self._diary.note("hello", client=said.client, node=node, said=said.model_dump())

    def dismiss(self, client: int, reason: str) -> None:
        """Turn somebody away that has said hello, as the others' federation has no place for it."""
        del self.known[client]
        self._turn_away(self.node_of.pop(client), reason, client=client)

    def _turn_away(self, node: int, reason: str, **more: int) -> None:
        if self._resting.get(node, (0.0, ""))[1] != reason:  # else it is an old story
            self._diary.note("turned away", node=node, reason=reason, **more)
            self._say(f"node {node} is no client: {reason}")
        self._resting[node] = (time.monotonic() + REST, reason)

    def _check(self, said: Introduction, node: int) -> None:
        """Whether this can be a client.

        Raises:
            RequestError: it cannot; says why.
        """
        for what, shape in {"an input": said.shape, **{f"the head's '{n}'": s for n, s in said.head.items()}}.items():
            if math.prod(shape) > _LARGEST:
                raise RequestError(f"expected at most {_LARGEST} numbers in {what}, came the shape {shape}")
        Prepare(tuple(said.mean), tuple(said.std), table=said.table)
        number, other = said.client, self.node_of.get(said.client)
        if number >= self.count:
            raise RequestError(f"expected a client-id below {self.count}, came {number}")
        if other is not None and other != node and other in self._office.wire.nodes():
            raise RequestError(f"client-id {number} is taken by node {other}")
        before = self.known.get(number)
        if before is not None and (before.architecture, before.head) != (said.architecture, said.head):
            raise RequestError(f"client {number} was '{before.architecture}' before, came as '{said.architecture}'")

    def _settle(self) -> None:
        """One numbering of classes: that of the first clients if they agree, else all their names in order."""
        lists = [said.class_names for said in self.known.values()]
        if all(names == lists[0] for names in lists):
            self.class_names = lists[0]
            return
        self.class_names = sorted({name for names in lists for name in names}, key=_in_order)
        others = [i for i, said in sorted(self.known.items()) if said.class_names != self.class_names]
        for number, answer in zip(
            others, self._office.ask([(self.node_of[i], self._greeting()) for i in others]), strict=True
        ):
            del self.known[number]
            self._take(self.node_of.pop(number), answer)

    def facts(self) -> Mapping[str, Any]:
        """What every task tells: the experiment, the settings, the classes' names."""
        return {"experiment": self._diary.experiment, "settings": self._settings, "class_names": self.class_names}


def _in_order(name: str) -> tuple[bool, int, str]:
    """Numbers by their size, then words."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
