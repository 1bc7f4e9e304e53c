"""Who may ask a SuperLink for what: the nodes' routes are everybody's, all others the keeper's own programs' alone.

Flower serves nodes (``/v1/fleet/``, where every request is signed with a node's key) and the keeper (``/v1/control/``:
start code, register keys) on one port, and asks the keeper for no credential. The gate stands before Flower's
application. It lets a request through to any other route only where the other end of its connection is a socket of
this machine that belongs to the user who runs the server, as Linux tells in ``/proc/net/tcp``.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError

__all__ = ["NODES", "Gate", "check_system", "is_own", "keeper", "listens"]

NODES = "/v1/fleet/"  # what the routes begin with that nodes call
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _LISTENING = "01", "0A"  # a closed socket is no longer its owner's in the table
_REFUSAL = b"this server takes nodes alone; its keeper's commands are those of the user who runs it, on its machine\n"
_Event = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]
Application = Callable[[_Event, _Receive, _Send], Awaitable[None]]
_End = tuple[Any, int]  # of a connection: address and port


class Gate:
    """An ASGI application before another one.

    Args:
        app: what is asked where the gate lets through.
        keeper: number of the user whose programs may ask for everything.
    """

    def __init__(self, app: Application, keeper: int) -> None:
        self._app, self._keeper = app, keeper

    async def __call__(self, scope: _Event, receive: _Receive, send: _Send) -> None:
        """See the module."""
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and self._lets(scope)):
            await self._app(scope, receive, send)
            return
        logging.getLogger("polyfed").warning(
            "refused %.200r to %.100r", scope.get("path"), (scope.get("client") or ("somebody",))[0]
        )
        if kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": _REFUSAL})

    def _lets(self, scope: _Event) -> bool:
        if str(scope["path"]).startswith(NODES):
            return True
        theirs = scope.get("client")
        ours = scope.get("server")
        return theirs is not None and ours is not None and is_own(tuple(theirs), tuple(ours), self._keeper)


def check_system() -> None:
    """Whether the system tells whose connections are.

    Raises:
        ConfigError: it does not.
    """
    if not TCP_TABLES[0].exists():
        raise ConfigError(
            f"expected a server's machine with Linux, whose {TCP_TABLES[0]} tells the keeper's programs from others', "
            "got another system"
        )


def is_own(theirs: tuple[str, int], ours: tuple[str, int], user: int) -> bool:
    """Whether the other end of a connection is a socket of this machine, and of this user.

    Args:
        theirs, ours: the connection's two ends, each an address and a port.
    """
    wanted = (_plain(theirs[0]), theirs[1]), (_plain(ours[0]), ours[1])
    return any((here, there) == wanted and owner == user for here, there, owner in _sockets(_ESTABLISHED))


def listens(address: str, port: int, user: int) -> bool:
    """Whether it is a program of this user that listens there; taken for granted where the system does not tell."""
    if not TCP_TABLES[0].exists():
        return True
    return any(here == (_plain(address), port) and owner == user for here, _, owner in _sockets(_LISTENING))


def _sockets(wanted: str) -> Iterator[tuple[_End, _End, int]]:
    """All of this machine in a state: the end that is here, the other one, the number of the user of the first."""
    for table in TCP_TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, here, there, state, *_, owner = line.split()[:8]
            if state == wanted:
                yield _end(here), _end(there), int(owner)


def _end(text: str) -> _End:
    """An address and a port as the table writes them: words of 32 bits in the machine's own order, ":", the port."""
    address, _, port = text.partition(":")
    words = [address[start : start + 8] for start in range(0, len(address), 8)]
    return _plain(b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)), int(port, 16)


def _plain(address: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address; one of IPv4 that is written as one of IPv6 is of IPv4. None: a text that is no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def keeper() -> int:
    """The number of the user who runs this process."""
    return os.geteuid()
