"""What pages show in the place of their markers, made of the methods and of stored results.

    {{ details }}                                  on a method's page: the three sections below, with their headings
    {{ hyperparameters }}                          on a method's page: the table of its hyperparameters
    {{ communication }}                            on a method's page: what is sent and kept, and the evaluated stage
    {{ privacy }}                                  on a method's page: what clipping does to uploads and gradients
    {{ deviations }}                               on a method's page: where it differs from its paper, numbered
    {{ results }}                                  on a method's page: what the stored results say of it, in a line
    {{ value worth/digits fedgh gain }}            a number of a suite: SUITE/SETTING ROW QUANTITY
    {{ value small fedgh above }}                  a number over all settings of a suite: SUITE ROW QUANTITY
    {{ value tables/worth-few fedgh accuracy }}    a number of a stored table: tables/NAME ROW COLUMN
    {{ table tables/worth-few }}                   a stored table
    {{ accuracies local,fedgh worth/digits ... }}  the accuracies of these rows in settings of suites
    {{ record round }}                             the keys of a file of a run: summary, round, result or model
    {{ recipe_keys }}                              every key of a recipe
    {{ commands }}                                 every command of the command line
    {{ datasets }}                                 every data set
    {{ methods }}                                  every method: paper, what may differ, what is sent, evaluated stage
    {{ table methods }}                            what methods gain in the suite small, and what they cost

Quantities of a row in a setting: accuracy, gain, alone, federated, "over ROW"; in percent and percentage points, with
one digit behind the point. Over settings: gain (the mean), settings, above (how many lie above Local by their 95 %
intervals), below, federated (in how many the other clients add to it). In code a marker stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import record_tables
import reference_tables
from results_pages import SUITES, Measurement, measurements, settings

from polyfed.core.method import Method
from polyfed.core.settings import Training
from polyfed.engine.uploads import has_upload
from polyfed.errors import ConfigError
from polyfed.escaping import markdown_text
from polyfed.experiments import reference
from polyfed.registry import METHODS
from polyfed.report.benchmark_results import RowResult, SettingResult
from polyfed.report.statistics import Estimate, mean_of
from polyfed.report.text_tables import Column
from polyfed.units import human_bytes, human_count
from polyfed.validation.settings import flat_fields

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
        except (ConfigError, KeyError, StopIteration, TypeError, ValueError) as error:
            about = f"{page.name}: expected a marker of scripts/page_markers.py, got {match[0]}"
            raise ValueError(f"{about}: {error}") from None

    return _MARKER.sub(expand, text)


# methods --------------------------------------------------------------------------------------------------------------
def hyperparameters(method: str) -> str:
    """The table of a method's hyperparameters."""
    keys = reference.list_hyperparameters(METHODS[method])
    lines = ["| hyperparameter | values | default | description |", "| --- | --- | --- | --- |"]
    for key in keys:
        shown = "-" if key.default == "none" else f"`{key.default}`"
        lines.append(f"| `{key.name}` | {key.type} | {shown} | {markdown_text(key.meaning)} |")
    return "\n".join(lines) if keys else "None."


def details(method: str) -> str:
    """The last sections of a method's page."""
    sections = {"Hyperparameters": hyperparameters, "Results": results, "Deviations from the paper": deviations}
    texts = {heading: section(method) for heading, section in sections.items()}
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in texts.items() if text)


def communication(method: str) -> str:
    """What a method sends and keeps, as its docstring has it, and which model is scored."""
    found = reference.page(method)
    down, up, kept = (markdown_text(found[key]) for key in ("down", "up", "states"))
    sent = f"Numbers of 4 bytes by client and round ([symbols](README.md)): down {down}; up {up}."
    stage = f"[Evaluated stage](../evaluation.md#stages-which-model): `{found['scored']}`."
    late = " [Stale uploads](../devices.md#asynchronous-rounds) are accepted."
    accepts = METHODS[method]().staleness_weighting != "none"
    return f"{sent} Kept between rounds: {kept}. {stage}{late if accepts else ''}"


