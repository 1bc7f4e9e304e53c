"""FedGH's own properties against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.randomness import generator
from polyfed.methods import FedGH, fedgh
from polyfed.methods.fedgh import header_sgd_step
from tests.helpers import few_classes, oracles
from tests.helpers.toys import clients, moved, rounds

MIXED = ["shallow", "deep", "wide"]  # different extractors, one feature width


def stepped(header, batches, lr, clip):
    """Steps of SGD, by autograd, on the mean cross entropy of each batch."""
    params = [header[name].double().requires_grad_() for name in ("weight", "bias")]
    optimizer = torch.optim.SGD(params, lr)
    for vectors, labels in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(vectors @ params[0].T + params[1], labels).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return {"weight": params[0].detach().float(), "bias": params[1].detach().float()}


def pairs_of(round):
    """Per client the pairs it sent, vectors and labels: clients ascending, classes ascending."""
    return [(message["lars"].double(), message["labels"].long()) for _, message in sorted(round.up.items())]


def batches_of(mode, per_client, epochs, round):
    vectors, labels = (torch.cat(parts) for parts in zip(*per_client, strict=True))
    draws = generator(0, "server header", round)
    for _ in range(epochs):
        if mode == "client":
            yield from per_client
            continue
        order = torch.randperm(len(labels), generator=draws) if isinstance(mode, int) else torch.arange(len(labels))
        size = {"lar": 1, "round": len(labels)}.get(mode, mode)
        yield from ((vectors[rows], labels[rows]) for rows in order.split(size))


@pytest.mark.parametrize(
    ("mode", "epochs", "lr", "clip"),
    [
        ("lar", 1, 0.5, 50.0),
        ("lar", 3, 0.1, 0.2),
        ("client", 2, 0.5, 0.0),
        ("round", 2, 0.5, 50.0),
        (10, 100, 0.05, 50.0),
    ],
)
def test_the_headers_steps(mode, epochs, lr, clip, monkeypatch):
    monkeypatch.setattr(fedgh, "_MAX_GRAD_NORM", clip)
    method = FedGH(header_batch=mode, header_epochs=epochs, header_lr=lr)
    members = clients([*MIXED, "deep", "shallow"], sizes=[12, 9, 15, 3, 8])
    history = rounds(method, members, rounds=3, client_fraction=0.8)
    for number, round in enumerate(history, 1):
        before, after = round.before["header"], round.after["header"]
        batches = batches_of(mode, pairs_of(round), epochs, number)
        assert moved(stepped(before, batches, lr, clip), after) < (2e-5 if epochs == 100 else 2e-6)
        assert moved(before, after) > 1e-3, "the header must really change (8.13)"


def test_weights_of_a_step_are_relative():
    draws = torch.Generator().manual_seed(1)
    theta, bias, z, w = (torch.rand(shape, generator=draws).double() for shape in ((4, 6), (4,), (7, 6), (7,)))
    y = torch.tensor([0, 3, 1, 1, 2, 0, 2])
    found = header_sgd_step(theta, bias, z, y, w, 0.3, 0.0)
    params = [theta.clone().requires_grad_(), bias.clone().requires_grad_()]
    losses = torch.nn.functional.cross_entropy(z @ params[0].T + params[1], y, reduction="none")
    slopes = torch.autograd.grad((w * losses).sum() / w.sum(), params)
    for new, before, slope in zip(found, (theta, bias), slopes, strict=True):
        torch.testing.assert_close(new, before - 0.3 * slope)
    torch.testing.assert_close(header_sgd_step(theta, bias, z, y, 9 * w, 0.3, 0.0), found)
    assert torch.equal(header_sgd_step(theta, bias, z, y, 0 * w, 0.3, 0.0)[0], theta)  # no weight: nothing moves


def test_lars_are_taken_after_training_in_eval_mode():
    people = few_classes.members(architectures=("bn", "deep", "dropout"))
    (round,) = rounds(FedGH(), people, rounds=1, local_epochs=3, lr=0.3)
    for i, client in enumerate(people):
        means = few_classes.class_means(client, round.weights[i])
        assert round.up[i]["labels"].tolist() == list(means)
        np.testing.assert_allclose(round.up[i]["lars"], np.stack([*means.values()]), atol=1e-6)


def test_noise_has_the_labels_mean_and_spread_of_the_lars_and_new_draws_every_round():
    """One client, 60 rounds without learning: its LARs stay the same, so the draws can be pooled."""
    plain, control = (FedGH(header_lr=0.0, control=kind) for kind in ("none", "noise"))
    assert [plain.is_control, control.is_control] == [False, True]
    (sent,) = rounds(plain, clients(["wide"]), rounds=1, lr=0.0)
    noisy = rounds(control, clients(["wide"]), rounds=60, lr=0.0)
    lars = sent.up[0]["lars"]
    draws = torch.stack([round.up[0]["lars"] for round in noisy])
    assert draws.shape == (60, *lars.shape)
    assert all(torch.equal(round.up[0]["labels"], sent.up[0]["labels"]) for round in noisy)
    assert len(draws.flatten(1).unique(dim=0)) == 60
    standard_error = float(lars.std()) / draws.numel() ** 0.5
    assert abs(float(draws.mean() - lars.mean())) < 5 * standard_error
    assert float(draws.std() / lars.std(correction=0)) == pytest.approx(1, abs=0.1)


test_conformance = testing.conformance(
    methods.FedGH(header_lr=0.1),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.CLASS_ROWS,
    skip=oracles.IN_ORDER,
)

test_other_settings = oracles.other_settings(
    (methods.FedGH(header_batch="round", header_epochs=20, header_lr=0.1), {}),
    (methods.FedGH(control="noise", header_lr=0.1), {"skip": oracles.IN_ORDER}),
)
