"""What pages show in the place of their markers, made of the catalog of methods and of stored results.

    {{ hyperparameters }}                          on a method's page: the table of its hyperparameters
    {{ results }}                                  on a method's page: what the stored results say of it, in a line
    {{ value worth/digits fedgh gain }}            a number of a suite: SUITE/SETTING ROW QUANTITY
    {{ value tables/worth-few fedsa accuracy }}    a number of a stored table: tables/NAME ROW COLUMN
    {{ table tables/worth-few }}                   a stored table

Quantities of a suite's row: accuracy, gain, alone, federated, "over ROW"; in percent and percentage points.
A number has one digit behind the point. In code a marker stays as it is.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from results_pages import Comparison, seeds_of, stored, to_markdown  # noqa: E402

from polyfed.cli import catalog  # noqa: E402
from polyfed.config.protocol import Protocol  # noqa: E402
from polyfed.errors import ConfigError  # noqa: E402
from polyfed.escaping import markdown_text  # noqa: E402
from polyfed.experiments.method_table import format_value  # noqa: E402
from polyfed.registry import METHODS  # noqa: E402
from polyfed.report.benchmark_results import RowResult, SettingResult, read_results  # noqa: E402
from polyfed.report.benchmark_worth import gain_between, gains_of  # noqa: E402
from polyfed.report.statistics import Estimate, mean_of  # noqa: E402
from polyfed.units import human_count  # noqa: E402

RESULTS = ROOT / "docs" / "results"
SUITES = ("worth", "small", "sizes", "longer", "papers")  # a method's line is of the first that has it
_MARKER = re.compile(r"^`{3,}.*?^`{3,}|`[^`\n]+`|\{\{ *(?P<words>[^{}\n]+?) *\}\}", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def expanded(text: str, page: Path) -> str:
    """A page's text with what its markers stand for.

    Raises:
        ValueError: a marker asks for what is not there.
    """

    def expand(match: re.Match[str]) -> str:
        if match["words"] is None:
            return match[0]
        name, *words = match["words"].split()
        try:
            return MARKERS[name](page.stem, *words)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            about = f"{page.name}: expected a marker of scripts/page_markers.py, got {match[0]}"
            raise ValueError(f"{about}: {error}") from None

    return _MARKER.sub(expand, text)


# methods --------------------------------------------------------------------------------------------------------------
def hyperparameters(method: str) -> str:
    """The table of a method's hyperparameters."""
    known = catalog.method(method)
    lines = ["| hyperparameter | default | description |", "| --- | --- | --- |"]
    for name, default in known["hyperparameters"].items():
        shown = "-" if default is None else f"`{format_value(default)}`"
        lines.append(f"| `{name}` | {shown} | {markdown_text(known['about'][name])} |")
    return "\n".join(lines) if known["hyperparameters"] else "None."


def results(method: str) -> str:
    """What the stored results say of a method: of the first suite that has it, else of the table with most seeds."""
    METHODS[method]  # a page of another name has no results
    if method == "local":
        return f"Gains of all methods are measured from this one ({_suite_link(SUITES[0])})."
    for suite in SUITES:
        found = [(one, row) for one in settings(suite).values() if (row := _row_of(one, method)) is not None]
        if found:
            return _in_suite(suite, found)
    tables = [(one, name) for one in comparisons() if (name := _name_in(one, method))]
    if not tables:
        return "Not in a stored suite; [one command](../benchmark.md#adding-a-method) adds a method to one."
    return _in_table(*max(tables, key=lambda found: seeds_of(found[0])))


@functools.cache
def settings(suite: str) -> dict[str, SettingResult]:
    """The settings of a suite that have figures, in the order of its protocol."""
    names = list(Protocol.load(ROOT / "suites" / suite).settings)
    return {one.setting: one for one in read_results(RESULTS / f"benchmark-{suite}", names)}


def _suite_link(suite: str) -> str:
    return f"[suite {suite}](../results/benchmark-{suite}/benchmark.md)"


def _row_of(one: SettingResult, method: str) -> RowResult | None:
    """The row of a method, or else of its first variant."""
    rows = [row for row in one.methods if row.method == method]
    return one.row(method) or next(iter(rows), None)