def privacy(method: str) -> str:
    """Whether clipping is possible: of uploads, else with the reason, and of the gradients of rows."""
    usual = METHODS[method]()
    uploads = "`upload_clip_norm` clips [each entry](../uploads.md) of an upload (client level)."
    if not has_upload(usual):
        uploads = "Nothing is uploaded."
    elif usual.fixed_entries:
        reasons = "; ".join(dict.fromkeys(usual.fixed_entries.values()))
        uploads = f"`upload_clip_norm` is not supported, as an upload has {markdown_text(reasons)}."
    rows = "`max_grad_norm` clips per-sample gradients (sample level)"
    if not _clips_gradients(usual):
        zeros = _zeros_that_allow(METHODS[method])
        rows = f"{rows}, only with {' or '.join(zeros)}" if zeros else "`max_grad_norm` is not supported"
    return f"**[Privacy](../privacy.md).** {uploads} {rows}."


def _zeros_that_allow(kind: type[Method]) -> list[str]:
    """The hyperparameters that have to be 0 for gradients of rows to be clipped."""
    found = []
    for name in flat_fields(kind):
        with contextlib.suppress(ConfigError):  # it is no number, or one that cannot be 0
            if _clips_gradients(kind(**{name: 0})):
                found.append(f"`{name} = 0`")
    return found


def _clips_gradients(method: Method) -> bool:
    phases = method.phases(Training())
    return method.supports_dp_sgd and all(phase.data == "train" and phase.rows is None for phase in phases)


def deviations(method: str) -> str:
    """The list of a method's deviations from its paper, as its docstring has them."""
    _, first, numbered = reference.page(method)["deviations"].partition("(1) ")
    points = re.split(r" \(\d+\) ", f" {first}{numbered}")[1:]
    return "\n".join(f"{number}. {markdown_text(point)}" for number, point in enumerate(points, 1))


def methods(_: str) -> str:
    """The table of all methods."""
    heads = ("method", "paper", "may differ between clients", "download", "upload", "state between rounds")
    lines = [f"| {' | '.join(heads)} | evaluation stage |", "| --- " * (len(heads) + 1) + "|"]
    for name in METHODS:
        found = reference.page(name)
        cells = [markdown_text(found[key]) for key in ("paper", "differs", "down", "up", "states")]
        lines.append(f"| [{name}]({name}.md) | {' | '.join(cells)} | `{found['scored']}` |")
    return "\n".join(lines)


def results(method: str) -> str:
    """What the stored results say of a method: of the first suite that has it, else of the table with most seeds."""
    METHODS[method]  # a page of another name has no results
    if method == "local":
        return f"Gains of all methods are measured from this one ({_suite_link(SUITES[0])})."
    for suite in SUITES:
        rows = [placed for placed in placed_rows(suite) if placed.row.method == method]
        if rows:
            names = {placed.row.name for placed in rows}
            name = method if method in names else rows[0].row.name
            return _in_suite(suite, name, [placed for placed in rows if placed.row.name == name])
    compared = [(one.seeds, file, name) for file, one in measurements().items() if (name := _name_in(one, method))]
    if compared:
        _, file, name = max(compared, key=lambda found: found[0])
        return _in_comparison(file, name)
    listed = [file for file, one in measurements().items() if any(row[0] == method for row in one.tables[0].rows)]
    where = f"Not in a stored suite, but in {_table_link(listed[0])}" if listed else "Not in a stored suite"
    return f"{where}; [one command](../benchmark.md#adding-a-method) adds a method to a suite."


def _suite_link(suite: str) -> str:
    return f"[suite {suite}](../results/benchmark-{suite})"


def _table_link(file: str) -> str:
    return f"[{measurements()[file].title.partition(':')[0]}](../results/tables/{file}.json)"


