"""docs/deployment-settings.md: its tables have all settings of nodes and of the server, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyfed.core.settings import Settings
from polyfed.deploy.flower_transport import RunConfig
from polyfed.deploy.node_config import NodeConfig

PAGE = (Path(__file__).parents[2] / "docs" / "deployment-settings.md").read_text(encoding="utf-8")


def keys(heading: str) -> set[str]:
    """What the first column of the table after these words names."""
    table = PAGE.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize(
    ("heading", "settings"),
    [("given in `--node-config`", NodeConfig), ("given in `[tool.flwr.app.config]`", RunConfig)],
)
def test_the_tables_list_all_settings_and_no_others(heading: str, settings: type[Settings]) -> None:
    assert keys(heading) == {str(field.alias) for field in settings.model_fields.values()}
