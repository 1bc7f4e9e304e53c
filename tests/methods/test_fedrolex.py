"""FedRolex: where the window stands, and that all else is HeteroFL (baselines 3.18)."""

from __future__ import annotations

import math

import numpy as np

from polyfed import methods, testing
from polyfed.methods import FedRolex
from polyfed.methods.building_blocks.width_levels import RATES
from polyfed.testing import Reduction
from polyfed.testing.fixtures import tiny_model
from tests.helpers import oracles
from tests.helpers.slices import rounds
from tests.helpers.toys import clients

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


test_conformance = testing.conformance(
    methods.FedRolex(rates="fix_a1-b1"),
    models=oracles.WIDE,
    reference_loss=oracles.masked,
    expected_bytes=oracles.sliced_bytes,
    skip=oracles.NUMBERED,
    changed_values={"rates": "dynamic_a1-b1", "max_grad_norm": 0.05},
    reductions=[
        Reduction({"step": 0}, methods.HeteroFL(rates="fix_a1-b1"), "received", same_architecture=True),
        oracles.is_fedavg(methods.FedRolex(**oracles.PLAIN, step=0), "uniform"),
    ],
)

test_other_settings = oracles.other_settings(
    (
        methods.FedRolex(rates="dynamic_a1-b1-c1"),
        {
            "models": [lambda: tiny_model(1, 8, 12, norm=True)],
            "skip": {**oracles.NORMED, **oracles.NUMBERED, "nan_is_rejected": "who sends statistics is refused twice"},
        },
    ),
)
