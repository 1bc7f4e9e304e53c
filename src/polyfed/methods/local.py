"""Local: every client trains alone; the baseline (also called Standalone).

In each round in which it is selected, a client trains for the recipe's local epochs on the mean cross entropy.
"""

from __future__ import annotations

from polyfed.core.method import Method, MethodCard, hyperparameters


@hyperparameters
class Local(Method):
    """Local training without communication."""

    card = MethodCard(name="local", paper="none: training without communication", form={})
