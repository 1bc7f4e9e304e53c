"""What docs/deployment.md says: its commands run as far as a machine without Flower lets them; its tables are true."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from polyfed.cli import app as cli
from polyfed.deploy import node_config
from polyfed.deploy.flower_transport import RUN_CONFIG

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def keys(heading: str) -> set[str]:
    """What the first column of the table after these words names."""
    table = PAGE.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_tables_list_all_settings_and_no_others() -> None:
    assert keys("given in `--node-config`") == {
        str(field.alias) for field in node_config.NodeConfig.model_fields.values()
    }
    assert keys("given in `[tool.flwr.app.config]`") == RUN_CONFIG.keys()


def test_our_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="the extra 'flower' is not installed")
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "quickstart.toml", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    group = cli.parser().commands["deploy"]
    for words in commands():
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        if words[:2] == ["polyfed", "deploy"]:
            group.commands[words[2]].make_context(words[2], words[3:])
            if words[2] in ("init", "certify", "key"):
                assert cli.status(words[1:]) == 0
    assert (tmp_path / "federation" / "keys" / "node.pub").exists()
