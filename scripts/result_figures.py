"""Draw the figures of docs/results that compare runs which no single report holds.

    python scripts/result_figures.py rank-collapse runs/rank-collapse   # of recipes/adapters/rank-collapse.toml
    python scripts/result_figures.py asynchrony runs/asynchrony         # of recipes/asynchrony.toml
    python scripts/result_figures.py gains docs/results/tables          # of stored comparisons with controls
    python scripts/result_figures.py unlike-own-data docs/results/tables
    python scripts/result_figures.py sizes docs/results/benchmark-sizes # of suites/sizes
    python scripts/result_figures.py others-rows docs/results/benchmark-small # of suites/small
    python scripts/result_figures.py closed-form-privacy docs/results # of scripts/closed_form_privacy.py

Reads run folders, or the stored tables; writes docs/results/NAME.png and, of what has no table elsewhere, NAME.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from polyfed.report.benchmark_figures import gains_figure
from polyfed.report.benchmark_results import read_results
from polyfed.report.benchmark_worth import gain_between
from polyfed.report.figures import series
from polyfed.report.findings import Gains
from polyfed.report.grouping import group_runs
from polyfed.report.plot_style import HEIGHT, SHEET, bar_style, canvas, empty_figure, legend, line_style, style_axes
from polyfed.report.run_records import load_runs
from polyfed.report.statistics import Estimate

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
KEY = "energy_beyond_smallest_rank"
SETTINGS = {  # stored table -> its name in the figure
    "worth-reference": "two classes",
    "worth-reference-more": "two classes",
    "worth-reference-fedorgp": "two classes",
    "worth-few": "few images",
    "worth-few-more": "few images",
    "worth-few-fedmrl": "few images",
    "worth-few-fedorgp": "few images",
    "naturals-heart": "hospitals",
    "naturals-watch": "watch",
    "naturals-contraception": "districts",
}
UNLIKE_OWN = {  # stored table -> its column, and what it shows
    "fedin-table1-fashion-small": ("accuracy", "Fashion-MNIST, one test set for all"),
    "naturals-watch-newcomers": ("held out, received", "the watch, newcomers"),
}

OVER_SIZES = (  # rows of suites/sizes
    "fedgh", "fd", "fedavg-tuned", "closed-form", "own-plus-common-alone", "own-plus-common", "pooled-tuned",
)  # fmt: skip

BY_OTHERS = (
    "fedgh", "fedavg-tuned", "closed-form", "own-plus-common-alone", "own-plus-common", "pooled-shares", "pooled-tuned",
)  # fmt: skip

OF_SUITE = {"watch": "watch", "two classes": "cifar10-two-classes"}  # names of closed_form_privacy.py and suites/small

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def rank_collapse(folder: Path) -> None:
    """The share of the common update's energy beyond the smallest rank, by round."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for run in load_runs(folder):
        shares = {one.round: one.server[KEY] for one in run.read_rounds() if KEY in one.server}
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
    found = [line for group in groups for line in series(group, "received") if "simulated" in line.axes]
    lines = {line.name: (line.axes["simulated"], line.mean) for line in sorted(found, key=lambda line: line.name)}
    about = "Mean over seeds of the mean over clients, each on its own test images; stage received."
    axes = ("simulated time [s]", "test accuracy [%]")
    _draw("asynchrony", "Accuracy against simulated time", about, axes, lines)


def gains(folder: Path) -> None:
    """Every method's gain over Local and its federated gain, in all settings that ran with controls."""
    by_setting: dict[str, dict[str, Gains]] = {}
    for stem, name in SETTINGS.items():
        stored = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
        (table,) = (one["rows"] for one in stored["tables"] if one["caption"].startswith("What federation is worth"))
        rows = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
        by_setting.setdefault(name, {}).update({row["method"]: _gains(row) for row in rows})
    shared = Counter(method for found in by_setting.values() for method in found)
    figure = gains_figure(by_setting, [method for method, _ in shared.most_common()], "gains")
    if figure is None:
        raise SystemExit(f"expected tables of gains in {folder}, got none")
    figure.figure.savefig(RESULTS / "gains.png", **SHEET)


