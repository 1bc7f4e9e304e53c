"""Whether a run's memory stays as it is over thousands of rounds.

    python benchmarks/endurance_memory.py                              2 000 rounds, five methods, serial and processes
    python benchmarks/endurance_memory.py --methods fedgh --executors processes --rounds 300

A tiny federation of digits (three clients, three networks, 10 training images each, scored in every round, a checkpoint
every 100) runs as `polyfed run` does, each method and executor in a process of its own, into a folder that is thrown
away. Every so many rounds the memory of the run's process and that of its workers are noted: resident pages that belong
to no file, shared ones once among those that share them (Pss_Anon and Pss_Shmem in /proc, so this needs Linux). Pages
of libraries are left out, as what they count for depends on who else has them open. The growth is the slope of the
straight line through what was noted in the last three quarters, in bytes per round.

Records are kept in memory for the result, so that some growth is meant: `history` is what a record takes.

A line of JSON for each run, then a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import linear_regression
from typing import Any

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml"
TINY = [
    "data.num_clients=3",
    "data.max_train_per_client=10",
    "data.max_test_per_client=5",
    "data.holdout=20",
    "evaluation.extra_stages=[]",
    "methods.fedhenn.alignment_data.size=20",
    "methods.fedgh.header_epochs=2",
    "run.checkpoint_every=100",
]


def size(value: Any) -> int:
    """Bytes of a record in memory, all that it holds included."""
    held: list[Any] = []
    if isinstance(value, Mapping):
        held = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        held = list(value)
    shared = isinstance(value, str | bool | type(None)) or (isinstance(value, int) and -5 <= value <= 256)
    return (0 if shared else sys.getsizeof(value)) + sum(map(size, held))


def own_memory(process: int) -> int:
    """Bytes of a process that are of no file; 0 where it has ended."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]]
        return 1024 * sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return 0


class Watch:
    """Notes memory every so many rounds: (round, bytes of this process, bytes of its workers)."""

    def __init__(self, every: int) -> None:
        from memory import family  # the benchmark beside this one

        self._family = family
        self.every, self.noted, self.records = every, list[tuple[int, int, int]](), list[int]()

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """See `polyfed.loggers.base.Logger`."""
        if record["round"] % self.every == 0:
            own, *others = self._family(os.getpid())
            self.noted.append((record["round"], own_memory(own), sum(map(own_memory, others))))
            self.records.append(size(record))

    def growth(self, place: int) -> float:
        """Bytes per round, of this process (1) or its workers (2)."""
        settled = self.noted[len(self.noted) // 4 :]
        return linear_regression([one[0] for one in settled], [one[place] for one in settled]).slope


def measured(method: str, executor: str, rounds: int, every: int) -> dict[str, Any]:
    """A run in this process."""
    import polyfed as pf

    watch = Watch(every)
    settings = [*TINY, f"training.rounds={rounds}", f"run.executor={executor}"]
    with tempfile.TemporaryDirectory() as folder:
        done = pf.run(
            QUICKSTART,
            method=method,
            overrides=settings,
            workers=2 if executor == "processes" else None,
            out=Path(folder) / "run",
            loggers=[watch],
        )
    first, last = watch.noted[len(watch.noted) // 4], watch.noted[-1]
    return {
        "method": method,
        "executor": executor,
        "rounds": rounds,
        "seconds": round(done.result["seconds"], 1),
        "mib": [round((one[1] + one[2]) / 2**20, 1) for one in (first, last)],
        "run_bytes_per_round": round(watch.growth(1)),
        "workers_bytes_per_round": round(watch.growth(2)),
        "history_bytes_per_round": round(sum(watch.records) / len(watch.records)),
    }


def main() -> None:
    """Measure every method with every executor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="local,fedavg,fedgh,fedhenn,fedin", metavar="A,B,...")
    parser.add_argument("--executors", default="serial,processes", metavar="A,B", help="[serial,processes]")
    parser.add_argument("--rounds", type=int, default=2000, help="[2000]")
    parser.add_argument("--every", type=int, default=20, metavar="ROUNDS", help="between two notes [20]")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if sys.platform != "linux":
        parser.error("expected Linux, whose /proc says what memory is shared")
    if not 8 * asked.every <= asked.rounds or asked.every < 1:
        parser.error(f"expected 8 times --every = {asked.every} rounds at least, got {asked.rounds}")
    if asked.one:
        print(json.dumps(measured(asked.methods, asked.executors, asked.rounds, asked.every)), flush=True)
        return
    rows = []
    for method in asked.methods.split(","):
        for executor in asked.executors.split(","):
            words = ["--one", "--methods", method, "--executors", executor]
            words += ["--rounds", str(asked.rounds), "--every", str(asked.every)]
            done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.exit(done.returncode)
            print(done.stdout, end="", flush=True)
            rows.append(json.loads(done.stdout))
    print(f"\n{'method':12}{'executor':10}{'MiB, first and last':>22}{'growth, run':>14}{'workers':>10}{'history':>10}")
    for row in rows:
        first, last = row["mib"]
        grown = [row[f"{name}_bytes_per_round"] for name in ("run", "workers", "history")]
        print(f"{row['method']:12}{row['executor']:10}{first:14.1f}{last:8.1f}", end="")
        print(f"{grown[0]:14}{grown[1]:10}{grown[2]:10}   bytes per round")


if __name__ == "__main__":
    main()
