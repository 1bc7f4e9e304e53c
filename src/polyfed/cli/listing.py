"""Lists for a terminal: a recipe's keys, the models, the data sets, one method's page."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.model_groups import GROUPS
from polyfed.report.text_tables import NOT_KNOWN, Column, render_text

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
        lines += textwrap.wrap(f"{paper or 'your own'}; {_input(in_shape, classes)}", width)
        lines += [render_text(_sizes([*group], names), width), ""]
    groups = ", ".join(f"{name} ({len(members)})" for name, members in GROUPS.items())
    lines += textwrap.wrap(f"groups of HtFLlib's, by how many networks they have: {groups}", width)
    return "\n".join(lines)


def of_some(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """A network, or those of a group, as `polyfed.models.zoo.page` describes them: client k gets the (k mod A)th."""
    return "\n".join([render_text(_sizes(rows), width), "", _input(rows[0]["in_shape"], rows[0]["classes"])])


def _sizes(rows: Sequence[Mapping[str, Any]], room: int = 0) -> list[Column]:
    """The names, in at least so much room, and what is counted."""
    columns = [Column("model", [f"{row['name']:<{room}}" for row in rows], words=True)]
    for heading, key in (("parameters", "parameters"), ("features", "feature_dim")):
        cells = [NOT_KNOWN if row[key] is None else f"{row[key]:,}" for row in rows]
        columns.append(Column(heading, [f"{cell:>11}" for cell in cells]))
    return columns


def _input(in_shape: Sequence[int] | None, classes: int | None) -> str:
    """With which inputs and classes the sizes hold."""
    if in_shape is None:
        return "sizes are not known"
    what = {1: f"{in_shape[0]} numbers", 3: "images of " + " x ".join(map(str, in_shape))}.get(len(in_shape), "inputs")
    return f"sizes with {what} and {classes} classes"


def of_datasets(sources: Iterable[Source], width: int) -> str:
    """One row per data set: name, whether its files are here, and what it is."""
    found = list(sources)
    columns = {
        "data set": [source.name for source in found],
        "here": [{True: "yes", False: "no", None: NOT_KNOWN}[source.is_here()] for source in found],
        "what it is": [source.about for source in found],
    }
    return _list(columns, width)


def of_methods(summaries: Mapping[str, str], width: int) -> str:
    """One row per method: name, and what it does."""
    table = _list({"method": [*summaries], "what it does": [*summaries.values()]}, width)
    return f"{table}\n\npolyfed methods NAME: paper, messages, hyperparameters, deviations"


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
        lines += [_keys(row["hyperparameters"], "hyperparameter", width), ""]
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
        lines += ["", _keys(section.keys, "key", width)]
    return "\n".join(lines)


def _keys(keys: Sequence[Key], title: str, width: int) -> str:
    columns = {
        title: [key.name for key in keys],
        "type": [key.type for key in keys],
        "default": [key.default for key in keys],
        "meaning": [key.meaning for key in keys],
    }
    return _list(columns, width)


def _list(columns: Mapping[str, Sequence[str]], width: int) -> str:
    """Columns of words under their headings."""
    return render_text([Column(heading, [*cells], words=True) for heading, cells in columns.items()], width)
