"""Is a GPU right, and what is it worth? One sitting of some minutes; the answer is a file of JSON.

    python benchmarks/gpu.py --minutes 9 --out gpu.json
    python benchmarks/gpu.py --minutes 9 --out gpu.json --parts table3

Parts, in this order; what is in the file already is not measured again, so that a second sitting goes on:

    methods     every method on the conformance kit's small clients, by `serial` and by `vectorized`, on the GPU and on
                the CPU: `difference` is the largest one between the weights and states that come of it, as a share of
                the largest entry (`agrees`: at most 0.001, with TF32 off)
    steps       clients with random 3 x 32 x 32 images train alone (method local): seconds per round (medians; the first
                round does not count) and client steps per second, for each of EXECUTORS
    table3      FedGH's Table 3 at its full size on CIFAR-10: FedGH, as many of its 3,000 epochs as fit; it goes on from
                the run folder beside the file
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.settings import Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Task
from polyfed.errors import PolyfedError, RunInterrupted
from polyfed.experiments.run import run
from polyfed.methods import Local
from polyfed.models import build
from polyfed.registry import METHODS
from polyfed.report.run_records import load_runs
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import Flat, state
from polyfed.version import __version__

ROOT = Path(__file__).resolve().parents[1]
SHAPE, CLASSES = (3, 32, 32), 10
EXECUTORS = ("serial", "vectorized")
CLOSE = 1e-3  # of the largest entry
PARTS = ("methods", "steps", "table3")
MOST_ALONE = 20  # clients who train one after the other; more take as long for each
TABLE3 = ["fedgh-cnn1", "fedgh-cnn2", "fedgh-cnn3", "fedgh-cnn4", "fedgh-cnn5"]


class OutOfTime(Exception):
    """What is left of the sitting does not suffice for the next measurement."""


class Sitting:
    """The time there is, and the file that grows with every measurement."""

    def __init__(self, minutes: float, out: Path | None, about: dict[str, Any]) -> None:
        self._ends = time.monotonic() + 60 * minutes
        self._out = out
        self.found: dict[str, Any] = {**about, **{part: [] for part in PARTS}}
        if out is not None and out.exists():
            kept = json.loads(out.read_text(encoding="utf-8"))
            if {name: kept.get(name) for name in about} == about:
                self.found |= {part: kept.get(part, []) for part in PARTS}

    def left(self) -> float:
        """Seconds."""
        return self._ends - time.monotonic()

    def take(self, part: str, key: dict[str, Any], measure: Callable[[], dict[str, Any]], needs: float) -> None:
        """Measure what the file does not have yet.

        Raises:
            OutOfTime: fewer than `needs` seconds are left.
        """
        if any(row.items() >= key.items() and "error" not in row for row in self.found[part]):
            return
        if self.left() < needs:
            raise OutOfTime(f"{part} {key}")
        began = time.monotonic()
        try:
            found = measure()
        except (PolyfedError, RuntimeError) as error:  # as where the memory runs out: the others are measured yet
            found = {"error": str(error)}
        row = {**key, **found, "took": time.monotonic() - began}
        self.found[part].append(row)
        print(json.dumps({"part": part, **row}), flush=True)
        self.save()

    def save(self) -> None:
        """Write the file."""
        if self._out is not None:
            self._out.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


# methods --------------------------------------------------------------------------------------------------------------


def compare_methods(sitting: Sitting, asked: argparse.Namespace) -> None:
    """How far methods' results on the device are from those on the CPU, by executor."""
    for name, executor in itertools.product(asked.methods.split(","), EXECUTORS):

        def measure(name: str = name, executor: str = executor) -> dict[str, Any]:
            gap = difference(*(kit_run(name, place, executor) for place in ("cpu", asked.device)))
            return {"difference": gap, "agrees": gap <= CLOSE}

        with tf32_off():
            sitting.take("methods", {"method": name, "executor": executor}, measure, needs=10)


@contextlib.contextmanager
def tf32_off() -> Iterator[None]:
    """Convolutions in float32 within the block."""
    as_set = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = as_set


def kit_run(name: str, device: str, executor: str) -> Flat:
    """Weights and states after a short run of the kit's clients."""
    method = METHODS[name]()
    among = ConformanceKit(method=method, device=device).world(one=True)
    return state(among.run(method, Training(rounds=3, batch_size=8, lr=0.05), executor=executor))


def difference(one: Flat, other: Flat) -> float:
    """The largest difference between two results, as a share of the largest entry of its tensor, or of 1."""
    shares = [0.0]
    for name, expected in one.items():
        if expected.numel():
            gap = (expected.double() - other[name].double()).abs().max()
            shares.append(float(gap / expected.double().abs().max().clamp(min=1.0)))
    return max(shares)


# steps ----------------------------------------------------------------------------------------------------------------


def lenet() -> nn.Module:
    """Two convolutions of 6 and 16 channels, layers of 120 and 84: 62 006 parameters."""
    body = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)]
    return nn.Sequential(*body, *head)


def network(name: str) -> nn.Module:
    """LeNet, or one of polyfed's."""
    return lenet() if name == "lenet" else build(name, SHAPE, CLASSES)


def time_steps(sitting: Sitting, asked: argparse.Namespace) -> None:
    """Rounds of clients of one network, and of two clients of each network of Table 3."""
    for names, count, batch in [*asked.jobs, (TABLE3, 2 * len(TABLE3), 64)]:
        for executor in EXECUTORS:
            if executor == "serial" and count > MOST_ALONE:
                continue
            key = {"models": names, "clients": count, "batch_size": batch, "executor": executor}
            sitting.take("steps", key, timing(asked, names, count, batch, executor), needs=20)


