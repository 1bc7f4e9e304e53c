"""Of the tests that start Flower's own programs: their recipe, and waiting for them."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import pytest

from tests.helpers.small_recipe import small_recipe

WITH_FLOWER = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="the extra 'flower' is not installed")
PATIENCE = 600.0  # seconds; a busy machine takes a minute for what takes seconds


def recipe_for_two(architectures: list[str], **training: float) -> str:
    """Two clients with a few digits each, a third of them for tests."""
    data = {"split": "6:1:3", "max_train_per_client": 40, "max_test_per_client": 20}
    return small_recipe(data=data, models={"architectures": architectures}, training=training)


def until(happened: Callable[[], bool], what: str) -> None:
    """Wait for it; what: says what did not happen."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
