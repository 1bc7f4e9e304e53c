"""docs/coming-from-flower.md: its app, run by Flower's own strategy, has the accuracy of polyfed's run."""

from __future__ import annotations

import logging.handlers
import queue
import re
from collections.abc import Iterable
from typing import Any

import pytest

import polyfed as pf
from tests.helpers.on_flower import WITH_FLOWER
from tests.project.test_pages import _reader as _reader
from tests.project.test_pages import follow


@WITH_FLOWER
@pytest.mark.usefixtures("_reader")
def test_the_app_of_flower_has_the_accuracy_of_polyfeds_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every round; server and clients in this process."""
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    follow("docs/coming-from-flower.md", code=False, run=False, capsys=capsys)
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
    pf.run("mine.toml", out="run")
    frame = pf.results("run").dropna(subset="round").query("metric == 'accuracy' and stage == 'received'")
    accuracy = re.compile(r"└──> Aggregated MetricRecord: \{'accuracy'\D*(\d+\.\d+)")
    by_flower = [float(found[1]) for line in lines if (found := accuracy.match(line))]
    assert frame["value"].tolist() == pytest.approx(by_flower, abs=1e-6)
