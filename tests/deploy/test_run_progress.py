"""The progress of a run elsewhere, from a folder that grows, is cut off, or is made anew."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from polyfed.deploy.run_progress import RunProgress
from polyfed.loggers.console import Console

FACTS = {
    "method": "fedgh",
    "dataset": "digits",
    "clients": 2,
    "rounds": 4,
    "seed": 0,
    "evaluation": {"stage": "personal"},
}


class Clock:
    """A clock on which every look is ten seconds later, so that no line is held back."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def record(number: int) -> dict[str, Any]:
    return {
        "round": number,
        "seconds": 2.0,
        "bytes_up": 10,
        "bytes_down": 20,
        "train_loss": 1.0,
        "accuracy": {"personal": {"mean": number / 10}},
    }


def append(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def follower(folder: Path, resume: bool = False) -> tuple[RunProgress, io.StringIO]:
    out = io.StringIO()
    return RunProgress(folder, FACTS, Console(stream=out, terminal=False, clock=Clock()), resume), out


def test_rounds_are_shown_as_they_come(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shown, out = follower(folder)
    shown.poll()
    assert shown.done == 0
    folder.mkdir()
    append(folder, "rounds.jsonl", record(1))
    shown.poll()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record(2))[:20])
    shown.poll()
    assert shown.done == 1, "half a line is no round"
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record(2))[20:] + "\n")
    shown.poll()
    assert shown.done == 2
    lines = out.getvalue().splitlines()
    assert "2 clients, 4 rounds, seed 0, accuracy of stage personal" in lines[0]
    assert "round 1/4  accuracy 10.00 %  6.0 s left" in lines[1]
    assert "round 2/4  accuracy 20.00 %  4.0 s left  up 20 B  down 40 B" in lines[2]


def test_a_resumed_run_goes_on_counting_and_a_cut_off_round_is_not_told_twice(tmp_path: Path) -> None:
    append(tmp_path, "rounds.jsonl", record(1), record(2))
    shown, out = follower(tmp_path, resume=True)
    assert shown.done == 2
    (tmp_path / "rounds.jsonl").write_text(json.dumps(record(1)) + "\n")
    shown.poll()
    append(tmp_path, "rounds.jsonl", record(2), record(3))
    shown.poll()
    assert shown.done == 3
    told = out.getvalue()
    assert "from round 3" in told
    assert [line.split()[2] for line in told.splitlines()[1:]] == ["3/4"]


def test_a_replaced_run_begins_anew(tmp_path: Path) -> None:
    append(tmp_path, "rounds.jsonl", record(1), record(2))
    append(tmp_path, "nodes.jsonl", {"event": "lost", "round": 1, "client": 0, "reason": "of the old run"})
    shown, out = follower(tmp_path)
    assert shown.done == 0
    for name in ("rounds.jsonl", "nodes.jsonl"):
        (tmp_path / name).unlink()
    shown.poll()
    append(tmp_path, "rounds.jsonl", record(1), record(2), record(3))
    shown.poll()
    assert shown.done == 3
    assert "old run" not in out.getvalue()


def test_what_happens_to_nodes_is_told(tmp_path: Path) -> None:
    shown, out = follower(tmp_path)
    append(tmp_path, "nodes.jsonl", {"event": "hello", "round": 0, "client": 1, "node": 7})
    append(tmp_path, "nodes.jsonl", {"event": "lost", "round": 2, "client": 1, "reason": "no answer within 600 s"})
    append(tmp_path, "nodes.jsonl", {"event": "refused", "round": 0, "reason": "another recipe"})
    shown.poll()
    assert out.getvalue().splitlines()[1:] == [
        "round 2: client 1, lost: no answer within 600 s",
        "a node, refused: another recipe",
    ]


def test_the_end_is_told_with_the_result_or_without(tmp_path: Path) -> None:
    shown, out = follower(tmp_path)
    result = {**FACTS, "accuracy": 0.5, "bytes_up": 1, "bytes_down": 2, "seconds": 3}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with shown:
        pass
    assert "fedgh: done  accuracy 50.00 % (personal)" in out.getvalue()
    shown, out = follower(tmp_path)
    try:
        with shown:
            raise RuntimeError
    except RuntimeError:
        pass
    assert "done" not in out.getvalue()


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    for name in ("rounds.jsonl", "nodes.jsonl"):
        (tmp_path / name).write_bytes(b'{"rou\n[]\n5\n{"round": "x", "reason": {}}\n' + b"[" * 100000 + b"\n")
    shown, out = follower(tmp_path, resume=True)
    append(tmp_path, "rounds.jsonl", {"round": 1}, record(1))
    append(tmp_path, "nodes.jsonl", {"event": "lost", "round": 1, "client": 1, "reason": "gone"})
    shown.poll()
    assert shown.done == 1
    assert "client 1, lost: gone" in out.getvalue()
