"""A node's disk: its client's states, and its secrets.

States are those after the last round that counted, after the one before it, and after the best one. The server decides
from which of them the client goes on: a node that is ahead (its answer was lost, or the server was put back to a
checkpoint) goes back, one that lacks the state reports it.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from polyfed.core.message import State
from polyfed.engine.wire import decode, encode
from polyfed.errors import RunError
from polyfed.records.read import atomic_write

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


def checkpoint_id(round: int, exchange: int) -> str:
    """The name of a client's state after an exchange of a round, by its index; names sort in time."""
    return f"{round:06d}-{exchange:02d}"


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
        return ClientSnapshot(**decode(data))

    def stored(self, wanted: str) -> bytes:
        """The file that `read` reads; b"" where there is none."""
        path = self._path(wanted)
        return path.read_bytes() if wanted and path.exists() else b""

    def write(self, name: str, kept: ClientSnapshot, needed: Collection[str]) -> None:
        """Keep a state; of the others only those that are needed, and the last of an earlier round.

        needed: the one that it was made on, and the best round's, whose models may be wanted.

        A round of several exchanges may be undone as a whole.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self._path(name), encode(vars(kept)))
        earlier = [mark for mark in self.marks() if _round(mark) < _round(name)]
        self._drop(mark for mark in self.marks() if mark not in (name, *needed, *earlier[-1:]))

    def rollback(self, wanted: str) -> None:
        """Drop all states after `wanted`."""
        self._drop(mark for mark in self.marks() if mark > wanted)

    def _drop(self, marks: Iterable[str]) -> None:
        for each in marks:
            self._path(each).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_ENDING}"


# secrets --------------------------------------------------------------------------------------------------------------


def load_or_create_key(folder: Path, name: str = _SECRET) -> bytes:
    """32 bytes that only this node knows, made when they are first needed, in a file for their owner alone.

    Raises:
        RunError: the file cannot be made or read, or holds something else.
    """
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # with the weights that will lie in it
        opener = functools.partial(os.open, mode=0o600)
        with contextlib.suppress(FileExistsError), open(path, "xb", opener=opener) as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        found = path.read_bytes()
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
