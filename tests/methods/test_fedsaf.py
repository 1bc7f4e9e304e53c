"""FedSAF's own properties against NumPy by hand; its loss is in tests/testing/test_conformance.py."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from polyfed.methods import FedSAF, Local
from tests.helpers import few_classes
from tests.helpers.few_classes import mean_rows
from tests.helpers.toys import CLASSES, rounds, same

members = functools.partial(few_classes.members, architectures=few_classes.WITHOUT_NORM)


# the round ----------------------------------------------------------------------------------------------------------


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
