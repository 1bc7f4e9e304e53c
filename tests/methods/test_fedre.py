"""FedRE's own properties against NumPy by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.message import nbytes
from polyfed.core.randomness import generator
from polyfed.core.settings import Privacy
from polyfed.engine.alone import alone
from polyfed.errors import ConfigError
from polyfed.methods import FedGH, FedRE
from tests.helpers.few_classes import class_means, members
from tests.helpers.table3 import kib, second_round
from tests.helpers.toys import CLASSES, NETS, Round, clients, federation, model_with, moved, rounds, same


def sound(people: list[Client], round: Round, number: int) -> bool:
    """Whether every upload is the mixture of the trained network's class means, by the weights of its round."""
    for i, client in enumerate(people):
        rows = class_means(client, round.trained[i])
        drawn = 1 - torch.rand(len(rows), generator=generator(0, "entangle", "train", number, i)).double().numpy()
        shares = dict(zip(rows, drawn / drawn.sum(), strict=True))
        encoding = [shares.get(c, 0.0) for c in range(CLASSES)]
        mixture = sum(shares[c] * row for c, row in rows.items())
        if not np.allclose(round.up[i]["encoding"].numpy(), encoding, atol=1e-6):
            return False
        if not np.allclose(round.up[i]["representation"].numpy(), mixture, atol=1e-6):
            return False
    return True


def numpy_header(round: Round, number: int, method: FedRE) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The header after the round's steps, of the losses summed over each batch."""
    theta, bias = (round.before["header"][name].double().numpy() for name in ("weight", "bias"))
    z, q = (
        np.stack([round.up[i][name].double().numpy() for i in sorted(round.up)])
        for name in ("representation", "encoding")
    )
    draws = generator(0, "server header", number)
    for _ in range(method.header_epochs):
        order = torch.randperm(len(z), generator=draws).tolist()
        for start in range(0, len(z), method.header_batch):
            rows = order[start : start + method.header_batch]
            logits = z[rows] @ theta.T + bias
            p = np.exp(logits - logits.max(1, keepdims=True))
            residual = p / p.sum(1, keepdims=True) - q[rows]
            theta = theta - method.header_lr * residual.T @ z[rows]
            bias = bias - method.header_lr * residual.sum(0)
    return theta, bias


# the round ----------------------------------------------------------------------------------------------------------


def test_uploads_are_mixtures_drawn_anew_in_every_round() -> None:
    people = members()
    history = rounds(FedRE(), people, rounds=3)
    assert all(sound(people, round, number) for number, round in enumerate(history, 1))
    seen = [tuple(round.up[2]["encoding"].tolist()) for round in history]
    assert len(set(seen)) == 3
    for round in history:
        assert set(round.up[0]) == {"representation", "encoding"}
        assert round.up[3]["encoding"].tolist() == [0, 0, 1]  # one class: nothing to mix
        assert all(float(message["encoding"].sum()) == pytest.approx(1) for message in round.up.values())


@pytest.mark.parametrize(("batch", "epochs"), [(32, 1), (2, 1), (3, 20)])
def test_the_header_against_numpy(batch: int, epochs: int) -> None:
    method = FedRE(header_lr=0.2, header_batch=batch, header_epochs=epochs)
    for number, round in enumerate(rounds(method, members(), rounds=3), 1):
        theta, bias = numpy_header(round, number, method)
        np.testing.assert_allclose(round.after["header"]["weight"].numpy(), theta, atol=1e-5)
        np.testing.assert_allclose(round.after["header"]["bias"].numpy(), bias, atol=1e-5)
        assert moved(round.before["header"], round.after["header"]) > 1e-3


def test_clients_train_as_under_fedgh() -> None:
    """With the same header sent, the two differ in what is uploaded alone."""
    ours, theirs = (rounds(method, members(), rounds=1)[0] for method in (FedRE(), FedGH()))
    assert all(same(ours.down[i]["header"], theirs.down[i]["header"]) for i in ours.down)
    assert all(same(ours.trained[i], theirs.trained[i]) for i in ours.trained)


def test_clients_of_one_class_are_those_of_fedgh() -> None:
    """Nothing is mixed; a sum over four at a quarter of the rate is FedGH's mean over the round."""
    alike = members(((0,), (1,), (2,), (1,)))
    ours = rounds(FedRE(header_lr=0.05), alike, rounds=3)
    theirs = rounds(FedGH(header_lr=0.2, header_batch="round", max_grad_norm=0.0), alike, rounds=3)
    for a, b in zip(ours, theirs, strict=True):
        assert moved(a.after["header"], b.after["header"]) < 1e-5


def test_the_newest_header_is_scored() -> None:
    people = members(test=40)
    last = rounds(FedRE(header_lr=0.3), people)[1]
    header = last.after["header"]
    for i, client in enumerate(people):
        weights = last.weights[i]
        assert weights is not None
        z = model_with(NETS[client.architecture], weights).represent(client.data.test.x).detach()
        hits = (z @ header["weight"].T + header["bias"]).argmax(1) == client.data.test.y
        assert last.record["accuracy_per_client"][i] == pytest.approx(float(hits.double().mean()))


def test_a_header_that_stays_is_worth_the_same_alone() -> None:
    people = clients(["deep"] * 3)
    together, separate = (rounds(method, people)[1] for method in (FedRE(header_lr=0.0), alone(FedRE(header_lr=0.0))))
    for i in range(3):
        assert together.weights[i] is not None
        assert same(together.weights[i], separate.weights[i])
    taught = [rounds(method, people)[1].weights[0] for method in (FedRE(header_lr=0.3), alone(FedRE(header_lr=0.3)))]
    assert not same(*taught)


# bytes, refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "present"), [(10, 2), (100, 10)])
def test_bytes(classes: int, present: int) -> None:
    """One mixture goes up, however many classes a client has."""
    round = second_round(FedRE(), classes, present, 2)
    assert nbytes(round.up[0]) == 4 * (500 + classes)
    assert nbytes(round.down[0]) == 4 * (500 * classes + classes)
    assert kib(FedRE(), round, 0) == f"{4 * (500 + classes + 501 * classes) / 1024:.2f}"


def test_unequal_widths_and_clipping_are_refused_before_round_1() -> None:
    with pytest.raises(ConfigError, match=r"one feature width.*gives 8.*gives 5.*models\.feature_dim.*fedhenn"):
        federation(FedRE(), clients(["deep", "broad"]))
    with pytest.raises(ConfigError, match="expected uploads that can be clipped, got fedre, which sends 'encoding'"):
        federation(FedRE(), members(), plugins=[Privacy(upload_clip_norm=1.0)])[0].run()
