"""FedKWAZ's class means, stages and server against NumPy and plain loops, and how images are mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.randomness import generator
from polyfed.functional.patch_mixing import mixing_map
from polyfed.methods import FedKWAZ, fedkwaz
from polyfed.methods.fedkwaz import CANDIDATES
from polyfed.testing import Reduction
from polyfed.testing.fixtures import CLASSES, draw, tiny_model
from tests.helpers import oracles
from tests.helpers.toys import Round, rounds

NETS: Mapping[str, Callable[[], nn.Module]] = {
    "small": lambda: tiny_model(0, 3, 6),
    "deep": lambda: tiny_model(1, 4, 6),
    "wide": lambda: tiny_model(0, 5, 6),
}
SOME = ((0, 1), (1, 2), (0, 1, 2))  # classes of three clients
WEIGHTS: dict[str, Any] = {"mutual": 0.7, "mixed": 0.4}


def members() -> list[Client]:
    """Three, each with a network of its own, with 9, 10, 11 images."""
    return [Client(kind, draw(9 + i, SOME[i], i)) for i, kind in enumerate(("deep", "wide", "small"))]


def image_rounds(method: Method, people: list[Client], **options: Any) -> list[Round]:
    """Two rounds of such a federation, or as asked for."""
    return rounds(method, people, NETS, classes=CLASSES, **options)


def part(weights: Mapping[str, Tensor] | None, name: str) -> dict[str, Tensor]:
    """One of a client's networks: "own" or "auxiliary_model"."""
    return {key.removeprefix(f"{name}."): t for key, t in (weights or {}).items() if key.startswith(f"{name}.")}


def pair(kind: str, weights: Mapping[str, Tensor]) -> list[Any]:
    """Both networks of a client of this architecture with these weights."""
    nets: list[Any] = [NETS[kind](), NETS["small"]()]
    for net, name in zip(nets, ("own", "auxiliary_model"), strict=True):
        net.load_state_dict(part(weights, name))
    return nets


def check_pair(weights: Mapping[str, Tensor] | None, nets: list[Any], atol: float) -> None:
    """Whether a client has come to these networks."""
    for name, net in zip(("own", "auxiliary_model"), nets, strict=True):
        torch.testing.assert_close(part(weights, name), dict(net.state_dict()), atol=atol, rtol=1e-3)


