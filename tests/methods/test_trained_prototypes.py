"""FedTGP and FedORGP: prototypes that the server trains, and the class that they predict, by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.functional import server_prototypes
from polyfed.methods import FedORGP, FedTGP
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, Round, moved, rounds, same

APART = FedTGP(prototype_weight=1.0, server_epochs=4, server_lr=0.1)
ORTHOGONAL = FedORGP(prototype_weight=0.5, gamma=2.0, server_epochs=3, server_lr=0.1)


def margin_loss(round: Round, rows: Tensor, labels: Tensor) -> server_prototypes.Loss:
    """Of FedTGP, with the margin that the clients' mean means have."""
    delta = server_prototypes.margin(torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)]), 100.0)
    assert round.record["server"]["margin"] == pytest.approx(delta, rel=1e-5)
    return functools.partial(server_prototypes.margin_loss, margin=delta)


def orthogonality(round: Round, rows: Tensor, labels: Tensor) -> server_prototypes.Loss:
    """Of FedORGP, written out."""

    def loss(p: Tensor, some: Tensor, y: Tensor) -> Tensor:
        found = torch.nn.functional.cosine_similarity(some[:, None], p[None], dim=2)
        own = torch.nn.functional.one_hot(y, CLASSES).bool()
        return (1 - found[own]).mean() + 2.0 * found[~own].abs().mean()

    return loss


@pytest.mark.parametrize(("method", "loss_of"), [(APART, margin_loss), (ORTHOGONAL, orthogonality)])
def test_the_network_goes_on_from_round_to_round(
    method: FedTGP | FedORGP, loss_of: Callable[[Round, Tensor, Tensor], server_prototypes.Loss]
) -> None:
    history = rounds(method, members(), rounds=3)
    for number, round in enumerate(history, 1):
        before, after = round.before["network"], round.after["network"]
        assert moved(before, after) > 1e-4
        if number > 1:
            assert same(before, history[number - 2].after["network"])
        rows, labels = (torch.cat([round.up[i][name] for i in sorted(round.up)]) for name in ("prototypes", "labels"))
        expected, value = server_prototypes.train_network(
            before,
            rows,
            labels,
            loss_of(round, rows, labels),
            method.server_epochs,
            4,
            0.1,
            generator(0, "server means", number),
        )
        assert all(torch.allclose(after[name], t, atol=1e-5) for name, t in expected.items())
        assert round.record["server"]["prototype_loss"] == pytest.approx(value, rel=1e-5)
        assert torch.equal(round.after["prototypes"], server_prototypes.prototypes(after))


def test_a_class_that_nobody_has_sent_has_no_prototype() -> None:
    first, second = rounds(APART, members(((0, 2), (2,))))
    assert first.after["network"]["embedding"].shape[0] == CLASSES
    assert second.down[0]["labels"].tolist() == [0, 2]
    late = rounds(APART, members(), lose=lambda round, i: round == 1 and i != 3)
    assert late[1].down[0]["labels"].tolist() == [2]
    assert late[0].record["server"]["margin"] == 100.0  # one class has no other to be near
    assert late[1].after["labels"].tolist() == [0, 1, 2]


def test_the_class_of_the_largest_cosine_is_predicted_where_asked_for() -> None:
    """Where another prototype is the nearest."""
    z, p, labels = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 2])
    assert ORTHOGONAL.prototype_scores(z, p, labels, CLASSES).argmax(1).tolist() == [2]
    assert APART.prototype_scores(z, p, labels, CLASSES).argmax(1).tolist() == [0]
    last = rounds(dataclasses.replace(ORTHOGONAL, predictor="prototype"), members(test=4))[1]
    assert list(last.record["accuracy_by_predictor"]["received"]) == ["head"]
