"""Kill runs at random moments, go on each time, and compare what they end with: the bits of a run that nobody killed.

    python scripts/endurance.py                                        50 kills of each method, serial and processes
    python scripts/endurance.py --cases fedgh,late --executors processes --kills 10 --seed 3

A case is a method on a small federation of digits (five clients, five networks, 24 rounds, a checkpoint every third);
`late` is FedGH with clients that drop out or answer two rounds late, so that uploads are under way when it dies. Each
is run once undisturbed and once killed: SIGKILL comes at a random moment of a random round, of the start or of the end;
then the same command goes on with --resume. Where a run is through before all kills are spent, it is compared and
another one begins. Runs are forked from one process that has imported everything, so that a kill costs no second.

Compared are `rounds.jsonl` and `result.json` but for times, `recipe.toml`, every byte of `models/` and every tensor of
the last checkpoint. Besides: a second process that is sent into the folder of a living one must be refused (exit status
2), and no worker may outlive its run.

A line of JSON for each case and executor, then a table. Exit status: 0 all alike, 1 otherwise. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml"
ROUNDS = 24
SMALL = [
    "data.num_clients=5",
    "data.max_train_per_client=20",
    "data.max_test_per_client=10",
    "data.holdout=20",
    f"training.rounds={ROUNDS}",
]
SMALL += ["methods.fedhenn.alignment_data.size=20", "methods.fedgh.header_epochs=2", "run.checkpoint_every=3"]
CASES: dict[str, tuple[str, list[str]]] = {
    "local": ("local", []),
    "fedavg": ("fedavg", ["training.client_fraction=0.6"]),
    "fedgh": ("fedgh", []),
    "fedhenn": ("fedhenn", ["training.client_fraction=0.6"]),
    "fedin": ("fedin", []),
    "scaffold": ("scaffold", ["training.momentum=0.0", "models.architectures=['digits-cnn1']"]),
    "late": ("fedgh", ["availability.delay_rate=0.4", "availability.delay_rounds=2", "availability.dropout_rate=0.2"]),
}
TIMES = {"seconds", "processor_seconds", "samples_per_second", "seal"}


@dataclass
class Told:
    """What became of a case."""

    kills: int = 0
    runs: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def started(words: list[str], log: Path) -> int:
    """A process of `polyfed` with these words; what it says goes to a file."""
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        from polyfed.cli.app import status

        os._exit(status(words))
    os._exit(99)


def ended(child: int, wait: float | None = None) -> int | None:
    """How a process ended; None: it has not, within `wait` seconds."""
    late = None if wait is None else time.monotonic() + wait
    while late is None or time.monotonic() < late:
        found, code = os.waitpid(child, 0 if late is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.001)
    return None


def workers(process: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def there(process: int) -> bool:
    """Whether a process lives."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true in time."""
    late = time.monotonic() + seconds
    while not condition() and time.monotonic() < late:
        time.sleep(0.002)
    return condition()


