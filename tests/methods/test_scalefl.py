"""ScaleFL against sub-models built and trained by hand (baselines 3.19)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.config.recipe import Recipe
from polyfed.core.randomness import generator
from polyfed.engine.executors.client_work import working_copy
from polyfed.errors import ConfigError
from polyfed.methods import ScaleFL
from polyfed.methods.scalefl import multi_exit_loss
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.slices import exit_logits, mean_of_entries, order_of, prefix, rounds
from tests.helpers.toys import CLASSES, clients, federation, moved

LEVELS = {"1": (0.4, 2), "2": (0.5, 3), "3": (0.55, 4), "4": (0.65, 5), "5": (1.0, 5)}  # width, blocks of the deep toy


def levels_of_five():
    """Of clients whose seed is 0."""
    order = torch.randperm(5, generator=generator(0, "server levels", 0)).tolist()
    return {number: str(5 - place) for number, place in enumerate(order)}


def widths(level, width=6, features=5):
    """Channels of the toy's layers at a level."""
    share = LEVELS[level][0]
    return math.ceil(round(share * width, 9)), math.ceil(round(share * features, 9))


@pytest.mark.parametrize(("kind", "weighting"), [("deep", "uniform"), ("deep", "samples"), ("deep-bn", "uniform")])
def test_a_round_is_that_of_sub_models_trained_by_hand(kind, weighting):
    members = clients([kind] * 5, [8, 12, 9, 10, 11])
    method, counts = ScaleFL(gamma=0.4, weighting=weighting), [c.n if weighting == "samples" else 1 for c in members]
    (round,) = rounds(method, members, rounds=1)
    before, after, levels = round.before["model"], round.after["model"], levels_of_five()
    assert sorted(levels.values()) == list("12345")
    for number, level in levels.items():
        blocks, (wide, high) = LEVELS[level][1], widths(level)
        sent, data = round.down[number]["model"], members[number].data.train
        assert all(torch.equal(t, prefix(before[n], t)) for n, t in sent.items())
        for name, tensor in sent.items():
            assert len(tensor) == (CLASSES if "head" in name or "exits" in name else high if "last" in name else wide)
        weights = {name: t.clone().requires_grad_() for name, t in sent.items()}
        for rows in order_of(members[number], number).split(4):
            if len(rows) > 1 or kind == "deep":
                outputs = exit_logits(weights, data.x[rows], blocks, batchnorm=kind == "deep-bn")
                loss = multi_exit_loss(outputs, data.y[rows], torch.ones(len(rows)), 0.4, 3.0)
                grads = torch.autograd.grad(loss, list(weights.values()))  # all have one: none is past the exit
                with torch.no_grad():
                    for p, g in zip(weights.values(), grads, strict=True):
                        assert bool(g.any())
                        p -= 0.1 * g
        assert moved({n: w.detach() for n, w in weights.items()}, round.up[number]["model"]) < 1e-5
    sent = [round.up[i]["model"] for i in range(5)]
    for name, whole in before.items():
        np.testing.assert_allclose(after[name].numpy(), mean_of_entries(name, whole, sent, counts), atol=1e-6)


def test_distillation_begins_after_its_share_of_the_rounds():
    fed, _ = federation(ScaleFL(), clients(["deep"], 8), rounds=8)
    fed.method.init_server(fed.server)
    at, message = working_copy(fed.clients[0], "5", fed.model_factory), fed.method.broadcast(fed.server, 0)
    found = []
    for at.round in range(1, 9):
        found.append(ScaleFL().receive(at, message)["distils"])
    assert found == [round >= 3 for round in range(1, 9)]


@pytest.mark.parametrize(
    "text",
    ["", "0.5@0.4", "1@1 0.5@0.4", "0@0.5 1@1", "1.5@0.5 1@1"],
)
def test_levels_that_mean_nothing_are_refused_in_one_line(text):
    shown = " ".join(text.split())  # an error is one line, without runs of blanks
    with pytest.raises(ConfigError, match=r"levels.*expected levels as width@depth.*; got '" + shown) as caught:
        Recipe.load("recipes/quickstart.toml", [f'method.levels="{text}"'], method="scalefl")
    assert "\n" not in str(caught.value)


def test_clients_get_the_levels_in_equal_shares_once_as_the_seed_says():
    levels = []
    for seed in (0, 0, 1):
        fed, _ = federation(ScaleFL(), clients(["deep"] * 10, 4), seed=seed)
        fed.method.init_server(fed.server)
        levels.append([fed.method.variant(fed.server, i) for i in range(10)])
        for fed.server.round in (1, 7):
            assert [fed.method.variant(fed.server, i) for i in range(10)] == levels[-1]
        assert sorted(levels[-1]) == list("1122334455")
        fed.server.set_available([3, 9])  # who is absent keeps its level
        assert [fed.method.variant(fed.server, i) for i in (3, 9)] == [levels[-1][3], levels[-1][9]]
    assert levels[0] == levels[1] != levels[2]
    fed, _ = federation(ScaleFL(), clients(["deep"] * 2, 4))
    fed.method.init_server(fed.server)
    assert {fed.method.variant(fed.server, i) for i in range(2)} == {"5", "3"}  # the largest is never left out


def scalefl_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of the stem, the block and its exit at half the width, or of all, 8 and 12 channels."""
    whole = ScaleFL(levels="0.5@0.5 1@1").variant(server, client_id) == "2"
    w, f = (8, 12) if whole else (4, 6)
    p = (9 * w + w) + (9 * w * w + w) + (w * 3 + 3) + whole * ((9 * w * f + f) + (f * 3 + 3))
    return 4 * p, 4 * p


def exits(model: Any, batch: Any, context: Any) -> float:
    """(L_1 + 2 L_2) / 3 with L_1 = CE + 0.3 3^2 KL(softmax(o_2 / 3) || softmax(o_1 / 3)), or CE of the only exit."""
    outputs = model(batch.x)
    *early, own = [oracles.cross_entropy(lambda x, out=out: out, batch, context) for out in outputs]
    if not early:
        return own
    q, p = (oracles.log_softmax(out.double() / 3) for out in outputs)
    return (early[0] + 0.3 * 9 * oracles.divergence(p, q) + 2 * own) / 3


test_conformance = testing.conformance(
    methods.ScaleFL(levels="0.5@0.5 1@1", gamma=0.3),
    models=oracles.WIDE,
    reference_loss=exits,
    expected_bytes=scalefl_bytes,
    skip=oracles.NUMBERED,
    changed_values={"levels": "0.5@0.3 1@1"},
    reductions=[
        oracles.is_fedavg({"levels": "1@1"}, "uniform"),
        Reduction(
            {"levels": "0.5@1"}, methods.HeteroFL(rates="fix_b1", masked=False), "received", same_architecture=True
        ),
    ],
)
