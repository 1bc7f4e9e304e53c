"""DepthFL against sub-models that are built and trained by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.engine.executors.client_work import working_copy
from polyfed.methods import DepthFL
from polyfed.methods.depthfl import mutual_exits_loss
from tests.helpers import oracles
from tests.helpers.slices import exit_logits, order_of
from tests.helpers.toys import NETS, clients, federation, moved, numpy_mean, rounds, samples

BLOCKS = {0: 5, 1: 4, 2: 3, 3: 2}  # of five; client k has the (k mod 4)-th of 1, 0.75, 0.5, 0.25


@pytest.mark.parametrize("kind", ["deep", "deep-bn"])
def test_a_round_is_that_of_sub_models_trained_by_hand(kind):
    members = clients([kind] * 5, [8, 12, 9, 10, 11])
    method = DepthFL(distillation=0.7, ramp_up=3)
    history = rounds(method, members, rounds=2)
    for number, round in enumerate(history):
        weight = 0.7 * math.exp(-5 * (1 - number / 3) ** 2)
        before, after = round.before["model"], round.after["model"]
        for client in range(5):
            blocks, sent = BLOCKS[client % 4], round.down[client]["model"]
            assert all(torch.equal(before[name], t) for name, t in sent.items())
            trained = {n: t.clone().requires_grad_() for n, t in sent.items() if "running" not in n}
            data = members[client].data.train
            for rows in order_of(members[client], client, round=number + 1).split(4):
                if len(rows) > 1 or kind == "deep":
                    outputs = exit_logits(trained, data.x[rows], blocks, batchnorm=kind == "deep-bn")
                    assert len(outputs) == blocks - 1
                    loss = mutual_exits_loss(outputs, data.y[rows], torch.ones(len(rows)), weight)
                    grads = torch.autograd.grad(loss, list(trained.values()))  # all have one
                    with torch.no_grad():
                        for p, g in zip(trained.values(), grads, strict=True):
                            p -= 0.1 * g
            up = {n: t for n, t in round.up[client]["model"].items() if n in trained}
            assert moved({n: w.detach() for n, w in trained.items()}, up) < 1e-5
        for name in before:
            sent = [round.up[i]["model"] for i in range(5)]
            assert any(name in model for model in sent)
            np.testing.assert_allclose(after[name].numpy(), numpy_mean(sent, [1] * 5, name), atol=1e-6)


@pytest.mark.parametrize(
    ("ramp_up", "at", "expected"),
    [(300, 1, math.exp(-5)), (10, 6, math.exp(-1.25)), (10, 11, 1), (10, 500, 1), (0, 1, 1)],
)
def test_distillation_ramps_up(ramp_up, at, expected):
    method = DepthFL(distillation=0.5, ramp_up=ramp_up)
    fed, _ = federation(method, clients(["deep"], 8))
    fed.method.init_server(fed.server)
    worker = working_copy(fed.clients[0], "1", fed.model_factory)
    worker.round = at
    context = method.receive(worker, method.broadcast(fed.server, 0))
    assert float(context["weight"]) == pytest.approx(0.5 * expected)


def test_prediction_is_by_the_mean_of_all_classifiers():
    x = samples(8, 0).x
    for variant, count in (("1", 4), ("0.5", 2), ("0.25", 1)):
        network = DepthFL().build(NETS["deep"](), variant).eval()
        outputs = network(x)
        assert len(outputs) == count
        torch.testing.assert_close(DepthFL().personal_model(network)(x), sum(outputs) / count)


@pytest.mark.parametrize(("ramp_up", "text"), [(300, "reaches 0.7% of its weight in the last round"), (1, "")])
def test_a_run_that_ends_before_its_ramp_says_so(ramp_up, text):
    method = DepthFL(ramp_up=ramp_up)
    (*_, last) = rounds(method, clients(["deep"] * 4), rounds=2)
    remark = method.remark(last.record)
    assert text in remark
    assert bool(text) == bool(remark)


def depthfl_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the stem, the block and its classifier, or of all, with 8 channels and 12 features."""
    p = (9 * 8 + 8) + (9 * 8 * 8 + 8) + (8 * 3 + 3) + (client_id % 2 == 0) * ((9 * 8 * 12 + 12) + (12 * 3 + 3))
    return 4 * p, 4 * p


def mutual_exits(model: Any, batch: Any, context: Any) -> float:
    """CE of both, and 0.6 exp(-5 (1 - 1 / 4)^2) (KL(o_1 || o_2) + KL(o_2 || o_1)) in round 2; or CE of the only one."""
    outputs = model(batch.x)
    total = sum(oracles.cross_entropy(lambda x, out=out: out, batch, context) for out in outputs)
    if len(outputs) == 1:
        return total
    p, q = map(oracles.log_softmax, outputs)
    return total + 0.6 * float(np.exp(-5 * 0.75**2)) * (oracles.divergence(p, q) + oracles.divergence(q, p))


test_conformance = testing.conformance(
    methods.DepthFL(depths="1 0.5", distillation=0.6, ramp_up=4),
    models=oracles.WIDE,
    reference_loss=mutual_exits,
    expected_bytes=depthfl_bytes,
    skip=oracles.NUMBERED,
    changed_values={"depths": "1 0.3"},
    reductions=[oracles.is_fedavg({"depths": "1"}, "uniform")],
)
