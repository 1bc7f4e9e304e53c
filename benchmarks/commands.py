"""What commands take: processor time of short ones, relative to importing PyTorch, and memory of reports.

    python benchmarks/commands.py
    python benchmarks/commands.py --runs 1,2,4 --clients 1000 --rounds 500

Short commands and the import take turns, each in a process of its own; medians count. Reports are of fabricated runs,
whose records are as long as those of so many clients. Half a minute at the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from polyfed.results.read import seal

COMMANDS = ["--help", "methods", "models", "recipe", "check recipes/quickstart.toml"]
ROOT = Path(__file__).resolve().parent.parent


def processor_seconds(words: list[str]) -> float:
    """Of Python with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fabricate(folder: Path, seed: int, clients: int, rounds: int) -> Path:
    """A run folder of which reports can be made."""
    folder.mkdir()
    spent = {"seconds": 1.0, "bytes_up": clients, "bytes_down": clients}
    score = {"mean": 0.5, "std": 0.1, "min": 0.2, "max": 0.8, "n": clients}
    facts: dict[str, Any] = {"method": "fedgh", "dataset": "digits", "clients": clients, "rounds": rounds, "seed": seed}
    result = {**facts, "accuracy": 0.5, "accuracy_by_stage": {"personal": score}, **spent}
    result["evaluation"] = {"stage": "personal", "weighting": "clients", "test": "client"}
    (folder / "result.json").write_bytes(seal(result))
    with (folder / "rounds.jsonl").open("wb") as lines:
        for number in range(1, rounds + 1):
            record = {"round": number, "clients": list(range(clients)), "evaluated": True, **spent}
            record["bytes_by_client"] = {str(client): {"down": 2600, "up": 1560} for client in range(clients)}
            record |= {"accuracy": {"personal": score}, "accuracy_per_client": [0.3972602739726027] * clients}
            lines.write(seal(record) + b"\n")
    return folder


def report_mib(folders: list[Path], out: Path) -> float:
    """The most memory that a report of some runs holds, in MiB."""
    words = ["report", *map(str, folders), "--out", str(out)]
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    code = f"import resource, sys; from polyfed.cli.app import status; status({words}); print({peak}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return round(int(done.stderr.split()[-1]) / 2**10, 1)


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", default=",".join(COMMANDS), metavar="A,B,...", help="short ones")
    parser.add_argument("--repeats", type=int, default=3, help="of each [3]")
    parser.add_argument("--runs", default="1,2", metavar="A,B,...", help="how many a report is of [1,2]")
    parser.add_argument("--clients", type=int, default=1000, help="of a fabricated run [1000]")
    parser.add_argument("--rounds", type=int, default=100, help="of a fabricated run [100]")
    asked = parser.parse_args()
    words = {command: ["-m", "polyfed", *command.split()] for command in asked.commands.split(",")}
    words["import torch"] = ["-c", "import torch"]
    turns = [{name: processor_seconds(of_it) for name, of_it in words.items()} for _ in range(asked.repeats)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in words}
    ratios = {name: round(seconds / medians["import torch"], 2) for name, seconds in medians.items()}
    for name, seconds in medians.items():
        row = {"command": name, "processor_seconds": round(seconds, 3), "over_import": ratios[name]}
        print(json.dumps(row), flush=True)
    with tempfile.TemporaryDirectory() as place:
        counts = [int(count) for count in asked.runs.split(",")]
        every = [fabricate(Path(place) / f"{at}", at, asked.clients, asked.rounds) for at in range(max(counts))]
        memory = {count: report_mib(every[:count], Path(place) / "out") for count in counts}
    for count, mib in memory.items():
        print(json.dumps({"report_of": count, "peak_mib": mib}))
    print(f"\n{'command':40}over import torch")
    for name, ratio in ratios.items():
        print(f"{name:40}{ratio:17.2f}")
    print(f"\n{'report of so many runs':40}peak MiB")
    for count, mib in memory.items():
        print(f"{count:<40}{mib:8.1f}")


if __name__ == "__main__":
    main()
