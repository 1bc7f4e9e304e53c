"""The figures in the repository are those of its suites, as the recipes, methods and protocols are now."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.config.protocol import Protocol
from polyfed.config.recipe import Recipe
from polyfed.experiments.benchmark import BenchmarkRequest, BenchmarkSetting, described, first_difference
from polyfed.report.benchmark_results import SettingResult, read_results

ROOT = Path(__file__).parents[2]
STORED = [
    pytest.param(suite, one, id=f"{suite.name}-{one.setting}")
    for suite in sorted(path.parent for path in (ROOT / "suites").glob("*/protocol.toml"))
    for one in read_results(ROOT / "docs" / "results" / f"benchmark-{suite.name}", list(Protocol.load(suite).settings))
]


@pytest.mark.parametrize(("suite", "stored"), STORED)
def test_what_the_figures_have_is_not_run_again(
    suite: Path, stored: SettingResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a change of a default, or of a recipe, would cost days of computing without a word."""
    figures = ROOT / "docs" / "results" / f"benchmark-{suite.name}"
    methods = tuple(row.name for row in stored.rows if row.control in ("", "targets"))
    protocol = Protocol.load(suite)
    settings = (stored.setting,)
    request = BenchmarkRequest(suite, protocol, settings, methods, tmp_path / "out", figures, progress=True)
    BenchmarkSetting(request, stored.setting).run("1 of 1")
    assert f"setting {stored.setting} (1 of 1): all figures are there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
