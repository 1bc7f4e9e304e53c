"""FedProto's own properties against NumPy by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.methods import FedProto
from polyfed.methods.building_blocks import prototypes
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.few_classes import SOME, WITHOUT_NORM, class_means, members
from tests.helpers.toys import CLASSES, moved, rounds


def held(state: dict[str, torch.Tensor]) -> dict[int, np.ndarray]:
    return {int(c): row for c, row in zip(state["labels"], state["prototypes"].double().numpy(), strict=True)}


@pytest.mark.parametrize("method", [FedProto(), FedProto(weighting="uniform")])
def test_uploads_and_prototypes_against_numpy(method: Any) -> None:
    people = members()
    counted = method == FedProto()
    for round in rounds(method, people, rounds=3):
        sent = {i: class_means(client, round.trained[i]) for i, client in enumerate(people)}
        for i, message in round.up.items():
            assert message["labels"].tolist() == sorted(sent[i])
            assert message["prototypes"].numpy() == pytest.approx(np.stack(list(sent[i].values())), abs=1e-6)
            counts = torch.bincount(people[i].data.train.y)
            assert ("counts" in message) == counted
            assert "counts" not in message or message["counts"].tolist() == counts[counts > 0].tolist()
        for c, row in held(round.after).items():
            owners = [i for i in sent if c in sent[i]]
            n = [int((people[i].data.train.y == c).sum()) if counted else 1 for i in owners]
            assert row == pytest.approx(np.average([sent[i][c] for i in owners], axis=0, weights=n), abs=1e-6)


def test_prototypes_collected_during_training_take_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights stand still they are those of a pass after it; else they are of weights on their way."""
    people = members(architectures=WITHOUT_NORM)
    after = rounds(FedProto(), people, local_epochs=2, lr=0.0)
    passed = rounds(FedProto(), people)
    monkeypatch.setattr(prototypes, "representations", None)
    during = FedProto(collected="during")
    for one, other in zip(after, rounds(during, people, local_epochs=2, lr=0.0), strict=True):
        for i, message in one.up.items():
            assert message["labels"].tolist() == other.up[i]["labels"].tolist()
            assert message["counts"].tolist() == other.up[i]["counts"].tolist()
            torch.testing.assert_close(other.up[i]["prototypes"], message["prototypes"])
    moving = rounds(during, people)
    assert moved(moving[0].up[0], passed[0].up[0]) > 1e-3
    assert "counts" not in rounds(FedProto(collected="during", weighting="uniform"), people)[0].up[0]


def test_a_class_that_nobody_sends_keeps_its_prototype() -> None:
    first, second = rounds(FedProto(), members(), lose=lambda round, i: round == 2 and i in (0, 2))
    before, after = held(first.after), held(second.after)
    assert (before[0] == after[0]).all()
    assert not (before[2] == after[2]).all()


def test_a_client_is_sent_its_own_classes_apart_from_the_others() -> None:
    _, second = rounds(FedProto(), members())
    for i, own in enumerate(SOME):
        assert second.down[i]["labels"].tolist() == list(own)
        rest = [c for c in range(CLASSES) if c not in own]
        assert second.down[i].get("others", {"labels": torch.empty(0)})["labels"].tolist() == rest
        assert second.states[i]["labels"].tolist() == [0, 1, 2]
    _, second = rounds(FedProto(candidates="own"), members())
    assert all("others" not in message for message in second.down.values())
    assert second.states[3]["labels"].tolist() == [2]


test_conformance = testing.conformance(
    methods.FedProto(prototype_weight=0.7),
    reference_loss=oracles.drawn_to,
    expected_bytes=oracles.of_classes(4 * (3 * 6 + 3), 4 * (6 + 2)),  # down 4 (C D + C) in two parts, up 4 (S D + 2 S)
    counted="statistics",
    reductions=[Reduction({"prototype_weight": 0.0, "predictor": "head"}, methods.Local())],
)
