"""What deployment needs besides polyfed itself: the packages of the extra `flower`, kept offline."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from polyfed.errors import ConfigError

__all__ = ["OFFLINE", "require_package"]

OFFLINE: Mapping[str, str] = {  # what keeps Flower from calling home, and from installing anything
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def require_package(package: str, purpose: str) -> None:
    """Whether a package of the extra is there, without importing it.

    Args:
        package: the name it is imported by.
        purpose: who needs it, for the message: "deploy local".

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{purpose} needs the package '{package}'; install it with: pip install 'polyfed[flower]'")
