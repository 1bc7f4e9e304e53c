"""Several processes that share the runs of one request: none is done twice, and what a killed one left goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.cli.app import status
from polyfed.engine.run_folder import FolderInUse, RunFolder, lock_folder
from polyfed.errors import RunError
from polyfed.experiments import benchmark as module
from polyfed.experiments import planned_runs
from polyfed.experiments.benchmark import benchmark
from tests.experiments.test_planned_runs import RECIPE, place
from tests.helpers.benchmark_figures import without_times
from tests.helpers.processes import ended, started

__all__ = ["place"]
pytestmark = [
    pytest.mark.usefixtures("unrendered"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux lets one"),
]
SHORT = RECIPE.replace("rounds = 1", "rounds = 3")
PROTOCOL = """
title = "A very small suite"
methods = ["fedgh", "fedproto"]
seeds = [0, 1]
tuning_seeds = [7]
[tuning.fedgh]
header_lr = [0.0, 1.0]
[tuning.fedproto]
prototype_weight = [0.0, 100.0]
[settings.short]
recipe = "recipe.toml"
[settings.other]
recipe = "recipe.toml"
overrides = ["training.lr=0.2"]
"""
COMMANDS = {
    "compare": ["compare", "recipe.toml", "--methods", "fedavg,fedprox", "--seeds", "0,1"],
    "benchmark": ["benchmark", "."],
}


class Shared:
    """Processes of one command. Each notes every round that it writes; one may be held up before it writes a round."""

    def __init__(self, words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
        self.words = words
        self.stop = ("", 0)  # the folder of a run, and the round before which a process is held
        self.running: list[int] = []
        self.told, self.tell = os.pipe()
        self.go_on, self.let_go = os.pipe()
        append, wait = RunFolder.append, planned_runs.wait_until_free

        def note(folder: RunFolder, record: Mapping[str, Any]) -> None:
            if (str(folder.path), record["round"]) == self.stop:
                os.write(self.tell, b"h")
                os.read(self.go_on, 1)
            append(folder, record)
            with Path("rounds.log").open("a") as file:
                file.write(f"{os.getpid()} {folder.path} {record['round']}\n")

        def tell_and_wait(folder: Path) -> None:
            os.write(self.tell, b"w")
            wait(folder)

        patch.setattr(RunFolder, "append", note)
        patch.setattr(planned_runs, "wait_until_free", tell_and_wait)

    def start(self, held_in: str = "", before_round: int = 0) -> int:
        """A process; where it is to be held, it is when this returns."""
        self.stop = (held_in, before_round)
        process = started([*self.words, "--out", "shared"], Path("log"))
        self.running.append(process)
        if held_in:
            self.until(process, b"h")
        return process

    def until(self, process: int, what: bytes) -> None:
        """Wait until a process tells that it is held, "h", or waits for another, "w"; or ends, which is wrong."""
        heard, _, _ = select.select([self.told, os.pidfd_open(process)], [], [])
        assert self.told in heard, Path("log").read_text()
        assert os.read(self.told, 1) == what, Path("log").read_text()

    def status(self, process: int) -> int:
        """Wait until a process has ended."""
        self.running.remove(process)
        return ended(process)

    def rounds(self) -> list[tuple[int, str, int]]:
        """The process, the run and the round, of all that were written."""
        lines = map(str.split, Path("rounds.log").read_text().splitlines())
        return [(int(process), run, int(number)) for process, run, number in lines]


@pytest.fixture
def share(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Shared]]:
    Path("recipe.toml").write_text(SHORT)
    Path("protocol.toml").write_text(PROTOCOL)
    monkeypatch.setattr("polyfed.experiments.compare.write_report", lambda *_: [])
    made: list[Shared] = []

    def shared(command: str) -> Shared:
        made.append(Shared(COMMANDS[command], monkeypatch))
        return made[-1]

    yield shared
    for process in [one for each in made for one in each.running]:  # of a test that has failed
        os.kill(process, signal.SIGKILL)
        ended(process)


def outcomes(folder: str) -> dict[str, Any]:
    """Of all runs what does not depend on time: rounds' scores and the sums of models; and figures, by their files."""
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).rglob("rounds.jsonl")):
        records = RunFolder(path.parent).records()
        scores = [(record["round"], record["accuracy_per_client"], record["train_loss"]) for record in records]
        models = path.parent / "models" / "index.json"
        sums = [one["sha256"] for one in json.loads(models.read_text()).values()] if models.exists() else []
        found[str(path.relative_to(folder))] = (scores, sums)
    for path in sorted(Path(folder, "results").glob("*.json")):
        found[path.name] = without_times(json.loads(path.read_text()))
    return found


@pytest.mark.parametrize(
    ("command", "held_in"),
    [("compare", "local/seed-0"), ("benchmark", "tuning/short/fedgh/header_lr=0/seed-7")],
)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "goes on"])
def test_two_processes_do_everything_once(
    share: Callable[[str], Shared], command: str, held_in: str, is_killed: bool
) -> None:
    shared = share(command)
    held_in = f"shared/{held_in}"
    first = shared.start(held_in, before_round=3)
    second = shared.start()
    shared.until(second, b"w")
    before = [run for process, run, _ in shared.rounds() if process == second]
    assert held_in not in before
    if is_killed:
        os.kill(first, signal.SIGKILL)
        assert shared.status(first) == -signal.SIGKILL
    else:
        os.write(shared.let_go, b".")
        assert shared.status(first) == 0, Path("log").read_text()
    assert shared.status(second) == 0, Path("log").read_text()
    counted = Counter((run, number) for _, run, number in shared.rounds())
    assert set(counted.values()) == {1}
    who = {process for process, run, number in shared.rounds() if (run, number) == (held_in, 3)}
    assert who == {second if is_killed else first}
    assert status([*shared.words, "--out", "alone", "--quiet"]) == 0
    assert outcomes("shared") == outcomes("alone")


def test_figures_and_page_are_written_by_one_process_at_a_time(
    share: Callable[[str], Shared], monkeypatch: pytest.MonkeyPatch
) -> None:
    share("benchmark")
    written = []

    def under_lock(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*asked: Any, **further: Any) -> Any:
            with pytest.raises(FolderInUse), lock_folder(Path("shared/results")):
                pass
            written.append(name)
            return write(*asked, **further)

        return checked

    for name in ("add_rows", "write_page"):
        monkeypatch.setattr(module, name, under_lock(name, getattr(module, name)))
    benchmark(".", "shared", settings=["short"], methods=["fedavg"])
    assert written[:3] == ["add_rows", "add_rows", "write_page"], "of local, of fedavg"


# in one process -----------------------------------------------------------------------------------------------------


def test_a_run_that_another_process_is_at_comes_last(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Path("compare/local/seed-1")
    taken.mkdir(parents=True)
    with contextlib.ExitStack() as other:
        other.enter_context(lock_folder(taken))
        monkeypatch.setattr(planned_runs, "wait_until_free", lambda folder: other.close())
        done = pf.compare("recipe.toml", ["fedavg"], (0, 1, 2), out="compare")
    assert not done.failures
    assert all(RunFolder(path.parent).records() for path in place.rglob("result.json"))
    assert len(list(place.rglob("result.json"))) == 6


def test_a_disk_without_locks_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="no file locks: let only one process at a time use a folder"):
        assert not pf.compare("recipe.toml", ["fedavg"], out="compare").failures


def test_a_lock_is_not_made_beyond_a_link(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / ".lock").symlink_to(place / "elsewhere")
    with pytest.raises(RunError, match="cannot write to run"):
        pf.run("recipe.toml", out="run")
    assert not Path("elsewhere").exists()