def _gains(row: Mapping[str, str]) -> Gains:
    """A row of such a table, whose figures are percentage points."""
    parts = {
        part: _gain(row[title], row[interval])
        for part, title, interval in (
            ("gain", "gain over Local", "interval of gain"),
            ("alone", "gain alone", "interval alone"),
            ("federated", "federated gain", "interval federated"),
        )
    }
    return Gains(local=None, pooled=None, way=None, **parts)


def _gain(mean: str, interval: str) -> Estimate:
    ends = [float(end) for end in interval.strip("[]").split(", ")] if interval.startswith("[") else None
    margin = None if ends is None else (ends[1] - ends[0]) / 200
    return Estimate(mean=float(mean.strip("*")) / 100, margin=margin)


def unlike_own_data(folder: Path) -> None:
    """Accuracy where clients are scored on what they have no data of: a common test set, and as newcomers."""
    about = "Mean over seeds in %; whiskers: standard deviation over seeds, where the table has it. Dotted: Local."
    figure, (panels,) = canvas("Inputs unlike a client's own data", about, HEIGHT, columns=2)
    for axes, (stem, (column, title)) in zip(panels, UNLIKE_OWN.items(), strict=True):
        rows = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))["tables"][0]["rows"]
        scores = {row[0]: row[rows[0].index(column)].strip("*").split(" ± ") for row in rows[1:]}
        means = {name: float(score[0]) for name, score in scores.items()}
        spreads = [float(score[1]) if len(score) > 1 else 0.0 for score in scores.values()]
        axes.barh(list(means), list(means.values()), xerr=spreads, capsize=3, **bar_style(0))
        axes.axvline(means["local"], color="black", linestyle=(0, (1.5, 2)), linewidth=1.6)
        axes.invert_yaxis()
        axes.set_title(title, size=9)
        axes.set(xlabel="accuracy [%]", xlim=(0, None))
        style_axes(axes, grid="x")
    figure.savefig(RESULTS / "unlike-own-data.png", **SHEET)


def sizes(folder: Path) -> None:
    """Every row's gain over Local against the training rows that a client has."""
    names = sorted(path.stem for path in folder.glob("rows-*.json"))
    by_size = {one.recipe["data"]["max_train_per_client"]: one for one in read_results(folder, names)}
    about = "Mean over seeds; whiskers: 95 % intervals, from three seeds on."
    figure, axes = empty_figure("When does federation pay? CIFAR-10, ten clients", about)
    handles = []
    drawn = []
    for number, name in enumerate(OVER_SIZES):
        gains = {rows: gain_between(one, "local", name) for rows, one in sorted(by_size.items())}
        known = {rows: gain for rows, gain in gains.items() if gain.mean is not None}
        if not known:
            continue
        beside = 1.03 ** (number - len(OVER_SIZES) / 2)  # so that whiskers can be told apart
        x = [rows * beside for rows in known]
        means = [100 * gain.mean for gain in known.values() if gain.mean is not None]
        margins = [100 * (gain.margin or 0.0) for gain in known.values()]
        handles.append(
            axes.errorbar(x, means, yerr=margins, elinewidth=1, capsize=2, markersize=4, **line_style(number))
        )
        drawn.append(name)
    if not drawn:
        raise SystemExit(f"expected the figures of suites/sizes in {folder}, got none")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="training rows per client", ylabel="over Local [percentage points]")
    axes.set_xticks(sorted(by_size), [str(rows) for rows in sorted(by_size)])
    axes.minorticks_off()
    legend(axes, handles, drawn)
    figure.savefig(RESULTS / "sizes.png", **SHEET)


