"""Run a stored row of a suite once more, with one seed, and set its accuracy beside the stored one.

    python scripts/rerun_row.py rows/rows-25 closed-form
    python scripts/rerun_row.py rows/rows-25 fedgh --seed 3

The stored file has all that this takes: the setting's recipe and the row's hyperparameters. The data lie below
POLYFED_DATA. Rows of methods, also alone, are run so; rows of pooled data and of models on own rows come of `polyfed
compare --controls`. The exit status is 1 where the two differ by more than a point: other processors round differently.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from results_pages import settings

import polyfed as pf
from polyfed.report.benchmark_results import RowResult, SettingResult

NEAR = 0.01  # of accuracies in [0, 1]


def recipe_of(setting: SettingResult, row: RowResult) -> pf.Recipe:
    """The recipe of a row's runs."""
    sections: dict[str, Any] = {name: dict(keys) for name, keys in setting.recipe.items()}
    sections["method"] = {"name": row.method}
    for key, value in row.hyperparameters.items():
        section, _, name = key.rpartition(".") if key.startswith("training.") else ("method", "", key)
        sections[section][name] = value
    return pf.Recipe.from_dict(sections)


def main(words: Sequence[str] | None = None) -> int:
    """Run the row, and print both accuracies; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("setting", help="SUITE/SETTING, such as rows/rows-25")
    parser.add_argument("row", help="of the setting's table, such as closed-form or fedgh-alone")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    suite, _, name = asked.setting.partition("/")
    setting = settings(suite)[name]
    (row,) = (one for one in setting.rows if one.name == asked.row)
    if row.control not in ("", "targets", "alone"):
        parser.error(f"expected a row of a method, got {row.name}, a control: polyfed compare --controls runs it")
    stored = row.figures[setting.score][str(asked.seed)]
    found = pf.run(recipe_of(setting, row), seed=asked.seed).result[setting.score]
    print(f"{asked.setting} {row.name}, seed {asked.seed}: stored {stored:.4f}, now {found:.4f}")
    return int(stored is None or abs(found - stored) > NEAR)


if __name__ == "__main__":
    sys.exit(main())
