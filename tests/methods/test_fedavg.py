"""FedAvg against NumPy by hand (baselines 3.2, fedin 8.7)."""

from __future__ import annotations

import numpy as np
import pytest

from polyfed import methods, testing
from polyfed.methods import FedAvg
from tests.helpers import oracles
from tests.helpers.toys import Two, clients, numpy_mean, rounds, same, shared, two_gradient, two_parameter_clients


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
def test_two_clients_two_parameters(weighting, shares, aggregation):
    members = two_parameter_clients()
    method = FedAvg(weighting=weighting, aggregation=aggregation)
    history = rounds(method, members, {"two": Two}, classes=2, rounds=3, local_epochs=2, batch_size=8, lr=0.5)
    w = np.array([0.3, -0.2])
    signs = set()
    for round in history:
        ends = [w - 0.5 * two_gradient(w, c.data.train) for c in members]
        ends = [end - 0.5 * two_gradient(end, c.data.train) for end, c in zip(ends, members, strict=True)]
        signs |= {np.sign(e - w).tolist()[0] for e in ends}
        w = sum(s * e for s, e in zip(shares, ends, strict=True))
        np.testing.assert_allclose(shared(round.after)["w"].numpy(), w, atol=1e-6)
    assert signs == {-1.0, 1.0}, "the two clients should pull both ways"


def test_shares_are_over_those_who_answered():
    sizes = [4, 8, 12, 20]
    history = rounds(
        FedAvg(),
        clients(["shallow"] * 4, sizes),
        rounds=4,
        client_fraction=0.75,
        lose=lambda r, i: i == (r + 1) % 4 or r == 4,
    )
    for number, round in enumerate(history[:3], 1):
        lost = (number + 1) % 4
        answered = [i for i in round.record["clients"] if i != lost]
        assert 0 < len(answered) < 4
        for name, value in shared(round.after).items():
            expected = numpy_mean([round.trained[i] for i in answered], [sizes[i] for i in answered], name)
            np.testing.assert_allclose(value.numpy(), expected, atol=1e-6)
    assert same(shared(history[3].after), shared(history[2].after)), "nobody answered: the model stays"


test_conformance = testing.conformance(
    methods.FedAvg(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    counted="updates",
    reductions=[oracles.is_fedavg(methods.FedAvg(aggregation="same-shape"))],
)
