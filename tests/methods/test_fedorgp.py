"""FedORGP's own properties against NumPy by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from polyfed.core.randomness import generator
from polyfed.functional import server_prototypes
from polyfed.methods import FedORGP
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, NETS, Round, model_with, moved, rounds, same

QUICK = FedORGP(prototype_weight=0.5, gamma=2.0, server_epochs=3, server_lr=0.1)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of all rows of one with all of the other."""
    unit_a, unit_b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))
    found: np.ndarray = unit_a @ unit_b.T
    return found


def pairs(round: Round) -> tuple[np.ndarray, np.ndarray]:
    """All means received, with their labels."""
    sent = [round.up[i] for i in sorted(round.up)]
    labels = np.concatenate([message["labels"].numpy() for message in sent])
    return np.concatenate([message["prototypes"].double().numpy() for message in sent]), labels


# the server ---------------------------------------------------------------------------------------------------------


def test_the_network_goes_on_from_round_to_round() -> None:
    history = rounds(QUICK, members(), rounds=3)
    for number, round in enumerate(history, 1):
        before, after = round.before["network"], round.after["network"]
        assert moved(before, after) > 1e-4
        if number > 1:
            assert same(before, history[number - 2].after["network"])
        rows, labels = (torch.tensor(part) for part in pairs(round))
        draws = generator(0, "server means", number)

        def loss(p: torch.Tensor, some: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = torch.nn.functional.cosine_similarity(some[:, None], p[None], dim=2)
            own = torch.nn.functional.one_hot(y, CLASSES).bool()
            return (1 - found[own]).mean() + 2.0 * found[~own].abs().mean()

        expected, value = server_prototypes.train_network(before, rows.float(), labels, loss, 3, 4, 0.1, draws)
        assert all(torch.allclose(after[name], t, atol=1e-5) for name, t in expected.items())
        assert round.record["server"]["prototype_loss"] == pytest.approx(value, rel=1e-5)
        assert torch.equal(round.after["prototypes"], server_prototypes.prototypes(after))


# the client ---------------------------------------------------------------------------------------------------------


def test_the_class_of_the_largest_cosine_is_predicted_where_asked_for() -> None:
    people = members(test=40)
    last = rounds(dataclasses.replace(QUICK, predictor="prototype"), people)[1]
    by_distance = 0
    for i, client in enumerate(people):
        model = model_with(NETS[client.architecture], last.weights[i] or {})
        z, p = model.represent(client.data.test.x).detach(), last.after["prototypes"]
        taken = cosines(z.double().numpy(), p.double().numpy()).argmax(1)
        share = float((taken == client.data.test.y.numpy()).mean())
        assert last.record["accuracy_per_client"][i] == pytest.approx(share)
        by_distance += int((torch.cdist(z, p).argmin(1).numpy() != taken).sum())
    assert by_distance > 0, "the nearest prototype should be another one now and then"
    assert list(last.record["accuracy_by_predictor"]["received"]) == ["head"]
    own = rounds(FedORGP(predictor="prototype", candidates="own"), members())[1]
    assert own.states[3]["labels"].tolist() == [2]
