"""Has pytest load the simulated device before anything is collected: `pytest -p gpu_plugin`."""

from __future__ import annotations

from collections.abc import Iterator

import gpu
import pytest


def pytest_configure() -> None:
    gpu.enable()


@pytest.fixture(autouse=True)
def _sound() -> Iterator[None]:
    """A real GPU would fail all tests after one with an index out of range."""
    yield
    gpu.repair()
