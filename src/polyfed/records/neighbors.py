"""Which data epsilon tells apart, for those who read it."""

from __future__ import annotations

from collections.abc import Iterable

# By what is released (`core.releases.Release.what`). Another row in a row's place takes one away and adds one: a sum of
# gradients changes by up to 2 C, sums of features by up to sqrt(0.95 * 4) = 1.95 times what a row has by itself, where
# the new features are the old ones' negative and class means are all that is sent (`functional.noisy_sums.add_noise`).
_NEIGHBORS = {
    "features": "another row in a row's place",
    "sums": "with or without a row (another in its place: up to 1.95 times the effect)",
    "training": "with or without a row (another in its place: up to 2 times the effect)",
    "upload": "a client's upload, or zeros",
}


def neighbors(what: Iterable[str]) -> str:
    """what: kinds of releases that an epsilon counts.

    >>> neighbors(["upload", "features"])
    "neighbors: another row in a row's place; a client's upload, or zeros"
    """
    asked = set(what)
    return f"neighbors: {'; '.join(said for kind, said in _NEIGHBORS.items() if kind in asked)}"
