"""FedRE's own properties against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.randomness import generator
from polyfed.methods import FedRE, fedre
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.few_classes import class_means, members
from tests.helpers.toys import CLASSES, Round, moved, rounds


def check_mixtures(people: list[Client], round: Round, number: int) -> None:
    """Every upload must be the mixture of the trained network's class means, by the weights of its round."""
    for i, client in enumerate(people):
        rows = class_means(client, round.trained[i])
        drawn = 1 - torch.rand(len(rows), generator=generator(0, "entangle", "train", number, i)).double().numpy()
        shares = dict(zip(rows, drawn / drawn.sum(), strict=True))
        encoding = [shares.get(c, 0.0) for c in range(CLASSES)]
        mixture = sum(shares[c] * row for c, row in rows.items())
        np.testing.assert_allclose(round.up[i]["encoding"].numpy(), encoding, atol=1e-6)
        np.testing.assert_allclose(round.up[i]["representation"].numpy(), mixture, atol=1e-6)


def stepped(round: Round, number: int, method: FedRE) -> dict[str, torch.Tensor]:
    """The header after the round's steps, by autograd."""
    params = [round.before["header"][name].clone().requires_grad_() for name in ("weight", "bias")]
    optimizer = torch.optim.SGD(params, method.header_lr)
    z, q = (torch.stack([round.up[i][name] for i in sorted(round.up)]) for name in ("representation", "encoding"))
    draws = generator(0, "server header", number)
    for _ in range(method.header_epochs):
        for rows in torch.randperm(len(z), generator=draws).split(fedre.HEADER_BATCH):
            optimizer.zero_grad()
            scores = z[rows] @ params[0].T + params[1]
            torch.nn.functional.cross_entropy(scores, q[rows], reduction="sum").backward()
            optimizer.step()
    return {"weight": params[0].detach(), "bias": params[1].detach()}


def test_uploads_are_mixtures_drawn_anew_in_every_round() -> None:
    people = members()
    history = rounds(FedRE(), people, rounds=3)
    for number, round in enumerate(history, 1):
        check_mixtures(people, round, number)
    seen = [tuple(round.up[2]["encoding"].tolist()) for round in history]
    assert len(set(seen)) == 3
    for round in history:
        assert set(round.up[0]) == {"representation", "encoding"}
        assert round.up[3]["encoding"].tolist() == [0, 0, 1]  # one class: nothing to mix
        assert all(float(message["encoding"].sum()) == pytest.approx(1) for message in round.up.values())


@pytest.mark.parametrize(("batch", "epochs"), [(32, 1), (2, 1), (3, 20)])
def test_the_headers_steps(batch: int, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedre, "HEADER_BATCH", batch)
    method = FedRE(header_lr=0.2, header_epochs=epochs)
    for number, round in enumerate(rounds(method, members(), rounds=3), 1):
        assert moved(stepped(round, number, method), round.after["header"]) < 1e-5
        assert moved(round.before["header"], round.after["header"]) > 1e-3


test_conformance = testing.conformance(
    methods.FedRE(header_lr=0.1),
    reference_loss=oracles.cross_entropy,
    expected_bytes=lambda *_: (4 * (3 * 6 + 3), 4 * (6 + 3)),  # down 4 (C D + C), up 4 (D + C), whatever classes
    reductions=[
        Reduction({"header_lr": 0.0}, methods.FedGH(header_lr=0.0)),
        Reduction({"header_lr": 0.0}, methods.FedGH(header_lr=0.0), "received"),
    ],
)
