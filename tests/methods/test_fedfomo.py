"""FedFomo against NumPy by hand: who is sent to whom, and what each makes of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.modules import float_state
from polyfed.methods.fedfomo import FedFomo, interpolate_towards, model_gains, normalize_positive
from polyfed.testing import ChangedValue
from tests.helpers import oracles
from tests.helpers.toys import NETS, Round, model_with, rounds, same, samples


def members(architectures: list[str]) -> list[Client]:
    """Clients with validation rows; whose classes differ."""
    return [Client(a, samples(10, i), samples(6, 100 + i), samples(9, 200 + i)) for i, a in enumerate(architectures)]


def loss_of(architecture: str, weights: Any, client: Client) -> float:
    """The mean cross entropy on validation rows."""
    held = client.data.validation
    return F.cross_entropy(model_with(NETS[architecture], weights)(held.x), held.y).item()


class Kept(FedFomo):
    """Keeps what a client starts its training from."""

    def receive(self, client: Client, message: Any) -> Any:
        context = super().receive(client, message)
        STARTS[client.round, client.id] = {n: t.clone() for n, t in float_state(client.model).items()}
        return context


STARTS: dict[tuple[int, int], dict[str, Tensor]] = {}


def mixed(architecture: str, old: Any, candidates: list[Any], client: Client) -> tuple[dict[str, Any], np.ndarray]:
    """What a client should start from, and delta."""
    parameters = [name for name, _ in NETS[architecture]().named_parameters()]
    losses = [loss_of(architecture, {**old, **one}, client) for one in candidates]
    ways = [{n: (one[n].double() - old[n].double()).numpy() for n in old if n in one} for one in candidates]
    gaps = [np.sqrt(sum((way[n] ** 2).sum() for n in parameters if n in way)) for way in ways]
    delta = (loss_of(architecture, old, client) - np.array(losses)) / np.array(gaps)
    omega = np.maximum(delta, 0) / max(np.maximum(delta, 0).sum(), 1e-9)
    steps = [{n: o * t for n, t in way.items()} for o, way in zip(omega, ways, strict=True)]
    return {n: t.double().numpy() + sum(step.get(n, 0) for step in steps) for n, t in old.items()}, delta


@pytest.mark.parametrize("architectures", [["bn"] * 3, ["shallow", "deep", "deep"]])
def test_every_start_by_hand(architectures: list[str]) -> None:
    STARTS.clear()
    people = members(architectures)
    history = rounds(Kept(), people, rounds=4)
    signs: set[float] = set()
    affinity = np.zeros((3, 3))
    for number, (before, round) in enumerate(itertools.pairwise(history), 2):
        for i, client in enumerate(people):
            mine = {n: before.weights[i][n] for n in STARTS[1, i]}
            sent = [round.down[i][f"candidate {place}"] for place in range(2)]
            old = STARTS[number - 1, i]
            start, delta = mixed(architectures[i], old, [mine, *sent], client)
            for name, value in STARTS[number, i].items():
                np.testing.assert_allclose(value, start[name], atol=2e-5)
            np.testing.assert_allclose(round.up[i]["delta"], delta[1:], rtol=1e-3, atol=1e-5)
            signs |= set(np.sign(delta[1:]).tolist())
            for one, gain in zip(sent, delta[1:], strict=True):  # whose it was, by its weights
                whose = [j for j in range(3) if j != i and all(torch.equal(before.weights[j][n], one[n]) for n in one)]
                affinity[i, whose[0]] += gain
        np.testing.assert_allclose(round.after["affinity"], affinity, rtol=1e-3, atol=1e-5)
    assert signs == {-1.0, 1.0}, "delta should come with both signs, and be summed unclipped"


def chosen(round: Round, before: Round, i: int) -> list[int]:
    """Whose models a client was sent, by their weights."""
    kept = {n: before.after[f"weights {n}"] for n in range(6) if f"weights {n}" in before.after}
    sent = [one for name, one in round.down[i].items() if name != "start"]
    return [next(n for n, w in kept.items() if same(w, one)) for one in sent]


def test_the_most_helpful_are_sent_unless_chance_has_it() -> None:
    best = rounds(FedFomo(num_models=2, epsilon=0.0), members(["shallow"] * 6), rounds=8)
    random = rounds(FedFomo(num_models=2, epsilon=1.0), members(["shallow"] * 6), rounds=8)
    greedy = []
    for history in (best, random):
        hits = 0
        for before, round in itertools.pairwise(history):
            for i in range(6):
                sent = chosen(round, before, i)
                assert len(set(sent)) == 2
                assert i not in sent
                row = before.after["affinity"][i]
                top = sorted((n for n in range(6) if n != i), key=lambda n: -float(row[n]))[:2]
                hits += sorted(row[n].item() for n in sent) == sorted(row[n].item() for n in top)
        greedy.append(hits)
    assert greedy[0] == 7 * 6
    assert greedy[1] < 20


def test_the_model_itself_and_what_is_not_finite_gain_nothing() -> None:
    found = model_gains(1.0, [1.0, 0.5, float("nan"), float("inf"), 0.5], [0.0, 1e-13, 1.0, 1.0, 1.0])
    assert found.tolist() == [0, 0, 0, 0, 0.5]
    assert model_gains(float("nan"), [1.0], [1.0]).tolist() == [0]
    assert model_gains(1.0, [], []).shape == (0,)


def test_if_all_are_worse_the_model_stays_bit_for_bit() -> None:
    shares = normalize_positive(model_gains(1.0, [1.5, 2.0], [1.0, 1.0]))
    assert shares.tolist() == [0, 0]
    model, other = {"w": torch.tensor([0.1, -0.7])}, {"w": torch.tensor([1.0, 2.0])}
    stays = interpolate_towards(model, [other, other], shares.tolist())["w"]
    assert torch.equal(stays, model["w"])
    assert stays is not model["w"]


def fedfomo_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down of all five others what is also the client's; up its model and five numbers."""
    held = {
        i: {name: t.numel() for name, t in server.initial_state(member.architecture).items() if t.is_floating_point()}
        for i, member in server.clients.items()
    }
    mine = held.pop(client_id)
    return 4 * sum(n for w in held.values() for name, n in w.items() if name in mine), 4 * (sum(mine.values()) + 5)


test_conformance = testing.conformance(
    methods.FedFomo(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=fedfomo_bytes,
    skip=oracles.NUMBERED,
    changed_values={"num_models": 2, "epsilon": ChangedValue(1.0, {"num_models": 2})},
)
