"""FedSAF's own properties against NumPy and autograd by hand."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.methods import FedSAF, Local
from tests.helpers import few_classes
from tests.helpers.few_classes import mean_rows
from tests.helpers.toys import CLASSES, NETS, Round, model_with, moved, rounds, same

ONE_STEP: dict[str, Any] = {"batch_size": 64, "lr": 0.2, "local_epochs": 1}
members = functools.partial(few_classes.members, architectures=few_classes.WITHOUT_NORM)


def gap(m: Tensor, p: Tensor) -> Tensor | float:
    """The structures' difference, pair by pair; of rows that both have."""
    terms = [
        ((m[a] - m[b]).square().mean().sqrt() - (p[a] - p[b]).square().mean().sqrt()) ** 2
        for a, b in permutations(range(len(m)), 2)
    ]
    return torch.stack(terms).mean() if terms else 0.0


def stepped(client: Client, before: Mapping[str, Tensor], down: Message) -> dict[str, Tensor]:
    """The weights after one step on all of the client's rows, the loss written out."""
    model = model_with(NETS[client.architecture], before)
    x, y = client.data.train.x, client.data.train.y
    z = model.represent(x)
    known = down["labels"].tolist()
    common = [c for c in y.unique().tolist() if c in known]
    m = torch.stack([z[y == c].mean(0) for c in common])
    p = torch.stack([down["prototypes"][known.index(c)] for c in common])
    loss = -torch.log_softmax(model.head(z), 1)[range(len(y)), y].mean() + 2.5 * gap(m, p)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return {name: w.detach() - 0.2 * g for (name, w), g in zip(model.named_parameters(), grads, strict=True)}


def sound(people: list[Client], history: list[Round]) -> bool:
    """Whether the second round's step is that of the loss above."""
    first, second = history
    steps = [stepped(client, first.trained[i], second.down[i]) for i, client in enumerate(people)]
    return all(moved(step, second.trained[i]) < 1e-5 for i, step in enumerate(steps))


# the round ----------------------------------------------------------------------------------------------------------


def test_a_step_against_autograd_by_hand() -> None:
    people = members()
    assert sound(people, rounds(FedSAF(structure_weight=2.5), people, **ONE_STEP))


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


def test_one_class_has_no_structure() -> None:
    people = members(((0,), (1,), (2,), (2,)))
    ours, local = (rounds(m, people, rounds=3)[-1] for m in (FedSAF(structure_weight=2.5), Local()))
    assert all(same(ours.trained[i], local.trained[i]) for i in range(4))
    expected = "no batch held two classes that have a prototype, so that clients train as in local"
    assert FedSAF().remark(ours.record) == expected
