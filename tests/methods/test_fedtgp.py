"""FedTGP: the margin and its loss in NumPy, and what the server trains."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.randomness import generator
from polyfed.methods.building_blocks.prototype_network import init_network, outputs, train_network
from polyfed.methods.fedtgp import FedTGP, adaptive_margin, margin_loss
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, moved, normal, rounds, same

METHOD = FedTGP(prototype_weight=1.0, server_epochs=4, server_lr=0.1)


def test_the_network_goes_on_from_round_to_round() -> None:
    history = rounds(METHOD, members(), rounds=3)
    for number, round in enumerate(history, 1):
        before, after = round.before["network"], round.after["network"]
        assert moved(before, after) > 1e-4
        if number > 1:
            assert same(before, history[number - 2].after["network"])
        rows, labels = (torch.cat([round.up[i][name] for i in sorted(round.up)]) for name in ("prototypes", "labels"))
        means = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
        margin = adaptive_margin(means, 100.0)
        assert round.record["server"]["margin"] == pytest.approx(margin, rel=1e-5)
        loss = functools.partial(margin_loss, delta=margin)
        draws = generator(0, "server means", number)
        expected, value = train_network(before, rows, labels, loss, 4, 4, 0.1, draws)
        assert all(torch.allclose(after[name], t, atol=1e-5) for name, t in expected.items())
        assert round.record["server"]["prototype_loss"] == pytest.approx(value, rel=1e-5)
        assert torch.equal(round.after["prototypes"], outputs(after))


def test_a_class_that_nobody_has_sent_has_no_prototype() -> None:
    first, second = rounds(METHOD, members(((0, 2), (2,))))
    assert first.after["network"]["embedding"].shape[0] == CLASSES
    assert second.down[0]["labels"].tolist() == [0, 2]
    late = rounds(METHOD, members(), lose=lambda round, i: round == 1 and i != 3)
    assert late[1].down[0]["labels"].tolist() == [2]
    assert late[0].record["server"]["margin"] == 100.0  # one class has no other to be near
    assert late[1].after["labels"].tolist() == [0, 1, 2]


def test_a_step_of_the_fit_is_that_of_autograd() -> None:
    weights = init_network(3, 5, 4, torch.Generator().manual_seed(0))
    rows, labels = normal(4, 4), torch.tensor([0, 2, 0, 1], dtype=torch.int32)
    before = {name: t.clone() for name, t in weights.items()}
    draws = torch.Generator().manual_seed(1)
    apart = functools.partial(margin_loss, delta=0.7)
    new, loss = train_network(weights, rows, labels, apart, 1, 4, 0.5, draws)
    w = {name: t.clone().requires_grad_() for name, t in before.items()}
    hidden = (w["embedding"] @ w["hidden.weight"].T + w["hidden.bias"]).relu()
    value = apart(hidden @ w["output.weight"].T + w["output.bias"], rows, labels.long())
    assert loss == pytest.approx(float(value.detach()), rel=1e-5)
    for (name, t), slope in zip(w.items(), torch.autograd.grad(value, list(w.values())), strict=True):
        assert torch.equal(weights[name], before[name])
        torch.testing.assert_close(new[name], t.detach() - 0.5 * slope, atol=1e-5, rtol=1e-5)


def test_initial_layers_are_uniform_within_one_over_the_root_of_their_inputs() -> None:
    made = init_network(3, 400, 100, torch.Generator().manual_seed(0))
    for layer, inputs in (("hidden", 100), ("output", 400)):
        assert 0.95 * inputs**-0.5 < float(made[f"{layer}.weight"].abs().max()) <= inputs**-0.5


def test_the_margin_is_the_largest_gap_to_the_nearest() -> None:
    centers = normal(4, 3)
    d = np.linalg.norm(centers.numpy()[:, None] - centers.numpy()[None], axis=2) + np.diag([np.inf] * 4)
    assert adaptive_margin(centers, 100.0) == pytest.approx(d.min(1).max(), rel=1e-6)
    assert adaptive_margin(centers, 0.1) == 0.1
    assert adaptive_margin(centers[:1], 100.0) == 100.0


def test_the_margin_loss_keeps_small_distances_of_many_rows_far_from_zero() -> None:
    """By products of rows, as PyTorch takes distances of more than 25 rows, they would drown in rounding."""
    rows, prototypes = 1000 + 0.1 * normal(60, 3), 1000 + 0.1 * normal(5, 3, seed=1)
    labels = torch.arange(60) % 5
    gaps = np.linalg.norm(rows.double().numpy()[:, None] - prototypes.double().numpy()[None], axis=2)
    away = np.exp(-gaps - 0.5 * np.eye(5)[labels.numpy()])
    expected = -np.log(away[np.arange(60), labels.numpy()] / away.sum(1)).mean()
    assert float(margin_loss(prototypes, rows, labels, 0.5)) == pytest.approx(expected, rel=1e-5)


test_conformance = testing.conformance(
    methods.FedTGP(prototype_weight=0.7, server_epochs=10, server_lr=0.1),
    reference_loss=oracles.drawn_to,
    expected_bytes=oracles.CLASS_ROWS,
    skip=oracles.TRAINED_AT_THE_SERVER,
    changed_values={"margin": 0.01},
    reductions=[Reduction({"prototype_weight": 0.0}, methods.Local())],
)
