"""A deployed server defends itself as one of a simulation does; a node that lies is refused, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyfed.core.message import flatten
from polyfed.deploy import node_registry
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Envelope, deserialize, serialize
from polyfed.deploy.server import serve
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from tests.deploy.test_server import ONE, same
from tests.helpers.nearby import DATA, FIRST_NODE, Nearby, recipe_of

LIAR = FIRST_NODE + 1


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_registry, "PAUSE", 0.001)


@pytest.mark.slow
def test_a_rule_and_a_bound_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    """The bound lies between the clients' norms, so that some are refused."""
    norm = _norms_of_round_1()[1]
    recipe = recipe_of("fedavg", **ONE, robust_aggregation={"aggregator": "median", "max_update_norm": norm})
    run = serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", deadline=5)
    same(recipe, run, tmp_path)
    assert 0 < len(run.history[0]["refused"]) < 3
    assert all("above robust_aggregation.max_update_norm" in entry["reason"] for entry in run.history[0]["refused"])


def _norms_of_round_1() -> list[float]:
    """Of the changes of FedAvg's weights, in order."""
    recipe = recipe_of("fedavg", **ONE, training={"rounds": 1}, robust_aggregation={"max_update_norm": 1e-9})
    refused = build_federation(recipe, data=DATA).run().history[0]["refused"]
    return sorted(float(entry["reason"].partition(" is ")[2].partition(",")[0]) for entry in refused)


@pytest.mark.slow
def test_a_node_that_sends_classes_of_its_own_making_is_refused(tmp_path: Path) -> None:
    """Labels that are no classes would fail in the server's hands; beside a rule they do not get there."""
    recipe = recipe_of("fedgh", robust_aggregation={"aggregator": "geometric_median"})
    wire = Nearby(recipe, tmp_path)

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if node != LIAR or envelope.kind != "train":
            return None
        answer = wire.ask(node, envelope)
        assert isinstance(answer, Envelope)
        message = flatten(deserialize(answer.body)[0])
        return Envelope(
            answer.kind, answer.facts, serialize({**message, "labels": torch.full_like(message["labels"], 99)})
        )

    wire.fault = fault
    run = serve(recipe, wire, out=tmp_path / "out", deadline=5)
    for record in run.history:
        (refused,) = record["refused"]
        assert refused["client"] == 1
        assert "'labels'" in refused["reason"]
    assert len(run.history) == 2


def test_hostile_clients_are_for_simulations(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", **ONE, adversaries={"label_flip_fraction": 0.3})
    with pytest.raises(ConfigError, match=r"^adversaries: expected none in a deployment"):
        serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