class Placed(NamedTuple):
    """A method's row in a setting. gain: over Local. federated: over itself alone, where it has run so."""

    setting: SettingResult
    row: RowResult
    gain: Estimate
    federated: Estimate | None


@functools.cache
def placed_rows(suite: str) -> tuple[Placed, ...]:
    """Those of all methods in all settings, Local and controls left out."""
    return tuple(
        Placed(one, row, one.gain(row.name), one.gain(row.name, alone) if alone in one.names else None)
        for one in settings(suite).values()
        for row in one.rows
        if row.method in METHODS  # some have left, and have no page
        if not row.control and row.method != "local" and row.hyperparameters.get("control", "none") == "none"
        for alone in [f"{row.name}-alone"]
    )


def _in_suite(suite: str, name: str, found: Sequence[Placed]) -> str:
    over = OverSettings.of(found)
    subject = "it" if name == found[0].row.method else f"`{name}`"
    lines = [
        f"In the {_suite_link(suite)}, {subject} is above Local in {over.above} of {_settings(over.settings)} and "
        f"below in {over.below}.",
        f"The mean gain is {_percent(over.gain)} points.",
        f"The other clients contribute to it in {over.federated} of {_settings(over.with_alone)}.",
    ]
    return " ".join(lines if over.with_alone else lines[:2])


@dataclass(frozen=True)
class OverSettings:
    """A method in the settings of a suite.

    Attributes:
        settings: how many have it. above, below: in how many it lies above and below Local by its interval. gain: mean
            over settings, in [0, 1]. with_alone: how many have it alone, too. federated: in how many of these the other
            clients add to it, by its interval, and it is not below Local.
    """

    settings: int
    above: int
    below: int
    gain: float | None
    with_alone: int
    federated: int

    @classmethod
    def of(cls, found: Sequence[Placed]) -> OverSettings:
        """That of a method's rows."""
        gains = [placed.gain for placed in found]
        with_alone = [placed for placed in found if placed.federated is not None]
        federated = [one.federated for one in with_alone if one.federated and (one.gain.mean or 0.0) >= 0]
        mean = mean_of([gain.mean for gain in gains])
        return cls(len(found), _count(gains, 1), _count(gains, -1), mean, len(with_alone), _count(federated, 1))


def _settings(count: int) -> str:
    return human_count(count, "setting")


def _count(gains: Sequence[Estimate], sign: int) -> int:
    """How many lie above zero by their intervals; with sign -1, below."""
    return sum(bool(gain.is_distinguishable) and sign * (gain.mean or 0.0) > 0 for gain in gains)


def _name_in(one: Measurement, method: str) -> str:
    """The name of a method's row in a comparison, or else of its first variant; "" where it has none."""
    if "vs Local" not in one.tables[0].rows[0]:
        return ""
    names = [row[0] for row in one.tables[0].rows[1:]]
    variants = [name for name in names if name.startswith(f"{method}-") and name not in METHODS]
    return method if method in names else next((name for name in variants if not name.endswith("-alone")), "")


def _in_comparison(file: str, name: str) -> str:
    one = measurements()[file]
    few = "" if one.cell(name, "minus Local") else ", with too few seeds to exclude chance"
    line = f"In {_table_link(file)}, `{name}` is {_side(one.cell(name, 'vs Local'))} Local{few}."
    federated = one.cell(name, "federated gain")
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
        return _number(measurements()[name].cell(row, quantity))
    if name:
        return _percent(_quantity(settings(where)[name], row, quantity))
    number = asdict(OverSettings.of([placed for placed in placed_rows(where) if placed.row.name == row]))[quantity]
    return _percent(number) if quantity == "gain" else str(number)


def _quantity(one: SettingResult, name: str, quantity: str) -> float | None:
    """In [0, 1]."""
    if name not in one.names:
        raise ValueError(f"no row '{name}'")
    if quantity == "accuracy":
        return mean_of(list(one.scores[name].values()))
    if quantity.startswith("over "):
        return one.gain(name, quantity.removeprefix("over ")).mean
    gains = {"gain": (name,), "alone": (f"{name}-alone",), "federated": (name, f"{name}-alone")}
    return one.gain(*gains[quantity]).mean