def lines(folder: Path) -> int:
    """How many rounds a run has recorded."""
    try:
        return (folder / "rounds.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def content(folder: Path) -> dict[str, Any]:
    """What a finished run has left, without times."""
    found: dict[str, Any] = {f"models/{path.name}": path.read_bytes() for path in (folder / "models").iterdir()}
    for path in sorted((folder / "checkpoint").glob("round-*"))[-1].glob("*.safetensors"):
        tensors = safetensors.deserialize(path.read_bytes())  # in whatever order
        found |= {f"checkpoint/{path.name}, {name}": dict(about) for name, about in tensors}
    recipe = (folder / "recipe.toml").read_text().splitlines()
    found["recipe.toml"] = [line for line in recipe if not line.startswith("out = ")]
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_bytes().splitlines()]
    found |= {f"rounds.jsonl, round {r['round']}": {k: v for k, v in r.items() if k not in TIMES} for r in records}
    result = json.loads((folder / "result.json").read_bytes())
    return found | {f"result.json, {k}": v for k, v in result.items() if k not in TIMES}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two runs differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def killed(words: list[str], folder: Path, r: random.Random, kills: int, seconds: float, told: Told) -> None:
    """One run in `folder`, killed up to so many times at moments in the order of rounds, and brought to its end."""
    moments = sorted(r.uniform(-0.5, ROUNDS + 0.5) for _ in range(kills))
    log = folder.with_suffix(".log")
    for moment in moments:
        process = started([*words, "--resume"], log)
        until(lambda: lines(folder) >= moment or not there(process), 120)  # noqa: B023  (used before the next)
        time.sleep(r.uniform(0, seconds if moment > 0 else 0.3))
        if r.random() < 0.1 and (folder / "recipe.toml").exists():
            second(words, folder, process, told)
        others = workers(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        code = ended(process)
        if code != -signal.SIGKILL:
            if code:
                told.wrong.append(f"a run ended with status {code}: {log.read_text()[-300:]}")
            break
        told.kills += 1
        if not until(lambda: not any(map(there, others)), 10):  # noqa: B023
            told.wrong.append(f"workers outlived their run: {others}")
    code = ended(started([*words, "--resume"], log))
    if code:
        told.wrong.append(f"the last resumption ended with status {code}: {log.read_text()[-300:]}")
    told.runs += 1


def second(words: list[str], folder: Path, first: int, told: Told) -> None:
    """Send a second process into the folder; it must be refused while the first lives."""
    log = folder.with_suffix(".second")
    code = ended(started([*words, "--resume"], log))
    said = log.read_text()
    log.unlink()
    if "another process is at work" in said and code == 2:
        told.refused += 1
    elif there(first) and not (folder / "result.json").exists():
        told.wrong.append(f"a second process was let in: status {code}, {said[-300:]}")


def case(name: str, executor: str, kills: int, seed: int, place: Path) -> Told:
    """All of a case."""
    method, settings = CASES[name]
    words = ["run", str(RECIPE), "--method", method, "--quiet"]
    for setting in [
        *SMALL,
        *settings,
        f"run.executor={executor}",
        *(["run.workers=2"] if executor == "processes" else []),
    ]:
        words += ["--set", setting]
    told, r = Told(), random.Random(f"{name} {executor} {seed}")
    if code := ended(started([*words, "--out", str(place / "straight")], place / "straight.log")):
        told.wrong.append(
            f"the undisturbed run ended with status {code}: {(place / 'straight.log').read_text()[-300:]}"
        )
        return told
    straight = content(place / "straight")
    records = [json.loads(line) for line in (place / "straight" / "rounds.jsonl").read_bytes().splitlines()]
    pace = sum(record["seconds"] for record in records) / ROUNDS
    while told.kills < kills and not told.wrong:
        folder = place / f"killed-{told.runs}"
        killed([*words, "--out", str(folder)], folder, r, kills - told.kills, pace, told)
        if not told.wrong and (found := differences(straight, content(folder))):
            told.wrong.append(f"not the same: {', '.join(found[:5])}")
    return told


def imported() -> None:
    """Import all that runs need, before processes part; no gradient is taken here."""
    from polyfed.config.recipe import Recipe
    from polyfed.experiments.data_cache import DataCache

    for method, settings in CASES.values():
        recipe = Recipe.load(RECIPE, [*SMALL, *settings], method=method)
    DataCache().federated(recipe)


def main() -> None:
    """Kill what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B,...", help=f"[all: {', '.join(CASES)}]")
    parser.add_argument("--executors", default="serial,processes", metavar="A,B", help="[serial,processes]")
    parser.add_argument("--kills", type=int, default=50, help="of each case and executor [50]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments [0]")
    asked = parser.parse_args()
    if sys.platform != "linux":
        parser.error("expected Linux, whose /proc says who lives")
    for name in asked.cases.split(","):
        if name not in CASES:
            parser.error(f"expected cases among {', '.join(CASES)}, got '{name}'")
    imported()

    rows, failed = [], False
    for name in asked.cases.split(","):
        for executor in asked.executors.split(","):
            place = Path(tempfile.mkdtemp(prefix="polyfed-endurance-"))
            told = case(name, executor, asked.kills, asked.seed, place)
            rows.append({"case": name, "executor": executor, **vars(told)})
            print(json.dumps(rows[-1]), flush=True)
            failed |= bool(told.wrong)
            if not told.wrong:
                shutil.rmtree(place)
    print(f"\n{'case':12}{'executor':10}{'kills':>7}{'runs':>6}{'second process refused':>24}   the same bits")
    for row in rows:
        same = "yes" if not row["wrong"] else f"NO: {row['wrong'][0]}"
        print(f"{row['case']:12}{row['executor']:10}{row['kills']:7}{row['runs']:6}{row['refused']:24}   {same}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
