"""FedRolex: where the window stands, and that all else is HeteroFL (baselines 3.18)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyfed.methods import FedRolex
from polyfed.methods.heterofl import RATES
from tests.helpers.slices import rounds, watched
from tests.helpers.toys import clients, net

WIDTH, FEATURES = 6, 5  # the toys'


def window(size: int, letter: str, j: int) -> list[int]:
    """{s, s + 1, ...} mod K with s = j mod K, by hand; j counts rounds from 0."""
    return [(j % size + i) % size for i in range(math.ceil(RATES[letter] * size))]


def test_windows_roll_forwards_and_what_comes_back_is_averaged_where_it_was():
    members = clients(["shallow"] * 3, [8, 12, 16])
    history = rounds(FedRolex(rates="fix_a1-b1-c1", masked=False), members, rounds=8)
    for j, round in enumerate(history):
        before, after = round.before["model"], round.after["model"]
        total = {name: np.zeros(tuple(t.shape)) for name, t in before.items()}
        count = {name: np.zeros(tuple(t.shape)) for name, t in before.items()}
        for number, letter in enumerate("abc"):
            wide, high = window(WIDTH, letter, j), window(FEATURES, letter, j)
            rows = {"extractor.linear": wide, "intermediate.block1.linear": wide, "intermediate.last.linear": high}
            columns = {"intermediate.block1.linear": wide, "intermediate.last.linear": wide, "head": high}
            for name, whole in before.items():
                layer, _, kind = name.rpartition(".")
                index = [rows.get(layer, list(range(len(whole))))]
                if kind == "weight":
                    index.append(columns.get(layer, list(range(whole.shape[1]))))
                here = np.ix_(*index)
                np.testing.assert_array_equal(round.down[number]["model"][name].numpy(), whole.numpy()[here])
                total[name][here] += round.up[number]["model"][name].double().numpy()
                count[name][here] += 1
        for name, whole in before.items():
            expected = np.where(count[name] > 0, total[name] / np.maximum(count[name], 1), whole.double().numpy())
            np.testing.assert_allclose(after[name].numpy(), expected, atol=1e-6)


def test_scores_are_those_of_the_window_trained_last_with_its_own_statistics():
    members = clients(["bn"] * 2, 12, test=40)
    fed, watch = watched(FedRolex(rates="fix_b1"), members, rounds=4)
    run = fed.run()
    large, statistics = watch.rounds[-1].after["model"], watch.rounds[-1].after["statistics b"]
    wide, high = window(WIDTH, "b", 3), window(FEATURES, "b", 3)
    model = net(width=3, features=3, batchnorm=True).eval()
    state = model.state_dict()
    for name, tensor in {**large, **statistics}.items():
        inner = name.startswith("intermediate.last")
        rows = list(range(3)) if name.startswith("head") else high if inner else wide
        here = tensor[rows]
        if tensor.dim() == 2 and not name.startswith("extractor"):
            here = here[:, high if name.startswith("head") else wide]
        state[name] = here
    model.load_state_dict(state)
    data = members[1].data.test
    share = float((model(data.x).argmax(1) == data.y).float().mean())
    assert run.history[-1]["accuracy_per_client"][1] == pytest.approx(share)
