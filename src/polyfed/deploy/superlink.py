"""The server's program: Flower's SuperLink behind the `gate`, with the options that make it safe.

It is composed of the parts of which ``flower-superlink`` is. Where another version of Flower has no such parts it does
not start, rather than start without the gate.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from polyfed.deploy.gate import Gate, check_system, keeper
from polyfed.deploy.requirements import OFFLINE, require_package
from polyfed.deploy.tls import AUTHORITY, SERVER, SERVER_KEY
from polyfed.errors import ConfigError
from polyfed.places import private_files

__all__ = ["serve_nodes"]

_FILES = {"--ssl-ca-certfile": AUTHORITY, "--ssl-certfile": SERVER, "--ssl-keyfile": SERVER_KEY}


@private_files()
def serve_nodes(keys: str | Path, *, host: str = "127.0.0.1", port: int = 8000, database: str | Path) -> None:
    """Run a SuperLink until a signal ends it.

    Args:
        keys: folder with what `certify` writes.
        host, port: where it listens.
        database: file that remembers which nodes are registered; made if missing.

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
        if left.is_file():  # what nodes send is in it, and older versions left it open
            if left.stat().st_uid != keeper():
                raise ConfigError(f"expected a database of this user's own, got {left}, which belongs to another")
            left.chmod(0o600)
    uvicorn.run(
        Gate(create_app(config, SuperLinkLifespan), keeper()),
        host=host,
        port=port,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        proxy_headers=False,  # the gate looks at connections, not at what a header says of them
        ws="none",
        log_level="warning",
        workers=1,
    )
