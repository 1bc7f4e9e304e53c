"""FIARSE against NumPy by hand: which weights a client has, its steps, who counts for an entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.core.message import nbytes
from polyfed.errors import ConfigError
from polyfed.functional.masks import unpack_bits
from polyfed.methods import FIARSE
from tests.helpers.slices import order_of
from tests.helpers.toys import clients, federation, model_with, moved, numpy_mean, rounds, same
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
@pytest.mark.parametrize(("kind", "weighting"), [("shallow", "uniform"), ("shallow", "samples"), ("bn", "uniform")])
def test_two_rounds_by_hand(kind, weighting, threshold):
    members = clients([kind] * 4, [8, 12, 9, 10])
    counts = [c.n if weighting == "samples" else 1 for c in members]
    history = rounds(FIARSE(**METHOD, weighting=weighting, threshold=threshold), members)
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
            share = [n * h[name] for n, h in zip(counts, held, strict=True)]
            count, total = sum(share), sum(s * u[name].double().numpy() for s, u in zip(share, ups, strict=True))
            expected = np.where(count > 0, total / np.maximum(count, 1), base.double().numpy())
            np.testing.assert_allclose(after[name].numpy(), expected, atol=1e-6)
    assert signs == {-1.0, 0.0, 1.0}
    assert fell, "some weight should fall below its threshold in training"


def test_what_no_sub_model_holds_stays_bit_for_bit():
    history = rounds(FIARSE(**METHOD), clients(["shallow"] * 3, 8), lose=lambda round, client: client == 0, rounds=1)
    before, after = history[0].before["model"], history[0].after["model"]
    kept, _ = masks_by_hand(before, 0.5, "global")
    for name, t in before.items():
        out = torch.from_numpy(~kept[name])
        assert torch.equal(t[out], after[name][out])
    assert moved(before, after) > 0


def test_nobody_answers_and_untouched_sub_models_come_back_as_they_went():
    (lost,) = rounds(FIARSE(**METHOD), clients(["bn"] * 3, 8), lose=lambda round, client: True, rounds=1)
    assert same(lost.before["model"], lost.after["model"])
    history = rounds(FIARSE(**METHOD), clients(["shallow"] * 3, 8), rounds=2, lr=0.0)
    assert same(history[0].before["model"], history[1].after["model"])


def test_masks_follow_the_weights_and_smaller_ones_lie_in_larger_ones():
    history = rounds(FIARSE(**METHOD), clients(["shallow"] * 3, 12), rounds=6, local_epochs=3, lr=0.5)
    kept = [{i: masks_by_hand(r.before["model"], SHARES[i], "global")[0] for i in (1, 2)} for r in history]
    assert any((kept[0][1][name] != kept[-1][1][name]).any() for name in kept[0][1])
    for masks in kept:
        assert all((masks[1][name] | ~masks[2][name]).all() for name in masks[1])


def test_what_is_left_out_is_zero_at_the_client_and_stays_so():
    """With momentum and weight decay, too."""
    members = clients(["shallow"] * 3, 12)
    (round,) = rounds(FIARSE(**METHOD), members, rounds=1, momentum=0.9, weight_decay=0.1, local_epochs=3)
    kept, _ = masks_by_hand(round.before["model"], 0.1, "global")
    for name, place in kept.items():
        assert not round.weights[2][name][torch.from_numpy(~place)].any()
    assert any(round.weights[2][name].any() for name in kept)


def test_normalization_is_never_left_out():
    (round,) = rounds(FIARSE(**METHOD), clients(["bn"] * 3, 8), rounds=1)
    assert round.down[2]["model"].keys() - round.down[2]["mask"].keys() == {
        name for name in toy(batchnorm=True).state_dict() if ".bn." in name and "num_batches" not in name
    }


def test_bytes_are_of_what_is_kept_and_a_bit_for_each_entry():
    for round in rounds(FIARSE(**METHOD), clients(["shallow"] * 3, 8)):
        sizes = [t.numel() for t in round.before["model"].values()]
        bits = sum(-(-size // 8) for size in sizes)
        for client, share in enumerate(SHARES):
            up = 4 * int(share * sum(sizes))
            assert (nbytes(round.down[client]), nbytes(round.up[client])) == (up + bits * (share < 1), up)


def test_by_layer_no_layer_is_left_out_whole():
    """Every layer keeps its share, at least one entry; of all weights together, some layers may keep none."""
    (round,) = rounds(FIARSE(shares="1 0.02", threshold="layer"), clients(["shallow"] * 2, 8), rounds=1)
    layers = {name.rpartition(".")[0] for name in round.before["model"]}
    for layer in layers:
        whole_, kept = (
            sum(t.numel() for n, t in model.items() if n.rpartition(".")[0] == layer)
            for model in (round.before["model"], round.down[1]["model"])
        )
        assert kept == max(1, int(0.02 * whole_))
    (round,) = rounds(FIARSE(shares="1 0.02"), clients(["shallow"] * 2, 8), rounds=1)
    assert any(not sum(t.numel() for n, t in round.down[1]["model"].items() if n.startswith(f"{m}.")) for m in layers)


def test_scored_is_the_sub_model():
    fed, watch = federation(FIARSE(**METHOD), clients(["shallow"] * 3, 8, test=40), rounds=1)
    run = fed.run()
    weights = watch.rounds[0].after["model"]
    for client, share in enumerate(SHARES):
        kept, _ = masks_by_hand(weights, share, "global")
        cut = {n: torch.where(torch.from_numpy(kept[n]), t, 0.0) for n, t in weights.items()}
        model, data = model_with(toy, cut), fed.clients[client].data.test
        with torch.no_grad():
            accuracy = float((model(data.x).argmax(1) == data.y).float().mean())
        assert run.result["accuracy_per_client"][client] == pytest.approx(accuracy)


# mutants of the step and of the mean, seen by the oracle --------------------------------------------------------------


def test_the_bias_of_the_gradient_and_the_falling_out_show():
    """Without the factor, or with the mask as it was received, another client comes back."""
    members = clients(["shallow"] * 3, [8, 12, 40])
    (round,) = rounds(FIARSE(shares="1 0.5"), members, rounds=1, local_epochs=1)
    kept, _ = masks_by_hand(round.before["model"], 0.5, "global")
    zeros = {name: torch.zeros_like(t) for name, t in round.before["model"].items()}
    start = whole(round.down[1]["model"], kept, zeros)
    plain = {name: t.clone().requires_grad_() for name, t in start.items()}
    model = toy()
    for rows in order_of(members[1], 1).split(4):
        data = members[1].data.train
        loss = F.cross_entropy(torch.func.functional_call(model, plain, (data.x[rows],)), data.y[rows])
        grads = torch.autograd.grad(loss, list(plain.values()))
        with torch.no_grad():
            for (name, p), g in zip(plain.items(), grads, strict=True):
                p -= 0.1 * g * torch.from_numpy(kept[name])
    found = whole(round.up[1]["model"], kept, zeros)
    assert moved({n: t.detach() for n, t in plain.items()}, found) > 1e-3


def test_a_mean_over_everybody_would_be_another():
    """Entries that a client lacks do not count as zeros."""
    (round,) = rounds(FIARSE(**METHOD), clients(["shallow"] * 3, 8), rounds=1)
    zeros = {name: torch.zeros_like(t) for name, t in round.before["model"].items()}
    ups = []
    for client, share in enumerate(SHARES):
        kept, _ = masks_by_hand(round.before["model"], share, "global")
        ups.append(whole(round.up[client]["model"], kept, zeros))
    naive = {n: torch.from_numpy(numpy_mean(ups, (1, 1, 1), n)).float() for n in zeros}
    assert moved(naive, round.after["model"]) > 0.05


# what cannot work -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh())


def test_networks_with_shared_weights_train():
    history = rounds(FIARSE(shares="1 0.5"), clients(["tied"] * 2, 12), {"tied": Tied})
    after = history[-1].after["model"]
    assert {"first.weight", "second.bias"} <= after.keys()
    assert "second.weight" not in after, "it travels once"
    assert all(round.record["refused"] == [] for round in history)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="one architecture for all clients"):
        federation(FIARSE(), clients(["shallow", "deep"], 8))
    with pytest.raises(ConfigError, match="expected shares of the network from 1 down"):
        FIARSE(shares="0.5 0.25")
