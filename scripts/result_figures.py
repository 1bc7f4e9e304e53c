"""Draw the figures of docs/results that compare runs which no single report holds.

    python scripts/result_figures.py rank-collapse runs/rank-collapse   # of recipes/adapters/rank-collapse.toml
    python scripts/result_figures.py asynchrony runs/asynchrony         # of recipes/asynchrony.toml

Reads run folders; writes docs/results/NAME.png and, of what has no table elsewhere, NAME.csv.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyfed.report.figures import series
from polyfed.report.grouping import group_runs
from polyfed.report.plot_style import empty_figure, legend, styles
from polyfed.report.run_records import load_runs

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
KEY = "energy_beyond_smallest_rank"

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def rank_collapse(folder: Path) -> None:
    """The share of the common update's energy beyond the smallest rank, by round."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for run in load_runs(folder):
        shares = {one.round: one.server[KEY] for one in run.rounds if KEY in one.server}
        if shares:
            lines[run.name] = (list(shares), list(shares.values()))
    with (RESULTS / "rank-collapse.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["run", "round", "share"])
        for name, (rounds, values) in lines.items():
            rows.writerows((name, number, f"{share:.4f}") for number, share in zip(rounds, values, strict=True))
    about = "Energy of the common update beyond rank 2; ranks 2, 4 and 16."
    _draw("rank-collapse", "Rank collapse", about, ("round", "energy beyond the smallest rank [%]"), lines)


def asynchrony(folder: Path) -> None:
    """Accuracy against simulated time, mean over seeds."""
    groups, _ = group_runs(load_runs(folder))
    found = [line for group in groups for line in series(group, "simulated", "received")]
    lines = {line.name: (line.x, line.mean) for line in sorted(found, key=lambda line: line.name)}
    about = "Mean over seeds of the mean over clients, each on its own test images; stage received."
    axes = ("simulated time [s]", "test accuracy [%]")
    _draw("asynchrony", "Accuracy against simulated time", about, axes, lines)


def _draw(stem: str, title: str, about: str, labels: tuple[str, str], lines: Lines) -> None:
    """Lines of shares, in percent."""
    if not lines:
        raise SystemExit("expected runs of the recipe, got none with such figures")
    figure, axes = empty_figure(title, about)
    handles = []
    for (x, y), style in zip(lines.values(), styles(), strict=False):
        handles += axes.plot(x, [100 * value for value in y], **style, markersize=4, markevery=max(1, len(x) // 12))
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, None))
    legend(axes, handles, lines)
    figure.savefig(RESULTS / f"{stem}.png", facecolor="white")


def main() -> None:
    """Draw what is asked for."""
    drawn = {"rank-collapse": rank_collapse, "asynchrony": asynchrony}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=drawn)
    parser.add_argument("folder", type=Path, help="of the runs")
    options = parser.parse_args()
    drawn[options.name](options.folder)


if __name__ == "__main__":
    main()
