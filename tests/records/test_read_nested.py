"""Files of JSON nested without end are unreadable ones like all others, wherever they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.deploy.node_registry import EventLog
from polyfed.report.html_report import read_command
from tests.helpers.refusals import refusal

NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("compare.json", read_command),
        ("nodes.jsonl", lambda folder: EventLog(folder / "nodes.jsonl", resume=True)),
    ],
)
def test_it_is_one_line_that_names_the_file(name: str, reader: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(NESTED)
    assert name in refusal(lambda: reader(tmp_path))
