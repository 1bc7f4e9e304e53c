"""FedKWAZ's class means, first stage, server and bytes against NumPy and plain loops; its second is LocalMutual's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.core.settings import Training
from polyfed.methods import FedKWAZ
from tests.helpers.image_clients import SOME, check_pair, image_rounds, members, pair

NAMES = ("own_features", "own_scores", "auxiliary_features", "auxiliary_scores")
PLAIN = FedKWAZ(mutual=0.0, mixed=0.0)  # stage 2 is cross entropy


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


def test_a_class_that_nobody_sends_keeps_its_means() -> None:
    first, second = image_rounds(FedKWAZ(), members(), lose=lambda round, i: round == 2 and i != 1)
    for name in NAMES:
        before, after = by_class(first.after, name), by_class(second.after, name)
        assert (before[0] == after[0]).all()
        np.testing.assert_allclose(after[2], by_class(second.up[1], name)[2], atol=1e-6)
    _, silent = image_rounds(FedKWAZ(), members(), lose=lambda round, i: round == 2)
    assert silent.before == silent.after
    few = image_rounds(FedKWAZ(), members(), lose=lambda round, i: round == 1 and i != 0)[1]
    assert few.down[2]["labels"].tolist() == [0, 1]  # class 2 is learned from the labels alone


def numpy_stage_1(nets: list[Any], x: torch.Tensor, y: torch.Tensor, down: Mapping[str, Any]) -> list[torch.Tensor]:
    """L_w and L_m, written out."""
    found = []
    for net, teacher in zip(nets, ("auxiliary", "own"), strict=True):
        z, scores = net.represent(x), net(x)
        rows = {kind: np.stack([*by_class(down, f"{teacher}_{kind}").values()]) for kind in ("features", "scores")}
        features, targets = (torch.tensor(one).float() for one in rows.values())
        soft = -(F.softmax(targets, 1)[y] * F.log_softmax(scores, 1)).sum(1).mean()
        found.append(F.cross_entropy(scores, y) + soft + (z - features[y]).square().mean())
    return found


def test_a_round_against_a_loop_with_two_optimizers() -> None:
    people = members()
    first, second = image_rounds(PLAIN, people, local_epochs=2)
    for number, client in enumerate(people):
        nets = pair(client.architecture, first.weights[number] or {})
        steppers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        order = generator(0, "batches", "train", 2, number)
        data = client.data.train
        for epoch in range(4):  # two of each stage
            for rows in torch.randperm(len(data.y), generator=order).split(4):
                x, y = data.x[rows], data.y[rows]
                both = [F.cross_entropy(net(x), y) for net in nets]
                if epoch < 2:
                    both = numpy_stage_1(nets, x, y, second.down[number])
                for stepper, loss in zip(steppers, both, strict=True):
                    stepper.zero_grad()
                    loss.backward()
                    stepper.step()
        check_pair(second.weights[number], nets, 1e-4)


def test_phases() -> None:
    training = Training(local_epochs=3)
    for method, expected in (
        (FedKWAZ(), [("global", 3), ("mutual", 3)]),
        (FedKWAZ(global_epochs=1), [("global", 1), ("mutual", 3)]),
        (FedKWAZ(global_epochs=0), [("mutual", 3)]),
    ):
        assert [(phase.name, phase.epochs) for phase in method.phases(training)] == expected
