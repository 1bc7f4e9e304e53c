"""FedRE's own properties against NumPy by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.randomness import generator
from polyfed.core.settings import Privacy
from polyfed.errors import ConfigError
from polyfed.methods import FedRE
from tests.helpers.few_classes import class_means, members
from tests.helpers.toys import CLASSES, Round, clients, federation, moved, rounds


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


# bytes, refusals ------------------------------------------------------------------------------------------------------


def test_unequal_widths_and_clipping_are_refused_before_round_1() -> None:
    with pytest.raises(ConfigError, match=r"one feature width.*gives 8.*gives 5.*models\.feature_dim.*fedhenn"):
        federation(FedRE(), clients(["deep", "broad"]))
    with pytest.raises(ConfigError, match="expected uploads that can be clipped, got fedre, which sends 'encoding'"):
        federation(FedRE(), members(), plugins=[Privacy(upload_clip_norm=1.0)])[0].run()
