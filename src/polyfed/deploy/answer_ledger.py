"""What a node has answered so far, on its own disk: so many different requests of a kind in a round, and no more.

Noise hides a client's rows as long as few answers are drawn about them. A server that asks for one round's training
many times, each time of a model that differs a little, would average it away; no restart and no other run may let it.
The same request asked again has the same answer, bit for bit, and is not counted twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from polyfed.engine.run_folder import lock_folder
from polyfed.errors import RunError
from polyfed.results.read import parse_json

__all__ = ["AnswerLedger"]


class AnswerLedger:
    """A file with a line for every request that was answered; processes that share it count together.

    Args:
        path: the file, made with the first line. Its folder is locked while a request is counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self, kind: str, request: str, most: int) -> None:
        """Note a request before it is answered.

        Args:
            kind: requests of one kind are counted together. request: what tells it from others. most: of the kind.

        Raises:
            RunError: it would be one too many, or the file cannot be read or written; it must not be answered.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with lock_folder(self._path.parent, waits=True):
                self._count(kind, request, most)
        except OSError as error:
            raise RunError(f"expected to note what is answered in {self._path}, got {error.strerror}") from None

    def _count(self, kind: str, request: str, most: int) -> None:
        known = self._read().get(kind, set())
        if request in known:
            return
        if len(known) >= most:
            raise RunError(
                f"expected at most {most} different requests for {kind} (answers, in this node's configuration), "
                "got one more"
            )
        self._write(kind, request)

    def _read(self) -> dict[str, set[str]]:
        """Requests by kind. A last line without its end was never answered."""
        found: dict[str, set[str]] = {}
        for line in self._lines():
            try:
                kind, request = parse_json(line)
            except (ValueError, TypeError):
                raise RunError(
                    f"expected a kind and a request in each line of {self._path}, got {line!r:.80}"
                ) from None
            found.setdefault(str(kind), set()).add(str(request))
        return found

    def _lines(self) -> list[bytes]:
        try:
            return self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def _write(self, kind: str, request: str) -> None:
        whole = sum(len(line) + 1 for line in self._lines())
        with self._path.open("ab") as file:
            file.truncate(whole)
            file.write(json.dumps([kind, request]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
