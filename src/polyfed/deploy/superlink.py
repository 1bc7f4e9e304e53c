"""The server's program: Flower's SuperLink behind a gate, with the options that make it safe.

Flower serves nodes (``/v1/fleet/``, where every request is signed with a node's key) and operators (``/v1/control/``:
start code, register keys) on one port, and asks operators for no credential. The gate stands before Flower's
application. It lets a request through to any other route only where the other end of its connection is a socket of
this machine that belongs to the user who runs the server, as Linux shows in ``/proc/net/tcp``.

The program is composed of the parts of which ``flower-superlink`` is. Where another version of Flower has no such parts
it does not start, rather than start without the gate.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from polyfed.deploy import OFFLINE, require_package
from polyfed.deploy.tls import AUTHORITY, SERVER, SERVER_KEY
from polyfed.errors import ConfigError
from polyfed.places import private_files

__all__ = ["NODES", "Gate", "check_system", "is_own", "serve_nodes"]

NODES = "/v1/fleet/"  # prefix of the nodes' routes
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_FILES = {"--ssl-ca-certfile": AUTHORITY, "--ssl-certfile": SERVER, "--ssl-keyfile": SERVER_KEY}
_ESTABLISHED = "01"  # a closed socket is no longer its owner's in the table
_REFUSAL = b"this server serves nodes; operators' commands need the user who runs it, on its machine\n"
_Event = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]
Application = Callable[[_Event, _Receive, _Send], Awaitable[None]]
_End = tuple[Any, int]  # of a connection: address and port


@private_files()
def serve_nodes(keys: str | Path, *, host: str = "127.0.0.1", port: int = 8000, database: str | Path) -> None:
    """Run a SuperLink until a signal ends it.

    Args:
        keys: folder with the files of `polyfed deploy certify`.
        host, port: where it listens.
        database: file with the nodes' registrations; made if missing.

    Raises:
        ConfigError: a file is missing, Flower or a part of it is not installed, the database is another user's, or the
            system is not Linux.
    """
    require_package("flwr", "deploy server")
    check_system()
    for name in _FILES.values():
        if not (Path(keys) / name).is_file():
            raise ConfigError(f"expected {name} in {keys}, as 'polyfed deploy certify' writes it, got none")
    os.environ.update(OFFLINE)  # before Flower is imported, which reads them
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    words = [word for option, name in _FILES.items() for word in (option, str(Path(keys) / name))]
    words += ["--host", host, "--port", str(port), "--database", str(database)]
    sys.argv = ["flower-superlink", *words, "--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    try:
        import uvicorn
        from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
        from flwr.superlink.main import create_app
    except ImportError as error:
        raise ConfigError(f"expected a version of Flower that the extra 'flower' names, got another: {error}") from None
    config = _parse_superlink_lifespan_config()
    for left in (Path(f"{database}{ending}") for ending in ("", "-wal", "-shm")):
        if left.is_file():  # it holds what nodes send
            if left.stat().st_uid != os.geteuid():
                raise ConfigError(f"expected a database of this user's own, got {left}, which belongs to another")
            left.chmod(0o600)

    uvicorn.run(
        Gate(create_app(config, SuperLinkLifespan), os.geteuid()),
        host=host,
        port=port,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        proxy_headers=False,  # the gate looks at connections, not at what a header says of them
        ws="none",
        log_level="warning",
        workers=1,
    )


class Gate:
    """An ASGI application before `app`. operator: number of the user whose programs may ask for everything."""

    def __init__(self, app: Application, operator: int) -> None:
        self._app, self._operator = app, operator

    async def __call__(self, scope: _Event, receive: _Receive, send: _Send) -> None:
        """See the module."""
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and self._lets(scope)):
            await self._app(scope, receive, send)
            return
        logging.getLogger("polyfed").warning(
            "refused %.200r to %.100r", scope.get("path"), (scope.get("client") or ("unknown",))[0]
        )
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": _REFUSAL})

    def _lets(self, scope: _Event) -> bool:
        if str(scope["path"]).startswith(NODES):
            return True
        theirs = scope.get("client")
        ours = scope.get("server")
        if theirs is None or ours is None:
            return False
        return is_own(tuple(theirs), tuple(ours), self._operator)


# whose connections are ------------------------------------------------------------------------------------------------


def check_system() -> None:
    """Check that the system shows whose connections are; ConfigError: it does not."""
    if not TCP_TABLES[0].exists():
        raise ConfigError(
            f"expected a server's machine with Linux, whose {TCP_TABLES[0]} tells one user's programs from others', "
            "got another system"
        )


def is_own(theirs: tuple[str, int], ours: tuple[str, int], user: int) -> bool:
    """Whether the other end of a connection is a socket of this machine, and of this user. An end: address and port."""
    wanted = (_plain(theirs[0]), theirs[1]), (_plain(ours[0]), ours[1])
    return any((here, there) == wanted and owner == user for here, there, owner in _connections())


def _connections() -> Iterator[tuple[_End, _End, int]]:
    """All of this machine: the end that is here, the other one, the number of the user of the first."""
    for table in TCP_TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, here, there, state, *_, owner = line.split()[:8]
            if state == _ESTABLISHED:
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
