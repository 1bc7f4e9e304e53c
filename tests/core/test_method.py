"""What a class of a method may override, and how."""

from __future__ import annotations

from typing import Any

import pytest

import polyfed as pf
from polyfed.core.method import Requirements, follows_device, server_follows_device
from polyfed.engine.method_wrappers import alone
from polyfed.errors import ConfigError
from polyfed.methods import MOON, FedAvg, FedGH


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"requirements": lambda self: Requirements()},
            r"Mine.requirements is read, not called; write @property above",
        ),
        ({"exposed": lambda self: None}, r"Mine.exposed is read, not called; write @property above def exposed"),
        ({"upload_form": lambda self: None}, r"Mine.upload_form is read, not called; write upload_form = \.\.\. in"),
        ({"broadcast": property(lambda self: {})}, r"Mine.broadcast is called, not read; write def broadcast"),
        ({"upload": True}, r"Mine.upload is called, not read; a hyperparameter or class variable needs another name"),
    ],
)
def test_hooks_of_another_kind_are_refused_where_the_class_is_made(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        type("Mine", (pf.Method,), body)
    with pytest.raises(ConfigError, match=message):  # also from a class beside it
        type("Mine", (type("Part", (), body), pf.Method), {})


def test_a_hyperparameter_has_no_name_of_a_declaration() -> None:
    with pytest.raises(ConfigError, match=r"Mine.adapters: a hyperparameter needs another name"):
        type("Mine", (pf.Method,), {"__annotations__": {"adapters": int}, "adapters": 3})


def test_a_property_may_be_a_plain_value() -> None:
    kind = type("Mine", (pf.Method,), {"requirements": Requirements(validation=True)})
    assert kind().requirements.validation


def test_a_server_works_on_a_device_until_a_class_changes_what_it_does() -> None:
    def hook(self: Any, *given: Any) -> None: ...

    @follows_device
    def marked(self: Any, *given: Any) -> None: ...

    assert server_follows_device(FedAvg())
    assert server_follows_device(MOON())  # which changes clients alone
    assert not server_follows_device(FedGH())
    assert not server_follows_device(alone(FedAvg()))
    for name in ("init_server", "start_round", "broadcast", "aggregate"):
        changed = type("Mine", (FedAvg,), {name: hook})
        assert not server_follows_device(changed())
        assert server_follows_device(type("Mine", (changed,), {"aggregate": marked})())
