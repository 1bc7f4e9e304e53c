"""Write docs/results/own-plus-common.md, what own networks plus a common closed form are worth, from stored figures.

    python scripts/own_plus_common.py
    python scripts/own_plus_common.py --elsewhere digits=runs/digits --elsewhere cifar10-few=runs/cifar10

The second form first stores what `polyfed compare recipes/own-plus-common.toml` found with the presets `all-classes`
and `newcomers`. own-plus-common-cost.json is what `python benchmarks/closed_form.py --out` writes with these changes of
recipes/own-plus-common.toml by `--set`: data.dataset=cifar10, data.num_clients=20, data.split=official:8:2,
data.max_train_per_client=100, data.max_test_per_client=100, models.architectures=["fedgh-cnn1"].

Reads docs/results/benchmark-small and benchmark-sizes, the comparisons in docs/results/tables that score other inputs
than a client's own, and the costs by number of features. All text is in this file, so that no number is typed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from polyfed.report.benchmark_results import RowResult, SettingResult, read_results
from polyfed.report.benchmark_worth import gain_between
from polyfed.report.statistics import Estimate, mean_of
from polyfed.report.text_tables import Column, interval, markdown_table

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
PAGE = RESULTS / "own-plus-common.md"
ELSEWHERE = "own-plus-common-elsewhere.json"
MINE, ALONE = "own-plus-common", "own-plus-common-alone"
SETTINGS = ("digits", "watch", "cifar10-few", "fashion", "tweets", "heart", "cifar10-two-classes")
OURS = ("own-plus-common", "own-plus-common-permuted", "closed-form")  # not published methods
LEAST = {"digits": 3, "watch": 8, "cifar10-few": 10, "fashion": 2, "tweets": 5}  # points that were predicted
NOT_BELOW_ZERO = ("heart", "cifar10-two-classes")
WINS = 5  # settings of seven in which it was predicted to lie above the best published method
MISSING = {"digits": 90, "cifar10-few": 50}  # per cent of rows of missing classes that were predicted to be right

INTRODUCTION = """\
# Own networks plus a common closed form

[`own-plus-common`](../methods/own-plus-common.md) in the settings of `suites/small`, each with its controls. A gain is
a mean over seeds of differences seed by seed, in percentage points, with a 95 % interval. Written by
`python scripts/own_plus_common.py` from the stored figures.
"""

ABOUT_GAINS = """\
*Federated gain*: `own-plus-common` over itself with each client alone, tuned as well. *Over it*: over the row beside.
The best rows of three kinds have the highest mean **test** score, which nobody knows beforehand: the hardest
comparison. *Alone*: rows that need nobody else, among them methods alone and a longer Local. *Published*: the suite's
methods from papers. *Pooled*: networks trained on the rows of all. Intervals that leave out zero are in bold.
"""

ABOUT_CONTROLS = """\
*Permuted*: the common model's classes are shifted by one, all else is equal: clients see on their validation rows that
it is of no use. *Closed form*: the common model alone, no network. *Label smoothing*: `fd-uniform`, which needs nobody.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elsewhere", action="append", metavar="SETTING=FOLDER", help="a comparison to store first")
    given = parser.parse_args()
    if given.elsewhere:
        stored = [row for setting in given.elsewhere for row in rows_elsewhere(*setting.split("=", 1))]
        (RESULTS / ELSEWHERE).write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


def page() -> str:
    """The whole text."""
    small = {one.setting: one for one in read_results(RESULTS / "benchmark-small", SETTINGS)}
    settings = [small[name] for name in SETTINGS]
    names = sorted(path.stem for path in (RESULTS / "benchmark-sizes").glob("rows-*.json"))
    sizes = sorted(read_results(RESULTS / "benchmark-sizes", names), key=rows_of)
    parts = [
        INTRODUCTION,
        "## What the others' rows are worth to it\n",
        _table(gain_columns(settings)),
        ABOUT_GAINS,
        "## Controls\n",
        _table(control_columns(settings)),
        ABOUT_CONTROLS,
        *elsewhere(),
        "## From how many rows does it not pay?\n",
        _table(size_columns(sizes)),
        paragraph("CIFAR-10, ten clients, five CNNs (`suites/sizes`); 4,800 rows: eight rounds, pooled on one seed."),
        "![Gains over Local by the training rows of a client](sizes.png)\n",
        *costs(),
        "## What was predicted\n",
        "Written down before the runs; gains of at least some points are judged by their mean, the others by their "
        "interval:\n",
        "\n".join(verdicts(settings, sizes)) + "\n",
    ]
    return "\n".join(parts)


