"""docs/coming-from-*.md, as a stranger would follow them, in order; and the methods that they translate.

A block whose first line names a file is saved, other Python and polyfed's commands run, and a block of text is what the
block before printed. Blocks called "console" are other libraries'.
"""

from __future__ import annotations

import logging.handlers
import queue
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed import registry
from polyfed.cli import app as cli
from polyfed.report.run_records import load_runs
from tests.helpers.on_flower import WITH_FLOWER
from tests.project.test_method_pages import check

pytestmark = pytest.mark.usefixtures("unrendered")

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # and how much rounding may change weights in three rounds
    "coming-from-pfllib.md": 1e-5,
    "coming-from-htfllib.md": 0.05,  # through BatchNorm's layers; a weight of 9.9 instead of 10 changes 0.1
    "coming-from-flower.md": 0.0,
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of all blocks."""
    return re.findall(
        r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def save_files(page: str) -> None:
    """Those that the page gives, into the present folder."""
    for _, text in blocks(page):
        if named := re.match(r"# (\w+\.(?:py|toml))\n", text):
            Path(named[1]).write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules that a page gives are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "added_folders", [])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run_line(line: str) -> None:
    """A line of a page; one of a recipe of ours, which needs more data and networks, is parsed with the recipe."""
    program, *words = shlex.split(line, comments=True)
    if program == "python":
        runpy.run_path(words[0], run_name="__main__")
    elif "recipes/" in line:
        check([program, *words])
    else:
        assert program == "polyfed"
        assert cli.status(words) == 0, line


def figures(text: str) -> list[float]:
    """All decimal numbers but those of lines of bytes and seconds."""
    lines = [line for line in text.splitlines() if not line.startswith("bytes")]
    return [float(figure) for figure in re.findall(r"\d+\.\d+", "\n".join(lines))]


def check_printed(shown: str, printed: str) -> None:
    """The figures of the last lines are nearly those shown, as processors round differently."""
    last = "\n".join(printed.splitlines()[-len(shown.splitlines()) :])
    assert figures(last) == pytest.approx(figures(shown), abs=15 if "%" in shown else 0.15)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_as_a_stranger_would_follow_it(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_files(page)
    printed = ""
    for language, text in blocks(page):
        if language == "text":
            check_printed(text, printed)
        elif language == "bash":
            for line in text.splitlines():
                run_line(line)
            printed = capsys.readouterr().out
        elif language == "python" and not re.match(r"# \w+\.py\n", text):
            exec(compile(text, page, "exec", dont_inherit=True), {"__name__": page})
            printed = capsys.readouterr().out
    if Path("runs/own").exists():
        check_same_networks("runs/mine", "runs/own", PAGES[page])


def check_same_networks(built_in: str, translated: str, rounding: float) -> None:
    """Those of a built-in method and of the page's, but for rounding."""
    files = sorted(Path(built_in, "models").glob("*-???.safetensors"))
    assert len(files) >= 4
    for file in files:
        same = Path(translated, "models", file.name)
        torch.testing.assert_close(load_file(file), load_file(same), rtol=1e-3, atol=rounding)


@WITH_FLOWER
def test_the_app_of_flower_has_the_accuracy_of_polyfeds_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round; server and clients in this process."""
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    save_files("coming-from-flower.md")
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 0)
    import client_app  # type: ignore[import-not-found]
    import server_app  # type: ignore[import-not-found]

    def context(number: int) -> Any:
        return Context(0, number, {"partition-id": number}, RecordDict(), {})

    class InThisProcess(Grid):
        def get_node_ids(self) -> Iterable[int]:
            return range(4)

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return [client_app.app(message, context(message.metadata.dst_node_id)) for message in messages]

        set_run = run = create_message = push_messages = pull_messages = None  # type: ignore[assignment]

    records = logging.handlers.QueueHandler(queue.SimpleQueue())
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [records])
    server_app.app(InThisProcess(), context(0))
    lines = [records.queue.get().getMessage().strip() for _ in range(records.queue.qsize())]
    run_line("python export.py")
    pf.run("mine.toml", out="run")
    (run,) = load_runs("run")
    by_flower = [figures(line)[0] for line in lines if line.startswith("└──> Aggregated MetricRecord: {'accuracy'")]
    assert [record.mean("received") for record in run.rounds] == pytest.approx(by_flower, abs=1e-6)
