"""What a round costs with `ray` on one machine, beside `pool` with as many workers.

    python benchmarks/ray_rounds.py                             # the quickstart, and CNN-1 for 8 clients at batch 10
    python benchmarks/ray_rounds.py --jobs quickstart --workers 2 --rounds 10 --repeats 3
    python benchmarks/ray_rounds.py --write benchmarks/ray_rounds.json

The executors take turns: each runs a federation of its own for a few rounds, `--repeats` times over. What comes of
them is compared, and must be the same. A line of JSON per job: wall seconds of a round with either (medians; the first
round of every turn, with the start of the workers, counts by itself), and `ratio`, ray over pool. Nothing is written
but what `--write` asks for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache

RECIPES = Path(__file__).parents[1] / "recipes"
EXECUTORS = ("pool", "ray")
JOBS: Mapping[str, tuple[str, Sequence[str]]] = {  # name -> recipe, settings
    "quickstart": ("quickstart.toml", ["run.track=[]"]),
    "cnn1-batch10": (
        "reference.toml",
        ["method.name=fedavg", 'models.architectures=["fedgh-cnn1"]', "training.batch_size=10", "data.clients=8"],
    ),
}


def records_of(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a run's records say but for its times."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def measure(
    job: str, workers: int, rounds: int, repeats: int, changed: Sequence[str], data: DataCache
) -> dict[str, Any]:
    """Both executors in turn.

    Raises:
        PolyfedError: the job cannot be done so. AssertionError: the executors disagree.
    """
    name, settings = JOBS[job]
    own = [f"training.rounds={rounds}", f"run.workers={workers}", *changed]
    first: dict[str, list[float]] = {executor: [] for executor in EXECUTORS}
    later: dict[str, list[float]] = {executor: [] for executor in EXECUTORS}
    for _ in range(repeats):
        seen = []
        for executor in EXECUTORS:
            recipe = Recipe.load(RECIPES / name, [*settings, *own, f"run.executor={executor}"])
            history = build_federation(recipe, data=data).run().history
            first[executor].append(history[0]["seconds"])
            later[executor] += [record["seconds"] for record in history[1:]]
            seen.append(records_of(history))
        assert seen[0] == seen[1], "ray and pool disagree"
    figures = {f"{executor}_first_s": median(first[executor]) for executor in EXECUTORS}
    figures |= {f"{executor}_round_s": median(later[executor]) for executor in EXECUTORS}
    ratio = figures["ray_round_s"] / figures["pool_round_s"]
    return {"job": job, "workers": workers, "rounds": rounds, "repeats": repeats, **figures, "ratio": ratio}


def main() -> None:
    """Measure every job asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), metavar="A,B,...", help="[all]")
    parser.add_argument("--workers", type=int, default=2, help="[2]")
    parser.add_argument("--rounds", type=int, default=5, help="of a turn [5]")
    parser.add_argument("--repeats", type=int, default=3, help="turns of either [3]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--write", metavar="FILE", help="the figures as JSON")
    asked = parser.parse_args()
    if asked.rounds < 2 or asked.repeats < 1:
        parser.error("expected at least 2 rounds and 1 repeat")
    jobs = list(dict.fromkeys(asked.jobs.split(",")))
    if unknown := [job for job in jobs if job not in JOBS]:
        parser.error(f"expected jobs among {', '.join(JOBS)}, got '{unknown[0]}'")
    data, rows = DataCache(), []
    try:
        for job in jobs:
            rows.append(measure(job, asked.workers, asked.rounds, asked.repeats, asked.set, data))
            print(json.dumps(rows[-1]), flush=True)
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    print(
        f"\n{'job':14}{'workers':>8}{'pool first':>12}{'ray first':>11}{'pool round':>12}{'ray round':>11}{'ratio':>7}"
    )
    for row in rows:
        first = f"{row['pool_first_s']:12.2f}{row['ray_first_s']:11.2f}"
        later = f"{row['pool_round_s']:12.3f}{row['ray_round_s']:11.3f}{row['ratio']:7.2f}"
        print(f"{row['job']:14}{row['workers']:8}{first}{later}")
    if asked.write:
        Path(asked.write).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
