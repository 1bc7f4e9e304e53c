"""Lists for a terminal, laid out by rich: a recipe's keys, the models, the data sets, one method's page."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from polyfed.model_groups import GROUPS

if TYPE_CHECKING:
    from polyfed.data.sources import Source
    from polyfed.experiments.reference import Key, Section

__all__ = ["of_datasets", "of_method", "of_methods", "of_models", "of_section", "of_some"]

_INDENT = "  "


def of_models(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """The models, as `polyfed.models.zoo.page` describes them: a table for every paper and kind of input."""
    names = max(len(row["name"]) for row in rows)
    lines = []
    for (paper, in_shape, classes), group in itertools.groupby(
        rows, lambda r: (r["paper"], r["in_shape"], r["classes"])
    ):
        table = _sizes([*group])
        table.columns[0].min_width = names
        lines += textwrap.wrap(f"{paper or 'your own'}; {_input(in_shape, classes)}", width)
        lines += [_rendered(table, width), ""]
    groups = ", ".join(f"{name} ({len(members)})" for name, members in GROUPS.items())
    lines += textwrap.wrap(f"groups of HtFLlib's, by how many networks they have: {groups}", width)
    return "\n".join(lines)


def of_some(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """A network, or those of a group, as `polyfed.models.zoo.page` describes them: client k gets the (k mod A)th."""
    return "\n".join([_rendered(_sizes(rows), width), "", _input(rows[0]["in_shape"], rows[0]["classes"])])


def _sizes(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table([("model", "left"), ("parameters", "right"), ("features", "right")])
    table.columns[1].min_width = len("100,000,000")
    for row in rows:
        sizes = [f"{row[key]:,}" if row[key] is not None else "-" for key in ("parameters", "feature_dim")]
        table.add_row(row["name"], *sizes)
    return table


def _input(in_shape: Sequence[int] | None, classes: int | None) -> str:
    """With which inputs and classes the sizes hold."""
    if in_shape is None:
        return "sizes are not known"
    what = {1: f"{in_shape[0]} numbers", 3: "images of " + " x ".join(map(str, in_shape))}.get(len(in_shape), "inputs")
    return f"sizes with {what} and {classes} classes"


def of_datasets(sources: Iterable[Source], width: int) -> str:
    """One row per data set: name, whether its files are here, and what it is."""
    table = _table([("data set", "left"), ("here", "left"), ("what it is", "left")])
    for source in sources:
        table.add_row(source.name, {True: "yes", False: "no", None: "-"}[source.is_here()], source.about)
    return _rendered(table, width)


def of_methods(summaries: Mapping[str, str], width: int) -> str:
    """One row per method: name, and what it does."""
    table = _table([("method", "left"), ("what it does", "left")])
    for name, summary in summaries.items():
        table.add_row(name, summary)
    return "\n".join(
        [_rendered(table, width), "", "polyfed methods NAME: paper, messages, hyperparameters, deviations"]
    )


def of_method(row: Mapping[str, Any], width: int) -> str:
    """The page of one method, as `polyfed.experiments.reference.page` describes it."""
    facts = {
        "paper": row["paper"],
        "may differ": row["differs"],
        "down": row["down"],
        "up": row["up"],
        "state": row["states"],
        "stage": row["scored"],
        "needs": ", ".join(row["needs"]) or "nothing",
    }
    lines = textwrap.wrap(f"{row['name']}: {row['summary']}", width)
    for name, fact in facts.items():
        told = textwrap.wrap(f"{name:<10}  {fact}", width, initial_indent=_INDENT, subsequent_indent=" " * 14)
        lines += told if fact else []
    lines.append("")
    if row["hyperparameters"]:
        lines += [_rendered(_keys(row["hyperparameters"], "hyperparameter"), width), ""]
    for text in filter(None, (row["text"], row["deviations"])):
        for line in text.splitlines():
            lines += textwrap.wrap(line, width, initial_indent=_INDENT, subsequent_indent=_INDENT) or [""]
        lines.append("")
    use = f'In a recipe: [method] name = "{row["name"]}", and its hyperparameters below it; --method {row["name"]}'
    lines += textwrap.wrap(use, width)
    return "\n".join(lines)


def of_section(section: Section, width: int) -> str:
    """A section of a recipe: what it is for, and a row for every key."""
    lines = textwrap.wrap(f"[{section.name}]  {section.about}", width)
    if section.keys:
        lines += ["", _rendered(_keys(section.keys, "key"), width)]
    return "\n".join(lines)


def _keys(keys: Sequence[Key], title: str) -> Table:
    table = _table([(title, "left"), ("type", "left"), ("default", "left"), ("meaning", "left")])
    for key in keys:
        table.add_row(key.name, key.type, key.default, key.meaning)
    return table


def _table(columns: Sequence[tuple[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=name == columns[0][0], overflow="fold")
    return table


def _rendered(table: Table, width: int) -> str:
    """As plain text; what is in it is shown as it stands."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, markup=False, highlight=False, emoji=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
