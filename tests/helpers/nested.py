"""FedHeNN's settings by their short names: ``nested(size=20, pool="seen")`` puts each into its table."""

from __future__ import annotations

from typing import Any

from polyfed.methods import FedHeNN
from polyfed.validation.hyperparameters import flat_fields

TABLE_OF = {inner: table for table, _, inner in (name.partition(".") for name in flat_fields(FedHeNN)) if inner}


def nested(**flat: Any) -> dict[str, Any]:
    """What `FedHeNN` takes: settings of its tables in a mapping each, the others as they are."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        if name in TABLE_OF:
            found.setdefault(TABLE_OF[name], {})[name] = value
        else:
            found[name] = value
    return found
