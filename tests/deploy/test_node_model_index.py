"""A node keeps its model with facts of its own: the server's last message cannot make it write others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyfed.deploy.protocol import Envelope, NodeError
from polyfed.deploy.server import serve
from tests.helpers.nearby import FIRST_NODE, Nearby, recipe_of


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> tuple[Nearby, Envelope]:
    """Nodes after a run, and the last message to the first of them."""
    place, recipe = tmp_path_factory.mktemp("nodes"), recipe_of("fedgh")
    wire = Nearby(recipe, place)
    serve(recipe, wire, out=place / "out", deadline=5)
    return wire, next(envelope for node, envelope in wire.sent if node == FIRST_NODE and envelope.kind == "finish")


@pytest.mark.parametrize(
    "entry",
    [
        {"architecture": None},
        {"classes": 2**40},
        {"feature_dim": 7},
        {"input": {"shape": [1, 2**20, 8], "type": "uint8"}},
        {"prepare": {"mean": 1}},
        {"class_names": 5},
        {"method": "os:system"},
        {"hyperparameters": {"header_lr": "x:y"}},
        {"auxiliary_model": "antigravity:net"},
        {"round": None},
    ],
    ids=str,
)
def test_another_model_than_the_nodes_own_is_refused(entry: dict[str, Any], finish: tuple[Nearby, Envelope]) -> None:
    wire, last = finish
    about = {**last.facts["about"], **entry}
    answer = wire.ask(FIRST_NODE, Envelope(last.kind, {**last.facts, "about": about}, last.body))
    assert isinstance(answer, NodeError)
    assert "expected the entry of this client's model, got another" in answer


def test_what_names_code_or_files_is_the_nodes_own(finish: tuple[Nearby, Envelope]) -> None:
    wire, last = finish
    about = {**last.facts["about"], "modules": ["/anywhere"], "vectors": "```\n/etc/passwd"}
    assert isinstance(wire.ask(FIRST_NODE, Envelope(last.kind, {**last.facts, "about": about}, last.body)), Envelope)
    for index in (wire.folder / "node-0").rglob("models/index.json"):
        for written in json.loads(index.read_text()).values():
            assert "modules" not in written
            assert written["vectors"] is None
