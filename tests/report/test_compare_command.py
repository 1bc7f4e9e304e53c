"""How a comparison was made: what its folder keeps of it."""

from __future__ import annotations

from pathlib import Path

from polyfed.report.html_report import read_command, save_command


def test_the_command_is_kept_on_one_line_without_places(tmp_path: Path) -> None:
    assert read_command(tmp_path) == ""
    save_command(tmp_path, "polyfed compare /disk/ana/mine/a.toml")
    assert read_command(tmp_path) == "polyfed compare mine/a.toml"
    (tmp_path / "command.txt").write_bytes(b"polyfed\n\n\xff")
    assert read_command(tmp_path) == "polyfed \ufffd"
