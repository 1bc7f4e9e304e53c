"""What a method would do in round 1: asked before a run, on a copy of the server, which stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from polyfed.core.method import Method
from polyfed.core.server import Server


def preview(method: Method, server: Server, present: Iterable[int] | None = None) -> Server:
    """A copy of the server in round 1, after `start` and `plan`.

    Args:
        server: before round 1. present: who is there; default: whom the server knows.
    """
    trial = copy.copy(server)
    trial.state = {}
    trial.log = {}
    trial.cache = {}
    trial.round = 1
    if present is not None:
        trial.set_available(present)
    method.init_server(trial)
    method.start_round(trial, list(trial.clients))
    return trial
