"""Local: every client trains alone; the baseline (also called Standalone).

In each round in which it is selected, a client trains for the recipe's local epochs on the mean cross entropy.
"""

from __future__ import annotations

from typing import ClassVar

from polyfed.core.method import Method, hyperparameters
from polyfed.core.upload_forms import Form


@hyperparameters
class Local(Method):
    """Local training without communication."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "none: training without communication"
    form: ClassVar[Form | None] = {}
