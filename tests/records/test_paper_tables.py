"""published.csv: as many numbers as the papers print, sums that hold or are footnoted, names that polyfed knows."""

from __future__ import annotations

import csv
import tomllib
from collections import Counter
from pathlib import Path

from polyfed.records import paper_tables
from polyfed.records.paper_tables import entries
from polyfed.registry import DATASETS, METHODS, MODELS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.toml"))

# paper/table -> numbers printed, "-" among them
COUNTS = {
    "fedhenn/table1": 6 * 3,
    "fedhenn/table2": 6 * 3,
    "fedhenn/table3": 3 * 2,
    "fedhenn/text": 2,  # Procrustes, and CKA beside it
    "fedgh/table1": 8 * 6,
    "fedgh/table2": 5,
    "fedgh/table3": 7 * 8,
    "fedgh/text": 5,  # four gains and a saving
    "fedin/table1": 17 * 12,
    "fedin/table2": 11 * 12,
    "fedin/table3": 9 * 2,
    "fedin/table4": 10 * 2,
    "fedin/table6": 3 * 10,
    "fedin/text": 2,  # figure 10's level, the appendix's deviation
    # of papers that no recipe follows, CIFAR-10 and CIFAR-100 only
    "fedtgp/table1": 7 * 4,
    "fedtgp/table2": 7 * 8,
    "fedkwaz/table2": 12 * 9,
    "fedfree/table1": 10 * 6,
}
OTHER_PAPERS = {"fedtgp", "fedkwaz", "fedfree"}
OTHER_METHODS = {
    "fedfree",
    "fedktl",
    "fedkwaz",
    "per-fedavg",
    "pfedla",
}  # of theirs


def test_every_table_has_as_many_numbers_as_are_printed() -> None:
    assert Counter(entry.place for entry in entries()) == COUNTS


def test_no_number_stands_twice_and_only_what_is_explained_is_missing() -> None:
    keys = Counter((e.place, e.setting, e.dataset, e.method, e.quantity) for e in entries())
    assert max(keys.values()) == 1
    missing = [entry for entry in entries() if entry.mean is None]
    assert Counter(entry.place for entry in missing) == {
        "fedgh/table1": 5,
        "fedgh/table3": 18,
        "fedtgp/table2": 2 * 2,
        "fedkwaz/table2": 3 * 2,
    }
    reasons = ("-diverged", "-not-reached", "-one-classifier")
    assert all(any(name.endswith(reasons) for name in entry.footnotes) for entry in missing)


def test_every_footnote_is_there_and_every_one_is_used() -> None:
    used = {name for entry in entries() for name in entry.footnotes}
    with (paper_tables.SOURCE / "published-footnotes.csv").open(encoding="utf-8", newline="") as file:
        texts = {row["footnote"]: row["text"] for row in csv.DictReader(file)}
    assert used == set(texts)
    papers = {place.partition("/")[0] for place in COUNTS}
    assert all(text.endswith(".") and name.partition("-")[0] in papers for name, text in texts.items())


def test_data_sets_stages_and_units_are_known() -> None:
    assert {e.dataset for e in entries()} <= {*DATASETS, ""}
    assert {e.stage for e in entries()} == {"received", "personal", ""}
    assert {e.unit for e in entries()} == {"%", "rounds", "KiB", "MiB", "million", ""}
    assert all(bool(e.stage) == (e.quantity == "accuracy") for e in entries())


def test_every_row_is_a_method_a_model_or_a_variant_of_a_recipe() -> None:
    recipes = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES]
    variants = {label for recipe in recipes for label in recipe.get("methods", {})}
    assert {entry.method for entry in entries()} <= {*METHODS, *MODELS, *variants, *OTHER_METHODS}
    assert {entry.paper for entry in entries() if entry.method in OTHER_METHODS} <= OTHER_PAPERS
