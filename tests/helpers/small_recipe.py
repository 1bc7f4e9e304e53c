"""The recipe of tests that need some run, whichever: two clients with a few digits each, FedGH, one round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

SMALL: Mapping[str, Mapping[str, Any]] = {
    "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 20, "max_test_per_client": 10},
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 1, "batch_size": 10},
}


def small_recipe(**sections: Mapping[str, Any]) -> str:
    """The recipe as TOML; sections are laid over it key by key.

    >>> small_recipe(training={"rounds": 2}).splitlines()[-3:]
    ['[training]', 'rounds = 2', 'batch_size = 10']
    """
    settings = {name: dict(SMALL.get(name, {})) for name in {**SMALL, **sections}}
    for name, values in sections.items():
        settings[name].update(values)
    return tomli_w.dumps(settings)
