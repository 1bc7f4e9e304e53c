"""What a round costs with each method, relative to one of them: processor time, so that busy neighbors count little.

    python benchmarks/round_cost.py recipes/shared-weights.toml --methods fedprox,scaffold --set data.limit_train=2000
    python benchmarks/round_cost.py recipes/reference.toml --methods fml,fedkd --base local --set data.num_clients=5

The methods take turns: every method runs a federation of its own for a few rounds, `--repeats` times over. A round that
is scored, and the first, in which much is done once, do not count. A line of JSON per method: seconds of processor time
per round (the median), the ratio to the base method's, and samples trained on per round. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache


class Clock:
    """A logger that takes the processor time of every round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.samples = 0
        self._began = 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins."""
        self._began = time.process_time()

    def client_done(self, done: int, total: int) -> None:
        """Of no interest."""

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is through."""
        now = time.process_time()
        if not record["evaluated"] and record["round"] > 1:
            self.seconds.append(now - self._began)
            self.samples = record["samples"]
        self._began = now

    def message(self, text: str) -> None:
        """Of no interest."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over."""


def main() -> None:
    """Measure every method asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--methods", required=True, metavar="A,B,...", help="methods and variants")
    parser.add_argument("--base", default="fedavg", metavar="A", help="what the ratio is to [fedavg]")
    parser.add_argument("--rounds", type=int, default=4, help="of every run; all but the first and the last count [4]")
    parser.add_argument("--repeats", type=int, default=2, help="runs of every method [2]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    asked = parser.parse_args()
    if asked.rounds < 3 or asked.repeats < 1:
        parser.error("expected at least 3 rounds and 1 repeat")
    names = list(dict.fromkeys([asked.base, *asked.methods.split(",")]))
    data, clocks = DataCache(), {name: Clock() for name in names}
    settings = [*asked.set, f"training.rounds={asked.rounds}", f"evaluation.every_n_rounds={asked.rounds}"]
    settings += ["run.executor=serial", "run.workers=1"]  # the clock sees this process only
    try:
        recipe = Recipe.load(asked.recipe, settings)
        for _ in range(asked.repeats):
            for name, clock in clocks.items():
                build_federation(recipe.choose(name), data=data, loggers=[clock]).run()
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    base = median(clocks[asked.base].seconds)
    for name, clock in clocks.items():
        seconds = median(clock.seconds)
        figures = {"seconds": round(seconds, 3), "ratio": round(seconds / base, 2), "samples": clock.samples}
        print(json.dumps({"method": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
