"""FedSelect against NumPy by hand: whose entry is whose, and what of it travels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.methods.fedselect import FedSelect, grow_mask
from polyfed.plugins.settings import Availability
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import NETS, Flat, clients, federation, flat_clients, rounds, same, shared


def numpy_step(w: np.ndarray, data: Any, lr: float, moves: np.ndarray) -> np.ndarray:
    x, y = data.x.double().numpy(), data.y.numpy()
    p = np.exp(x @ w.T)
    p /= p.sum(1, keepdims=True)
    return w - lr * moves * (((p - np.eye(3)[y]).T @ x) / len(x))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("aggregation", "weighting"), [("layer-wise", "uniform"), ("layer-wise", "samples"), ("same-shape", "uniform")]
)
def test_two_clients_by_hand(every: int, aggregation: Any, weighting: Any) -> None:
    members, total, lr = flat_clients(), 6, 0.4
    hyperparameters = {"aggregation": aggregation, "weighting": weighting}
    method = FedSelect(personal_rate=0.34, max_personal_fraction=0.7, grow_interval=every, **hyperparameters)
    counts = [client.n if weighting == "samples" else 1 for client in members]
    history = rounds(method, members, {"flat": Flat}, rounds=total, local_epochs=2, batch_size=8, lr=lr)
    w = Flat().weight.detach().double().numpy()
    own, anchor, mask = [w, w], [w, w], [np.zeros((3, 2), bool)] * 2
    signs: set[float] = set()
    for number, round in enumerate(history):
        ends = []
        for i, client in enumerate(members):
            old, grown = mask[i], mask[i].copy().ravel()
            if number and number % every == 0:
                if grown.mean() < 0.7:
                    free = np.flatnonzero(~grown)
                    order = np.argsort(-np.abs(own[i] - anchor[i]).ravel()[free])
                    grown[free[order[: int(np.rint(0.34 * len(free)))]]] = True
                anchor[i] = own[i]
            mask[i] = grown.reshape(3, 2)
            end = np.where(old, own[i], w)
            for moves in [mask[i]] * 2 * bool(mask[i].any()) + [~mask[i]] * 2:
                end = numpy_step(end, client.data.train, lr, moves)
            signs |= set(np.sign(end - own[i]).ravel().tolist())
            ends.append(end)
            np.testing.assert_allclose(round.weights[i]["weight"], end, atol=1e-5)
            assert round.down[i]["model"]["weight"].numel() == (~old).sum()
            sent = round.up[i]["model"]["weight"].numpy()
            np.testing.assert_allclose(sent.ravel(), end[~mask[i]], atol=1e-5)
            assert ("mask" in round.up[i]) == (old != mask[i]).any()
        own = ends
        share = [n * ~m for n, m in zip(counts, mask, strict=True)]
        count = sum(share)
        w = np.where(count > 0, sum(s * e for s, e in zip(share, ends, strict=True)) / np.maximum(count, 1), w)
        np.testing.assert_allclose(shared(round.after)["weight"], w, atol=1e-5)
    assert signs >= {-1.0, 1.0}
    assert (mask[0] != mask[1]).any(), "the two should keep different entries"
    assert 0.7 <= mask[0].mean() < 1 or every == 2


def test_masks_grow_and_stop_and_leave_biases_and_batchnorm_shared() -> None:
    history = rounds(
        FedSelect(grow_interval=1, personal_rate=0.5, max_personal_fraction=0.6), clients(["bn"] * 3), rounds=7
    )
    names = {name for name, p in NETS["bn"]().named_parameters() if p.dim() > 1}
    for i in range(3):
        held = [round.after.get(f"mask {i}", {}) for round in history]
        assert held[0] == {}
        assert all(mask.keys() == names for mask in held[1:])
        assert not any(
            (before[name] & ~after[name]).any() for before, after in itertools.pairwise(held[1:]) for name in names
        )
        assert all(0.6 <= float(m.float().mean()) <= 0.82 for m in held[-1].values())  # one half, then half of the rest
        assert same(held[-1], held[3])


def test_a_lost_mask_is_sent_again() -> None:
    """A client that drops out after training has grown a mask of which the server knows nothing."""
    method, dropping = (
        FedSelect(grow_interval=1, personal_rate=0.3, max_personal_fraction=1.0),
        Availability(dropout_rate=0.5, dropout_stage="after"),
    )
    fed, watch = federation(method, clients(["deep"] * 3), rounds=8, seed=3, plugins=[dropping])
    fed.run()
    again = 0
    for before, round in itertools.pairwise(watch.rounds):
        for i in range(3):
            known, mine = round.before.get(f"mask {i}", {}), round.up[i].get("mask", {})
            for name, value in round.down[i]["model"].items():
                assert value.numel() == (int((~known[name]).sum()) if name in known else value.numel())
            if i in before.record["dropped"] and "mask" in before.up[i]:
                again += 1
                assert same(mine, before.up[i]["mask"]), "it says the same mask again, and does not grow meanwhile"
    assert again > 2
    assert not any(round.record["refused"] for round in watch.rounds)


def test_of_equal_entries_the_first_are_taken() -> None:
    grown = grow_mask(torch.zeros(200, dtype=torch.bool), torch.ones(200), 0.1, 1.0)
    assert grown.nonzero().flatten().tolist() == list(range(20))


def fedselect_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down still all; up without a quarter of every matrix, and a bit for each of its entries."""
    weights = server.initial_state(server.clients[client_id].architecture).values()
    matrices = [t.numel() for t in weights if t.dim() > 1]
    p = oracles.numbers(server, client_id)
    return 4 * p, 4 * (p - sum(round(n / 4) for n in matrices)) + sum(-(-n // 8) for n in matrices)


test_conformance = testing.conformance(
    methods.FedSelect(grow_interval=1),
    reference_loss=oracles.cross_entropy,
    expected_bytes=fedselect_bytes,
    changed_values={"max_personal_fraction": 0.1},
    reductions=[
        Reduction({"personal_rate": 0.0}, methods.FedAvg(weighting="uniform"), "received"),
        Reduction({"personal_rate": 0.0, "weighting": "samples"}, methods.FedAvg(), "received"),
        Reduction({"max_personal_fraction": 0.0}, methods.FedAvg(weighting="uniform"), "received"),
    ],
)
