"""Clients whose rows do not count any more: what has come of them is taken out of every checkpoint, read or written.

Who they are stands in a file of the run folder, which nothing removes: so nobody comes back with an older checkpoint,
or with a run that replaces the present one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.core.message import Message, State
from polyfed.core.method import Method
from polyfed.engine.run_folder import RunFolder


@dataclass(frozen=True)
class Forgotten:
    """The clients that a run has forgotten, by number, and its method, which takes them out.

    Raises:
        ConfigError: there are some, and the method cannot.
    """

    method: Method
    clients: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.clients:
            self.method.remembered({})

    @classmethod
    def of(cls, method: Method, folder: RunFolder | None) -> Forgotten:
        """Those of a run folder; of a run without one nobody."""
        return cls(method, () if folder is None else folder.forgotten())

    def server(self, state: State) -> State:
        """The server's state without them; itself where nothing has been there."""
        return functools.reduce(self.method.forget, self.clients, state)

    def upload(self, client: int, message: Message) -> Message:
        """What is left of an upload on its way to the server; itself where that is all."""
        return self.method.forget_upload(message) if client in self.clients else message

    def client(self, state: State, server: State) -> State:
        """A client's state with what has come of the server's."""
        return self.method.forget_at_client(state, server)