def table(_: str, place: str) -> str:
    """The main table of a stored measurement, or that of all methods."""
    where, _, name = place.partition("/")
    if place == "methods":
        return _table_of_methods()
    if where != "tables":
        raise ValueError("no such table")
    return measurements()[name].tables[0].to_markdown()


def accuracies(_: str, names: str, *places: str) -> str:
    """A table of rows of suites, in percent, and what each row needs; "-" where a setting has no such row."""
    found = [settings(suite)[name] for suite, name in (place.split("/") for place in places)]
    heads = [f"[{name}](results/benchmark-{suite}#{name})" for suite, name in (place.split("/") for place in places)]
    lines = [f"| row | needs | {' | '.join(heads)} |", f"| :-- | :-- |{' --: |' * len(places)}"]
    for name in names.split(","):
        row = next(row for one in found for row in one.rows if row.name == name)
        cells = [_percent(_quantity(one, name, "accuracy")) if name in one.names else "-" for one in found]
        lines.append(f"| `{name}` | {_needs(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _needs(row: RowResult) -> str:
    if row.control.startswith("pooled"):
        return "all rows in one place"
    return "nobody" if row.name == "local" or row.control.startswith(("own", "alone")) else "the others"


def _table_of_methods(suite: str = "small") -> str:
    """What methods gain in a suite, best first, and what they cost."""
    found: dict[str, list[Placed]] = {}
    for placed in placed_rows(suite):
        found.setdefault(placed.row.name, []).append(placed)
    over = {name: OverSettings.of(rows) for name, rows in found.items()}
    names = sorted(found, key=lambda name: (-over[name].federated, -over[name].above, -(over[name].gain or 0.0)))
    columns = [
        Column("method", [f"[{name}](methods/{found[name][0].row.method}.md)" for name in names]),
        Column("gain over Local", [_percent(over[name].gain) for name in names]),
        Column("above Local", [f"{over[name].above} of {over[name].settings}" for name in names]),
        Column("below", [str(over[name].below) for name in names]),
        Column("by the others", [_by_the_others(over[name]) for name in names]),
        Column("sent per client and round", [human_bytes(_median_sent(found[name])) for name in names]),
        Column("time, Local = 1", [f"{_median_time(found[name]):.1f}" for name in names]),
    ]
    lines = [[column.heading for column in columns], [":--", *["--:"] * (len(columns) - 1)]]
    lines += zip(*(column.cells for column in columns), strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_the_others(over: OverSettings) -> str:
    return f"{over.federated} of {over.with_alone}" if over.with_alone else "-"


def _median_sent(found: Sequence[Placed]) -> float:
    """Bytes of a client in a round, up and down; median over settings."""
    sent = [(_mean(one, one.row.name, "bytes_up") + _mean(one, one.row.name, "bytes_down"), one) for one in found]
    return statistics.median(total / one.setting.clients / one.setting.rounds for total, one in sent)


def _median_time(found: Sequence[Placed]) -> float:
    """Processor time over Local's; median over settings."""
    times = [[_mean(one, name, "processor_seconds") for name in (one.row.name, "local")] for one in found]
    return statistics.median(own / local for own, local in times)


def _mean(placed: Placed, row: str, metric: str) -> float:
    one = placed.setting
    return one.means(metric)[one.names.index(row)] or 0.0


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
    "details": details,
    "hyperparameters": hyperparameters,
    "methods": methods,
    "communication": communication,
    "privacy": privacy,
    "deviations": deviations,
    "results": results,
    "value": value,
    "table": table,
    "accuracies": accuracies,
    "record": lambda _, name: record_tables.tables(name),
    "recipe_keys": lambda _: reference_tables.recipe_keys(),
    "commands": lambda _: reference_tables.commands(),
    "datasets": lambda _: reference_tables.datasets(),
}