def timing(
    asked: argparse.Namespace, names: Sequence[str], count: int, batch: int, executor: str
) -> Callable[[], dict[str, Any]]:
    """What measures seconds, steps and memory of rounds."""

    def measure() -> dict[str, Any]:
        on_cuda = torch.device(asked.device).type == "cuda" and torch.backends.cuda.is_built()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(asked.device)
        workers = count if executor == "vectorized" else None
        federation = Federation(
            [Client(names[k % len(names)], images(asked.samples, k)) for k in range(count)],
            Local(),
            Training(rounds=asked.rounds, batch_size=batch),
            task=Task(classes=CLASSES),
            executor=Execution(executor=executor, device=asked.device, workers=workers),
            builders={name: lambda name=name: network(name) for name in names},
        )
        began = time.monotonic()
        federation.run()
        whole = time.monotonic() - began
        seconds = median(record["seconds"] for record in federation.history[1:])
        steps = count * -(-asked.samples // batch)
        peak = torch.cuda.max_memory_allocated(asked.device) if on_cuda else None
        return {
            "seconds": seconds,
            "steps_per_second": steps / seconds,
            "first_round": whole - sum(record["seconds"] for record in federation.history[1:]),
            "peak_bytes": peak,
        }

    return measure


def images(count: int, seed: int) -> LabeledSamples:
    """Random bytes, random classes."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, *SHAPE), generator=draws, dtype=torch.uint8)
    return LabeledSamples(x, torch.randint(0, CLASSES, (count,), generator=draws))


# table 3 --------------------------------------------------------------------------------------------------------------


def run_table3(sitting: Sitting, asked: argparse.Namespace) -> None:
    """As many rounds, of 30 epochs each, as fit into what is left."""
    files = ("test.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
    absent = [name for name in files if not (asked.data / "cifar10" / name).exists()]
    if absent:
        print(f"table3 needs {', '.join(absent)} in {asked.data / 'cifar10'}")
        return
    if sitting.left() < 60:
        raise OutOfTime("table3")
    recipe = Recipe.load(
        ROOT / "recipes" / "fedgh" / "table3.toml",
        [f'data.root="{asked.data}"', f'run.device="{asked.device}"', "run.checkpoint_every=1", *asked.set],
        method="fedgh",
    )
    folder = asked.work / "table3"
    stop = threading.Timer(max(sitting.left() - 30, 1), os.kill, (os.getpid(), signal.SIGINT))  # as Ctrl-C
    began = time.monotonic()
    stop.start()
    try:
        run(recipe, out=folder, resume=True)
    except RunInterrupted as end:
        print(end)
    finally:
        stop.cancel()
    (record,) = load_runs(folder)
    rounds = [each for each in record.rounds if each.round]
    row = {
        "rounds": len(rounds),
        "seconds_per_round": median(each.seconds or 0.0 for each in rounds) if rounds else None,
        "accuracy": [each.mean("personal") for each in rounds],
        "sitting_seconds": time.monotonic() - began,
    }
    sitting.found["table3"] = [row]
    sitting.save()
    print(json.dumps({"part": "table3", **row}))


# main -----------------------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Sitting, argparse.Namespace], None]] = {
    "methods": compare_methods,
    "steps": time_steps,
    "table3": run_table3,
}


def read_options() -> argparse.Namespace:
    """The words of the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="[cuda]")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="of the sitting [9]")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="A,B,...", help="[%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the answer as JSON; it is gone on with")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"), metavar="DIR", help="run folders [%(default)s]")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="has cifar10/ [POLYFED_DATA]")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B,...", help="compared with the CPU [all]")
    jobs = "lenet:2,lenet:20,lenet:100,fedgh-cnn1:20,fedgh-cnn1:100,fedhenn-h5:20,resnet10-gn:20"
    parser.add_argument("--jobs", default=jobs, metavar="MODEL:CLIENTS,...", help="timed [%(default)s]")
    parser.add_argument("--samples", type=int, default=500, metavar="N", help="of a client [500]")
    parser.add_argument("--batch-size", type=int, default=10, metavar="B", help="[10]")
    parser.add_argument("--rounds", type=int, default=3, metavar="T", help="timed [3]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of Table 3")
    asked = parser.parse_args()
    asked.parts = asked.parts.split(",")
    pairs = [job.partition(":") for job in asked.jobs.split(",")]
    asked.data = (asked.data or Path(os.environ.get("POLYFED_DATA", "runs/data"))).resolve()
    counts = [count for _, _, count in pairs]
    if not all(count.isdecimal() and int(count) > 1 for count in counts) or asked.rounds < 2 or asked.samples < 1:
        parser.error("expected numbers of clients from 2 on, samples from 1 on, and 2 rounds or more")
    asked.jobs = [([model], int(count), asked.batch_size) for model, _, count in pairs]
    if unknown := set(asked.methods.split(",")) - set(METHODS):
        parser.error(f"expected methods among {', '.join(METHODS)}, got {min(unknown)}")
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"expected parts among {', '.join(PARTS)}, got {min(unknown)}")
    return asked


def main() -> None:
    """Measure what is asked for and not in the file yet, until the time is over."""
    asked = read_options()
    is_cuda = torch.device(asked.device).type == "cuda" and torch.cuda.is_available()
    card = torch.cuda.get_device_name(asked.device) if is_cuda else asked.device
    sitting = Sitting(asked.minutes, asked.out, {"polyfed": __version__, "torch": torch.__version__, "device": card})
    try:
        for part in asked.parts:
            MEASURES[part](sitting, asked)
    except OutOfTime as end:
        print(f"out of time before {end}; the same command goes on")
    wrong = [f"{row['method']} ({row['executor']})" for row in sitting.found["methods"] if not row.get("agrees")]
    print(f"other than on the CPU: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
