"""The reference job beside busy neighbors: how much longer a round takes than on its own.

    python benchmarks/busy.py
    python benchmarks/busy.py --workers 2,1 --loops 2 --method fedgh --rounds 3 --max-train 50 --repeats 3
    python benchmarks/busy.py recipes/quickstart.toml --max-train 50

Runs alone and runs beside `--loops` processes that do nothing but spin take turns; the data are loaded once. A run's
first round, in which workers start and much is done once, does not count, nor does a round that is scored. A line of
JSON per number of workers: median wall seconds of a round alone and beside the loops, and their ratio, the slowdown;
then a table. On a machine that others use, too, "alone" is not alone: read the ratio together with its load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from polyfed.config.recipe import Recipe
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache

REFERENCE = Path(__file__).parents[1] / "recipes" / "reference.toml"
SPIN = "while True: pass"


@contextlib.contextmanager
def neighbors(count: int) -> Iterator[None]:
    """So many busy loops, for as long as the block lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def round_seconds(recipe: Recipe, data: DataCache) -> list[float]:
    """Wall seconds of the rounds of a run that count."""
    history = build_federation(recipe, data=data).run().history
    return [record["seconds"] for record in history[1:] if not record["evaluated"]]


def main() -> None:
    """Measure for every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(REFERENCE), help="[recipes/reference.toml]")
    parser.add_argument("--workers", default="2,1", metavar="A,B,...", help="1: no worker processes [2,1]")
    parser.add_argument("--loops", type=int, default=2, help="busy neighbors [2]")
    parser.add_argument("--method", default="fedgh", help="or a variant of the recipe [fedgh]")
    parser.add_argument("--rounds", type=int, default=3, help="of a run; the first and the last do not count [3]")
    parser.add_argument("--max-train", type=int, default=50, help="rows per client [50]")
    parser.add_argument("--repeats", type=int, default=3, help="runs alone and beside the loops, each [3]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    asked = parser.parse_args()
    if asked.rounds < 3 or asked.repeats < 1 or asked.loops < 1:
        parser.error("expected at least 3 rounds, 1 repeat and 1 loop")
    settings = [f"training.rounds={asked.rounds}", f"evaluation.every_n_rounds={asked.rounds}"]
    settings += [f"data.max_train_per_client={asked.max_train}", "data.max_test_per_client=10", *asked.set]
    data, rows = DataCache(), []
    try:
        counts = [int(word) for word in asked.workers.split(",")]
        whole = Recipe.load(asked.recipe, settings, method=asked.method)
        for workers in counts:
            executor = "processes" if workers > 1 else "serial"
            recipe = whole.with_run(executor=executor, workers=workers)
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(asked.repeats):
                alone += round_seconds(recipe, data)
                with neighbors(asked.loops):
                    beside += round_seconds(recipe, data)
            figures = {"alone": median(alone), "beside": median(beside)}
            facts = {"method": asked.method, "workers": workers, "loops": asked.loops, "cores": os.cpu_count()}
            rows.append({**facts, **figures, "slowdown": median(beside) / median(alone), "goal": "<= 2.5"})
            print(json.dumps(rows[-1]), flush=True)
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    except ValueError:
        parser.error(f"expected --workers as whole numbers with commas between, got '{asked.workers}'")
    print(f"\n{'workers':>7}{'alone, s':>11}{'beside, s':>11}{'slowdown':>10}  goal")
    for row in rows:
        figures = f"{row['workers']:7}{row['alone']:11.3f}{row['beside']:11.3f}{row['slowdown']:10.2f}"
        print(f"{figures}  {row['goal']}")


if __name__ == "__main__":
    main()
