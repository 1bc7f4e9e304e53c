"""The table of methods: model heterogeneity, communication, state and hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["format_value", "symbols_in", "to_markdown"]

_SYMBOLS = (
    (
        "P",
        "floats of a client's network: weights and float buffers; P(r): at width r; P(l): at level l; P(d): at depth d",
    ),
    ("P_h, P_G", "of its head, of a feature generator"),
    ("P_m, P_A(r)", "of the auxiliary model, of adapters of rank r"),
    ("K (m + n + 1)", "an m x n matrix as its K largest singular values with their vectors"),
    ("C, S, D", "classes of the task, classes of the client, input features of the head (closed-form: its `features`)"),
    ("L, r", "public inputs, columns of the mean kernel's factor"),
    ("n_S, q", "pairs of intermediate features, floats of one pair"),
    ("M, M_k, K_k", "other clients' models, personal entries of client k, entries of its sub-model"),
    ("S(r), S(l)", "floats of BatchNorm's statistics at width r, at level l"),
    ("w, phi, h", "weights, those of the extractor, those of the head; w_k, h_k: client k's"),
    ("c, m, a, A", "control variates, momentum or masks, anchors, affinities; c_k, m_k, a_k: client k's"),
)


_INTRODUCTION = """\
<!-- made by python scripts/catalog.py -->

# Methods

[Choosing a method](../choosing.md) leads to one in three questions. `polyfed methods NAME` prints a method's equations
and hyperparameters, and `polyfed check RECIPE.toml --methods all` what each sends with your models and data.

In the table, download and upload are numbers of 4 bytes per client and round; below it are the symbols. Methods that
average weights do so layer by layer: each tensor over the clients that have it, where tensors of the same name need the
same shape. With `aggregation = "same-shape"`, each architecture is averaged by itself. BatchNorm's running statistics
are averaged like weights. `received` and `personal` are [evaluation stages](../evaluation.md).
"""


def symbols_in(text: str) -> list[tuple[str, str]]:
    """Symbols that occur in a description of sizes, with their meanings."""
    words = set(re.findall(r"[A-Za-z]+(?:_\w+)?", text))
    return [entry for entry in _SYMBOLS if words & set(re.findall(r"[A-Za-z]+(?:_\w+)?", entry[0]))]


def to_markdown(pages: Iterable[Mapping[str, Any]]) -> str:
    """The page docs/methods/README.md. pages: of the methods, as `polyfed.experiments.method_facts.page` has them."""
    lines = [
        "| method | paper | may differ between clients | download | upload | state between rounds | evaluation stage |",
        f"|{' --- |' * 7}",
    ]
    for row in pages:
        cells = [row[key] for key in ("paper", "differs", "down", "up", "states")]
        cells = [f"[{row['name']}]({row['name']}.md)", *cells, f"`{row['scored']}`"]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    symbols = [f"| {_cell(symbol)} | {_cell(meaning)} |" for symbol, meaning in _SYMBOLS]
    return "\n".join([_INTRODUCTION, *lines, "", "| symbol | |", "| --- | --- |", *symbols]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def format_value(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
