"""A file of JSON nested without end is an unreadable one like all others."""

from __future__ import annotations

from pathlib import Path

from polyfed.deploy.node_registry import EventLog
from tests.helpers.refusals import refusal


def test_it_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.jsonl"
    file.write_bytes(b"[" * 100_000)
    assert file.name in refusal(lambda: EventLog(file, resume=True))
