"""The local loop: batches, phases, masks and precision, against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.method import Batch, Context, Method, Phase, StepResult
from polyfed.core.randomness import generator
from polyfed.core.settings import Training
from polyfed.data.augmentation import augmentation
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import phase_data, poisson_batches, train
from polyfed.errors import RunError
from polyfed.methods import Local
from polyfed.testing.fixtures import draw, tiny_model
from polyfed.testing.observation import Spy
from tests.helpers.toys import clients


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


@pytest.mark.parametrize("size", [21, 1])
def test_the_loss_of_a_round_is_the_mean_over_its_rows(size: int) -> None:
    """By steps so small that the network stays what it is; the last batch is smaller than the others."""
    data = draw(size, (0, 1, 2), 0)
    model = linear()
    expected = nn.functional.cross_entropy(model(data.x), data.y).item()
    run = Federation([Client(model, data)], Local(), Training(rounds=1, batch_size=8, lr=1e-12)).run()
    assert run.history[0]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_images_are_augmented_by_a_stream_of_their_own() -> None:
    plain = batches(Training(rounds=2, batch_size=8))
    changed = batches(Training(rounds=2, batch_size=8, augmentation="crop-flip"))
    stored = draw(21, (0, 1, 2), 0).x
    augment = augmentation("crop-flip")
    assert augment is not None
    for (client, number), found in changed.items():
        stream = generator(0, "augment", "train", number, client)
        for batch, usual in zip(found, plain[client, number], strict=True):
            assert batch.rows is not None
            assert usual.rows is not None
            assert torch.equal(batch.rows, usual.rows)  # the order does not change
            drawn = augment.draw(len(batch.rows), stored.shape[1:], stream)
            assert torch.equal(batch.x, augment.apply(stored[batch.rows], drawn))
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
        federation = Federation(clients, Local(), Training(rounds=2, batch_size=16))
        patterns.clear()  # of the trials before round 1
        federation.run()
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


# one training by itself ---------------------------------------------------------------------------------------------


class Seen(Method):
    """Keeps its batches, the phase of each, and which layers were in training mode; sums up what it is told."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.phases_seen: list[str] = []
        self.modes: list[dict[str, bool]] = []

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        self.phases_seen.append(client.phase)
        return {"step": torch.tensor(float(step))}

    def gradients(self, model: nn.Module, batch: Batch, context: Context) -> StepResult:
        self.batches.append(batch)
        self.modes.append({name: module.training for name, module in model.named_modules()})
        found = super().gradients(model, batch, context)
        return StepResult(found.grads, found.loss, {"rows": batch.w.sum()}, {"step": context["step"]})

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x), batch.y)


def at_work(model: nn.Module, **training: Any) -> Client:
    client = Client(model, draw(21, (0, 1, 2), 0))
    client.id, client.classes, client.seed, client.round, client.bound = 0, 3, 5, 1, model
    client.training = Training(**training)
    return client


def test_a_phase_of_some_rows_and_at_most_so_many_steps() -> None:
    chosen = torch.tensor([20, 3, 5, 8, 13])
    client, method = at_work(linear(), batch_size=2), Seen()
    data = client.data.train
    phases = [Phase(2, rows="chosen", name="some"), Phase(1, name="all")]
    result = train(client, method, {"chosen": chosen}, phases=phases)
    assert method.phases_seen == ["some"] * 6 + ["all"] * 11
    assert client.phase == ""
    for epoch in (method.batches[:3], method.batches[3:6]):
        assert sorted(row for batch in epoch for row in batch.rows.tolist()) == [3, 5, 8, 13, 20]  # type: ignore[union-attr]
    for batch in method.batches:
        assert torch.equal(batch.x, data.x[batch.rows])
        assert torch.equal(batch.y, data.y[batch.rows])
    assert (result.steps, result.samples) == (17, 10 + 21)
    assert {name: float(total) for name, total in result.sums.items()} == {"rows": 31}
    assert {name: float(total) for name, total in result.raw.items()} == {"step": 16 * 17 / 2}
    short = train(at_work(linear(), batch_size=2), Seen(), {"chosen": chosen}, most=2, phases=phases)
    assert (short.steps, short.samples) == (4, 8)


@pytest.mark.parametrize("trains", [("head",), lambda name: name.startswith("head.")])
def test_only_what_a_phase_trains_moves_and_other_layers_rest(trains: Any) -> None:
    model, method = tiny_model(1, 4, 6, norm=True), Seen()
    frozen = next(model.head.parameters())
    frozen.requires_grad_(False)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    train(at_work(model, batch_size=8, lr=0.5), method, {}, phases=[Phase(1, trains)])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name != "head.bias"), name
    assert not method.modes[0]["extractor.norm"]
    assert method.modes[0]["head"]
    assert all(module.training for module in model.modules())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


@pytest.mark.parametrize("own", [None, 0.25])
def test_a_phase_may_train_by_the_whole_rate_whatever_the_schedule(own: float | None) -> None:
    def trained(lr_schedule: str, **phase: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = tiny_model(1, 4, 6)
        client = at_work(model, batch_size=8, lr=0.5, rounds=4, lr_schedule=lr_schedule)
        client.round = 4
        train(client, Seen(), {}, phases=[Phase(1, lr=own, **phase)])
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    plain = trained("constant")
    assert all(torch.equal(t, plain[name]) for name, t in trained("cosine", follows_schedule=False).items())
    assert any(not torch.equal(t, plain[name]) for name, t in trained("cosine").items())


def test_a_phase_that_trains_nothing_takes_no_step_and_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny_model(1, 4, 6)
    phases = [Phase(1, lambda name: False), Phase(1, ("head",))]
    method = Seen()
    assert train(at_work(model, batch_size=21), method, {}, phases=phases).steps == 1
    assert train(at_work(model), method, {}, phases=phases[:1]).loss == 0.0
    method.loss = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        train(at_work(model), method, {}, phases=phases)
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_masked_entries_stay_bit_for_bit() -> None:
    model = linear()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    mask = torch.rand(3, 36, generator=torch.Generator().manual_seed(0)) < 0.5
    settings = {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.3, "batch_size": 8}
    train(at_work(model, **settings), Seen(), {"mask": {"1.weight": mask}}, phases=[Phase(2, mask="mask")])
    moved = model.state_dict()["1.weight"] != before["1.weight"]
    assert torch.equal(moved, mask)
    assert (model.state_dict()["1.bias"] != before["1.bias"]).all()  # has no mask


def test_batches_by_chance_of_some_rows() -> None:
    client = at_work(linear(), batch_size=2)
    chosen = torch.tensor([20, 3, 5, 8, 13])
    found = list(poisson_batches(client, Phase(300), 21, chosen, torch.Generator().manual_seed(0)))
    assert len(found) == 300 * 3
    often = torch.cat(found).bincount(minlength=21) / len(found)
    assert often[chosen].numpy() == pytest.approx(2 / 5, abs=0.05)
    assert int((often > 0).sum()) == 5


def test_chances_are_drawn_in_double_precision() -> None:
    """As privacy is accounted for with a rate of B / M, and not with a multiple of 2^-24."""
    client = at_work(linear(), batch_size=2)
    found = poisson_batches(client, Phase(4), 21, None, torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(0)
    for rows in found:
        numbers = torch.rand(21, generator=draws, dtype=torch.float64)
        assert rows.tolist() == [row for row, number in enumerate(numbers.tolist()) if number < 2 / 21]


def test_public_rows_must_be_there() -> None:
    (client,) = clients(["deep"])
    with pytest.raises(RunError, match=r"data\.holdout"):
        phase_data(client, Phase(1, data="public"))
