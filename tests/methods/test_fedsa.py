"""FedSA's own properties against NumPy by hand."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed import methods, testing
from polyfed.methods import FedSA
from polyfed.methods.fedsa import draw_anchors, margin_contrastive_loss
from polyfed.testing import Reduction
from tests.helpers import few_classes, oracles
from tests.helpers.few_classes import SOME, mean_rows
from tests.helpers.toys import CLASSES, federation, normal, rounds, worker

QUICK = FedSA(anchor_weight=0.7, contrast=0.4, calibration=0.3, momentum=0.8)
members = functools.partial(few_classes.members, architectures=few_classes.WITHOUT_NORM)


def test_a_client_keeps_the_gap_of_its_means_after_training() -> None:
    people = members()
    (round,) = rounds(QUICK, people, rounds=1)
    for i, client in enumerate(people):
        if len(SOME[i]) > 1:
            means = mean_rows(client, round.trained[i]).double().numpy()
            apart = np.linalg.norm(means[:, None] - means[None], axis=2)
            gap = np.mean(np.where(np.eye(len(means)), np.inf, apart).min(1))
            assert float(round.states[i]["gap"]) == pytest.approx(gap, rel=1e-5)
        else:
            assert "gap" not in round.states[i]


@pytest.mark.parametrize(("own", "expected"), [(None, 2.0), (0.5, 2.0), (7.0, 7.0)])
def test_the_larger_gap_is_the_margin(own: float | None, expected: float) -> None:
    at = worker(federation(QUICK, members())[0], 0)
    if own is not None:
        at.state["gap"] = torch.tensor(own)
    anchors = 2 * torch.arange(3.0)[:, None] * torch.eye(5)[0]  # on a line, 2 apart
    assert float(QUICK.receive(at, {"anchors": anchors})["margin"]) == expected


@pytest.mark.parametrize("momentum", [0.0, 0.8, 0.9999, 1.0])
def test_anchors_move_to_the_clients_mean_means(momentum: float) -> None:
    people = members()
    method = FedSA(momentum=momentum)
    for round in rounds(method, people, rounds=3, lr=0.01):
        for i, client in enumerate(people):
            assert torch.allclose(round.up[i]["prototypes"], mean_rows(client, round.trained[i]), atol=1e-6)
            assert round.up[i]["labels"].tolist() == list(SOME[i])
        for c in range(CLASSES):
            rows = [m["prototypes"][m["labels"].tolist().index(c)] for m in round.up.values() if c in m["labels"]]
            mean = np.mean([row.double().numpy() for row in rows], axis=0)  # every client counts once
            expected = momentum * round.before["anchors"][c].double().numpy() + (1 - momentum) * mean
            assert round.after["anchors"][c].numpy() == pytest.approx(expected, abs=1e-6)


def test_anchors_are_those_of_the_layers() -> None:
    """Biases are drawn, too, by PyTorch's layers; normalization takes them out."""
    draws = torch.Generator().manual_seed(3)
    classes = torch.randn(5, 8, generator=draws)
    layers: list[nn.Module] = []
    for _ in range(2):
        linear = nn.Linear(8, 8)
        linear.weight.data.uniform_(-(8**-0.5), 8**-0.5, generator=draws)
        layers += [linear, nn.BatchNorm1d(8), nn.ReLU()]
    expected = nn.Sequential(*layers).train()(classes).detach()
    found = draw_anchors(5, 8, torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, draw_anchors(5, 8, torch.Generator().manual_seed(4)))


def test_the_contrast_against_numpy() -> None:
    z, anchors, y = normal(6, 3), normal(4, 3, seed=1), torch.tensor([0, 3, 1, 1, 2, 0])
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 1.0])
    found = margin_contrastive_loss(z, y, w, anchors, torch.tensor(0.7))
    d = np.linalg.norm(z.double().numpy()[:, None] - anchors.double().numpy(), axis=2)
    d[np.arange(6), y.numpy()] += 0.7
    losses = d[np.arange(6), y.numpy()] + np.log(np.exp(-d).sum(1))
    assert float(found) == pytest.approx((losses * w.numpy()).sum() / w.numpy().sum(), rel=1e-6)


def test_gradients_are_finite_at_an_anchor_and_under_vmap() -> None:
    anchors, y = normal(3, 4), torch.tensor([0, 2])

    def loss(z: torch.Tensor) -> torch.Tensor:
        return margin_contrastive_loss(z, y, torch.ones(2), anchors, torch.tensor(1.0))

    at = torch.stack([anchors[y], anchors[y] + 0.5])
    found = torch.func.vmap(torch.func.grad(loss))(at)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[1], torch.func.grad(loss)(at[1]))


def anchored(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 mean_d (z - A[y])^2 + 0.4 CE(-(||z - A[c]|| + delta [c = y])) + 0.3 mean_c CE(h(A[c]), c), float64."""
    z, a = (t.detach().double().numpy() for t in (model.represent(batch.x), context["anchors"]))
    y, delta = batch.y.numpy(), float(context["margin"])
    pulled = ((z - a[y]) ** 2).mean()
    away = np.sqrt(((z[:, None] - a) ** 2).sum(axis=2)) + delta * np.eye(3)[y]
    contrasted = oracles.of_labels(oracles.log_softmax(-away), batch.y)
    calibrated = oracles.of_labels(oracles.log_softmax(model.head(context["anchors"])), torch.arange(3))
    return oracles.cross_entropy(model, batch, context) + 0.7 * pulled + 0.4 * contrasted + 0.3 * calibrated


test_conformance = testing.conformance(
    methods.FedSA(anchor_weight=0.7, contrast=0.4, calibration=0.3, momentum=0.8),
    reference_loss=anchored,
    expected_bytes=oracles.of_classes(72, 4 * (6 + 1)),  # down 4 C D
    reductions=[Reduction({"anchor_weight": 0.0, "contrast": 0.0, "calibration": 0.0}, methods.Local())],
)
