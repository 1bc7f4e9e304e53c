"""LocalMutual against a loop with two optimizers; who teaches whom, on which images, and how mixtures are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed.core.randomness import generator
from polyfed.errors import ConfigError
from polyfed.functional.patch_mixing import mixing_map
from polyfed.methods import LocalMutual, local_mutual
from polyfed.methods.local_mutual import CANDIDATES
from tests.helpers import toys
from tests.helpers.image_clients import CLASSES, NETS, check_pair, image_rounds, kl, members, pair
from tests.helpers.toys import federation

METHOD = LocalMutual(mutual=0.7, mixed=0.4)


def losses(nets: list[Any], x: torch.Tensor, y: torch.Tensor, mixed: list[torch.Tensor]) -> list[torch.Tensor]:
    """L_w and L_m of METHOD, each with the other network as a constant."""
    found = []
    for me, other, own_mixture in ((nets[0], nets[1], mixed[1]), (nets[1], nets[0], mixed[2])):
        loss = torch.nn.functional.cross_entropy(me(x), y) + 0.7 * kl(other(x), me(x), 4.0)
        loss = loss + 0.7 * (me.represent(x) - other.represent(x).detach()).square().mean()
        loss = loss + 0.4 * (me.represent(mixed[0]) - other.represent(mixed[0]).detach()).square().mean()
        found.append(loss + 0.4 * kl(other(own_mixture), me(own_mixture), 4.0))
    return found


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_round_against_a_loop_with_two_optimizers(kind: str) -> None:
    people = members()
    first, second = image_rounds(METHOD, people, optimizer=kind, local_epochs=2)
    for number, client in enumerate(people):
        nets = pair(client.architecture, first.weights[number] or {})
        make = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
        steppers = [make(net.parameters(), lr=0.1) for net in nets]
        order = generator(0, "batches", "train", 2, number)
        inputs = generator(0, "inputs", "train", 2, number)
        data = client.data.train
        for _ in range(2):
            for rows in torch.randperm(len(data.y), generator=order).split(4):
                x, y = data.x[rows], data.y[rows]
                shares = [mixing_map(6, 6, 16, 0.1, inputs) for _ in range(3)]
                ends = torch.rand(3, 4, generator=inputs)
                mixed = []
                for share, end in zip(shares, ends, strict=True):
                    ranked = sorted(range(len(rows)), key=lambda i, end=end: float(end[i]))  # type: ignore[misc]
                    mixed.append(torch.stack([share * x[i] + (1 - share) * x[ranked[i]] for i in range(len(rows))]))
                both = losses(nets, x, y, mixed)
                grads = [torch.autograd.grad(loss, [*net.parameters()]) for loss, net in zip(both, nets, strict=True)]
                for stepper, net, grad in zip(steppers, nets, grads, strict=True):
                    for p, g in zip(net.parameters(), grad, strict=True):
                        p.grad = g
                    stepper.step()
        check_pair(second.weights[number], nets, 2e-4)


def numpy_gaps(nets: list[Any], x: torch.Tensor, alpha: float, patches: int, draws: torch.Generator) -> list[float]:
    share = mixing_map(6, 6, patches, alpha, draws)
    x = share * x + (1 - share) * x[torch.randperm(len(x), generator=draws)]
    (z, f), (z_m, f_m) = [
        (net.represent(x).detach().double().numpy(), net(x).detach().double().numpy() / 4) for net in nets
    ]
    p, q = (one - np.log(np.exp(one).sum(1, keepdims=True)) for one in (f, f_m))
    both = ((np.exp(q) * (q - p)).sum(1).mean(), (np.exp(p) * (p - q)).sum(1).mean())
    return [float(((z - z_m) ** 2).mean()), *map(float, both)]


def test_the_search_takes_what_the_networks_differ_on_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_mutual, "SEARCH_EVERY", 2)
    people = members()
    first, second, third = image_rounds(LocalMutual(), people, rounds=3)
    chosen = set()
    for number, client in enumerate(people):
        assert first.states[number]["mixtures"].tolist() == [[0.1, 16.0]] * 3
        nets = [net.eval() for net in pair(client.architecture, first.weights[number] or {})]
        draws = generator(0, "mixtures", "train", 2, number)
        gaps = np.array([numpy_gaps(nets, client.data.train.x, a, n, draws) for a, n in CANDIDATES])
        expected = [list(map(float, CANDIDATES[place])) for place in gaps.argmax(0)]
        assert second.states[number]["mixtures"].tolist() == expected
        assert torch.equal(third.states[number]["mixtures"], second.states[number]["mixtures"])
        chosen |= {tuple(one) for one in expected}
    assert len(chosen) > 1
    assert "mixtures" not in image_rounds(LocalMutual(mixed=0.0))[-1].states[0]


def test_what_is_refused_before_round_1() -> None:
    with pytest.raises(
        ConfigError, match=r"local-mutual needs images, inputs \(C, H, W\) of floats; client 0 has \(4,\)"
    ):
        federation(LocalMutual(), toys.clients(["deep", "wide"]))
    with pytest.raises(ConfigError, match=r"both networks of a client.*gives 6, the second network 5; set models"):
        federation(LocalMutual(shared="narrow"), members(), NETS, classes=CLASSES)
