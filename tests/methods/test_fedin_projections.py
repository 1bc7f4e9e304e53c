"""FedIN among networks of different widths and families: pairs in one common shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.core.client import Client
from polyfed.core.method import TrainingResult
from polyfed.core.randomness import generator
from polyfed.errors import ConfigError
from polyfed.functional.feature_pooling import random_orthogonal
from polyfed.methods import FedIN
from polyfed.methods.building_blocks import feature_pairs
from polyfed.models.split import SequentialSplit
from tests.helpers.toys import CLASSES, NETS, batch, clients, federation, model_with, moved, rounds, same, worker

UNEQUAL = ["shallow", "wide", "broad"]  # s_in 6, 9, 6; s_out 5, 5, 8
SMALL = {"projection_channels": 4, "projection_grid": 2, "projection_features": 3}


def projected(kind: str = "fixed", **hyperparameters: object) -> FedIN:
    return FedIN(**{"aggregation": "same-shape", "projection": kind, **SMALL, **hyperparameters})


# "none" and equal cuts ------------------------------------------------------------------------------------------------


def test_without_projections_their_sizes_are_refused() -> None:
    for size, value in SMALL.items():
        with pytest.raises(ConfigError, match=f"{size} = {value} does nothing beside projection = 'none'"):
            FedIN(**{size: value})


def test_square_matrices_change_nothing_but_rounding() -> None:
    """s_in and s_out of 6 and 5 numbers in a common shape of 6 and 5: rotated on the way, and back."""
    members = clients(["shallow", "deep", "shallow", "deep"])
    sizes = {"projection_channels": 6, "projection_grid": 1, "projection_features": 5}
    plain, turned = (
        rounds(FedIN(**hyperparameters), members) for hyperparameters in ({}, {"projection": "fixed", **sizes})
    )
    for a, b in zip(plain, turned, strict=True):
        for i in range(4):
            assert moved(a.trained[i], b.trained[i]) < 1e-5
            s_out = [h.up[i]["features"]["s_out"] for h in (a, b)]
            torch.testing.assert_close(s_out[0].norm(dim=1), s_out[1].norm(dim=1), atol=1e-5, rtol=0)
            assert moved({"s": s_out[0]}, {"s": s_out[1]}) > 0.1
    assert moved(plain[1].trained[0], rounds(FedIN(exchange_features=False), members)[1].trained[0]) > 1e-3


# the pairs ------------------------------------------------------------------------------------------------------------


def test_what_is_sent_is_the_own_features_times_the_matrices() -> None:
    members = clients(UNEQUAL)
    plain = rounds(FedIN(aggregation="same-shape"), clients(["wide"]), rounds=1)
    assert "features" in plain[0].up[0]
    (round,) = rounds(projected(), members, rounds=1)
    for i, (c, d) in enumerate([(6, 5), (9, 5), (6, 8)]):
        p_in = random_orthogonal(4, c, generator(0, "projection in", 4, c)).double().numpy()
        p_out = random_orthogonal(3, d, generator(0, "projection out", 3, d)).double().numpy()
        model = model_with(NETS[members[i].architecture], round.trained[i])
        rows = torch.randperm(12, generator=generator(0, "features", "train", 1, i))[:4]
        s_in = model.extract(members[i].data.train.x[rows]).detach()
        s_out = model.transform(s_in).detach().double().numpy() @ p_out.T
        sent = round.up[i]["features"]
        for place in range(5):  # a vector is one place: the summary, and each of 2 x 2
            np.testing.assert_allclose(sent["s_in"][:, place], s_in.double().numpy() @ p_in.T, atol=1e-5)
        np.testing.assert_allclose(sent["s_out"], s_out, atol=1e-5)


def at_work(method: FedIN, number: int) -> Client:
    fed, _ = federation(method, clients(UNEQUAL))
    return worker(fed, number)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_misfit_and_its_gradient_by_hand(number: int) -> None:
    """The mean of (P_out f(P_in' s_in) - s_out)^2, f going through one layer after the other."""
    method = projected(mu=0.0, combine="none")
    at = at_work(method, number)
    g = torch.Generator().manual_seed(5)
    pairs = {"s_in": torch.randn(4, 5, 4, generator=g), "s_out": torch.randn(4, 3, generator=g)}
    at.context = method.receive(at, {"model": {}, "features": pairs})
    data, given = batch(at.data.train), {**at.context, **pairs}
    found = method.gradients(at.model, data, given)
    c, d = int(at.context["p_in"].shape[1]), int(at.context["p_out"].shape[1])
    assert (c, d) == [(6, 5), (9, 5), (6, 8)][number]
    own = pairs["s_in"][:, 1:].mean(dim=1) @ at.context["p_in"]
    loss = (at.model.transform(own) @ at.context["p_out"].T - pairs["s_out"]).square().mean()
    assert float(found.sums["loss_in"]) == pytest.approx(float(loss.detach()), abs=1e-6)
    local = F.cross_entropy(at.model(data.x), data.y)
    for name, p in at.model.named_parameters():
        inner = name.startswith("intermediate")
        (expected,) = torch.autograd.grad(local + loss if inner else local, p, retain_graph=True)
        torch.testing.assert_close(found.grads[name], expected, atol=1e-6, rtol=0)


def test_one_width_has_one_matrix_and_another_seed_another() -> None:
    fed, other = (federation(projected(), clients([*UNEQUAL, "deep"]), seed=seed)[0] for seed in (0, 1))
    for one in (fed, other):
        held = [projected().common.matrices(worker(one, i)) for i in range(4)]
        assert torch.equal(held[0]["p_in"], held[2]["p_in"])
        assert torch.equal(held[0]["p_in"], held[3]["p_in"])
        assert torch.equal(held[0]["p_out"], held[1]["p_out"])
        assert held[1]["p_in"].shape == (4, 9)
        assert not held[0]["p_in"].requires_grad
    assert not torch.allclose(*(projected().common.matrices(worker(one, 0))["p_in"] for one in (fed, other)))


# trained --------------------------------------------------------------------------------------------------------------


def polar(matrix: np.ndarray) -> np.ndarray:
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    return u @ v


def test_the_step_of_trained_matrices_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """P <- the orthogonal matrix nearest to P - lr (mean gradient of l_IN + gradient of what a return trip loses)."""
    monkeypatch.setattr(feature_pairs, "MATRIX_LR", 0.7)
    method = projected("trained")
    at = at_work(method, 1)
    before = method.common.matrices(at)
    g = torch.Generator().manual_seed(7)
    sums = {n: torch.randn(before[n].shape, generator=g) for n in ("p_in", "p_out")}
    pairs = {"s_in": torch.randn(4, 9, generator=g), "s_out": torch.randn(4, 5, generator=g)}
    sent = method.common.upload(at, pairs, TrainingResult(2, 8, 0.0, {"in_steps": torch.tensor(2.0)}, sums))
    for name, s in (("p_in", pairs["s_in"]), ("p_out", pairs["s_out"])):
        p, x = before[name].detach().double().numpy(), s.double().numpy()
        lost = x @ p.T @ p - x  # of mean lost^2, a quadratic form in P'P
        back = 2 / x.size * (p @ x.T @ lost + p @ lost.T @ x)
        expected = polar(p - 0.7 * (sums[name].double().numpy() / 2 + back))
        assert np.abs(back).max() > 1e-3
        np.testing.assert_allclose(at.state["projections"][name], expected, atol=1e-5)
    fresh = at.state["projections"]
    assert same(sent, projected().common.project(pairs, fresh))


# refusals -------------------------------------------------------------------------------------------------------------


def test_features_that_are_no_grid_are_refused_before_round_1() -> None:
    odd = {"odd": lambda: SequentialSplit(Rows(), nn.Flatten(), nn.Linear(12, CLASSES))}
    with pytest.raises(ConfigError, match=r"client 0 \('odd'\): expected a vector .* got \(3, 4\)"):
        federation(projected(), clients(["odd"]), odd)
    federation(FedIN(), clients(["odd"]), odd)


class Rows(nn.Module):
    """Three tokens, which are no square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unflatten(1, (3, 4))


def test_unequal_cuts_are_told_of_projections_and_unequal_tensors_of_same_shape() -> None:
    with pytest.raises(ConfigError, match=r"use method.aggregation = 'same-shape', with method.projection = 'fixed'"):
        federation(FedIN(aggregation="same-shape"), clients(UNEQUAL))
    with pytest.raises(ConfigError, match=r"tensors of one name to have one shape; .*'same-shape'"):
        federation(projected(aggregation="layer-wise"), clients(UNEQUAL))
    federation(projected(), clients(UNEQUAL))
