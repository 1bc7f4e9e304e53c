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
    done = set()
    for words in commands():
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        if words[:2] == ["polyfed", "deploy"] and words[2] in ("init", "certify", "key"):
            assert cli.status(words[1:]) == 0
            done.add(words[2])
    assert done == {"init", "certify", "key"}
    assert (tmp_path / "federation" / "keys" / "node.pub").exists()


def test_the_local_command_asks_for_what_the_command_line_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def stand_in(recipe: Path, **options: object) -> object:
        asked.update(options, recipe=recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("polyfed.deploy.local_cluster.local", stand_in)
    (words,) = [words for words in commands() if words[:3] == ["polyfed", "deploy", "local"]]
    assert cli.status(words[1:]) == 130
    assert asked["recipe"] == Path("recipes/quickstart.toml")
    assert (asked["nodes"], asked["overrides"], asked["out"]) == (3, ["training.rounds=2"], Path("runs/deployed"))
    assert (asked["overwrite"], asked["deadline"]) == (False, 600.0)


def test_programs_are_started_as_those_of_the_app_that_init_writes(tmp_path: Path) -> None:
    from polyfed.deploy.app_template import create_app

    create_app(
        tmp_path / "app", ROOT / "recipes" / "quickstart.toml", host="fl.example.org", overrides=["data.num_clients=2"]
    )
    readme = (tmp_path / "app" / "README.md").read_text(encoding="utf-8")
    programs = [words for words in commands() if words[:2] == ["polyfed", "deploy"] and words[2] in ("server", "node")]
    assert [words[2] for words in programs] == ["server", "node"]
    for words in programs:
        assert any(shlex.split(line) == words for line in readme.splitlines() if line.startswith("polyfed ")), words
