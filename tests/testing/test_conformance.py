"""The conformance kit itself, on methods of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from polyfed import methods, testing
from polyfed.models.split import SequentialSplit
from polyfed.registry import METHODS
from polyfed.testing import Reduction
from tests.helpers import oracles

TESTS = Path(__file__).parents[1]


def test_no_method_is_left_out() -> None:
    for entry in METHODS.entries.values():
        module = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
        test = TESTS / "methods" / f"test_{module.rpartition('.')[2]}.py"
        assert "\ntest_conformance = testing.conformance(" in test.read_text(encoding="utf-8"), test


def test_what_the_kit_asks_on_the_way_leaves_its_plain_run_as_it_is() -> None:
    """The loss is asked several times: statistics and draws of dropout are those of a run where nobody asks."""

    def build() -> SequentialSplit:
        extractor = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten())
        return SequentialSplit(extractor, nn.Linear(64, 6), nn.Linear(6, 3), "normed")

    asked = ["same_seed_same_result"]
    assert not testing.violations(methods.Local(), asked, models=[build], reference_loss=oracles.cross_entropy)


def test_what_is_asked_after_the_plain_run_is_no_part_of_it() -> None:
    kit = testing.ConformanceKit(method=methods.FedGH())
    federation = kit.observed.federation
    assert federation is not None
    before = {client: len(sent) for client, sent in kit.observed.sent.items()}
    federation.method.broadcast(federation.server, 0)
    assert {client: len(sent) for client, sent in kit.observed.sent.items()} == before


def test_a_hyperparameter_said_to_be_inert_must_be() -> None:
    found = testing.violations(methods.FedAvg(), ["hyperparameters_matter"], no_effect={"weighting": "no reason"})
    assert "has `no_effect` (no reason)" in found["hyperparameters_matter"]


def test_check_names_the_property() -> None:
    everything_else = dict.fromkeys(set(testing.PROPERTIES) - {"reductions", "declared"}, "not here")
    with pytest.raises(testing.ConformanceError, match="reductions: local: "):
        testing.check(methods.Local(), reductions=[Reduction(methods.Local(), methods.FedAvg())], skip=everything_else)


def test_the_kit_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    assert not testing.violations(methods.Local(), ["other_seed_other_result", "loss_is_pure", "learns"])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.Generator.__module__ == "torch._C"
