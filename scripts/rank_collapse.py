"""Draw the share of the common update's energy beyond the smallest rank, by round, of runs of fedlora.

    python scripts/rank_collapse.py runs/rank-collapse docs/assets/rank-collapse

Reads run folders; writes FIGURE.svg and FIGURE.csv.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from polyfed.report.run_records import load_runs

KEY = "energy_beyond_smallest_rank"


def energy_by_round(folder: Path) -> dict[str, dict[int, float]]:
    """Run -> round -> share, of all runs below a folder."""
    found: dict[str, dict[int, float]] = {}
    for run in load_runs(folder):
        shares = {one.round: one.server[KEY] for one in run.rounds if KEY in one.server}
        if shares:
            found[run.name] = shares
    return found


def main(folder: str, figure: str) -> None:
    """Read the runs, draw the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = energy_by_round(Path(folder))
    if not shares:
        sys.exit(f"expected runs of fedlora below {folder}, got none")
    plot, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for name, by_round in shares.items():
        axes.plot(list(by_round), [100 * share for share in by_round.values()], label=name)
    axes.set(xlabel="round", ylabel="energy beyond the smallest rank (%)", ylim=(0, None))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.locator_params(axis="x", integer=True)
    plot.savefig(f"{figure}.svg", metadata={"Date": None})
    with Path(f"{figure}.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["run", "round", "share"])
        for name, by_round in shares.items():
            rows.writerows((name, number, f"{share:.4f}") for number, share in by_round.items())


if __name__ == "__main__":
    main(*sys.argv[1:])
