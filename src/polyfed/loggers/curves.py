"""The numbers of a round's record under the names that curves have, in TensorBoard and in experiment trackers alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyfed.records.read import flat_table


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Name -> value: each finite number is named after its place in the record.

    Lists, and what is told client by client, have no curves.

    >>> curves({"round": 1, "train_loss": 0.5, "accuracy": {"personal": {"mean": 0.25}}, "clients": [0, 2]})
    {'train_loss': 0.5, 'accuracy/personal/mean': 0.25}
    """
    shown = {key: value for key, value in record.items() if key != "round" and "_client" not in key}
    return {
        name: float(value)
        for name, value in flat_table(shown, "/").items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
