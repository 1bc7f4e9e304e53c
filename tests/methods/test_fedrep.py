"""FedRep by hand: heads that never travel, parts that rest bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.data.samples import LabeledSamples
from polyfed.methods.fedrep import FedRep
from polyfed.models.split import SequentialSplit
from tests.helpers import oracles
from tests.helpers.toys import clients, federation, flat_clients, rounds, same, shared, watch_steps, worker


def linear() -> SequentialSplit:
    """A 2 x 2 and a 3 x 2 matrix: logits h phi x."""
    torch.manual_seed(3)
    return SequentialSplit(nn.Linear(2, 2, bias=False), nn.Identity(), nn.Linear(2, 3, bias=False), "flat")


def client_by_hand(phi: Tensor, h: Tensor, data: LabeledSamples, lr: float, head: int, body: int) -> list[Tensor]:
    """Both weights after `head` steps on h and `body` steps on phi."""
    weights = [phi.clone().requires_grad_(), h.clone().requires_grad_()]
    for trained in [1] * head + [0] * body:
        loss = F.cross_entropy(data.x @ weights[0].T @ weights[1].T, data.y)
        (slope,) = torch.autograd.grad(loss, weights[trained])
        weights[trained] = (weights[trained] - lr * slope).detach().requires_grad_()
    return [one.detach() for one in weights]


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
def test_two_clients_by_hand(weighting: Any, shares: tuple[float, float], aggregation: Any) -> None:
    members = flat_clients()
    method = FedRep(weighting=weighting, aggregation=aggregation, head_epochs=3, extractor_epochs=2)
    fed, watch = federation(method, members, {"flat": linear}, rounds=3, batch_size=8, lr=0.3)
    start = [worker(fed, i).model.state_dict()["head.weight"].clone() for i in (0, 1)]
    phi = fed.server.initial_state("flat")["extractor.weight"]
    fed.run()
    signs: set[float] = set()
    for round in watch.rounds:
        ends = [client_by_hand(phi, h, c.data.train, 0.3, 3, 2) for c, h in zip(members, start, strict=True)]
        for i, (own, h) in enumerate(ends):
            np.testing.assert_allclose(round.weights[i]["head.weight"], h, atol=1e-5)
            np.testing.assert_allclose(round.weights[i]["extractor.weight"], own, atol=1e-5)
            signs |= set((own - phi).sign().flatten().tolist())
        start = [h for _, h in ends]
        phi = shares[0] * ends[0][0] + shares[1] * ends[1][0]
        np.testing.assert_allclose(shared(round.after)["extractor.weight"], phi, atol=1e-5)
    assert signs == {-1.0, 1.0}, "weights should move both ways"


@pytest.mark.parametrize(
    "training", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam", "weight_decay": 0.1}]
)
def test_what_rests_rests_bit_for_bit(training: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = watch_steps(monkeypatch, FedRep)
    (round,) = rounds(FedRep(head_epochs=2), clients(["bn"], 12), rounds=1, **training)
    assert [step.phase for step in steps] == ["head"] * 6 + ["extractor"] * 3  # 12 samples in batches of 4
    start, turn, end = steps[0].before, steps[6].before, round.weights[0]
    for name in start:
        assert torch.equal(start[name], turn[name]) == (not name.startswith("head.")), name  # running statistics, too
        assert torch.equal(turn[name], end[name]) == name.startswith("head."), name


def test_in_the_end_everybody_fits_the_head_to_the_newest_extractor() -> None:
    method = FedRep(head_epochs=1, final_head_epochs=3)
    fed, watch = federation(method, clients(["bn"] * 4, 10), rounds=2, client_fraction=0.5)
    fed.run()
    last, final = watch.rounds[-2:]
    assert final.record["final_round"]
    assert final.record["bytes_up"] == 0
    assert final.record["samples"] == 4 * 3 * 10
    assert same(shared(final.after), shared(last.after))
    for i, weights in final.weights.items():
        assert all(torch.equal(weights[n], t) for n, t in shared(last.after).items()), "what is kept is the newest"
        if last.weights[i] is not None:
            assert not torch.equal(weights["head.weight"], last.weights[i]["head.weight"])
    plain = rounds(FedRep(head_epochs=1), clients(["bn"] * 4, 10), rounds=2, client_fraction=0.5)
    assert same(shared(plain[-1].after), shared(last.after))


test_conformance = testing.conformance(
    methods.FedRep(head_epochs=2),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.of_weights(-4 * 21, -4 * 21),
)

test_other_settings = oracles.other_settings(
    (
        methods.FedRep(head_epochs=1, aggregation="same-shape", weighting="samples", final_head_epochs=1),
        {"skip": {"batchnorm": "the final heads are trained in training mode, which moves clients' own statistics"}},
    ),
)
