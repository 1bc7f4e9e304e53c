"""A node's disk: its client's states, the requests that it has answered, and its secrets.

**States** after the last round that counted and after the one before it. The server decides from which of them the
client goes on: a node that is ahead (its answer was lost, or the server was put back to a checkpoint) goes back, one
that lacks the state reports it.

**Answers**: so many different requests of a kind in a round, and no more. Noise hides a client's rows as long as few
answers are drawn about them. A server that asks for one round's training many times, each time of a model that differs
a little, would average it away; no restart and no other run may allow that. The same request asked again has the same
answer, bit for bit, and is not counted twice.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from polyfed.core.message import State
from polyfed.deploy.protocol import deserialize, merge_client_state, serialize, split_client_state
from polyfed.engine.run_folder import atomic_write, lock_folder
from polyfed.errors import RunError
from polyfed.results.read import parse_json

_ENDING = ".state"
_SECRET = "noise.secret"
_TOKEN = "number.secret"
_BYTES = 32


@dataclass(frozen=True)
class ClientSnapshot:
    """A client between two rounds.

    weights: None where it has none of its own yet; of the network `variant`. data: checksum of its rows; "": not known.
    """

    variant: str = ""
    weights: Mapping[str, Tensor] | None = None
    state: State = field(default_factory=dict)
    data: str = ""


def checkpoint_id(round: int, place: int) -> str:
    """The name of a client's state after exchange `place` of a round; names sort in time."""
    return f"{round:06d}-{place:02d}"


def _round(name: str) -> str:
    return name.partition("-")[0]


class NodeCheckpoints:
    """A folder with a client's states after its last exchanges, by `checkpoint_id`; made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def marks(self) -> list[str]:
        """The states' names, in time."""
        return sorted(path.name.removesuffix(_ENDING) for path in self._folder.glob(f"[0-9]*{_ENDING}"))

    def read(self, wanted: str) -> ClientSnapshot:
        """The client after `wanted`; "": at its beginning.

        Raises:
            RunError: there is no such state, or it is damaged.
        """
        if not wanted:
            return ClientSnapshot()
        try:
            data = self._path(wanted).read_bytes()
        except FileNotFoundError:
            have = ", ".join(self.marks()) or "nothing"
            raise RunError(f"expected the state after '{wanted}' in {self._folder}, got {have}") from None
        message, facts = deserialize(data)
        weights, state = split_client_state(message)
        own = weights if facts.get("own") else None
        return ClientSnapshot(str(facts.get("variant", "")), own, state, str(facts.get("data", "")))

    def stored(self, wanted: str) -> bytes:
        """The file that `read` reads; b"" where there is none."""
        path = self._path(wanted)
        return path.read_bytes() if wanted and path.exists() else b""

    def write(self, name: str, kept: ClientSnapshot, base: str) -> None:
        """Keep a state; of the others only `base`, on which it was made, and the last of an earlier round.

        A round of several exchanges may be undone as a whole.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        facts = {"variant": kept.variant, "own": kept.weights is not None, "data": kept.data}
        atomic_write(self._path(name), serialize(merge_client_state(kept.weights or {}, kept.state), facts))
        earlier = [mark for mark in self.marks() if _round(mark) < _round(name)]
        self._drop(mark for mark in self.marks() if mark not in (name, base, *earlier[-1:]))

    def rollback(self, wanted: str) -> None:
        """Drop all states after `wanted`."""
        self._drop(mark for mark in self.marks() if mark > wanted)

    def _drop(self, marks: Iterable[str]) -> None:
        for each in marks:
            self._path(each).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_ENDING}"


# answers --------------------------------------------------------------------------------------------------------------


def count_answer(path: Path, kind: str, request: str, most: int) -> None:
    """Note a request before it is answered, in a file with a line for each; processes that share it count together.

    Args:
        path: of the file, made with the first line. Its folder is locked while a request is counted.
        kind: requests of one kind are counted together. request: identifies it. most: different ones of the kind.

    Raises:
        RunError: it would be one too many, or the file cannot be read or written; it must not be answered.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(path.parent, waits=True, needed=True):
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a line without end has no answer
            known = {asked for asked_kind, asked in map(_entry, lines) if asked_kind == kind}
            if request in known:
                return
            if len(known) >= most:
                raise RunError(
                    f"expected at most {most} different requests for {kind} (answers, in this node's configuration), "
                    "got one more"
                )
            with path.open("ab") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
                file.write(json.dumps([kind, request]).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"expected to note what is answered in {path}, got {error.strerror}") from None


def _entry(line: bytes) -> tuple[str, str]:
    try:
        kind, request = parse_json(line)
    except (ValueError, TypeError):
        raise RunError(f"expected a kind and a request in each line of the answers, got {line!r:.80}") from None
    return str(kind), str(request)


# secrets --------------------------------------------------------------------------------------------------------------


def load_or_create_key(folder: Path, name: str = _SECRET) -> bytes:
    """32 bytes that only this node knows, made when they are first needed, in a file for their owner alone.

    Args:
        name: of the file; another for each purpose.

    Raises:
        RunError: the file cannot be made or read, or holds something else.
    """
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # with the weights that will lie in it
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found = path.read_bytes()
        else:
            with os.fdopen(handle, "wb") as file:
                found = secrets.token_bytes(_BYTES)
                file.write(found)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"expected a file for this node's secret at {path}, got {error.strerror}") from None
    if len(found) != _BYTES:
        raise RunError(f"expected {_BYTES} bytes as this node's secret in {path}, got {len(found)}; remove it")
    return found


def token(folder: Path, experiment: str) -> str:
    """By which a server recognizes this node under any registration: a function of a secret of its own.

    Raises:
        RunError: as `load_or_create_key`.
    """
    return hmac.digest(load_or_create_key(folder, _TOKEN), f"number {experiment}".encode(), "sha256").hex()
