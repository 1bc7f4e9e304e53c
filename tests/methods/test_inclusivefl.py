"""InclusiveFL against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.methods import InclusiveFL
from polyfed.methods.inclusivefl import last_blocks
from polyfed.testing import Reduction
from polyfed.testing.fixtures import draw, tiny_model
from tests.helpers import oracles
from tests.helpers.quick import others_slow
from tests.helpers.toys import numpy_mean, rounds, zoo_weights

NETS = {f"blocks{n}": lambda n=n: tiny_model(n, 4, 6) for n in range(5)}
ALL = ["blocks2", "blocks4", "blocks1", "blocks2", "blocks4"]  # last blocks: 0 of blocks1, 1 of blocks2
SIZES = [8, 12, 16, 10, 14]


def members(architectures, sizes):
    return [Client(a, draw(n, (0, 1, 2), i)) for i, (a, n) in enumerate(zip(architectures, sizes, strict=True))]


def played(method, architectures=ALL, sizes=SIZES, **options):
    return rounds(method, members(architectures, sizes), NETS, **{"rounds": 3, **options})


def block(number, name="conv.weight"):
    return f"intermediate.block{number}.{name}"


class Reference:
    """The server's half in NumPy, one model per architecture."""

    chain = (("blocks1", "blocks2"), ("blocks2", "blocks4"))  # ascending in size

    def __init__(self, models, beta, local_last):
        self.w = {a: {n: t.double().numpy() for n, t in m.items()} for a, m in models.items()}
        self.beta, self.m = beta, {}
        self.last = {"blocks1": [0], "blocks2": [1], "blocks4": []}
        self.heard = {"blocks1": [0, 1], "blocks2": [1, 2, 3]}  # blocks of the next larger that count
        self.own = {a: set() for a in models}
        for a, _ in self.chain:
            if local_last:
                self.own[a] |= {block(b, n) for b in self.last[a] for n in ("conv.weight", "conv.bias")}

    def carry(self, u):
        """Adds the larger networks' updates of the round before to the last blocks', and keeps those of this one."""
        plain = {a: dict(one) for a, one in u.items()}
        for a in u:
            for name, m in self.m.get(a, {}).items():
                u[a][name] = self.beta * m + (1 - self.beta) * u[a][name]
        for small, large in self.chain:
            if large in plain:
                self.m[small] = {
                    block(b, n): np.mean([plain[large][block(j, n)] for j in self.heard[small]], axis=0)
                    for b in self.last[small]
                    for n in ("conv.weight", "conv.bias")
                }

    def round(self, uploads, kinds, sizes):
        u, w = {}, {}
        for a in {kinds[i] for i in uploads}:
            who = [i for i in uploads if kinds[i] == a]
            mean = {n: numpy_mean([uploads[i] for i in who], [sizes[i] for i in who], n) for n in self.w[a]}
            u[a] = {n: mean[n] - self.w[a][n] for n in mean}
            w[a] = sum(sizes[i] for i in who)
        self.carry(u)
        old = {a: dict(one) for a, one in self.w.items()}
        for a in self.w:
            for name in self.w[a]:
                if name in self.own[a]:
                    if a in u:
                        self.w[a][name] = old[a][name] + u[a][name]
                    continue
                sharing = [b for b in u if name in self.w[b] and name not in self.own[b]]
                if sharing:
                    total = sum(w[b] for b in sharing)
                    self.w[a][name] = sum(w[b] * (old[b][name] + u[b][name]) for b in sharing) / total


@pytest.mark.parametrize(
    ("beta", "local_last"),
    others_slow([(0.2, True), (1.0, True), (0.4, False), (0.0, True)], quick=[(0.2, True), (0.4, False)]),
)
def test_rounds_by_hand(beta, local_last):
    method = InclusiveFL(beta=beta, local_last_block=local_last)
    lose = lambda r, i: (r, i) in {(1, 2), (2, 1), (2, 4)}  # noqa: E731  (an architecture without anybody)
    history = played(method, lose=lose, rounds=4, local_epochs=2)
    start = {ALL[i]: m["model"] for i, m in history[0].down.items()}
    reference = Reference(start, beta, local_last)
    for number, round in enumerate(history, 1):
        for i, message in round.down.items():
            for name, value in message["model"].items():
                np.testing.assert_allclose(value.numpy(), reference.w[ALL[i]][name], atol=5e-6, err_msg=name)
        answered = {i: m["model"] for i, m in round.up.items() if not lose(number, i)}
        reference.round(answered, ALL, SIZES)


def test_last_blocks_of_the_resnets():
    """ResNet10 has 1 1 1 1 blocks, 14 1 1 2 2, 18 2 2 2 2, 22 2 2 3 3, 26 3 3 3 3."""
    chain = {14: {3: 0, 4: 0}, 18: {1: 0, 2: 0}, 22: {3: 1, 4: 1}, 26: {1: 1, 2: 1}}
    small = zoo_weights("resnet10")
    for depth, stages in chain.items():
        large = zoo_weights(f"resnet{depth}")
        found = last_blocks(small, large)
        assert {tuple(name.split(".")[1:3]) for name in found} == {(f"stage{s}", str(b)) for s, b in stages.items()}
        for name, names in found.items():
            stage, block, layer = name.split(".", 3)[1:]
            halves = block == "0" and stage != "stage1"
            changes = halves and (layer.startswith(("conv1", "shortcut")))
            expected = [f"intermediate.{stage}.{int(block) + i}.{layer}" for i in (0, 1)]
            assert names == ([] if changes else expected)
            assert all(large[n].shape == small[name].shape for n in names)
        assert last_blocks(large, small) == {}
        assert last_blocks(large, large) == {}
        small = large


test_conformance = testing.conformance(
    methods.InclusiveFL(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    reductions=[
        Reduction({"beta": 0.0, "local_last_block": False}, methods.FedAvg(), "received"),
        oracles.is_fedavg({"beta": 0.5}),
    ],
)
