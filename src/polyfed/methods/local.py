"""Local: every client trains alone; the baseline (also called Standalone).

In each round in which it is selected, a client trains for the recipe's local epochs on the mean cross entropy.
Sent: down nothing; up nothing. Kept: none.
"""

from __future__ import annotations

from polyfed.core.method import Method, hyperparameters


@hyperparameters
class Local(Method):
    """Local training without communication."""

    upload_form = {}
