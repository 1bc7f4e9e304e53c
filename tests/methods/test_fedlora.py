"""FedLoRA against NumPy by hand: what clients get, what the server makes of it, what stacking leaves with clients."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed import testing
from polyfed.core.adapters import adapters_of, energy_beyond, product
from polyfed.methods import FedLoRA, fedlora
from polyfed.models.split import SequentialSplit
from tests.helpers import oracles
from tests.helpers.toys import Round, clients, federation, moved, rounds, worker

RULES = ["svd", "slices", "pad"]  # those but "stack" leave everybody the same adapters
RANKS, ALPHA = "1 2 4", 4.0
OF = (1, 2, 4)
LAYERS = {"extractor.linear": (4, 6), "intermediate.block1.linear": (6, 6), "intermediate.last.linear": (6, 5)}
COUNTS = [8, 12, 20]


def lora_of(rule: str) -> FedLoRA:
    return FedLoRA(ranks=RANKS, alpha=ALPHA, aggregation=rule)  # type: ignore[arg-type]


def members(sizes: list[int] = COUNTS, test: int = 0) -> list:  # type: ignore[type-arg]
    return clients(["shallow"] * len(sizes), sizes, test=test)


def updates(message: dict, client: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """The update alpha / r B A of each layer in a client's upload, in float64."""
    group = message["adapters"]
    found = {}
    for name in LAYERS:
        a, b = group[f"{name}.lora_a"].double().numpy(), group[f"{name}.lora_b"].double().numpy()
        assert len(a) == min(OF[client], *LAYERS[name])
        found[name] = ALPHA / len(a) * b @ a
    return found


def mean_update(round: Round, name: str) -> np.ndarray:
    shares = [float(COUNTS[i]) for i in round.up]
    parts = [share * updates(up, i)[name] for share, (i, up) in zip(shares, round.up.items(), strict=True)]
    found: np.ndarray = np.sum(parts, axis=0) / sum(shares)
    return found


def test_stacking_adds_the_weighted_sum_of_products_to_everybodys_network() -> None:
    """In every round, so that a mutant that restarts adapters without merging them dies."""
    method = lora_of("stack")
    fed, watch = federation(method, members(), rounds=3)
    fed.run()
    total = {name: np.zeros(shape[::-1]) for name, shape in LAYERS.items()}
    start = worker(fed, 0).model.state_dict()
    for number, round in enumerate(watch.rounds, 1):
        for client in range(3):
            weights = round.weights[client]
            assert weights is not None
            for name in LAYERS:
                np.testing.assert_allclose(weights[f"{name}.offset"].numpy(), total[name], atol=1e-6)
                assert torch.equal(weights[f"{name}.weight"], start[f"{name}.weight"])
            assert int(round.up[client]["stacks_added"]) == number - 1
            assert ("stack" in round.down[client]) == (number > 1)
        for name in LAYERS:
            total[name] = total[name] + mean_update(round, name)
            np.testing.assert_allclose(round.after["sum_of_stacks"][name].numpy(), total[name], atol=1e-6)
    assert all(np.abs(update).max() > 1e-3 for update in total.values())
    at = worker(fed, 0)
    method.receive(at, watch.rounds[-1].down[0])
    assert torch.equal(at.model.state_dict()["head.bias"], watch.rounds[-1].before["head"]["head.bias"])


@pytest.mark.parametrize("rule", RULES)
def test_the_server_joins_what_the_clients_sent(rule: str) -> None:
    for round in rounds(lora_of(rule), members(), rounds=2):
        sent = [adapters_of(up["adapters"], ALPHA) for up in round.up.values()]
        before, after = (adapters_of(state["common"]) for state in (round.before, round.after))
        for name, shape in LAYERS.items():
            expected = fedlora.RULES[rule]([own[name] for own in sent], COUNTS, before[name])
            assert torch.equal(after[name].a, expected.a)
            assert torch.equal(after[name].b, expected.b)
            assert expected.rank == min(4, *shape)
        beyond = [energy_beyond(product(adapter), 1) for adapter in after.values()]
        assert round.record["server"]["energy_beyond_smallest_rank"] == pytest.approx(np.mean(beyond))
        head = sum(n / sum(COUNTS) * up["head"]["head.bias"] for n, up in zip(COUNTS, round.up.values(), strict=True))
        assert torch.allclose(round.after["head"]["head.bias"], head)


def test_a_client_that_missed_rounds_gets_all_updates() -> None:
    """Nobody's network differs by who was there, nor by an upload that was lost."""
    absent = {(1, 0), (2, 0), (3, 2)}
    fed, watch = federation(lora_of("stack"), members(), rounds=5, lose=lambda round, client: (round, client) in absent)
    fed.run()
    for round in watch.rounds[1:]:
        offsets = [{n: t for n, t in (round.weights[i] or {}).items() if n.endswith("offset")} for i in range(3)]
        present = [offsets[i] for i in range(3) if i in round.up and round.record["refused"] == []]
        for other in present[1:]:
            assert moved(present[0], other) < 1e-6
    names = [set(round.down[0]) for round in watch.rounds]
    assert names[0] == {"head", "stacks"}
    assert "stack" in names[1]
    assert "sum_of_stacks" in names[2]  # two updates that the server does not know to have been added
    kept = {n: t for n, t in (fed.clients[0].weights or {}).items() if n.endswith("offset")}
    before = watch.rounds[-1].before["sum_of_stacks"]
    assert moved({f"{name}.offset": t for name, t in before.items()}, kept) < 1e-6


def two_linear_layers() -> SequentialSplit:
    """Inputs 36, then 24 and 12, and a head of 3."""
    extractor = nn.Sequential(OrderedDict(flat=nn.Flatten(), one=nn.Linear(36, 24), tanh=nn.Tanh()))
    body = nn.Sequential(OrderedDict(two=nn.Linear(24, 12), tanh=nn.Tanh()))
    return SequentialSplit(extractor, body, nn.Linear(12, 3), "linear")


def fedlora_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Ranks 1, 2 and 4 in turn, 14 of six clients; 36 + 24 and 24 + 12 numbers for each; the head has 39."""
    rank = (1, 2, 4)[client_id % 3]
    return 4 * (14 * 96 + 39) + 8, 4 * (rank * 96 + 39) + 8


ADAPTED: dict[str, Any] = {"models": [two_linear_layers], "reference_loss": oracles.cross_entropy}


test_conformance = testing.conformance(
    lora_of("stack"),
    expected_bytes=fedlora_bytes,
    skip=oracles.NUMBERED,
    changed_values={"ranks": "1 3 6", "layers": "one", "aggregation": "slices"},
    **ADAPTED,
)

test_other_settings = oracles.other_settings(
    *((lora_of(rule), {**ADAPTED, "skip": oracles.NUMBERED}) for rule in RULES),
)
