"""MOON against gradients by hand: drawn to what came, away from the client's own last model."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.errors import ConfigError
from polyfed.methods import MOON, FedAvg
from tests.helpers.toys import (
    NETS,
    Client,
    batch,
    clients,
    federation,
    model_with,
    moved,
    rounds,
    same,
    samples,
    shared,
    worker,
)


def of(reference):
    """The weights of a reference network, by name."""
    return {name.removeprefix("model."): t for name, t in reference.weights.items()}


def term(z, near, far, temperature):
    """l_con as it stands in the paper."""
    a, b = (torch.exp((F.normalize(z) * F.normalize(o)).sum(1) / temperature) for o in (near, far))
    return -torch.log(a / (a + b)).mean()


@pytest.mark.parametrize("architecture", ["deep", "bn"])
def test_rounds_by_hand(architecture):
    """Full batches, three epochs: every client's way from what came, with its own last model as it then was."""
    members, mu, temperature = clients([architecture] * 3, 8), 2.0, 0.3
    method = MOON(mu=mu, temperature=temperature)
    history = rounds(method, members, rounds=4, local_epochs=3, batch_size=8, lr=0.3, client_fraction=0.7)
    last, seen, losses = {}, 0, []
    for round in history:
        for i in round.record["clients"]:
            data = members[i].data.train
            model, near = (model_with(NETS[architecture], round.down[i]["model"]) for _ in range(2))
            far = model_with(NETS[architecture], last.get(i, round.down[i]["model"]))
            seen += i in last
            optimizer = torch.optim.SGD(model.train().parameters(), 0.3)
            for _ in range(3):
                optimizer.zero_grad()
                z = model.represent(data.x)
                with torch.no_grad():
                    others = near.represent(data.x), far.represent(data.x)
                loss = F.cross_entropy(model.head(z), data.y) + mu * term(z, *others, temperature)
                loss.backward()
                losses.append(float(loss.detach()))
                optimizer.step()
            for name, t in round.up[i]["model"].items():
                torch.testing.assert_close(t, model.state_dict()[name], atol=2e-5, rtol=1e-4)
            last[i] = dict(round.trained[i])
        assert round.record["train_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        losses = []
    assert seen >= 3, "clients should come again"


def test_a_clients_first_round_is_fedavgs():
    """Also when it is first drawn later: no reference networks are run, and the loss is larger by mu log 2."""
    runs = [rounds(m, clients(["bn", "deep-bn", "dropout"]), rounds=2, local_epochs=2) for m in (MOON(), FedAvg())]
    first, second = zip(*runs, strict=True)
    assert same(*(shared(round.after) for round in first))
    assert moved(*(shared(round.after) for round in second)) > 1e-4
    gap = first[0].record["train_loss"] - first[1].record["train_loss"]
    assert gap == pytest.approx(math.log(2), abs=1e-5)
    assert first[0].record["sums"] == {}
    assert 0 < second[0].record["sums"]["contrast"] < 2
    history = rounds(MOON(), clients(["deep"] * 4), rounds=4, client_fraction=0.5)
    late = next(r for r in history[1:] if any(history[0].weights[i] is None for i in r.record["clients"]))
    assert late.record["round"] > 1


def test_the_reference_networks():
    """What came this round, and what the client's own last round ended with, however many rounds ago; both copies."""
    members = clients(["bn"] * 3)
    fed, watch = federation(method := MOON(), members, rounds=5, client_fraction=0.7)
    fed.run()
    ended = {i: round.trained[i] for round in watch.rounds for i in round.record["clients"]}
    long_ago = [i for i in ended if i not in watch.rounds[-1].record["clients"]]
    assert long_ago
    for i in ended:
        at = worker(fed, i, round=6)
        context = method.receive(at, message := method.broadcast(fed.server, i))
        floats = {name: t for name, t in ended[i].items() if t.is_floating_point()}
        assert same(of(context["previous"]), floats)
        assert same(of(context["received"]), dict(message["model"]))
        assert not same(of(context["previous"]), of(context["received"]))
        own = {t.data_ptr() for t in (*at.model.state_dict().values(), *fed.clients[i].weights.values())}
        sent = {t.data_ptr() for t in message["model"].values()}
        for reference in context.values():
            assert not {t.data_ptr() for t in of(reference).values()} & (own | sent)


def test_no_gradient_reaches_them_and_batchnorm_counts_its_own_steps_alone():
    members = clients(["bn"])
    fed, _ = federation(method := MOON(mu=3.0), members, rounds=2)
    fed.run()
    counter = "extractor.bn.num_batches_tracked"
    assert int(fed.clients[0].weights[counter]) == 6  # two rounds of three steps
    at = worker(fed, 0, round=3)
    context, one = method.receive(at, method.broadcast(fed.server, 0)), batch(members[0].data.train)
    before = {name: dict(of(net)) for name, net in context.items()}
    bits = {name: {k: t.clone() for k, t in weights.items()} for name, weights in before.items()}
    at.model.train()
    statistics = {n: t.clone() for n, t in at.model.state_dict().items() if "running" in n}
    z = context["previous"].represent(one.x)
    assert not z.requires_grad
    assert at.model.training
    assert same(statistics, {n: at.model.state_dict()[n] for n in statistics})
    torch.testing.assert_close(z, model_with(NETS["bn"], before["previous"]).represent(one.x))
    method.gradients(at.model, one, context)
    assert all(same(bits[name], of(net)) for name, net in context.items())


@pytest.mark.parametrize(("hyperparameter", "values"), [("mu", (1.0, 0.2)), ("temperature", (0.5, 5.0))])
def test_the_hyperparameters_weigh_the_term(hyperparameter, values):
    """A smaller mu or a larger T is nearer to FedAvg."""
    plain = shared(rounds(FedAvg(), clients(["deep"] * 2), rounds=3)[-1].after)
    strong, weak = (
        moved(plain, shared(rounds(MOON(**{hyperparameter: v}), clients(["deep"] * 2), rounds=3)[-1].after))
        for v in values
    )
    assert strong > 1.5 * weak > 0


def test_mu_0_is_fedavg_and_costs_nothing_more():
    runs = [rounds(m, clients(["deep-bn", "bn"], [8, 16]), rounds=3) for m in (MOON(mu=0.0), FedAvg())]
    assert same(*(shared(run[-1].after) for run in runs))
    fed, _ = federation(method := MOON(mu=0.0), clients(["bn"]))
    fed.run()
    assert method.receive(worker(fed, 0, round=3), method.broadcast(fed.server, 0)) == {}


def test_it_pulls_to_what_came_and_off_its_own():
    """After local training from the same weights, the representations are nearer to the received model's."""
    data = samples(40, 3)
    members = [Client("deep", data), Client("deep", samples(40, 4, (0, 1)))]
    fed, watch = federation(MOON(mu=0.0), members, rounds=1, local_epochs=5)
    fed.run()
    cosines = {}
    for mu in (0.0, 5.0):
        method = MOON(mu=mu)
        at = worker(fed, 0, round=2)
        context, one = method.receive(at, method.broadcast(fed.server, 0)), batch(data)
        optimizer = torch.optim.SGD(at.model.parameters(), 0.1)
        for _ in range(20):
            for name, p in at.model.named_parameters():
                p.grad = method.gradients(at.model, one, context).grads[name] if name != "head.bias" else None
            optimizer.step()
        z = at.model.represent(one.x).detach()
        near, far = (
            model_with(NETS["deep"], weights).represent(one.x).detach()
            for weights in (shared(fed.server.state), watch.rounds[0].trained[0])
        )
        cosines[mu] = float((F.cosine_similarity(z, near) - F.cosine_similarity(z, far)).mean())
    assert cosines[5.0] > cosines[0.0] + 1e-3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"moon needs .*client 1 \('wide'\).*same-shape"):
        federation(MOON(), clients(["shallow", "wide"]))
    with pytest.raises(ConfigError, match="moon needs split models"):
        federation(MOON(), clients(["plain"]), {"plain": lambda: torch.nn.Linear(4, 3)})
    assert rounds(MOON(aggregation="same-shape"), clients(["shallow", "wide", "broad"]))
    with pytest.raises(ValueError, match="temperature"):
        MOON(temperature=0.0)