def _in_suite(suite: str, found: Sequence[tuple[SettingResult, RowResult]]) -> str:
    names = list(dict.fromkeys(row.name for _, row in found))
    gains = [gain_between(one, "local", row.name) for one, row in found]
    federated = [gains_of(one)[row.name].federated for one, row in found if row.name in gains_of(one)]
    mean = mean_of([gain.mean for gain in gains])
    subject = "it" if names == [found[0][1].method] else f"`{'`, `'.join(names)}`"
    lines = [
        f"In the {_suite_link(suite)}, {subject} is above Local in {_count(gains, 1)} of {_settings(len(gains))} and "
        f"below in {_count(gains, -1)}.",
        f"The mean gain is {_percent(mean)} points.",
        f"The other clients contribute to it in {_count(federated, 1)} of {_settings(len(federated))}.",
    ]
    return " ".join(lines if federated else lines[:2])


def _settings(count: int) -> str:
    return human_count(count, "setting")


def _count(gains: Sequence[Estimate], sign: int) -> int:
    """How many lie above zero by their intervals; with sign -1, below."""
    return sum(bool(gain.is_distinguishable) and sign * (gain.mean or 0.0) > 0 for gain in gains)


def _name_in(one: Comparison, method: str) -> str:
    """The name of a method's row in a stored table, or else of its first variant; "" where it has none."""
    names = [row[0] for row in one.tables[0].rows[1:]]
    variants = [name for name in names if name.startswith(f"{method}-") and name not in METHODS]
    return method if method in names else next((name for name in variants if not name.endswith("-alone")), "")


def _in_table(one: Comparison, name: str) -> str:
    few = "" if _cell(one, name, "minus Local") else ", with too few seeds to exclude chance"
    link = f"[{one.folder}](../results/tables/{one.name}.md)"
    line = f"In {link}, `{name}` is {_side(_cell(one, name, 'vs Local'))} Local{few}."
    federated = _cell(one, name, "federated gain")
    return f"{line} It is {_side(federated)} the same method with each client alone." if federated else line


def _side(difference: str) -> str:
    number = _number(difference)
    return f"{number.removeprefix('-')} points {'below' if number.startswith('-') else 'above'}"


# numbers and tables ---------------------------------------------------------------------------------------------------
def value(_: str, place: str, row: str, *words: str) -> str:
    """A number of a suite, or of a stored table."""
    where, _, name = place.partition("/")
    quantity = " ".join(words)
    if where == "tables":
        return _number(_cell(_comparison(name), row, quantity))
    return _percent(_quantity(settings(where)[name], row, quantity))


def _quantity(one: SettingResult, name: str, quantity: str) -> float | None:
    """In [0, 1]."""
    row = one.row(name)
    if row is None:
        raise ValueError(f"no row '{name}'")
    if quantity == "accuracy":
        return mean_of(list(row.by_seed.values()))
    if quantity == "gain":
        return gain_between(one, "local", name).mean
    if quantity.startswith("over "):
        return gain_between(one, quantity.removeprefix("over "), name).mean
    gains = gains_of(one)[name]
    return {"alone": gains.alone, "federated": gains.federated}[quantity].mean


def table(_: str, place: str) -> str:
    """The main table of a stored comparison."""
    where, _, name = place.partition("/")
    if where != "tables":
        raise ValueError("no such table")
    return to_markdown(_comparison(name).tables[0])


def _comparison(name: str) -> Comparison:
    return {one.name: one for one in comparisons()}[name]


comparisons = functools.cache(stored)


def _cell(one: Comparison, name: str, column: str) -> str:
    """A method's cell in the first table that has the column; "" where none has."""
    return next((cell for each in one.tables if (cell := each.column(column, name))), "")


def _number(cell: str) -> str:
    """The mean of a cell such as "+3.93 ± 1.94", with one digit."""
    found = _NUMBER.match(cell)
    if found is None:
        raise ValueError(f"no number in '{cell}'")
    return _digit(float(found[0]))


def _percent(share: float | None) -> str:
    if share is None:
        raise ValueError("a number that is not known")
    return _digit(100 * share)


def _digit(number: float) -> str:
    text = f"{number:.1f}"
    return "0.0" if text == "-0.0" else text


MARKERS: dict[str, Callable[..., str]] = {
    "hyperparameters": hyperparameters,
    "results": results,
    "value": value,
    "table": table,
}
