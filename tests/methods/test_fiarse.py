"""FIARSE against NumPy by hand: which weights a client has, its steps, who counts for an entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.functional.masks import unpack_bits
from polyfed.methods.fiarse import FIARSE, keep_large, magnitude_threshold
from tests.helpers import oracles
from tests.helpers.slices import order_of
from tests.helpers.toys import clients, rounds
from tests.helpers.toys import net as toy

SHARES = (1.0, 0.5, 0.1)
METHOD = {"shares": "1 0.5 0.1"}


def masks_by_hand(weights, share, threshold):
    """Name -> kept entries, and the threshold of its group, in NumPy; BatchNorm has none."""
    names = [n for n in weights if ".bn." not in n]
    layers = {n.rpartition(".")[0] for n in names}
    groups = [names] if threshold == "global" else [[n for n in names if n.rpartition(".")[0] == m] for m in layers]
    kept, thetas = {}, {}
    for group in groups:
        sizes = np.sort(np.abs(np.concatenate([weights[n].numpy().ravel() for n in group])))[::-1]
        theta = sizes[max(1, int(share * len(sizes))) - 1]
        kept |= {n: np.abs(weights[n].numpy()) >= theta for n in group}
        thetas |= dict.fromkeys(group, float(theta))
    return kept, thetas


def whole(values, kept, fill):
    """Sent entries in their places."""
    found = {}
    for name, value in values.items():
        found[name] = fill[name].clone()
        place = torch.from_numpy(kept[name]) if name in kept else torch.ones_like(fill[name], dtype=torch.bool)
        found[name][place] = value.flatten()
    return found


def trained_by_hand(weights, thetas, member, number, round, batchnorm):
    """SGD at rate 0.1 on the network without the weights below their thresholds, the gradient biased by formula."""
    model = toy(batchnorm=batchnorm)
    model.load_state_dict(weights, strict=False)
    model.train()
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rows in order_of(member, number, round=round).split(4):
        if len(rows) == 1 and batchnorm:
            continue
        for name, p in model.named_parameters():
            out = np.abs(exact[name].numpy()) < thetas.get(name, 0.0)
            p.data.copy_(torch.where(torch.from_numpy(out), 0.0, exact[name]))
        model.zero_grad()
        F.cross_entropy(model(member.data.train.x[rows]), member.data.train.y[rows]).backward()
        for name, p in model.named_parameters():
            v, t = exact[name].double().numpy(), thetas.get(name, 0.0)
            slope = 1 + 2 * np.abs(v) * t / (np.abs(v) + t) ** 2 if t else np.ones_like(v)
            g = p.grad.double().numpy() * slope * (np.abs(v) >= t)
            exact[name] = torch.from_numpy(v - 0.1 * g).float()
    return exact


@pytest.mark.parametrize("threshold", ["global", "layer"])
@pytest.mark.parametrize("kind", ["shallow", "bn"])
def test_two_rounds_by_hand(kind, threshold):
    members = clients([kind] * 4, [8, 12, 9, 10])
    history = rounds(FIARSE(**METHOD, threshold=threshold), members)
    signs, fell = set(), 0
    for number, round in enumerate(history, 1):
        before, after = round.before["model"], round.after["model"]
        ups, held = [], []
        for client in range(4):
            share = SHARES[client % 3]
            kept, thetas = masks_by_hand(before, share, threshold) if share < 1 else ({}, {})
            sent, up = round.down[client]["model"], round.up[client]["model"]
            assert ("mask" in round.down[client]) == (share < 1)
            for name, t in sent.items():
                place = torch.from_numpy(kept[name]) if name in kept else torch.ones_like(before[name], dtype=bool)
                assert torch.equal(t.flatten(), before[name][place])
                if name in kept:
                    bits = round.down[client]["mask"][name]
                    assert torch.equal(unpack_bits(bits, place.shape), ~place)
            zeros = {name: torch.zeros_like(t) for name, t in before.items()}
            start = whole(sent, kept, zeros)
            expected = trained_by_hand(start, thetas, members[client], client, number, kind == "bn")
            mine = whole(up, kept, zeros)
            for name, t in expected.items():
                np.testing.assert_allclose(mine[name].numpy(), t.numpy(), atol=1e-5)
                signs |= set(np.sign((t - start[name]).numpy()).ravel().tolist())
                fell += int(((t.abs() < thetas.get(name, 0.0)) & (start[name] != 0)).sum())
            ups.append(mine)
            held.append({n: kept.get(n, np.ones(tuple(t.shape), bool)) for n, t in before.items()})
        for name, base in before.items():
            count = sum(h[name].astype(int) for h in held)
            total = sum(h[name] * u[name].double().numpy() for h, u in zip(held, ups, strict=True))
            expected = np.where(count > 0, total / np.maximum(count, 1), base.double().numpy())
            np.testing.assert_allclose(after[name].numpy(), expected, atol=1e-6)
    assert signs == {-1.0, 0.0, 1.0}
    assert fell, "some weight should fall below its threshold in training"


def test_a_share_keeps_whole_entries_and_at_least_one() -> None:
    tensors = [torch.arange(1.0, 41.0), -torch.arange(41.0, 101.0)]
    assert float(magnitude_threshold(tensors, 0.29)) == 72  # 29 entries, though 0.29 * 100 is a little less than 29
    assert float(magnitude_threshold(tensors, 0.001)) == 100


def test_threshold_0_is_the_tensor_itself_with_its_plain_gradient() -> None:
    x = torch.tensor([0.0, -2.0, 3.0], requires_grad=True)
    y = keep_large(x, torch.tensor(0.0))
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def fiarse_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the whole network, or a quarter of it and a bit for each entry of its eight tensors."""
    sizes = [t.numel() for t in server.initial_state("net0").values()]
    if client_id % 2 == 0:
        return 4 * sum(sizes), 4 * sum(sizes)
    up = 4 * (sum(sizes) // 4)
    return up + sum(-(-size // 8) for size in sizes), up


test_conformance = testing.conformance(
    methods.FIARSE(shares="1 0.25"),
    models=oracles.WIDE,
    expected_bytes=fiarse_bytes,
    skip=oracles.NUMBERED,
    changed_values={"shares": "1 0.5"},
    reductions=[oracles.is_fedavg({"shares": "1"}, "uniform")],
)