def paragraph(text: str) -> str:
    """In lines."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(columns: Sequence[Column]) -> str:
    return markdown_table(columns) + "\n"


# tables -------------------------------------------------------------------------------------------------------------


def gain_columns(settings: Sequence[SettingResult]) -> list[Column]:
    """A row for each setting."""
    columns = [
        Column("setting", [one.setting for one in settings], words=True),
        Column("Local", [score(one.row("local")) for one in settings]),
        Column(MINE, [score(one.row(MINE)) for one in settings]),
        gain_column("federated gain", [gain_between(one, ALONE, MINE) for one in settings]),
    ]
    for title, is_asked in KINDS.items():
        others = [best(one, is_asked) for one in settings]
        gains = [gain_between(one, other.name, MINE) for one, other in zip(settings, others, strict=True)]
        columns.append(Column(f"best {title}", [f"{row.name} {score(row)}" for row in others], words=True))
        columns.append(gain_column("over it", gains))
    return columns


def control_columns(settings: Sequence[SettingResult]) -> list[Column]:
    """A row for each setting."""
    rows = {
        "alone": ALONE,
        "permuted": "own-plus-common-permuted",
        "closed form": "closed-form",
        "closed form alone": "closed-form-alone",
        "label smoothing": "fd-uniform",
    }
    smooth = [gain_between(one, "closed-form", MINE) for one in settings]
    return [
        Column("setting", [one.setting for one in settings], words=True),
        Column(MINE, [score(one.row(MINE)) for one in settings]),
        *(Column(title, [score(one.row(name)) for one in settings]) for title, name in rows.items()),
        gain_column("over the closed form", smooth),
    ]


def size_columns(sizes: Sequence[SettingResult]) -> list[Column]:
    """A row for each number of rows that a client has."""
    rows = {"Local": "local", "alone": ALONE, MINE: MINE, "closed form": "closed-form", "pooled": "pooled-tuned"}
    return [
        Column("rows", [f"{rows_of(one):,}" for one in sizes]),
        *(Column(title, [score(one.row(name)) for one in sizes]) for title, name in rows.items()),
        gain_column("federated gain", [gain_between(one, ALONE, MINE) for one in sizes]),
        gain_column("over Local", [gain_between(one, "local", MINE) for one in sizes]),
    ]


def gain_column(title: str, gains: Sequence[Estimate]) -> Column:
    """Means with intervals, in bold where zero is left out."""
    bold = frozenset(at for at, gain in enumerate(gains) if gain.is_distinguishable)
    return Column(title, [gain_text(gain) for gain in gains], bold=bold)


def gain_text(gain: Estimate) -> str:
    """A gain in points, with its interval where there are enough seeds."""
    if gain.mean is None:
        return "-"
    text = f"{100 * gain.mean:+.1f}"
    return text if gain.margin is None else f"{text} {interval(gain)}"


def elsewhere() -> Iterator[str]:
    """On inputs unlike a client's own."""
    found = read(ELSEWHERE)
    if not found:
        return
    yield "## Missing classes and newcomers\n"
    yield _table(
        [
            Column("setting", [one["setting"] for one in found], words=True),
            Column("method", [one["method"] for one in found], words=True),
            Column("own classes", [percent(one["own"]) for one in found]),
            Column("missing classes", [percent(one["missing"]) for one in found]),
            Column("newcomers", [percent(one["newcomers"]) for one in found]),
        ]
    )
    yield paragraph(
        "Per cent of test rows, mean over clients and seeds 0 to 2. *Missing classes*: those that a client has no "
        "training rows of. *Newcomers*: clients that take no part, scored when they join. `own-plus-common` uses the "
        "class shares of their own training rows, `own-plus-common-all` the federation's, and none of their rows."
    )


def costs() -> Iterator[str]:
    """By the number of features."""
    found = read("own-plus-common-cost.json")
    if not found:
        return
    yield "## What it costs\n"
    yield _table(
        [
            Column("D", [f"{one['features']:,}" for one in found]),
            Column("accuracy", [percent(one["accuracy"]) for one in found]),
            Column("up, MiB", [f"{one['up'] / 2**20:.1f}" for one in found]),
            Column("down, KiB", [f"{one['down'] / 1024:.0f}" for one in found]),
            Column("map, ms", [f"{1000 * one['map_seconds']:,.0f}" for one in found]),
            Column("sums, ms", [f"{1000 * one['sum_seconds']:,.0f}" for one in found]),
            Column("solution, ms", [f"{1000 * one['solve_seconds']:,.0f}" for one in found]),
            Column("memory, MiB", [f"{one['memory'] / 2**20:,.0f}" for one in found]),
        ]
    )
    yield paragraph(
        f"The closed form on CIFAR-10, {found[0]['rows']} rows a client, seed 0, by `benchmarks/closed_form.py`. The "
        "upload is sent once. Map and sums are a client's work, the solution the server's, in processor time."
    )


# verdicts -----------------------------------------------------------------------------------------------------------


