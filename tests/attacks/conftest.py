"""Runs that attacks are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

import polyfed as pf
from polyfed.experiments.build import build_federation
from polyfed.report.run_records import RunRecord, load_runs


class Done(NamedTuple):
    """A finished run. federation: as it was at the end."""

    record: RunRecord
    federation: Any


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """A run of the module's RECIPE with these settings, made once; its folder must be left as it is."""
    made: dict[str, Done] = {}

    def make(method: str, sections: Mapping[str, Mapping[str, Any]] | None = None, **hyperparameters: Any) -> Done:
        key = json.dumps([method, hyperparameters, sections])
        if key not in made:
            settings = {**request.module.RECIPE, "method": {"name": method, **hyperparameters}}
            for name, section in (sections or {}).items():
                settings[name] = {**settings.get(name, {}), **section}
            path = tmp_path_factory.mktemp("runs") / "run"
            federation = build_federation(pf.Recipe.from_dict(settings), out=path)
            federation.run()
            made[key] = Done(load_runs(path)[0], federation)
        return made[key]

    return make
