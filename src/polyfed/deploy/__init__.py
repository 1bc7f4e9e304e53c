"""The same methods among real machines: clients are nodes of their own, the server a process that asks them.

`server` and `node` are the two halves, `protocol` what they write each other. Only `flower_transport`, `superlink` and
`supernode` know Flower.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping

from polyfed.errors import ConfigError

__all__ = ["OFFLINE", "SHORTEST", "require_package", "wait_on"]

OFFLINE: Mapping[str, str] = {  # what keeps Flower from calling home, and from installing anything
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
SHORTEST = 0.1  # seconds between two looks for a message


def wait_on(since: float, longest: float) -> None:
    """Pause between two looks, for a tenth of the time waited since (`time.monotonic`), `longest` seconds at most."""
    time.sleep(min(max((time.monotonic() - since) / 10, SHORTEST), longest))


def require_package(package: str, purpose: str) -> None:
    """Check, without importing it, that the package of the extra `flower` is there which the purpose needs.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{purpose} needs the package '{package}'; install it with: pip install 'polyfed[flower]'")
