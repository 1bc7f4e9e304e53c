"""Methods with settings under which large steps leave rounding errors what they are."""

from __future__ import annotations

from typing import Any

from polyfed.core.method import Method
from polyfed.registry import METHODS

# FedDF's 128 steps of Adam on the server carry rounding beyond the tolerance on some processors;
# ProtoNorm's prototypes have one length, so that a row without features is as far from all, and rounding decides;
# with their defaults and steps of 0.1, FedSA multiplies a rounding error a thousandfold in a few rounds, and FedORGP,
# whose weight is 10, a few times
_SETTINGS: dict[str, dict[str, Any]] = {
    "feddf": {"server_steps": 16},
    "fedorgp": {"prototype_weight": 1.0},
    "fedsa": {"anchor_weight": 1.0, "contrast": 0.5},
    "protonorm": {"prototype_weight": 1.0, "spread_steps": 0},
}


def gentle(name: str) -> Method:
    """The method of this name, for comparisons up to rounding after several large steps."""
    method: Method = METHODS[name](**_SETTINGS.get(name, {}))
    return method
