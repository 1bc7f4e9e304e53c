"""The figures in the repository are those of its suites, as the recipes, methods and protocols are now."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.config.protocol import Protocol
from polyfed.config.recipe import Recipe
from polyfed.experiments.benchmark import described, first_difference
from polyfed.report.benchmark_results import SettingResult, read_results

ROOT = Path(__file__).parents[2]
STORED = [
    pytest.param(suite, one, id=f"{suite.name}-{one.setting}")
    for suite in sorted(path.parent for path in (ROOT / "suites").glob("*/protocol.toml"))
    for one in read_results(ROOT / "docs" / "results" / f"benchmark-{suite.name}", list(Protocol.load(suite).settings))
]


@pytest.mark.parametrize(("suite", "stored"), STORED)
def test_stored_figures_are_of_the_recipes_that_there_are(suite: Path, stored: SettingResult) -> None:
    """A change of a default, or of a recipe, else leaves figures behind that nothing makes any more."""
    protocol = Protocol.load(suite)
    setting = protocol.settings[stored.setting]
    changes = protocol.overrides_of(stored.setting)
    recipe = Recipe.load(suite / setting.recipe, changes, preset=setting.preset)
    assert first_difference(stored.recipe, recipe) is None


def test_figures_of_the_suite_small_are_there() -> None:
    assert len(STORED) >= 5, "else the test above tests nothing"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("training.rounds=7", ("training.rounds", 20, 7)),
        ("data.dirichlet_alpha=0.3", ("data.dirichlet_alpha", 0.5, 0.3)),
        ("data.root=elsewhere", None),
        ("run.seed=3", None),
        ("method.name=fedgh", None),
    ],
)
def test_the_first_difference_is_named(change: str, found: object) -> None:
    """The place of the data, the seed and the method are no part of a setting."""
    recipe = ROOT / "suites" / "small" / "fashion.toml"
    stored = described(Recipe.load(recipe))
    assert first_difference(stored, Recipe.load(recipe, [change])) == found
