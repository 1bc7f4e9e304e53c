"""Nodes in this process are asked without pauses."""

import pytest

from polyfed.deploy import node_registry


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_registry, "LONGEST", 0.001)
