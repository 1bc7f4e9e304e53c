"""Intervals and totals in the pages' sentences are those of the tables: figures that change are changed everywhere."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from polyfed.config.protocol import Protocol
from polyfed.report.benchmark_results import read_processor_time, read_results
from polyfed.report.benchmark_worth import gains_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
SUITES = DOCS.parent / "suites"
NUMBER = r"[+-]?\d+\.\d+"  # without a point, brackets are footnotes
INTERVAL = rf"\[({NUMBER}),\s+({NUMBER})\]"
CITED = re.compile(rf"({NUMBER})\s+{INTERVAL}")
ITS_OWN_TABLE = "fedlora.md"  # nowhere else
PAGES = (
    *("benchmark.md", "when-it-pays.md", "federation-worth.md", "results/claims.md"),
    *(
        f"methods/{path.name}"
        for path in sorted((DOCS / "methods").glob("*.md"))
        if path.name != ITS_OWN_TABLE and CITED.search(path.read_text())
    ),
)


def intervals_of_tables() -> set[tuple[float, float]]:
    """Lower and upper end of all intervals in the result pages, but for the claims, whose own are checked."""
    pages = [path for path in (DOCS / "results").rglob("*.md") if path.name != "claims.md"]
    found = {(float(low), float(high)) for page in pages for low, high in re.findall(INTERVAL, page.read_text())}
    return found | {(-high, -low) for low, high in found}  # "loses 5.1" for a gain of -5.1


KNOWN = intervals_of_tables()


def is_known(low: str, high: str) -> bool:
    """Whether a table has the interval, with as many decimals or more."""
    decimals = max(len(number.partition(".")[2]) for number in (low, high))
    rounding = 0.5 * 10**-decimals + 1e-9 if decimals < 2 else 1e-9
    ends = float(low), float(high)
    return any(all(abs(a - b) <= rounding for a, b in zip(ends, known, strict=True)) for known in KNOWN)


@pytest.mark.parametrize("page", PAGES)
def test_intervals_in_sentences_are_those_of_tables(page: str) -> None:
    cited = CITED.findall((DOCS / page).read_text())
    assert cited, "else nothing is tested"
    assert [found for found in cited if not is_known(*found[1:])] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_mean_lies_in_the_middle_of_its_interval(page: str) -> None:
    for mean, low, high in CITED.findall((DOCS / page).read_text()):
        rounding = 10 ** -len(mean.partition(".")[2])
        assert abs(float(mean) - (float(low) + float(high)) / 2) <= 1.01 * rounding, (mean, low, high)


def test_a_changed_figure_is_found() -> None:
    assert is_known("+2.39", "+5.35"), "FedGH over Local, docs/results/tables/fedgh-header-steps.md"
    assert is_known("2.4", "5.4")
    assert not is_known("+2.39", "+5.36")


@pytest.mark.parametrize("suite", ["small", "longer", "papers"])
def test_totals_of_a_suite_are_those_of_its_figures(suite: str) -> None:
    page = " ".join((DOCS / "benchmark.md").read_text().split())
    figures = DOCS / "results" / f"benchmark-{suite}"
    settings = read_results(figures, list(Protocol.load(SUITES / suite).settings))
    runs = sum(len(row.accuracy) for setting in settings for row in setting.rows)
    grids = [tuning for setting in settings for tuning in setting.tuning.values()]
    trials = sum(len(tuning.seeds) * math.prod(map(len, tuning.tried.values())) for tuning in grids)
    spent = read_processor_time(figures).values()
    hours, minutes = divmod(round(sum(one.scored + one.trials for one in spent) / 60), 60)
    count = f"{runs:,}".replace(",", " ")
    ran = f"{count} scored runs and {trials} trials" if trials else f"{count} scored runs"
    assert f"{ran}, {hours} h {minutes:02} min of processor time" in page


def test_counts_of_federated_gains_are_those_of_the_figures() -> None:
    page = " ".join((DOCS / "benchmark.md").read_text().split())
    settings = read_results(DOCS / "results" / "benchmark-small", list(Protocol.load(SUITES / "small").settings))
    federated = [gains.federated for setting in settings for gains in gains_of(setting).values()]
    told = [gain.mean for gain in federated if gain.is_distinguishable]
    above = sum((mean or 0.0) > 0 for mean in told)
    said = f"Of the {len(federated)} federated gains {above} lie above zero by their intervals and {len(told) - above}"
    assert f"{said} below" in page
