"""The papers' numbers, and ours beside them.

``published.csv`` holds the numbers as printed (`polyfed.records.paper_tables`). A recipe names its papers' tables:
``paper_tables = ["fedgh/table3"]`` in ``[run]``. Which column it is follows from its data: the data set's name, and a
setting such as "num_clients=10, classes_per_client=2", which must be the recipe's own. Which row, from the variant's or
the method's name.

Quantities that runs are measured in: "accuracy" (%), "rounds to 90 %", "bytes to 90 %", "bytes per client and round",
"parameters sent" (up, million). They are counted as the papers do: bytes both ways and as a method's own paper counts
them, four to a parameter; a method that sends nothing has no rounds; what is printed of a client and round is the
median over rounds of what was sent divided by the clients asked.

Ours differs where the difference is more than three spreads. A spread is sqrt(s^2 + o^2), s the paper's and o ours, the
sample standard deviation over seeds; with one seed it is s alone. A row without s is not judged, nor is a run at a
smaller size than the paper's, or with a setting that ``--set`` changed and the column does not name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.records.paper_tables import PaperNumber, entries
from polyfed.report.frames import round_frame
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord, format_setting
from polyfed.report.statistics import Estimate, finite, scores_by_seed, to_target, total

if TYPE_CHECKING:
    import pandas as pd

SPREADS = 3
DIFFERS = "differs"
WITHIN = f"within {SPREADS} spreads"
NO_SPREAD = "no spread given"
SCALED_DOWN = "scaled down"
OTHER_SETTINGS = "other settings"
NOT_REACHED = "not reached"
BYTES_PER_UNIT = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TO = re.compile(r"(rounds|bytes) to ([0-9.]+) ?%")
_PER_CLIENT = "bytes per client and round"
_PARAMETERS = "parameters sent"
_BYTES_PER_MILLION = 4e6  # parameters


# which column -----------------------------------------------------------------------------------------------------
def numbers_for(run: RunRecord) -> list[PaperNumber]:
    """The printed numbers of the columns that a run is made after, all of their rows; none where it names no table."""
    if not run.recipe.run.paper_tables:
        return []
    data = run.recipe.data
    known = [entry for entry in entries() if entry.place in run.recipe.run.paper_tables]
    return [one for one in known if one.dataset in (data.get("dataset"), "") and _is_set(one.setting, data)]


def _is_set(setting: str, data: Mapping[str, Any]) -> bool:
    """Whether "num_clients=10, classes_per_client=2" is what the recipe's data say; true of no setting at all."""
    asked = [part.partition("=") for part in setting.split(",") if part.strip()]
    return all(format_setting(data.get(key.strip())) == value.strip() for key, _, value in asked)


# ours beside theirs -----------------------------------------------------------------------------------------------
def compare_with_paper(group: Group) -> pd.DataFrame:
    """A line for each number that a paper prints for a row, controls aside, and that our runs have: in its unit.

    Columns: name (of the row), place, setting, quantity and unit of `PaperNumber`, stage (that ours is scored in),
    seeds, ours and ours_std, paper and paper_std as printed, difference (ours minus theirs), footnotes (names). None is
    "not known". mark: DIFFERS, WITHIN, NO_SPREAD, SCALED_DOWN, OTHER_SETTINGS; NOT_REACHED where not all of our runs
    reached the target; "" where one of the two is missing otherwise.
    """
    import pandas as pd

    columns = ["name", "place", "setting", "quantity", "unit", "stage", "seeds", "ours", "ours_std", "paper"]
    columns += ["paper_std", "difference", "mark", "footnotes"]
    lines: list[tuple[Any, ...]] = []
    for name, runs in group.rows.items():
        every = [] if runs[0].control else numbers_for(runs[0])
        printed = [entry for entry in every if entry.method == runs[0].label_or_method]
        named = {entry.place: entry.stage for entry in printed if entry.stage}  # of a table's rounds and bytes, too
        for entry in printed:
            stage = named.get(entry.place, runs[0].stage)
            rounds = round_frame(group, stage)
            ours = _measured(entry, runs, rounds[rounds["name"] == name], stage)
            if ours is None:
                continue
            difference = None if ours.mean is None or entry.mean is None else ours.mean - entry.mean
            told = (name, entry.place, entry.setting, entry.quantity, entry.unit, stage, " ".join(map(str, ours.seeds)))
            numbers = (ours.mean, ours.std, entry.mean, entry.spread, difference)
            lines.append((*told, *numbers, _mark(entry, ours, runs), entry.footnotes))
    return pd.DataFrame(lines, columns=columns, dtype=object)


def _measured(entry: PaperNumber, runs: Sequence[RunRecord], rounds: pd.DataFrame, stage: str) -> Estimate | None:
    """Over seeds, the quantity in the entry's unit; None where it is none of ours. rounds: the row's."""
    seeds = [run.seed for run in runs]
    if entry.quantity == "accuracy":
        return _scaled(scores_by_seed(runs, stage), 0.01 if entry.unit == "%" else 1.0)
    if entry.quantity in (_PER_CLIENT, _PARAMETERS):
        sent = rounds["paper_up"] + (rounds["paper_down"] if entry.quantity == _PER_CLIENT else 0.0)
        each = (sent / rounds["clients"])[(rounds["clients"] > 0) & (rounds["final_round"] == 0)]
        medians = each.groupby(rounds["seed"]).median().to_dict()  # a first round may have nothing to send yet
        unit = _BYTES_PER_MILLION if entry.quantity == _PARAMETERS else BYTES_PER_UNIT[entry.unit]
        return _scaled({seed: finite(medians.get(seed)) for seed in seeds}, unit)
    found = _TO.fullmatch(entry.quantity)
    if found is None:
        return None
    needed = to_target(rounds, seeds, float(found[2]) / 100)
    if found[1] == "bytes":
        return _scaled(needed["bytes_paper"], BYTES_PER_UNIT[entry.unit])
    if total(rounds, "paper_up", "paper_down") == 0:  # nobody sends anything
        return Estimate.of(dict.fromkeys(seeds, 0.0))
    return Estimate.of(needed["rounds"])


def _scaled(found: Mapping[int, float | None], unit: float) -> Estimate:
    return Estimate.of({seed: None if value is None else value / unit for seed, value in found.items()})


def _mark(entry: PaperNumber, ours: Estimate, runs: Sequence[RunRecord]) -> str:
    if ours.mean is None:
        return NOT_REACHED if _TO.fullmatch(entry.quantity) else ""
    if entry.mean is None:
        return ""
    if any(run.scaled_down for run in runs):
        return SCALED_DOWN
    named = {f"data.{part.partition('=')[0].strip()}" for part in entry.setting.split(",")}
    if any(text.partition("=")[0] not in named for run in runs for text in run.overrides):
        return OTHER_SETTINGS
    if entry.spread is None:
        return NO_SPREAD
    spread = math.hypot(entry.spread, ours.std or 0.0)
    return DIFFERS if abs(ours.mean - entry.mean) > SPREADS * spread else WITHIN
