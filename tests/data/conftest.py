"""Every test here has an empty cache of its own, and no data folder unless it sets one."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("POLYFED_CACHE", str(place))
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    return place
