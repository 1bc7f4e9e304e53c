"""Runs the whole suite ten times on a clean clone, where luck would show: in random order, beside load, on one core.

    python scripts/repeat_tests.py [--into FOLDER] [--runs random,load,core] [pytest arguments ...]

Five runs in random order (each prints its seed), three beside four busy loops, two on one core. The first failure ends
it. FOLDER has the clone, a log of each run and `done.json`: the same command goes on with what is not done. Tests are
those of `make test-all` unless arguments say otherwise ("-m 'not slow'", "tests/functional").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = {"random": 5, "load": 3, "core": 2}
BUSY_LOOPS = 4


def head() -> str:
    """The commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def clone(place: Path, commit: str) -> Path:
    """A clean clone of the commit; one that is there already is taken if it is the same."""
    folder = place / "clone"
    marker = place / "commit"
    if folder.is_dir() and marker.is_file() and marker.read_text(encoding="utf-8") == commit:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    (place / "done.json").unlink(missing_ok=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, folder], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=folder, check=True)
    marker.write_text(commit, encoding="utf-8")
    return folder


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Processes that do nothing, as fast as they can."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def command_of(kind: str, number: int, arguments: Sequence[str]) -> list[str]:
    """The command of one run."""
    workers = ["-n", "0"] if kind == "core" else ["-n", "auto", "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", *workers]
    if kind == "random":
        command += ["-p", "tests.helpers.shuffle", "--shuffle", str(1000 + number)]
    if kind == "core":
        command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
    return [*command, *arguments]


def run(kind: str, number: int, folder: Path, log: Path, arguments: Sequence[str]) -> tuple[bool, str, float]:
    """One run: whether it passed, pytest's last line, its seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "src")}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out, busy(BUSY_LOOPS if kind == "load" else 0):
        status = subprocess.run(
            command_of(kind, number, arguments), cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = next((line.strip("= ") for line in reversed(lines) if re.search(r"\b(passed|failed|error)", line)), "")
    return status == 0, said or f"status {status}", time.monotonic() - began


def table(done: dict[str, list[object]]) -> str:
    """What was done, a line a run."""
    rows = [f"| {name} | {said} | {seconds:.0f} |" for name, (said, seconds) in done.items()]
    return "\n".join(["| run | result | seconds |", "| --- | --- | ---: |", *rows])


def main() -> int:
    """Run what is not done; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "repeat", help="folder of clone and logs")
    parser.add_argument("--runs", default=",".join(RUNS), help="which kinds, separated by commas")
    options, arguments = parser.parse_known_args()
    kinds = options.runs.split(",")
    if wrong := set(kinds) - RUNS.keys():
        parser.error(f"expected kinds of runs among {', '.join(RUNS)}, got {', '.join(sorted(wrong))}")
    place = options.into.resolve()
    commit = head()
    folder = clone(place, commit)
    kept = place / "done.json"
    asked = [commit, *arguments]
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    done: dict[str, list[object]] = found["done"] if found.get("asked") == asked else {}
    for kind in kinds:
        for number in range(1, RUNS[kind] + 1):
            name = f"{kind} {number}"
            if name in done:
                continue
            log = place / f"{kind}-{number}.log"
            passed, said, seconds = run(kind, number, folder, log, arguments)
            print(f"{name}: {said}", flush=True)
            if not passed:
                print(f"{table(done)}\n\n{name} failed: {said}; see {log}")
                return 1
            done[name] = [said, seconds]
            kept.write_text(json.dumps({"asked": asked, "done": done}), encoding="utf-8")
    print(table(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
