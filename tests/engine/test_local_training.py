"""The local loop: batches, optimizers, against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.method import Batch, Context, Method, StepResult
from polyfed.core.randomness import generator
from polyfed.core.settings import Training
from polyfed.data.transforms import augment
from polyfed.engine.federation import Federation
from polyfed.methods import Local
from polyfed.testing.fixtures import SHORT, difference, draw, tiny_model
from polyfed.testing.spy import Spy


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def batches(training: Training, size: int = 21, norm: bool = False) -> dict[tuple[int, int], list[Batch]]:
    """The batches of two clients: (client, round) -> in order."""
    found: dict[tuple[int, int], list[Batch]] = {}
    place = {"key": (0, 0)}

    def inputs(call: Any, client: Client, step: int, generator: torch.Generator) -> Context:
        place["key"] = client.id, client.round
        assert step == len(found.get(place["key"], []))
        return call(client, step, generator)

    def gradients(call: Any, model: Any, batch: Batch, context: Context) -> StepResult:
        found.setdefault(place["key"], []).append(batch)
        return call(model, batch, context)

    model = tiny_model(1, 4, 6, norm=True) if norm else linear()
    clients = [Client(model, draw(size, (0, 1, 2), 0)) for _ in range(2)]
    Federation(clients, Spy(Local(), step_inputs=inputs, gradients=gradients), training).run()
    return found


def rows(batch: Batch) -> list[float]:
    return batch.x.flatten(1).sum(dim=1).tolist()


def test_every_row_once_per_epoch_the_last_batch_ragged() -> None:
    found = batches(Training(rounds=1, local_epochs=3, batch_size=8))[0, 1]
    assert [len(batch.y) for batch in found] == [8, 8, 5] * 3
    whole = sorted(draw(21, (0, 1, 2), 0).x.flatten(1).sum(dim=1).tolist())
    for epoch in range(3):
        seen = sorted(value for batch in found[3 * epoch : 3 * epoch + 3] for value in rows(batch))
        assert seen == pytest.approx(whole)
    assert all(torch.equal(batch.w, torch.ones(len(batch.y))) for batch in found)


def test_images_are_augmented_by_a_stream_of_their_own() -> None:
    plain = batches(Training(rounds=2, batch_size=8))
    changed = batches(Training(rounds=2, batch_size=8, augmentation="crop-flip"))
    stored = draw(21, (0, 1, 2), 0).x
    for (client, number), found in changed.items():
        stream = generator(0, "augment", "train", number, client)
        for batch, usual in zip(found, plain[client, number], strict=True):
            assert batch.rows is not None
            assert usual.rows is not None
            assert torch.equal(batch.rows, usual.rows)  # the order does not change
            assert torch.equal(batch.x, augment(stored[batch.rows], stream))
            assert not torch.equal(batch.x, usual.x)
            assert torch.equal(batch.y, usual.y)


def test_the_order_differs_by_epoch_round_client_and_seed() -> None:
    found = batches(Training(rounds=2, local_epochs=2, batch_size=21))
    orders = [tuple(rows(batch)) for key in sorted(found) for batch in found[key]]
    assert len(orders) == 8
    assert len(set(orders)) == 8
    assert tuple(draw(21, (0, 1, 2), 0).x.flatten(1).sum(dim=1).tolist()) not in orders


def test_a_single_row_is_left_out_only_where_batchnorm_cannot_take_it() -> None:
    training = Training(rounds=1, batch_size=4)
    assert [len(batch.y) for batch in batches(training)[0, 1]] == [4, 4, 4, 4, 4, 1]
    assert [len(batch.y) for batch in batches(training, norm=True)[0, 1]] == [4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "adam", "weight_decay": 0.01},
        {"optimizer": "adamw", "weight_decay": 0.01},
    ],
    ids=str,
)
def test_local_training_is_the_loop_that_anybody_would_write(settings: dict[str, Any]) -> None:
    training = Training(rounds=2, local_epochs=2, batch_size=8, lr=0.05, **settings)
    model = tiny_model(1, 4, 6)
    client = Client(model, draw(21, (0, 1, 2), 0))
    recorded: list[tuple[int, Batch]] = []

    def inputs(call: Any, client: Client, step: int, generator: torch.Generator) -> Context:
        recorded.append((client.round, None))  # type: ignore[arg-type]
        return {}

    def gradients(call: Any, model: Any, batch: Batch, context: Context) -> StepResult:
        recorded[-1] = (recorded[-1][0], batch)
        return call(model, batch, context)

    federation = Federation([client], Spy(Local(), step_inputs=inputs, gradients=gradients), training)
    federation.run()
    own = copy.deepcopy(model)
    total = 0.0
    for number in (1, 2):
        name = training.optimizer
        if name == "sgd":
            optimizer: Any = torch.optim.SGD(
                own.parameters(), 0.05, training.momentum, weight_decay=training.weight_decay
            )
        else:
            kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
            optimizer = kind(own.parameters(), 0.05, weight_decay=training.weight_decay)
        total = 0.0
        for batch in [batch for round, batch in recorded if round == number]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(own(batch.x), batch.y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch.y)
    assert federation.clients[0].weights is not None
    assert difference(federation.clients[0].weights, dict(own.state_dict()), 1e-5) is None
    assert federation.history[-1]["train_loss"] == pytest.approx(total / 42, rel=1e-5)


def test_frozen_parameters_of_a_users_model_stay() -> None:
    model = tiny_model(1, 4, 6)
    for parameter in model.extractor.parameters():
        parameter.requires_grad_(False)
    federation = Federation([Client(model, draw(21, (0, 1, 2), 0))], Local(), SHORT)
    federation.run()
    own = federation.clients[0].weights
    assert own is not None
    for name, before in model.state_dict().items():
        assert torch.equal(before, own[name]) == name.startswith("extractor."), name


def test_dropout_repeats_and_differs_by_client_and_round() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            dropped = nn.functional.dropout(torch.ones(36), 0.5, self.training)
            if self.training:
                patterns.append(tuple(dropped.tolist()))
            return self.out(x.flatten(1) * dropped)

    runs = []
    for _ in range(2):
        patterns: list[tuple[float, ...]] = []
        clients = [Client(Noisy(), draw(16, (0, 1, 2), 0)) for _ in range(2)]
        for client in clients:
            torch.nn.init.zeros_(client.given.out.weight)
            torch.nn.init.zeros_(client.given.out.bias)
        torch.rand(3)  # the global generator's state is nobody's business
        Federation(clients, Local(), Training(rounds=2, batch_size=16)).run()
        runs.append(patterns)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_part_that_gets_its_first_gradient_late(momentum: float) -> None:
    """The head joins from the second step on, as by hand; PyTorch's fused SGD would fall over it."""

    class Late(Method):
        def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> dict[str, Tensor]:
            return {} if step == 0 else {"joined": torch.ones(())}

        def loss(self, model: nn.Module, batch: Batch, context: Mapping[str, Any]) -> Tensor:
            loss = (model[0](batch.x).square()).mean()
            return loss + model[1](batch.x).square().mean() if "joined" in context else loss

    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    oracle, x = copy.deepcopy(given), torch.randn(4, 3)
    training = Training(rounds=1, local_epochs=3, batch_size=4, lr=0.1, momentum=momentum, weight_decay=0.1)
    trained = Federation([Client(given, (x, torch.zeros(4, dtype=torch.int64)))], Late(), training).run().models[0]
    optimizer = torch.optim.SGD(oracle.parameters(), 0.1, momentum, weight_decay=0.1, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        loss = oracle[0](x).square().mean() + (oracle[1](x).square().mean() if step else 0.0)
        loss.backward()
        optimizer.step()
    for name, expected in oracle.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], expected)
