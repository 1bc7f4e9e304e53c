"""HeteroFL against sub-models built and trained by hand (baselines 3.16)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.errors import ConfigError
from polyfed.functional.channel_slices import slice_channels
from polyfed.methods import HeteroFL
from polyfed.methods.building_blocks.width_levels import client_level
from polyfed.methods.heterofl import mean_of_holders
from tests.helpers import oracles
from tests.helpers.slices import PLAN, SHAPES, kept, order_of, places, prefix, rounds, small, tensors
from tests.helpers.toys import CLASSES, clients, federation, moved, samples


def rounds_of(method, kind, labels=((0, 1, 2),) * 3, sizes=(8, 12, 16), **options):
    members = [Client(kind, samples(n, i, own)) for i, (n, own) in enumerate(zip(sizes, labels, strict=True))]
    return rounds(method, members, **options), members


def by_hand(kind, letter, large, data, order, lr, present, clip):
    """One epoch in batches of 4 of a network of its own, made narrow from the start."""
    model = small(kind, letter)
    model.load_state_dict({n: prefix(large[n], t) if n in large else t for n, t in model.state_dict().items()})
    for rows in order.split(4):
        logits = model(data.x[rows]) * torch.tensor([float(c in present) for c in range(CLASSES)])
        loss = F.cross_entropy(logits, data.y[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= lr * (min(1.0, clip / norm) if clip else 1.0) * g
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "clip", "weighting"), [("shallow", 0.0, "uniform"), ("bn", 0.5, "uniform"), ("bn", 0.0, "samples")]
)
def test_a_round_is_that_of_networks_made_narrow_by_hand(kind, clip, weighting):
    labels, counts = [(0, 1, 2), (0, 1), (1, 2)], (8, 12, 16) if weighting == "samples" else (1, 1, 1)
    method = HeteroFL(rates="fix_a1-b1-c1", max_grad_norm=clip, weighting=weighting)
    (round,), members = rounds_of(method, kind, labels=labels, rounds=1)
    before, after = round.before["model"], round.after["model"]
    sent = []
    for number, (letter, present) in enumerate(zip("abc", labels, strict=True)):
        data = members[number].data.train
        order = order_of(members[number], number)
        trained = by_hand(kind, letter, before, data, order, 0.1, present, clip)
        assert moved(trained, round.up[number]["model"]) < 1e-5
        sent.append(round.up[number]["model"])
        assert round.up[number]["classes"].tolist() == [c in present for c in range(CLASSES)]
    for name, whole in before.items():
        total, count = np.zeros(tuple(whole.shape)), np.zeros(tuple(whole.shape))
        for model, present, share in zip(sent, labels, counts, strict=True):
            value = model[name].double().numpy()
            inside = tuple(slice(0, n) for n in value.shape)
            has = np.full(value.shape, float(share))
            if name.startswith("head."):
                has[[c for c in range(CLASSES) if c not in present]] = 0
            total[inside] += has * value
            count[inside] += has
        expected = np.where(count > 0, total / np.maximum(count, 1), whole.double().numpy())
        np.testing.assert_allclose(after[name].numpy(), expected, atol=1e-6)


def mean_by_entry(base, parts, weights):
    found = {}
    for name, whole in base.items():
        total, count = np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
        for (own, channels), weight in zip(parts, weights, strict=True):
            if name in own:
                values = own[name].double().numpy()
                for here, there in zip(
                    itertools.product(*map(range, values.shape)),
                    itertools.product(*places(name, channels)),
                    strict=True,
                ):
                    total[there] += weight * values[here]
                    count[there] += weight
        found[name] = np.where(count > 0, total / np.maximum(count, 1e-300), whole.double().numpy())
    return found


@pytest.mark.parametrize("weights", [[1.0] * 3, [2.0, 0.5, 3.0]])
def test_the_mean_is_over_those_who_hold_the_entry(weights):
    base = tensors(0)
    held = [kept(g2=[0, 1], g3=[0, 1, 2]), kept(g2=[4, 0, 1], g3=[3, 0]), kept(g2=[0], g3=[1], g1=[2, 0])]
    parts = [(slice_channels(PLAN, tensors(seed), channels), channels) for seed, channels in enumerate(held, 1)]
    del parts[1][0]["bias"]
    found, expected = mean_of_holders(PLAN, base, parts, weights), mean_by_entry(base, parts, weights)
    for name in base:
        np.testing.assert_allclose(found[name].numpy(), expected[name], atol=1e-6)
    untouched = torch.ones(5, dtype=torch.bool)
    untouched[[0, 1, 4]] = False
    assert torch.equal(found["conv"][untouched], base["conv"][untouched])
    assert not torch.equal(found["conv"][0], base["conv"][0])


def test_a_part_of_weight_0_has_no_say_and_nobody_changes_nothing():
    base, other = tensors(0), tensors(1)
    for parts, weights in (([], []), ([(other, {})], [0.0])):
        assert all(torch.equal(t, base[name]) for name, t in mean_of_holders(PLAN, base, parts, weights).items())
    alike = mean_of_holders(PLAN, base, [(other, {})] * 3, [0.1, 0.7, 3.0])
    assert all(torch.equal(t, other[name]) for name, t in alike.items()), "the mean of equal entries is that entry"


def test_levels_that_no_client_has_are_named_before_round_1():
    def remarks(rates, count):
        return [
            line
            for line in federation(HeteroFL(rates=rates), clients(["shallow"] * count))[0].remarks()
            if "level" in line
        ]

    (line,) = remarks("fix_a1-b1-c1-d1-e1", 3)
    assert line == (
        "heterofl: rates = 'fix_a1-b1-c1-d1-e1' gives none of the 3 clients level a, c; "
        "in a round they train 0.5 of each layer's channels at most"
    )
    assert not remarks("fix_a1-b1-c1-d1-e1", 5)
    assert not remarks("dynamic_a1-b1-c1-d1-e1", 3)


@pytest.mark.parametrize(
    "text",
    ["dynamic", "dynamic_a1-f1", "fix_a0-b1", "fix_a1-a2"],
)
def test_rates_that_mean_nothing_are_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"rates.*expected 'dynamic_' or 'fix_'.*; got '" + text) as caught:
        Recipe.load("recipes/quickstart.toml", [f"method.rates={text}"], method="heterofl")
    assert "\n" not in str(caught.value)


def test_fixed_rates_are_given_to_blocks_of_clients_once():
    fed, _ = federation(HeteroFL(), clients(["shallow"] * 10, 4))
    for round in (0, 1, 7):
        fed.server.round = round
        assert "".join(client_level(fed.server, "fix_a1-b1-c1-d1-e1", i) for i in range(10)) == "aabbccddee"
        assert "".join(client_level(fed.server, "fix_c1-a2", i) for i in range(10)) == "cccaaaaaaa"
    fed.server.set_available([1, 9])  # who is absent keeps its place
    assert [client_level(fed.server, "fix_a1-b1", i) for i in (1, 9)] == ["a", "b"]


def test_dynamic_rates_are_drawn_anew_by_their_shares():
    fed, _ = federation(HeteroFL(), clients(["shallow"] * 4, 4))
    drawn = {i: [] for i in range(4)}
    for fed.server.round in range(1, 251):
        for i in range(4):
            drawn[i].append(client_level(fed.server, "dynamic_a3-c1", i))
    letters = [letter for own in drawn.values() for letter in own]
    assert 0.7 < letters.count("a") / 1000 < 0.8
    assert letters.count("a") + letters.count("c") == 1000
    assert len({tuple(d) for d in drawn.values()}) == 4


def test_statistics_are_reported_after_the_average_and_metered():
    history, members = rounds_of(HeteroFL(rates="fix_a1-b2"), "bn", sizes=(10, 8, 9), rounds=2)
    large = history[-1].after["model"]
    assert not any("running" in name for name in large)
    for letter, numbers in (("a", [0]), ("b", [1, 2])):
        model = small("bn", letter)
        model.load_state_dict({n: prefix(large[n], t) if n in large else t for n, t in model.state_dict().items()})
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm1d)}
        seen = {name: [] for name in layers}
        for name, layer in layers.items():
            layer.register_forward_hook(lambda m, args, out, into=seen[name]: into.append(args[0].detach()))
        for number in numbers:
            for rows in torch.arange(members[number].n).split(4):
                if len(rows) > 1:  # 9 rows: 4, 4 and one alone
                    model.train()(members[number].data.train.x[rows])
        found = history[-1].after[f"statistics {letter}"]
        for name, batches in seen.items():
            mean = np.mean([b.double().numpy().mean(0) for b in batches], axis=0)
            var = np.mean([b.double().numpy().var(0, ddof=1) for b in batches], axis=0)
            size = len(mean)
            np.testing.assert_allclose(found[f"{name}.running_mean"][:size].numpy(), mean, atol=1e-5)
            np.testing.assert_allclose(found[f"{name}.running_var"][:size].numpy(), var, atol=1e-5)
            assert bool((found[f"{name}.running_mean"][size:] == 0).all())
    assert len(found[f"{name}.running_mean"]) > size


test_conformance = testing.conformance(
    methods.HeteroFL(rates="fix_a1-b1"),
    models=oracles.WIDE,
    reference_loss=oracles.masked,
    expected_bytes=oracles.sliced_bytes,
    skip=oracles.NUMBERED,
    changed_values={"rates": "dynamic_a1-b1", "max_grad_norm": 0.05},
    reductions=[
        oracles.is_fedavg(methods.HeteroFL(**oracles.PLAIN), "uniform"),
        oracles.is_fedavg(methods.HeteroFL(**oracles.PLAIN, weighting="samples")),
    ],
)
