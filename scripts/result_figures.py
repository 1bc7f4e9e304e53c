"""Draw the figures of docs/results.md from the stored figures.

    python scripts/result_figures.py

Writes rows.png, sizes.png, others-rows.png and unlike-own-data.png into docs/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results_pages import RESULTS, measurements, settings

from polyfed.report.benchmark_results import SettingResult
from polyfed.report.plot_style import HEIGHT, SHEET, canvas, empty_figure, legend, line_style, style_axes
from polyfed.report.statistics import Estimate

UNLIKE_OWN = {  # stored table -> its column, and what it shows
    "fedin-table1-fashion-small": ("accuracy", "Fashion-MNIST, one test set for all"),
    "naturals-watch-newcomers": ("held out, received", "the watch, newcomers"),
}
BY_ROWS = {  # row of suites/rows -> what needs which clients
    "local": "local: a network, nobody else",
    "own-linear": "own-linear: scikit-learn, nobody else",
    "closed-form-alone": "closed-form, nobody else",
    "fedgh": "fedgh: the others' class means",
    "pooled-shares": "pooled-shares: a network, all rows in one place",
    "closed-form": "closed-form: the others' sums",
}
OVER_SIZES = (  # rows of suites/sizes
    "fedgh", "fd", "fedavg-tuned", "closed-form", "own-plus-common-alone", "own-plus-common", "pooled-tuned",
)  # fmt: skip
BY_OTHERS = (  # rows of suites/small
    "fedgh", "fedavg-tuned", "closed-form", "own-plus-common-alone", "own-plus-common", "pooled-shares", "pooled-tuned",
)  # fmt: skip
BAR = {"facecolor": "#99c7e0", "edgecolor": "black", "linewidth": 0.8}


def unlike_own_data() -> None:
    """Accuracy where clients are scored on what they have no data of: a common test set, and as newcomers."""
    about = "Mean over seeds in %; whiskers: standard deviation over seeds, where the table has it. Dotted: Local."
    figure, (panels,) = canvas("Inputs unlike a client's own data", about, HEIGHT, columns=2)
    for axes, (stem, (column, title)) in zip(panels, UNLIKE_OWN.items(), strict=True):
        rows = measurements()[stem].tables[0].rows
        scores = {row[0]: row[rows[0].index(column)].strip("*").split(" ± ") for row in rows[1:]}
        means = {name: float(score[0]) for name, score in scores.items()}
        spreads = [float(score[1]) if len(score) > 1 else 0.0 for score in scores.values()]
        axes.barh(list(means), list(means.values()), xerr=spreads, capsize=3, **BAR)
        axes.axvline(means["local"], color="black", linestyle=(0, (1.5, 2)), linewidth=1.6)
        axes.invert_yaxis()
        axes.set_title(title, size=9)
        axes.set(xlabel="accuracy [%]", xlim=(0, None))
        style_axes(axes, grid="x")
    figure.savefig(RESULTS / "unlike-own-data.png", **SHEET)


def rows() -> None:
    """Accuracy against the labeled rows that a client has, trained on and for validation together."""
    images = [one for name, one in settings("rows").items() if name.startswith("rows-")]
    by_rows = {one.rows_per_client("training", "validation") or 0.0: one for one in images}
    counts = sorted(by_rows)
    about = "CIFAR-10, ten clients, five networks, every label counted. Mean over seeds, 95 % intervals."
    figure, axes = empty_figure("What are the other clients' rows worth?", about)
    handles = []
    for at, name in enumerate(BY_ROWS):
        known = [(count, Estimate.of(scores)) for count in counts if (scores := by_rows[count].scores.get(name))]
        drawn = [(count, 100 * score.mean, 100 * (score.margin or 0.0)) for count, score in known if score.mean]
        places, means, margins = zip(*drawn, strict=True)
        look = {**line_style(at), "elinewidth": 1, "capsize": 2, "markersize": 4}
        handles.append(axes.errorbar(places, means, yerr=margins, **look))
    axes.set(xscale="log", xlabel="labeled rows per client", ylabel="accuracy [%]")
    axes.set_xticks(counts, [f"{count:.0f}" for count in counts])
    axes.minorticks_off()
    legend(axes, handles, list(BY_ROWS.values()))
    figure.savefig(RESULTS / "rows.png", **SHEET)


def sizes() -> None:
    """Every row's gain over Local against the labeled rows that a client has, for training and for validation."""
    by_size = {one.rows_per_client("training", "validation") or 0.0: one for one in settings("sizes").values()}
    about = "Mean over seeds; whiskers: 95 % intervals, from three seeds on."
    figure, axes = empty_figure("When does federation pay? CIFAR-10, ten clients", about)
    rows = sorted(by_size)
    handles = [
        _gains(
            axes, [by_size[one] for one in rows], name, [one * 1.03 ** (at - len(OVER_SIZES) / 2) for one in rows], at
        )
        for at, name in enumerate(OVER_SIZES)
    ]
    axes.set(
        xscale="log", xlabel="labeled rows per client, of them for training", ylabel="over Local [percentage points]"
    )
    axes.set_xticks(rows, [f"{one:.0f}\n({by_size[one].rows_per_client('training'):.0f})" for one in rows])
    axes.minorticks_off()
    legend(axes, handles, OVER_SIZES)
    figure.savefig(RESULTS / "sizes.png", **SHEET)


def others_rows() -> None:
    """Gains over Local in every setting: of a method, of linear models, and of networks trained on the rows of all."""
    found = list(settings("small").values())
    figure, axes = empty_figure(
        "What are the others' rows worth?", "Gain over Local, mean over seeds; whiskers: 95 % intervals."
    )
    handles = []
    for at, name in enumerate(BY_OTHERS):
        x = [place + 0.1 * (at - len(BY_OTHERS) // 2) for place in range(len(found))]
        handles.append(_gains(axes, found, name, x, at, linestyle="none"))
    axes.set(ylabel="over Local [percentage points]")
    axes.set_xticks(range(len(found)), [one.setting.replace("cifar10-", "cifar10\n") for one in found])
    legend(axes, handles, BY_OTHERS)
    figure.savefig(RESULTS / "others-rows.png", **SHEET)


def _gains(
    axes: Any, settings: Sequence[SettingResult], name: str, x: Sequence[float], number: int, **style: Any
) -> Any:
    """Draw a row's gains over Local in the settings that have it."""
    axes.axhline(0, color="black", linewidth=0.8)
    gains = [(place, one.gain(name)) for place, one in zip(x, settings, strict=True)]
    known = [(place, 100 * gain.mean, 100 * (gain.margin or 0.0)) for place, gain in gains if gain.mean is not None]
    places, means, margins = zip(*known, strict=True)
    look = {**line_style(number), "elinewidth": 1, "capsize": 2, "markersize": 4, **style}
    return axes.errorbar(places, means, yerr=margins, **look)


if __name__ == "__main__":
    for draw in (rows, sizes, others_rows, unlike_own_data):
        draw()
