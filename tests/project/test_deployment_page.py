"""docs/deployment.md: its tables have all settings of nodes and of the server, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from polyfed.deploy.flower_transport import RUN_CONFIG
from polyfed.deploy.node_config import NodeConfig

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")


def keys(heading: str) -> set[str]:
    """What the first column of the table after these words names."""
    table = PAGE.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_tables_list_all_settings_and_no_others() -> None:
    assert keys("given in `--node-config`") == {str(field.alias) for field in NodeConfig.model_fields.values()}
    assert keys("given in `[tool.flwr.app.config]`") == RUN_CONFIG.keys()