def others_rows(folder: Path) -> None:
    """Gains over Local in every setting: of a method, of linear models, and of networks trained on the rows of all."""
    others = ("gains", "processor-seconds")  # no settings
    settings = read_results(folder, sorted(path.stem for path in folder.glob("*.json") if path.stem not in others))
    about = "Gain over Local, mean over seeds; whiskers: 95 % intervals."
    figure, axes = empty_figure("What are the others' rows worth?", about)
    handles = []
    for number, name in enumerate(BY_OTHERS):
        gains = {at: gain_between(one, "local", name) for at, one in enumerate(settings)}
        known = {at: gain for at, gain in gains.items() if gain.mean is not None}
        x = [at + 0.1 * (number - len(BY_OTHERS) // 2) for at in known]
        means = [100 * gain.mean for gain in known.values() if gain.mean is not None]
        margins = [100 * (gain.margin or 0.0) for gain in known.values()]
        style = {**line_style(number), "linestyle": "none"}
        handles.append(axes.errorbar(x, means, yerr=margins, elinewidth=1, capsize=2, markersize=4, **style))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel="over Local [percentage points]")
    axes.set_xticks(range(len(settings)), [one.setting.replace("cifar10-", "cifar10\n") for one in settings])
    legend(axes, handles, BY_OTHERS)
    figure.savefig(RESULTS / "others-rows.png", **SHEET)


def closed_form_privacy(folder: Path) -> None:
    """Accuracy of the closed form over epsilon."""
    stored = json.loads((folder / "closed-form-privacy.json").read_text(encoding="utf-8"))["settings"]
    about = "Mean over seeds. Lines without points: without noise. Dotted: Local, where suites/small has it."
    figure, (panels,) = canvas("The closed form with one release with noise", about, HEIGHT, columns=len(stored))
    names = {"together": "noise of each client", "summed": "noise of one, shared", "alone": "each client alone"}
    for axes, (setting, lines) in zip(panels, stored.items(), strict=True):
        handles = []
        for number, who in enumerate(names):
            found = {one["epsilon"]: mean(one["accuracy"].values()) for one in lines if one["who"] == who}
            style = line_style(number)
            plain = found.pop(None, None)
            drawn = axes.plot(list(found), [100 * value for value in found.values()], markersize=4, **style)
            if plain is not None:
                level = axes.axhline(100 * plain, color=style["color"], linewidth=1)
            handles.append(drawn[0] if found else level)
        if setting in OF_SUITE:
            tables = read_results(folder / "benchmark-small", [OF_SUITE[setting]])
            local = next(row for row in tables[0].rows if row.name == "local-tuned")
            level = mean(value for value in local.accuracy.values() if value is not None)
            axes.axhline(100 * level, color="black", linestyle=(0, (1.5, 2)), linewidth=1.6)
        axes.set_title(setting, size=9)
        axes.set(xscale="log", xlabel="epsilon")
        axes.set_xticks([1, 3, 10], ["1", "3", "10"])
        axes.minorticks_off()
        style_axes(axes)
    panels[0].set_ylabel("accuracy [%]")
    legend(panels[0], handles, list(names.values()))
    figure.savefig(RESULTS / "closed-form-privacy.png", **SHEET)


def _draw(stem: str, title: str, about: str, labels: tuple[str, str], lines: Lines) -> None:
    """Lines of shares, in percent."""
    if not lines:
        raise SystemExit("expected runs of the recipe, got none with such figures")
    figure, axes = empty_figure(title, about)
    handles = []
    for number, (x, y) in enumerate(lines.values()):
        handles += axes.plot(
            x, [100 * value for value in y], **line_style(number), markersize=4, markevery=max(1, len(x) // 12)
        )
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, None))
    legend(axes, handles, lines)
    figure.savefig(RESULTS / f"{stem}.png", **SHEET)


def main() -> None:
    """Draw what is asked for."""
    drawn = {
        "rank-collapse": rank_collapse,
        "asynchrony": asynchrony,
        "gains": gains,
        "unlike-own-data": unlike_own_data,
        "sizes": sizes,
        "others-rows": others_rows,
        "closed-form-privacy": closed_form_privacy,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=drawn)
    parser.add_argument("folder", type=Path, help="of the runs, or of the tables")
    options = parser.parse_args()
    drawn[options.name](options.folder)


if __name__ == "__main__":
    main()
