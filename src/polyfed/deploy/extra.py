"""What deployment needs besides polyfed itself: the packages of the extra `flower`."""

from __future__ import annotations

import importlib.util

from polyfed.errors import RequestError

__all__ = ["expect"]


def expect(package: str, purpose: str) -> None:
    """Whether a package of the extra is there, without importing it.

    Args:
        package: the name it is imported by.
        purpose: who needs it, for the message: "deploy local".

    Raises:
        RequestError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise RequestError(f"{purpose} needs the package '{package}'; install it with: pip install 'polyfed[flower]'")
