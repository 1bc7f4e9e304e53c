"""Which parameters of a long test `make test` asks; `make test-all` asks all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(parameters: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """The parameters in their order, each that is none of `quick` marked as slow.

    Args:
        parameters: as `pytest.mark.parametrize` takes them. quick: those that stand for all; each must be there.
    """
    given, wanted = list(parameters), list(quick)
    missing = [each for each in wanted if each not in given]
    assert not missing, f"no such parameters: {missing}"
    return [each if each in wanted else _slow(each) for each in given]


def _slow(parameter: Any) -> Any:
    values = parameter if isinstance(parameter, tuple) else (parameter,)
    return pytest.param(*values, marks=pytest.mark.slow)
