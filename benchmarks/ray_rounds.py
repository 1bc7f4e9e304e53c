"""What a round costs with `ray` on one machine, beside `processes` with as many workers.

    python benchmarks/ray_rounds.py                             # the quickstart, and CNN-1 for 8 clients at batch 10
    python benchmarks/ray_rounds.py --jobs quickstart --workers 2 --rounds 20
    python benchmarks/ray_rounds.py --write benchmarks/ray_rounds.json

Two federations run in one process, a round of the one and a round of the other in turn, so that a busy machine slows
both alike. Their records are compared, and must be the same. A line of JSON per job: wall seconds of a round with
either (medians; the first round, with the start of the workers, counts by itself), and `ratio`, the median of ray's
over that of `processes`, round by round. Nothing is written but what `--write` asks for.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache

RECIPES = Path(__file__).parents[1] / "recipes"
EXECUTORS = ("processes", "ray")
JOBS: Mapping[str, tuple[str, Sequence[str]]] = {  # name -> recipe, settings
    "quickstart": ("quickstart.toml", ["run.loggers=[]"]),
    "cnn1-batch10": (
        "reference.toml",
        ["method.name=fedavg", 'models.architectures=["fedgh-cnn1"]', "training.batch_size=10", "data.num_clients=8"],
    ),
}


TIMES = ("seconds", "processor_seconds")  # that equal runs do not share


def records_of(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a run's records say but for its times."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in history]


class Turns:
    """Runs in threads, of which one is at work at a time: they take turns round by round."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._count = count
        self._turn = 0
        self._over: set[int] = set()

    def wait(self, number: int) -> None:
        """Until it is this one's turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == number)

    def pass_on(self, number: int, is_over: bool = False) -> None:
        """A round of this one is through, or all of them."""
        with self._condition:
            if is_over:
                self._over.add(number)
            others = [(number + step) % self._count for step in range(1, self._count + 1)]
            self._turn = next((other for other in others if other not in self._over), -1)
            self._condition.notify_all()


class Runner(threading.Thread):
    """A federation's run, which waits for its turn before every round."""

    def __init__(self, recipe: Recipe, data: DataCache, turns: Turns, number: int) -> None:
        super().__init__()
        self._federation = build_federation(recipe, data=data, loggers=[self.round])
        self._turns = turns
        self._number = number
        self.history: Sequence[Mapping[str, Any]] = ()
        self.error: BaseException | None = None

    def round(self, record: Mapping[str, Any]) -> None:
        """A round is through."""
        self._turns.pass_on(self._number)
        self._turns.wait(self._number)

    def run(self) -> None:
        """All rounds."""
        self._turns.wait(self._number)
        try:
            self.history = self._federation.run().history
        except BaseException as error:
            self.error = error
        self._turns.pass_on(self._number, is_over=True)


def measure(job: str, workers: int, rounds: int, changed: Sequence[str], data: DataCache) -> dict[str, Any]:
    """Both executors, round by round in turn.

    Raises:
        PolyfedError: the job cannot be done so. AssertionError: the executors disagree.
    """
    name, settings = JOBS[job]
    own = [f"training.rounds={rounds}", f"run.workers={workers}", *changed]
    turns = Turns(len(EXECUTORS))
    recipes = [Recipe.load(RECIPES / name, [*settings, *own, f"run.executor={executor}"]) for executor in EXECUTORS]
    runners = [Runner(recipe, data, turns, number) for number, recipe in enumerate(recipes)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
        if runner.error is not None:
            raise runner.error
    processes, ray = runners
    assert records_of(processes.history) == records_of(ray.history), "ray and processes disagree"
    figures: dict[str, Any] = {"job": job, "workers": workers, "rounds": rounds}
    for executor, runner in zip(EXECUTORS, runners, strict=True):
        first, *later = [record["seconds"] for record in runner.history]
        figures |= {f"{executor}_first_s": first, f"{executor}_round_s": median(later)}
    pairs = zip(processes.history, ray.history, strict=True)
    ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs]
    return {**figures, "ratio": median(ratios[1:])}


def main() -> None:
    """Measure every job asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), metavar="A,B,...", help="[all]")
    parser.add_argument("--workers", type=int, default=2, help="[2]")
    parser.add_argument("--rounds", type=int, default=12, help="of either [12]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--write", metavar="FILE", help="the figures as JSON")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("expected at least 2 rounds")
    jobs = list(dict.fromkeys(asked.jobs.split(",")))
    if unknown := [job for job in jobs if job not in JOBS]:
        parser.error(f"expected jobs among {', '.join(JOBS)}, got '{unknown[0]}'")
    data, rows = DataCache(), []
    try:
        for job in jobs:
            rows.append(measure(job, asked.workers, asked.rounds, asked.set, data))
            print(json.dumps(rows[-1]), flush=True)
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    first_heads, later_heads = f"{'processes first':>17}{'ray first':>11}", f"{'processes round':>17}{'ray round':>11}"
    print(f"\n{'job':14}{'workers':>8}{first_heads}{later_heads}{'ratio':>7}")
    for row in rows:
        first = f"{row['processes_first_s']:17.2f}{row['ray_first_s']:11.2f}"
        later = f"{row['processes_round_s']:17.3f}{row['ray_round_s']:11.3f}{row['ratio']:7.2f}"
        print(f"{row['job']:14}{row['workers']:8}{first}{later}")
    if asked.write:
        Path(asked.write).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