def kl(teacher: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """T^2 KL of softmax(teacher / T) and softmax(scores / T), the teacher a constant; a mean over rows."""
    p = torch.softmax(teacher.detach() / temperature, 1)
    q = torch.log_softmax(scores / temperature, 1)
    return temperature**2 * (p * (p.log() - q)).sum(1).mean()


NAMES = ("own_features", "own_scores", "auxiliary_features", "auxiliary_scores")


def outputs(nets: list[Any], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The four kinds of rows, in eval mode."""
    own, other = (net.eval() for net in nets)
    rows = own.represent(x), own(x), other.represent(x), other(x)
    return {name: one.detach() for name, one in zip(NAMES, rows, strict=True)}


def by_class(message: Mapping[str, Any], name: str) -> dict[int, np.ndarray]:
    labels = message["labels"].tolist()
    return dict(zip(labels, message[name].double().numpy(), strict=True))


def test_class_means_of_both_networks_go_up_after_training_and_plain_means_come_down_to_all() -> None:
    people = members()
    first, second = image_rounds(FedKWAZ(), people)
    assert all(message == {} for message in first.down.values())
    assert second.down[0]["labels"].tolist() == [0, 1, 2]
    for i, client in enumerate(people):
        assert first.up[i]["labels"].tolist() == list(SOME[i])
        for name, rows in outputs(pair(client.architecture, first.trained[i]), client.data.train.x).items():
            for c, mean in by_class(first.up[i], name).items():
                expected = rows[client.data.train.y == c].double().numpy().mean(0)
                np.testing.assert_allclose(mean, expected, atol=1e-5)
    for name in NAMES:
        sent = [by_class(first.up[i], name) for i in range(3)]
        for c, row in by_class(second.down[1], name).items():
            np.testing.assert_allclose(row, np.mean([one[c] for one in sent if c in one], axis=0), atol=1e-6)


def stage_1(nets: list[Any], x: torch.Tensor, y: torch.Tensor, down: Mapping[str, Any]) -> list[torch.Tensor]:
    """L_w and L_m, written out."""
    found = []
    for net, teacher in zip(nets, ("auxiliary", "own"), strict=True):
        z, scores = net.represent(x), net(x)
        rows = {kind: np.stack([*by_class(down, f"{teacher}_{kind}").values()]) for kind in ("features", "scores")}
        features, targets = (torch.tensor(one).float() for one in rows.values())
        soft = -(F.softmax(targets, 1)[y] * F.log_softmax(scores, 1)).sum(1).mean()
        found.append(F.cross_entropy(scores, y) + soft + (z - features[y]).square().mean())
    return found


def mixtures(x: torch.Tensor, draws: torch.Generator) -> list[torch.Tensor]:
    """The images mixed three times, each by a map and an order of its own."""
    shares = [mixing_map(6, 6, 16, 0.1, draws) for _ in range(3)]
    orders = torch.rand(3, 4, generator=draws)[:, : len(x)].argsort(dim=1)
    return [share * x + (1 - share) * x[order] for share, order in zip(shares, orders, strict=True)]


def stage_2(nets: list[Any], x: torch.Tensor, y: torch.Tensor, mixed: list[torch.Tensor]) -> list[torch.Tensor]:
    """L_w and L_m, each with the other network as a constant."""
    found = []
    for me, other, own_mixture in ((nets[0], nets[1], mixed[1]), (nets[1], nets[0], mixed[2])):
        loss = torch.nn.functional.cross_entropy(me(x), y) + 0.7 * kl(other(x), me(x), 4.0)
        loss = loss + 0.7 * (me.represent(x) - other.represent(x).detach()).square().mean()
        loss = loss + 0.4 * (me.represent(mixed[0]) - other.represent(mixed[0]).detach()).square().mean()
        found.append(loss + 0.4 * kl(other(own_mixture), me(own_mixture), 4.0))
    return found


def test_both_stages_against_a_loop_with_two_optimizers() -> None:
    people = members()
    first, second = image_rounds(FedKWAZ(**WEIGHTS), people, local_epochs=2)
    for number, client in enumerate(people):
        nets = pair(client.architecture, first.weights[number] or {})
        steppers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        order, inputs = (generator(0, what, "train", 2, number) for what in ("batches", "inputs"))
        data = client.data.train
        for epoch in range(4):  # two of each stage
            for rows in torch.randperm(len(data.y), generator=order).split(4):
                x, y = data.x[rows], data.y[rows]
                if epoch < 2:
                    both = stage_1(nets, x, y, second.down[number])
                else:
                    both = stage_2(nets, x, y, mixtures(x, inputs))
                for stepper, loss in zip(steppers, both, strict=True):
                    stepper.zero_grad()
                    loss.backward()
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
    monkeypatch.setattr(fedkwaz, "SEARCH_EVERY", 2)
    people = members()
    first, second, third = image_rounds(FedKWAZ(), people, rounds=3)
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
    assert "mixtures" not in image_rounds(FedKWAZ(mixed=0.0), people)[-1].states[0]


test_conformance = testing.conformance(
    methods.FedKWAZ(**WEIGHTS),
    expected_bytes=oracles.of_classes(
        4 * 3 * (12 + 6 + 1), 4 * (12 + 6 + 1)
    ),  # down 4 (2 C D + 2 C C + C), up of S classes
    changed_values={"shared": "largest"},
    reductions=[
        Reduction({"global_epochs": 0, "mutual": 0.0, "mixed": 0.0}, methods.Local(), part="own."),
    ],
)
