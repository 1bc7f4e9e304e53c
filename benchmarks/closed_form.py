"""What the sums of a closed form cost: bytes, processor time, memory and accuracy, by the number of features D.

    python benchmarks/closed_form.py
    python benchmarks/closed_form.py --recipe suites/small/digits.toml --features 144,576 --out closed-form.json

For each D the method `closed-form` runs one round of the recipe; then the parts of its work are timed by themselves: a
client's map and sums, and the server's solution. Memory is the largest that these parts add to a process of their own,
on random inputs of the same form. Needs the recipe's data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polyfed.config.recipe import Recipe
from polyfed.core.message import get_group, nbytes
from polyfed.core.randomness import generator
from polyfed.experiments.build import build_federation
from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import sum_rows
from polyfed.functional.closed_forms import discriminant
from polyfed.functional.feature_maps.feature_map import draw_map

_MIB = 2**20


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds of processor time."""
    began = time.process_time()
    return work(), time.process_time() - began


def memory_now(name: str) -> int:
    """Bytes of "VmRSS", or "VmHWM", the largest since it was reset (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def measure(recipe: str, overrides: list[str], features: int, shrinkage: float) -> tuple[dict[str, Any], torch.Size]:
    """The figures of one D but for memory, and the form of a client's inputs."""
    named = ["training.rounds=1", f"method.features={features}", f"method.shrinkage={shrinkage}", *overrides]
    federation = build_federation(Recipe.load(Path(recipe), named, method="closed-form"))
    done = federation.run()
    client = federation.clients[0]
    inputs = client.prepare(client.data.train.x[:])
    drawn = draw_map(inputs[:1], features, generator(client.seed, "random features"), client.categories)
    phi, map_seconds = timed(lambda: drawn(inputs))
    sums, sum_seconds = timed(lambda: sum_rows(phi, client.data.train.y[:], client.classes))
    total = get_group(federation.server.state, "sums")
    _, solve_seconds = timed(lambda: discriminant(total, shrinkage))
    found = {
        "features": phi.shape[1],
        "shrinkage": shrinkage,
        "rows": len(inputs),
        "up": nbytes({"sums": sums}),
        "down": nbytes({"solution": get_group(federation.server.state, "solution")}),
        "map_seconds": map_seconds,
        "sum_seconds": sum_seconds,
        "solve_seconds": solve_seconds,
        "accuracy": done.result["accuracy"],
    }
    return found, inputs.shape


def memory(shape: torch.Size, features: int, shrinkage: float) -> int:
    """Bytes that map, sums and solution add to the largest memory of this process."""
    inputs = torch.randn(shape)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the largest
    before = memory_now("VmRSS")
    phi = draw_map(inputs[:1], features, torch.Generator())(inputs)
    sums = sum_rows(phi, torch.arange(len(inputs)) % 2, 2)
    discriminant(class_statistics.add(sums, sums), shrinkage)
    return memory_now("VmHWM") - before


def table(found: list[dict[str, Any]]) -> str:
    """Markdown of all."""
    heads = ["D", "accuracy", "up, MiB", "down, KiB", "map, ms", "sums, ms", "solution, ms", "memory, MiB"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for one in found:
        cells = [
            f"{one['features']:,}",
            f"{100 * one['accuracy']:.1f}",
            f"{one['up'] / _MIB:.1f}",
            f"{one['down'] / 1024:.0f}",
            f"{1000 * one['map_seconds']:,.0f}",
            f"{1000 * one['sum_seconds']:,.0f}",
            f"{1000 * one['solve_seconds']:,.0f}",
            f"{one['memory'] / _MIB:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/own-plus-common.toml", help="whose data are used [%(default)s]")
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe, KEY=VALUE; may be repeated")
    parser.add_argument("--features", default="288,576,1152,4608", help="numbers D, with commas between [%(default)s]")
    parser.add_argument("--shrinkage", type=float, default=0.1, help="s [%(default)s]")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for features in map(int, given.features.split(",")):
        one, shape = measure(given.recipe, given.set, features, given.shrinkage)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(one | {"memory": pool.apply(memory, (shape, features, given.shrinkage))})
        print(json.dumps(found[-1]), flush=True)
    print(table(found))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
