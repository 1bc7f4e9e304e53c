"""What a comparison notes of how it was made."""

import json
from pathlib import Path

import pytest

from polyfed.errors import ConfigError
from polyfed.report.html_report import read_command, save_command


def test_the_day_of_the_last_run_is_kept(tmp_path: Path) -> None:
    save_command(tmp_path, "polyfed compare a.toml", ran=False)
    made = json.loads((tmp_path / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps(made | {"date": "2020-01-01"}))
    save_command(tmp_path, "polyfed compare a.toml", ran=False)
    assert json.loads((tmp_path / "compare.json").read_text())["date"] == "2020-01-01"
    save_command(tmp_path, "polyfed compare a.toml", ran=True)
    assert json.loads((tmp_path / "compare.json").read_text())["date"] != "2020-01-01"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert read_command(tmp_path) == {"command": "", "date": ""}
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(ConfigError, match=r"compare.json cannot be read"):
        read_command(tmp_path)
