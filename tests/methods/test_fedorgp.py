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
from tests.helpers.toys import (
    CLASSES,
    NETS,
    Round,
    model_with,
    moved,
    rounds,
    same,
)

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


def numpy_prototypes(w: dict[str, np.ndarray]) -> np.ndarray:
    hidden = np.maximum(w["embedding"] @ w["hidden.weight"].T + w["hidden.bias"], 0)
    found: np.ndarray = hidden @ w["output.weight"].T + w["output.bias"]
    return found


def numpy_loss(w: dict[str, np.ndarray], rows: np.ndarray, labels: np.ndarray, gamma: float) -> float:
    found = cosines(rows, numpy_prototypes(w))
    own = np.eye(CLASSES)[labels] > 0
    return float((1 - found[own]).mean() + gamma * np.abs(found[~own]).mean())


# the server ---------------------------------------------------------------------------------------------------------


def test_a_step_of_the_server_against_finite_differences() -> None:
    """One epoch, one batch: the network moves down the slope of the means over all pairs received."""
    method = FedORGP(gamma=2.0, server_lr=0.05)
    (round,) = rounds(method, members(), rounds=1, batch_size=20)
    rows, labels = pairs(round)
    w = {name: t.double().numpy() for name, t in round.before["network"].items()}
    assert round.record["server"]["prototype_loss"] == pytest.approx(numpy_loss(w, rows, labels, 2.0), rel=1e-5)
    signs = set()
    for name, t in w.items():
        for place in list(np.ndindex(t.shape))[:6]:
            ends = []
            for way in (1e-5, -1e-5):
                other = {**w, name: t.copy()}
                other[name][place] += way
                ends.append(numpy_loss(other, rows, labels, 2.0))
            slope = (ends[0] - ends[1]) / 2e-5
            signs.add(np.sign(slope))
            assert float(round.after["network"][name][place]) == pytest.approx(t[place] - 0.05 * slope, abs=1e-5)
    assert {-1.0, 1.0} <= signs


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

        expected, _ = server_prototypes.train_network(before, rows.float(), labels, loss, 3, 4, 0.1, draws)
        assert all(torch.allclose(after[name], t, atol=1e-5) for name, t in expected.items())
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
