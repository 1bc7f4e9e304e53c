"""FedTGP's own properties against NumPy by hand."""

from __future__ import annotations

import functools

import pytest
import torch

from polyfed.core.randomness import generator
from polyfed.functional import server_prototypes
from polyfed.methods import FedTGP
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, moved, rounds, same

QUICK = FedTGP(prototype_weight=1.0, server_epochs=4, server_lr=0.1)


def test_the_network_goes_on_from_round_to_round():
    history = rounds(QUICK, members(), rounds=3)
    for number, round in enumerate(history, 1):
        before, after = round.before["network"], round.after["network"]
        assert moved(before, after) > 1e-4
        if number > 1:
            assert same(before, history[number - 2].after["network"])
        rows = torch.cat([round.up[i]["prototypes"] for i in sorted(round.up)])
        labels = torch.cat([round.up[i]["labels"] for i in sorted(round.up)])
        centers = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
        delta = server_prototypes.margin(centers, 100.0)
        assert round.record["server"]["margin"] == pytest.approx(delta, rel=1e-5)
        draws = generator(0, "server means", number)
        apart = functools.partial(server_prototypes.margin_loss, margin=delta)
        expected, loss = server_prototypes.train_network(before, rows, labels, apart, 4, 4, 0.1, draws)
        assert all(torch.allclose(after[name], t, atol=1e-6) for name, t in expected.items())
        assert round.record["server"]["prototype_loss"] == pytest.approx(loss, rel=1e-5)
        assert torch.equal(round.after["prototypes"], server_prototypes.prototypes(after))


def test_a_class_that_nobody_has_sent_has_no_prototype():
    first, second = rounds(QUICK, members(((0, 2), (2,))))
    assert first.after["network"]["embedding"].shape[0] == CLASSES
    assert second.down[0]["labels"].tolist() == [0, 2]
    late = rounds(QUICK, members(), lose=lambda round, i: round == 1 and i != 3)
    assert late[1].down[0]["labels"].tolist() == [2]
    assert late[0].record["server"]["margin"] == 100.0  # one class has no other to be near
    assert late[1].after["labels"].tolist() == [0, 1, 2]
