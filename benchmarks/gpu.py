"""Is a GPU right, and what is it worth? Three minutes on a machine that has one; the answer is a file of JSON.

    python benchmarks/gpu.py --out gpu.json

First every method runs on the conformance kit's small clients, by `serial` and by `vectorized`, on the GPU and on the
CPU: `difference` is the largest one between the weights and states that come of it, as a share of the largest entry
(`agrees`: at most 0.001, with TF32 off). Then clients with random 3 x 32 x 32 images train without a word to anybody
(method local) by either executor: seconds per round (medians; the first round does not count), steps per second of all
clients together, the device's memory at its fullest, and `speedup`, serial over vectorized.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.settings import Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Task
from polyfed.errors import PolyfedError
from polyfed.methods import Local
from polyfed.models import build
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import Flat, state
from polyfed.version import __version__

SHAPE, CLASSES = (3, 32, 32), 10
EXECUTORS = ("serial", "vectorized")
CLOSE = 1e-3  # of the largest entry


def lenet() -> nn.Module:
    """Two convolutions of 6 and 16 channels, layers of 120 and 84: 62 006 parameters."""
    body = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)]
    return nn.Sequential(*body, *head)


def compared(name: str, device: str) -> list[dict[str, Any]]:
    """How far a method's results on the device are from those on the CPU, by executor."""
    rows = []
    for executor in EXECUTORS:
        row: dict[str, Any] = {"method": name, "executor": executor}
        try:
            found = [kit_run(name, place, executor) for place in ("cpu", device)]
            row["difference"] = difference(*found)
            row["agrees"] = row["difference"] <= CLOSE
        except (PolyfedError, RuntimeError) as error:
            row["error"] = str(error)
            row["agrees"] = False
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


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


def timed(model: str, count: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds, steps and memory of rounds by either executor."""
    row: dict[str, Any] = {"model": model, "clients": count, "batch_size": asked.batch_size}
    steps = count * -(-asked.samples // asked.batch_size)
    on_cuda = torch.device(asked.device).type == "cuda"
    for executor in EXECUTORS:
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(asked.device)
        federation = Federation(
            [Client("network", images(asked.samples, number)) for number in range(count)],
            Local(),
            Training(rounds=asked.rounds, batch_size=asked.batch_size),
            task=Task(classes=CLASSES),
            executor=Execution(executor, device=asked.device, workers=count if executor == "vectorized" else None),
            builders={"network": lenet if model == "lenet" else lambda: build(model, SHAPE, CLASSES)},
        )
        federation.run()
        seconds = median(record["seconds"] for record in federation.history[1:])
        peak = torch.cuda.max_memory_allocated(asked.device) if on_cuda else None
        row[executor] = {"seconds": seconds, "steps_per_second": steps / seconds, "peak_bytes": peak}
    row["speedup"] = row["serial"]["seconds"] / row["vectorized"]["seconds"]
    print(json.dumps(row), flush=True)
    return row


def images(count: int, seed: int) -> LabeledSamples:
    """Random bytes, random classes."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, *SHAPE), generator=draws, dtype=torch.uint8)
    return LabeledSamples(x, torch.randint(0, CLASSES, (count,), generator=draws))


def main() -> None:
    """Compare all methods with the CPU, then take the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="[cuda]")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B,...", help="compared with the CPU [all]")
    parser.add_argument("--models", default="lenet,fedgh-cnn1", metavar="A,B,...", help="timed [%(default)s]")
    parser.add_argument("--clients", default="20,100", metavar="K,L,...", help="timed [%(default)s]")
    parser.add_argument("--samples", type=int, default=500, metavar="N", help="of a client [500]")
    parser.add_argument("--batch-size", type=int, default=10, metavar="B", help="[10]")
    parser.add_argument("--rounds", type=int, default=3, metavar="T", help="timed [3]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the answer as JSON")
    asked = parser.parse_args()
    counts = asked.clients.split(",")
    if not all(count.isdecimal() and int(count) > 1 for count in counts) or asked.rounds < 2 or asked.samples < 1:
        parser.error("expected numbers of clients from 2 on, samples from 1 on, and 2 rounds or more")
    if unknown := set(asked.methods.split(",")) - set(METHODS):
        parser.error(f"expected methods among {', '.join(METHODS)}, got {min(unknown)}")
    is_cuda = torch.device(asked.device).type == "cuda"
    answer: dict[str, Any] = {
        "polyfed": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(asked.device) if is_cuda and torch.cuda.is_available() else asked.device,
    }
    as_set = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        answer["compared"] = [row for name in asked.methods.split(",") for row in compared(name, asked.device)]
    finally:
        torch.backends.cudnn.allow_tf32 = as_set
    try:
        answer["timed"] = [timed(model, int(count), asked) for model in asked.models.split(",") for count in counts]
    except (PolyfedError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    if asked.out is not None:
        asked.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{row['method']} ({row['executor']})" for row in answer["compared"] if not row["agrees"]]
    print(f"other than on the CPU: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
