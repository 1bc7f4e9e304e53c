"""Methods that say that nobody sees a client's start: drawn after all, it makes no difference to any bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.client import Client, PublicData
from polyfed.core.model_factory import ModelFactory
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.task import Task
from polyfed.registry import METHODS
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import CLASSES, draw, tiny_model
from tests.helpers.quick import others_slow

BLANK = sorted(name for name, method in METHODS.items() if method.ignores_initial_weights)
QUICK = {"num_widths": 3, "grow_interval": 1, "server_steps": 2, "server_batch": 8}


def run(name: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Federation, int]:
    """Two of four clients in each of three rounds, everybody scored; how often an initial network was made."""
    made, initial = [], ModelFactory.initial_state

    def counted(
        self: ModelFactory, architecture: str, variant: str = "", owner: Any = None, *rest: Any, **how: Any
    ) -> Any:
        made.append(owner)
        return initial(self, architecture, variant, owner, *rest, **how)

    hyperparameters = {f.name for f in dataclasses.fields(METHODS[name])}
    with monkeypatch.context() as patch:
        patch.setattr(ModelFactory, "initial_state", counted)
        patch.setattr(METHODS[name], "ignores_initial_weights", not drawn)
        method = METHODS[name](**{key: value for key, value in QUICK.items() if key in hyperparameters})
        alike = method.requirements.same_architecture
        kinds = ["net0", "net0" if alike else "net1"] * 2
        data = [[draw(n, (0, 1, 2), seed + i) for n, seed in ((12, 0), (9, 50), (6, 90))] for i in range(4)]
        members = [Client(kind, *parts) for kind, parts in zip(kinds, data, strict=True)]
        builders = {f"net{i}": lambda depth=i + 1: tiny_model(depth, 6, 6, norm=True) for i in range(2)}
        federation = Federation(
            members,
            method,
            Training(rounds=3, client_fraction=0.5, batch_size=6),
            Evaluation(extra_stages=["received", "personal"]),
            task=Task(public=PublicData(draw(16, range(CLASSES), 99)), classes=CLASSES),
            builders=builders,
        )
        federation.run()
    return federation, sum(isinstance(owner, int) for owner in made)


@pytest.mark.parametrize("name", others_slow(BLANK, quick=("fedavg", "fedfomo")))
def test_the_run_is_the_same_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (blank, none), (drawn, some) = (run(name, drawn, monkeypatch) for drawn in (False, True))
    assert worlds.difference(worlds.all_state(blank), worlds.all_state(drawn)) is None
    assert worlds.records(blank) == worlds.records(drawn)
    assert none == 0 < some


def test_a_receive_or_broadcast_of_ones_own_says_so_anew() -> None:
    class Keeps(METHODS["fedavg"]):  # type: ignore[misc]
        def receive(self, client: Client, message: Any) -> Any:
            return {}

    class SendsLess(METHODS["fedavg"]):  # type: ignore[misc]
        def broadcast(self, server: Server, client_id: int) -> Any:
            return {}

    class Other(METHODS["fedavg"]):  # type: ignore[misc]
        def upload(self, client: Client, trained: Any) -> Any:
            return {}

    said = [method.ignores_initial_weights for method in (Keeps, SendsLess, Other, METHODS["fedavg"])]
    assert said == [False, False, True, True]
    assert {"fedavg", "fedprox", "scaffold", "fednova", "moon", "fedfomo", "feddpa"} <= set(BLANK)
    assert "fedrep" not in BLANK


def test_a_network_of_ones_own_is_never_blank() -> None:
    builders = {"a": lambda: nn.Linear(4, 3)}
    start = ModelFactory(builders, lambda model, variant: model, 0, torch.device("cpu"), blank=True)
    assert not any(t.any() for t in start.starting_state("a", "", 0, None).values())
    own = nn.Linear(4, 3)
    assert torch.equal(start.starting_state("a", "", 0, own)["weight"], own.weight)
