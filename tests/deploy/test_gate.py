"""Who is let through to which route of the server, told by real connections of this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from polyfed.deploy.superlink import Gate, check_system, is_own

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the table of connections is Linux'")
ME, SOMEBODY = os.geteuid(), os.geteuid() + 1
CONTROL = "/v1/control/start-run"


@contextmanager
def connection(family: int = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends: the one that called, the one that was called."""
    try:
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError:
        pytest.skip("no IPv6 here")
    with (
        closing(listening),
        closing(
            socket.create_connection(("127.0.0.1" if host == "::" else host, listening.getsockname()[1]))
        ) as calling,
    ):
        called, _ = listening.accept()
        with closing(called):
            yield calling, called


def ends(called: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    """Theirs and ours, as a server sees them."""
    return called.getpeername()[:2], called.getsockname()[:2]


def asks(path: str, called: socket.socket, keeper: int, kind: str = "http") -> str:
    """What becomes of a request: "through", or the status of the refusal."""
    theirs, ours = ends(called)
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        said.append("through")

    async def send(event: Any) -> None:
        said.append(event.get("status", event.get("code")))

    async def receive() -> Any:
        raise AssertionError("nothing is read before it is let through")

    asyncio.run(Gate(app, keeper)({"type": kind, "path": path, "client": theirs, "server": ours}, receive, send))
    return str(said[0])


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
)
def test_a_connection_has_its_owner(family: int, host: str) -> None:
    with connection(family, host) as (_, called):
        theirs, ours = ends(called)
        assert is_own(theirs, ours, ME)
        assert not is_own(theirs, ours, SOMEBODY)
        assert not is_own((theirs[0], theirs[1] ^ 1), ours, ME), "another connection"
        assert not is_own(("192.0.2.7", theirs[1]), ours, ME), "from elsewhere"
        assert not is_own(("nonsense", 0), ours, ME)


def test_who_has_hung_up_is_nobody() -> None:
    """The table calls what was closed root's own: whoever asks and hangs up at once would be root."""
    with connection() as (calling, called):
        theirs, ours = ends(called)
        calling.close()
        assert not is_own(theirs, ours, ME)
        assert not is_own(theirs, ours, 0)


def test_nodes_are_let_through_whoever_they_are() -> None:
    with connection() as (_, called):
        assert asks("/v1/fleet/pull-messages", called, SOMEBODY) == "through"


@pytest.mark.parametrize(
    "path",
    [
        CONTROL,
        "/v1/runtime/acquire-task",
        "/docs",
        "/",
        "",
        "/v1/fleet",
        "/x/v1/fleet/a",
        "//v1/fleet/a",
        "/V1/FLEET/a",
    ],
)
def test_all_else_is_the_keepers(path: str) -> None:
    with connection() as (_, called):
        assert asks(path, called, ME) == "through"
        assert asks(path, called, SOMEBODY) == "403"


def test_other_ways_in_are_shut() -> None:
    with connection() as (_, called):
        assert asks("/v1/fleet/x", called, ME, "websocket") == "1008"


def test_another_system_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    check_system()
    monkeypatch.setattr("polyfed.deploy.superlink.TCP_TABLES", (tmp_path / "none",))
    with pytest.raises(Exception, match="expected a server's machine with Linux"):
        check_system()
    with connection() as (_, called):
        assert asks(CONTROL, called, ME) == "403"
