"""docs/troubleshooting.md: every error line that it shows is the program's own."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.cli import app as cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def steps(block: str, prompt: str) -> Iterator[tuple[str, list[str]]]:
    """What is typed, and the lines that it shows."""
    for part in re.split(rf"^{re.escape(prompt)} ", block, flags=re.MULTILINE)[1:]:
        first, *others = part.splitlines()
        more = [line[4:] for line in itertools.takewhile(lambda line: line.startswith("..."), others)]
        yield "\n".join([first, *more]), others[len(more) :]


def agrees(shown: str, line: str) -> bool:
    """Whether a shown line, in which "..." stands for anything, is this one."""
    return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), line) is not None


@pytest.mark.parametrize("block", blocks("console"))
def test_commands_print_the_lines_shown(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for typed, shown in steps(block, "$"):
        program, *words = shlex.split(typed)
        assert program == "polyfed"
        status = cli.status(words)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("polyfed: ")]
        assert (status != 0) == bool(shown), typed
        assert len(lines) == len(shown)
        for expected, line in zip(shown, lines, strict=True):
            assert agrees(expected, line), line


def test_calls_raise_the_errors_shown() -> None:
    names: dict[str, object] = {}
    for typed, shown in (step for block in blocks("pycon") for step in steps(block, ">>>")):
        if not shown:
            exec(typed, names)
            continue
        with pytest.raises(pf.PolyfedError) as caught:
            exec(typed, names)
        (expected,) = shown
        assert agrees(expected, str(caught.value)), caught.value
