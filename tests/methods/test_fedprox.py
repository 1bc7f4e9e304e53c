"""FedProx against NumPy by hand: the squared norm, about what came this round, of parameters alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.core.message import nbytes
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, FedIN, FedProx
from tests.helpers.toys import (
    NETS,
    Two,
    batch,
    clients,
    federation,
    moved,
    rounds,
    same,
    shared,
    two_gradient,
    two_parameter_clients,
    worker,
)


def cross_entropy(w, data):
    logits = data.x.double().numpy() * w
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return -np.log(p[np.arange(len(p)), data.y.numpy()]).mean()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
def test_rounds_by_hand(weighting, aggregation):
    """Also the logged loss, which has the squared norm; a client that was not drawn starts from what came last."""
    members, mu, lr = two_parameter_clients(3), 0.7, 0.5
    method = FedProx(mu=mu, weighting=weighting, aggregation=aggregation)
    history = rounds(
        method, members, {"two": Two}, classes=2, rounds=5, local_epochs=3, batch_size=8, lr=lr, client_fraction=0.7
    )
    w, signs, drawn = np.array([0.3, -0.2]), set(), set()
    for round in history:
        ends, losses = [], []
        for i in round.record["clients"]:
            data, now = members[i].data.train, w
            for _ in range(3):
                losses.append((cross_entropy(now, data) + mu / 2 * ((now - w) ** 2).sum(), len(data)))
                now = now - lr * (two_gradient(now, data) + mu * (now - w))
            ends.append((now, len(data) if weighting == "samples" else 1))
        signs |= {np.sign((end - w)[0]) for end, _ in ends}
        drawn.add(tuple(round.record["clients"]))
        w = sum(end * n for end, n in ends) / sum(n for _, n in ends)
        np.testing.assert_allclose(shared(round.after)["w"].numpy(), w, atol=1e-6)
        loss = sum(value * n for value, n in losses) / sum(n for _, n in losses)
        assert round.record["train_loss"] == pytest.approx(loss, abs=1e-6)
    assert signs == {-1.0, 1.0}, "the clients should pull both ways"
    assert len(drawn) > 1


def test_the_first_step_is_fedavgs():
    """There w is what came: with one step a round the term never enters, however large mu is."""
    for epochs, alike in ((1, True), (2, False)):
        runs = [rounds(m, clients(["bn"] * 3), batch_size=12, local_epochs=epochs) for m in (FedProx(mu=5.0), FedAvg())]
        assert same(*(shared(run[-1].after) for run in runs)) == alike


@pytest.mark.parametrize("architecture", ["deep", "bn"])
def test_the_terms_gradient(architecture):
    """It is mu (w - w^t) for every parameter, and buffers have none."""
    members = clients([architecture])
    fed, _ = federation(method := FedProx(mu=0.3), members)
    method.init_server(fed.server)
    at = worker(fed, 0)
    context = method.receive(at, method.broadcast(fed.server, 0))
    received = {name: p.detach().clone() for name, p in at.model.named_parameters()}
    assert context["received"].keys() == received.keys()
    with torch.no_grad():
        for p in at.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    at.model.eval()
    one = batch(members[0].data.train)
    with_term, without = (m.gradients(at.model, one, context).grads for m in (method, FedAvg()))
    for name, p in at.model.named_parameters():
        expected = 0.3 * (p.detach() - received[name])
        torch.testing.assert_close(with_term[name] - without[name], expected, atol=1e-5, rtol=1e-4)


def test_the_larger_mu_the_nearer():
    ways = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        (round,) = rounds(FedProx(mu=mu), clients(["deep"]), rounds=1, local_epochs=10)
        ways.append(moved(shared(round.before), shared(round.after)))
    assert ways == sorted(ways, reverse=True)
    assert ways[-1] < 0.5 * ways[0]


def test_the_default_bites():
    assert FedProx().mu == 0.01
    ends = [shared(rounds(m, clients(["deep"] * 2), local_epochs=3)[-1].after) for m in (FedProx(), FedAvg())]
    assert moved(*ends) > 1e-6


@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
def test_fedin_without_pairs_is_fedprox(aggregation):
    weighting = "uniform" if aggregation == "layer-wise" else "samples"
    method = FedProx(mu=0.2, aggregation=aggregation, weighting=weighting)
    other = FedIN(exchange_features=False, mu=0.2, aggregation=aggregation)
    runs = [rounds(m, clients(["deep-bn", "bn", "bn"], [4, 8, 12]), rounds=3, local_epochs=2) for m in (method, other)]
    for client in range(3):
        assert same(runs[0][-1].down[client]["model"], runs[1][-1].down[client]["model"])


def test_batchnorm_statistics_are_averaged():
    (round,) = rounds(FedProx(mu=1.0), clients(["bn"] * 2, [8, 24]), rounds=1)
    for name, value in shared(round.after).items():
        expected = 0.25 * round.trained[0][name].double() + 0.75 * round.trained[1][name].double()
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=0)
        assert "num_batches" not in name
        assert not name.endswith("running_mean") or value.any()


@pytest.mark.parametrize("architecture", ["shallow", "bn"])
def test_bytes(architecture):
    floats = sum(t.numel() for t in NETS[architecture]().state_dict().values() if t.is_floating_point())
    for round in rounds(FedProx(), clients([architecture] * 2)):
        assert all(nbytes(m) == 4 * floats for m in round.down.values())
        assert all(nbytes(m) == 4 * floats + 8 for m in round.up.values())


def test_what_does_not_nest_is_refused():
    with pytest.raises(ConfigError, match=r"fedprox needs .*client 1 \('wide'\).*same-shape"):
        federation(FedProx(), clients(["shallow", "wide"]))
    assert rounds(FedProx(aggregation="same-shape"), clients(["shallow", "wide"]))


def test_mu_is_not_negative():
    with pytest.raises(ValueError, match="mu"):
        FedProx(mu=-0.1)