def verdicts(settings: Sequence[SettingResult], sizes: Sequence[SettingResult]) -> Iterator[str]:
    """A line for each prediction: what was predicted, what was found."""
    by_name = {one.setting: one for one in settings}
    for name, least in LEAST.items():
        gain = gain_between(by_name[name], ALONE, MINE)
        holds = gain.mean is not None and 100 * gain.mean >= least
        yield line(f"federated gain of at least {least} points on {name}", gain, holds)
    for name in NOT_BELOW_ZERO:
        gain = gain_between(by_name[name], ALONE, MINE)
        yield line(f"federated gain not below zero on {name}", gain, is_not_below(gain))
    wins = sum(lies_above(gain_between(one, best(one, is_published).name, MINE)) for one in settings)
    asked = f"above the best published method in {WINS} of {len(settings)} settings"
    yield f"- {asked}: **{held(wins >= WINS)}**, in {wins}"
    other_shares = [one for one in read(ELSEWHERE) if one["method"] == "own-plus-common-all"]
    by_setting = {one["setting"]: one for one in other_shares}
    for name, least in MISSING.items():
        if name in by_setting:
            share = by_setting[name]["missing"]
            yield f"- {least} % of missing classes on {name}: **{held(100 * share >= least)}**, {percent(share)} %"
    largest = sizes[-1]
    gain = gain_between(largest, "local", MINE)
    yield line(f"with {rows_of(largest):,} rows not below Local", gain, is_not_below(gain))
    gains = {rows_of(one): gain_between(one, ALONE, MINE) for one in sizes}
    told = {rows: gain for rows, gain in gains.items() if gain.margin is not None}
    vanished = [f"at {rows:,} rows" for rows, gain in told.items() if not lies_above(gain)]
    crossing = vanished[0] if vanished else f"none up to {max(told):,} rows"
    few = [rows for rows in gains if rows not in told]
    others = [f"with {rows:,} rows {gain_text(gains[rows])}, on too few seeds to tell" for rows in few]
    yield f"- a number of rows from which the federated gain cannot be told from zero: {'; '.join([crossing, *others])}"


def line(prediction: str, gain: Estimate, holds: bool) -> str:
    """A verdict with its figure."""
    if gain.mean is None:
        return f"- {prediction}: not measured yet"
    return f"- {prediction}: **{held(holds)}**, {gain_text(gain)}"


def held(holds: bool) -> str:
    """The word for it."""
    return "held" if holds else "failed"


def lies_above(gain: Estimate) -> bool:
    """Whether the interval lies above zero."""
    return bool(gain.is_distinguishable) and (gain.mean or 0) > 0


def is_not_below(gain: Estimate) -> bool:
    """Whether the interval does not lie below zero; of too few seeds, the mean."""
    if gain.mean is None:
        return False
    return gain.mean >= 0 or gain.is_distinguishable is False


def rows_elsewhere(setting: str, folder: str) -> Iterator[dict[str, Any]]:
    """What a comparison says of other inputs than a client's own."""
    found = json.loads((Path(folder) / "comparison.json").read_text(encoding="utf-8"))
    for row in found["tables"][0]["rows"]:
        classes = row["by_classes"]
        newcomers = row["held_out"]["received"]
        yield {
            "setting": setting,
            "method": row["name"],
            "seeds": row["seeds"],
            "own": classes["own"],
            "missing": classes["missing"],
            "newcomers": newcomers,
        }


# rows ---------------------------------------------------------------------------------------------------------------


def is_published(row: RowResult) -> bool:
    """Whether a row is a paper's method, with the others."""
    settings = row.hyperparameters
    is_control = bool(row.control) or settings.get("control", "none") != "none"
    return not is_control and bool(row.bytes_up) and row.method not in OURS


def needs_nobody(row: RowResult) -> bool:
    """Whether a row needs no other client."""
    own_control = row.hyperparameters.get("control") in ("own", "uniform", "labels", "pseudo-labels")
    is_alone = row.control in ("alone", "longer") or (not row.control and row.bytes_up == 0)
    return is_alone or own_control


def is_pooled(row: RowResult) -> bool:
    """Whether a row is a network trained on the rows of all."""
    return row.control.startswith("pooled")


KINDS = {"alone": needs_nobody, "published": is_published, "pooled": is_pooled}


def best(setting: SettingResult, is_asked: Any) -> RowResult:
    """The row of a kind with the highest mean test score."""
    return max((row for row in setting.rows if is_asked(row)), key=lambda row: mean(row) or 0.0)


def mean(row: RowResult | None) -> float | None:
    """Mean test score over seeds."""
    return None if row is None else mean_of(list(row.by_seed.values()))


def score(row: RowResult | None) -> str:
    """In per cent."""
    return percent(mean(row))


def percent(value: float | None) -> str:
    """A share in per cent with one decimal."""
    return "-" if value is None else f"{100 * value:.1f}"


def rows_of(setting: SettingResult) -> int:
    """Training rows that a client has at most."""
    found: int = setting.recipe["data"]["max_train_per_client"]
    return found


def read(name: str) -> list[dict[str, Any]]:
    """A stored list; empty where there is none yet."""
    path = RESULTS / name
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


if __name__ == "__main__":
    main()
