"""What is said where something is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyfed.errors import ConfigError


def refusal(make: Callable[[], object]) -> str:
    """The one line of the `ConfigError` that a call ends with."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)
