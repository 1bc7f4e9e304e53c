"""Nodes in this process are asked without pauses; those of Flower's programs have a recipe and a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.deploy import app_template, node_registry
from polyfed.deploy.local_cluster import LocalCluster
from tests.helpers.on_flower import recipe_for_two


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_registry, "LONGEST", 0.001)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_for_two(["digits-cnn1", "digits-cnn2"], rounds=4, lr=0.05))
    return path


@pytest.fixture
def loopback(recipe: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes and a server, with keys and app, not started."""
    app_template.create_app(tmp_path / "app", recipe)
    with LocalCluster(tmp_path, tmp_path, 2) as made:
        yield made
