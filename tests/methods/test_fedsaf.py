"""FedSAF's own properties against NumPy and autograd by hand."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.server import Server
from polyfed.engine.alone import alone
from polyfed.functional.class_structure import Measure
from polyfed.methods import FedSAF, Local
from tests.helpers import few_classes
from tests.helpers.few_classes import mean_rows
from tests.helpers.toys import CLASSES, NETS, Round, model_with, moved, rounds, same

MEASURES: tuple[Measure, ...] = ("cka", "gram", "distance")
ONE_STEP: dict[str, Any] = {"batch_size": 64, "lr": 0.2, "local_epochs": 1}
members = functools.partial(few_classes.members, architectures=few_classes.WITHOUT_NORM)


def gap(m: Tensor, p: Tensor, measure: str) -> Tensor | float:
    """The structures' difference, pair by pair; of rows that both have."""
    n, width = m.shape
    if n < (3 if measure == "cka" else 2):
        return 0.0
    if measure == "distance":
        terms = [
            ((m[a] - m[b]).square().mean().sqrt() - (p[a] - p[b]).square().mean().sqrt()) ** 2
            for a, b in permutations(range(n), 2)
        ]
        return torch.stack(terms).mean()
    m, p = m - m.mean(0), p - p.mean(0)
    if measure == "gram":
        terms = [((m[a] @ m[b] - p[a] @ p[b]) / width) ** 2 for a, b in product(range(n), repeat=2)]
        return torch.stack(terms).mean()
    return 1 - (m.T @ p).square().sum() / ((m.T @ m).norm() * (p.T @ p).norm())


def stepped(client: Client, before: Mapping[str, Tensor], down: Message, measure: str) -> dict[str, Tensor]:
    """The weights after one step on all of the client's rows, the loss written out."""
    model = model_with(NETS[client.architecture], before)
    x, y = client.data.train.x, client.data.train.y
    z = model.represent(x)
    known = down["labels"].tolist()
    common = [c for c in y.unique().tolist() if c in known]
    m = torch.stack([z[y == c].mean(0) for c in common])
    p = torch.stack([down["prototypes"][known.index(c)] for c in common])
    loss = -torch.log_softmax(model.head(z), 1)[range(len(y)), y].mean() + 2.5 * gap(m, p, measure)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return {name: w.detach() - 0.2 * g for (name, w), g in zip(model.named_parameters(), grads, strict=True)}


def sound(people: list[Client], history: list[Round], measure: str) -> bool:
    """Whether the second round's step is that of the loss above."""
    first, second = history
    steps = [stepped(client, first.trained[i], second.down[i], measure) for i, client in enumerate(people)]
    return all(moved(step, second.trained[i]) < 1e-5 for i, step in enumerate(steps))


# the round ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
def test_a_step_against_autograd_by_hand(measure: Measure) -> None:
    people = members()
    assert sound(people, rounds(FedSAF(structure_weight=2.5, structure=measure), people, **ONE_STEP), measure)


def test_prototypes_are_the_clients_mean_means() -> None:
    people = members()
    for round in rounds(FedSAF(), people, rounds=3):
        for i, client in enumerate(people):
            assert torch.allclose(round.up[i]["prototypes"], mean_rows(client, round.trained[i]), atol=1e-6)
            assert set(round.up[i]) == {"labels", "prototypes"}
        for c in range(CLASSES):
            rows = [m["prototypes"][m["labels"].tolist().index(c)] for m in round.up.values() if c in m["labels"]]
            mean = np.mean([row.double().numpy() for row in rows], axis=0)  # every client counts once
            assert round.after["prototypes"][c].numpy() == pytest.approx(mean, abs=1e-6)


def test_a_class_that_nobody_sent_anew_keeps_its_prototype() -> None:
    first, second = rounds(FedSAF(), members(), lose=lambda round, i: round == 2 and i != 3)
    assert torch.equal(second.after["prototypes"][:2], first.after["prototypes"][:2])
    assert not torch.equal(second.after["prototypes"][2], first.after["prototypes"][2])
    late = rounds(FedSAF(), members(), lose=lambda round, i: round == 1 and i != 3)
    assert late[1].down[0]["labels"].tolist() == [2]
    assert late[1].after["labels"].tolist() == [0, 1, 2]


def test_round_1_is_local() -> None:
    first = rounds(FedSAF(structure_weight=5.0), members(), rounds=1)[0]
    local = rounds(Local(), members(), rounds=1)[0]
    assert all(message == {} for message in first.down.values())
    assert all(same(first.trained[i], local.trained[i]) for i in range(4))


def test_where_the_prototypes_lie_does_not_matter() -> None:
    """Turned and moved prototypes teach the same; a longer way between two of them does not."""

    class Turned(FedSAF):
        def broadcast(self, server: Server, client_id: int) -> Message:
            message = super().broadcast(server, client_id)
            turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))[0]
            return message and {**message, "prototypes": message["prototypes"] @ turn + 3}

    class Stretched(FedSAF):
        def broadcast(self, server: Server, client_id: int) -> Message:
            message = super().broadcast(server, client_id)
            return message and {**message, "prototypes": 2 * message["prototypes"]}

    ours, turned, stretched = (rounds(kind(structure_weight=2.5), members())[1] for kind in (FedSAF, Turned, Stretched))
    for i in range(3):
        assert moved(ours.trained[i], turned.trained[i]) < 1e-5
        assert moved(ours.trained[i], stretched.trained[i]) > 1e-3


@pytest.mark.parametrize("measure", MEASURES)
def test_two_classes_have_no_structure_to_cka_and_one_has_none_to_anybody(measure: Measure) -> None:
    people = members(((0, 1), (1, 2), (0, 2), (2,)))
    ours = rounds(FedSAF(structure_weight=2.5, structure=measure), people, rounds=3)[-1]
    local = rounds(Local(), people, rounds=3)[-1]
    assert same(ours.trained[3], local.trained[3])
    assert same(ours.trained[0], local.trained[0]) == (measure == "cka")
    remark = FedSAF(structure=measure).remark(ours.record)
    expected = "no batch held three classes that have a prototype, so that clients train as in local"
    assert remark == (expected if measure == "cka" else "")


def test_the_head_is_scored() -> None:
    people = members(test=40)
    last = rounds(FedSAF(), people)[1]
    for i, client in enumerate(people):
        weights = last.weights[i]
        assert weights is not None
        scores = model_with(NETS[client.architecture], weights)(client.data.test.x)
        share = float((scores.argmax(1) == client.data.test.y).double().mean())
        assert last.record["accuracy_per_client"][i] == pytest.approx(share)


def test_alone_a_client_keeps_to_its_own_structure() -> None:
    people = members()
    separate = rounds(alone(FedSAF(structure_weight=2.5)), people)[1]
    assert torch.equal(
        separate.down[2]["prototypes"], rounds(alone(FedSAF(structure_weight=2.5)), people)[0].up[2]["prototypes"]
    )
    together = rounds(FedSAF(structure_weight=2.5), people)[1]
    assert not same(together.trained[2], separate.trained[2])


# bytes, refusals ------------------------------------------------------------------------------------------------------
