"""The most memory that a run holds, and what it writes to disk.

    python benchmarks/memory.py --set data.root='"DIR"'             the reference job, or set POLYFED_DATA
    python benchmarks/memory.py recipes/quickstart.toml --methods fedavg,fedgh --rounds 2

Every method runs as `polyfed run` does, in processes of its own, into a folder that is thrown away. Memory is what the
system counts for the run and its workers together, ten times a second: resident pages, those that several processes
share once among them (PSS in /proc, so this needs Linux). Written bytes are those of the run folder per round, without
the checkpoints and the models.

A line of JSON for each method, then a table. About a minute at the defaults: fedavg, which sends whole models, for two
rounds of the reference job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL_MEMORY, GOAL_WRITTEN = 900, 10_000  # MiB; bytes per round
REFERENCE = Path(__file__).resolve().parent.parent / "recipes" / "reference.toml"


def family(process: int) -> list[int]:
    """A process and all that it has started, as far as they are there."""
    found = [process]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def held(process: int) -> int:
    """Bytes of memory of a process and all that it has started, shared pages once."""
    total = 0
    for each in family(process):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measured(asked: argparse.Namespace, method: str, folder: Path) -> dict[str, Any]:
    """A run of a method into `folder`."""
    words = ["run", asked.recipe, "--method", method, "--out", str(folder), "--workers", str(asked.workers)]
    for setting in [*asked.set, f"training.rounds={asked.rounds}"]:
        words += ["--set", setting]
    most = 0
    with subprocess.Popen(
        [sys.executable, "-m", "polyfed", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        while run.poll() is None:
            most = max(most, held(run.pid))
            time.sleep(0.1)
        assert run.stderr is not None
        if run.returncode:
            sys.stderr.write(run.stderr.read())
            sys.exit(run.returncode)
    apart = {"checkpoint", "models"}
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in apart]
    rounds = len((folder / "rounds.jsonl").read_bytes().splitlines())
    written = sum(path.stat().st_size for path in files) / rounds
    return {"method": method, "peak_mib": round(most / 2**20, 1), "bytes_per_round": round(written)}


def main() -> None:
    """Measure every method asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(REFERENCE), help="[recipes/reference.toml]")
    parser.add_argument("--methods", default="fedavg", metavar="A,B,...", help="methods and variants [fedavg]")
    parser.add_argument("--workers", type=int, default=2, help="[2]")
    parser.add_argument("--rounds", type=int, default=2, help="[2]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    asked = parser.parse_args()
    if sys.platform != "linux":
        parser.error("expected Linux, whose /proc says what memory is shared")
    rows = []
    for method in dict.fromkeys(asked.methods.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append({**measured(asked, method, Path(folder) / "run"), "workers": asked.workers})
        print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'method':16}peak MiB (goal: {GOAL_MEMORY})  bytes per round (goal: < {GOAL_WRITTEN})")
    for row in rows:
        print(f"{row['method']:16}{row['peak_mib']:20.1f}  {row['bytes_per_round']:28}")


if __name__ == "__main__":
    main()
