"""FedET step by step; the consensus and the loss themselves are in tests/functional/test_consensus.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.client import PublicData
from polyfed.methods import FedET
from polyfed.methods.fedet import confidence_weights, consensus, transfer_loss
from tests.helpers import oracles
from tests.helpers.few_classes import SIZES, disagreeing
from tests.helpers.toys import CLASSES, NETS, model_with, numpy_mean, public, rounds, same, softmax

HELD = public(20)
MIXED = ["shallow", "wide", "shallow", "wide"]
WHOLE = {"server_batch": 20, "server_steps": 1, "server_lr": 0.5, "diversity_weight": 0.7}  # all inputs in one step
HEAD = ("head.weight", "head.bias")


def played(method, architectures=MIXED, held=HELD, **options):
    return rounds(method, disagreeing(architectures), held=held, **options)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_two_rounds_step_by_step(weighting):
    """Means within each architecture, the head's over all; one step of the large network; its head goes to all."""
    shares = SIZES if weighting == "samples" else (1,) * 4
    history, disputes = played(FedET(**WHOLE, weighting=weighting), lr=0.02), []
    for round in history:
        sent = [round.up[i]["model"] for i in range(4)]
        head = {name: torch.from_numpy(numpy_mean(sent, shares, name)).float() for name in HEAD}
        model = model_with(NETS["wide"], {**round.before["server"], **head})
        with torch.no_grad():
            nets = [model_with(NETS[a], w) for a, w in zip(MIXED, sent, strict=True)]
            agreed = consensus(torch.stack([one(HELD.samples.x) for one in nets]))
        disputes.append(float(agreed.disagreement.float().mean()))
        transfer_loss(model(HELD.samples.x), agreed, 0.7).backward()
        for name, parameter in model.named_parameters():
            expected = (parameter - 0.5 * parameter.grad).detach()
            torch.testing.assert_close(round.after["server"][name], expected, atol=1e-5, rtol=0)
        assert round.record["server"]["disputed"] == pytest.approx(disputes[-1])
        for architecture in ("shallow", "wide"):
            members = [i for i, a in enumerate(MIXED) if a == architecture]
            group = round.after[f"model {architecture}"]
            assert all(torch.equal(group[name], round.after["server"][name]) for name in HEAD)
            for name in group.keys() - set(HEAD):
                mean = numpy_mean([sent[i] for i in members], [shares[i] for i in members], name)
                np.testing.assert_allclose(group[name].numpy(), mean, atol=1e-6)
    assert any(0 < share < 1 for share in disputes)
    for i, architecture in enumerate(MIXED):
        assert same(history[1].down[i]["model"], history[0].after[f"model {architecture}"])


def test_every_input_is_learnt_from_before_any_comes_again_and_no_label_is_looked_at():
    """Nothing of five steps of 4 among 20 inputs is left out: another input anywhere leads elsewhere."""
    method = FedET(server_batch=4, server_steps=5, server_lr=0.5)
    (plain,) = played(method, rounds=1)
    turned = PublicData(dataclasses.replace(HELD.samples, y=(HELD.samples.y + 1) % CLASSES))
    other = dataclasses.replace(turned, origin="other")
    for held in (turned, other):
        assert same(plain.after["server"], played(method, held=held, rounds=1)[0].after["server"])
    for row in (0, 7, 19):
        x = HELD.samples.x.clone()
        x[row] += 3.0
        held = PublicData(dataclasses.replace(HELD.samples, x=x))
        assert not same(plain.after["server"], played(method, held=held, rounds=1)[0].after["server"])


def draw(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(scores):
    """Sample by sample, network by network."""
    labels, others, disputed = [], [], []
    for n in range(scores.shape[1]):
        s = scores[:, n]
        v = ((s - s.mean(1, keepdims=True)) ** 2).mean(1)
        label = (v[:, None] * s / v.sum()).sum(0).argmax()
        left = [i for i in range(len(s)) if s[i].argmax() != label]
        labels.append(label)
        others.append(sum(v[i] * s[i] for i in left) / sum(v[i] for i in left) if left else np.zeros(s.shape[1]))
        disputed.append(bool(left))
    return np.array(labels), np.array(others), np.array(disputed)


def test_consensus_by_hand():
    scores = draw(4, 60, 3)
    scores[:, :9] += 30 * torch.eye(3).repeat(3, 1)  # here all agree
    found, (labels, others, disputed) = consensus(scores), by_hand(scores.numpy())
    np.testing.assert_array_equal(found.labels, labels)
    np.testing.assert_allclose(found.others, others, atol=1e-12)
    np.testing.assert_array_equal(found.disagreement, disputed)
    assert 0 < disputed.sum() < 60
    assert not found.others[~found.disagreement].any()


def test_shares_sum_to_one_and_leave_out_who_is_not_counted():
    v, counted = draw(5, 40).square(), draw(5, 40, seed=1) > 0
    counted[:, 0] = False
    v[:, 1], counted[:, 1] = 0.0, torch.tensor([True, False, True, False, False])
    found = confidence_weights(v, counted)
    assert not found[~counted].any()
    torch.testing.assert_close(found.sum(0)[1:], torch.ones(39, dtype=torch.float64))
    assert not found[:, 0].any()
    assert found[:, 1].tolist() == [0.5, 0, 0.5, 0, 0]


@pytest.mark.parametrize("weight", [0.0, 0.8])
def test_the_servers_loss_by_hand(weight):
    scores, agreed = draw(20, 3, seed=5).requires_grad_(), consensus(draw(3, 20, 3, seed=6))
    agreed = agreed._replace(disagreement=agreed.disagreement & (torch.arange(20) % 3 > 0))
    loss = transfer_loss(scores, agreed, weight)
    p, y = softmax(scores.detach().numpy()), agreed.labels.numpy()
    q, disputed = softmax(agreed.others.numpy()), agreed.disagreement.numpy()
    kl = disputed * (q * np.log(q / p)).sum(1)
    assert loss.item() == pytest.approx((-np.log(p[np.arange(20), y]) + weight * kl).mean())
    (gradient,) = torch.autograd.grad(loss, scores)
    expected = (p - np.eye(3)[y] + weight * disputed[:, None] * (p - q)) / 20
    np.testing.assert_allclose(gradient.numpy(), expected, atol=1e-12)
    assert 0 < disputed.sum() < 20
    assert ((p - q).min() < 0 < (p - q).max()).all()


test_conformance = testing.conformance(
    methods.FedET(server_steps=2, server_batch=8, server_lr=0.05, diversity_weight=0.5),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    changed_values={"network": "smallest"},
    reductions=[oracles.is_fedavg({"server_steps": 0}, "uniform")],
)
