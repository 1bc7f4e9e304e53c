"""Local (also called Standalone): every client learns alone; the row that every other method must beat.

Client k:  E local epochs of SGD on CE(f(x; w_k), y).
Sent per round: nothing. State: the client's weights.
A client trains only in the rounds in which it is drawn, so that it learns exactly as long as under the other methods.
"""

from __future__ import annotations

from typing import ClassVar

from polyfed.core.method import Method, hyperparameters
from polyfed.core.upload_forms import Form


@hyperparameters
class Local(Method):
    """No exchange at all."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "every client for itself"
    form: ClassVar[Form | None] = {}
