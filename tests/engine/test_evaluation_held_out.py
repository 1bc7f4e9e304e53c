"""Clients held out of training: who they are, what they are scored with, and that nobody else notices them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Method, TrainingResult
from polyfed.core.settings import Evaluation, Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.methods import FedAvg, FedProto, Local
from polyfed.report.run_records import load_runs
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TinyFederation, difference, records, state
from tests.helpers.hospitals import hospitals
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow
from tests.helpers.small_recipe import SMALL

LAST = 5  # of the kit's six clients
HELD = Evaluation(held_out=[LAST], held_out_epochs=2, extra_stages=["received", "personal"])
THREE = Training(rounds=3, batch_size=8, lr=0.1)


def usual(method: Method) -> TinyFederation:
    return ConformanceKit(method=method).usual


def run(method: Method, evaluation: Evaluation = HELD, training: Training = THREE, **options: Any) -> Federation:
    return usual(method).run(method, training, evaluation=evaluation, **options)


def last(federation: Federation) -> dict[str, Any]:
    return federation.history[-1]


def of_others(federation: Federation) -> dict[str, Tensor]:
    """All states but the newcomer's."""
    return {name: tensor for name, tensor in state(federation).items() if f"client {LAST}:" not in name}


# nobody notices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", others_slow([Local(), FedAvg(), FedProto()], quick=[FedProto()]), ids=lambda method: method.name
)
def test_the_others_train_as_if_there_were_no_such_client(method: Method) -> None:
    world = usual(method)
    without = dataclasses.replace(world, clients=world.clients[:LAST])
    plain = without.run(method, THREE, evaluation=Evaluation(extra_stages=["received", "personal"]))
    held = run(method)
    assert difference(of_others(held), of_others(plain)) is None
    for one, other in zip(held.history, plain.history, strict=True):
        assert one["accuracy"] == other["accuracy"]
        assert one["accuracy_per_client"] == [*other["accuracy_per_client"], None]
        assert (one["bytes_up"], one["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
        assert one["samples"] == other["samples"]


# what they are scored with ------------------------------------------------------------------------------------------


class Watched(FedAvg):
    """FedAvg that notes who uploads."""

    uploaded: list[int] = []  # noqa: RUF012 - of the test

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        self.uploaded.append(client.id)
        return super().upload(client, trained)


def test_held_out_clients_upload_nothing_and_release_nothing() -> None:
    Watched.uploaded.clear()
    privacy = Privacy(upload_clip_norm=1.0, upload_noise_multiplier=1.0)
    held = run(Watched(), privacy=privacy)
    assert set(Watched.uploaded) == set(range(LAST))
    released = {client for record in held.history for entry in record["releases"] for client in entry["clients"]}
    assert released == set(range(LAST))
    world = usual(FedAvg())
    plain = dataclasses.replace(world, clients=world.clients[:LAST]).run(FedAvg(), THREE, privacy=privacy)
    assert last(held)["epsilon"] == last(plain)["epsilon"]
    assert held.clients[LAST].weights is None
    assert held.clients[LAST].state == {}


def test_of_fedavg_they_receive_the_average() -> None:
    held = run(FedAvg())
    average = held.export(2).eval()  # of the same network; what it has trained since is overwritten
    message = FedAvg().broadcast(held.server, 2)
    average.load_state_dict({**average.state_dict(), **message["model"]})  # type: ignore[dict-item]
    own = held.clients[LAST].data.test
    with torch.inference_mode():
        right = (average(own.x).argmax(dim=1) == own.y).double().mean()
    found = last(held)
    assert found["held_out"]["received"]["mean"] == pytest.approx(float(right))
    assert found["held_out_per_client"]["received"] == {str(LAST): pytest.approx(float(right))}
    assert found["held_out"]["received"]["n"] == 1


def test_of_local_they_train_as_a_client_does_in_its_first_round() -> None:
    """With the epochs that were asked for, on its own rows, in its own random streams."""
    one = Training(rounds=1, batch_size=8, lr=0.1)
    held = run(Local(), HELD, one)
    trained = run(Local(), Evaluation(), one.model_copy(update={"local_epochs": 2}))
    longer = run(Local(), HELD.model_copy(update={"held_out_epochs": 40}), one)
    mine = last(held)["held_out_per_client"]
    assert mine["after_training"] == {str(LAST): last(trained)["accuracy_per_client"][LAST]}
    assert last(longer)["held_out"]["after_training"]["mean"] > mine["received"][str(LAST)]
    assert last(longer)["held_out"]["received"] == last(held)["held_out"]["received"]


# executors and resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", others_slow([FedAvg(), FedProto()], quick=[FedAvg()]), ids=lambda method: method.name
)
def test_workers_give_the_serial_result(method: Method) -> None:
    evaluation = HELD.model_copy(update={"metrics": ["calibration_error", "auc"], "missing_classes": True})
    serial = run(method, evaluation)
    pool = run(method, evaluation, executor="processes", workers=2)
    assert difference(state(serial), state(pool)) is None
    assert records(serial) == records(pool)


def test_a_resumed_run_has_the_same_records(tmp_path: Path) -> None:
    world = usual(FedAvg())
    whole = run(FedAvg())
    with pytest.raises(RunInterrupted):
        world.run(FedAvg(), THREE, evaluation=HELD, out=tmp_path / "run", loggers=[Interrupt(1)])
    again = world.federation(FedAvg(), THREE, evaluation=HELD, out=tmp_path / "run")
    result = again.run(resume=True).result
    assert records(again) == records(whole)
    assert result["held_out"] == last(whole)["held_out"]
    assert result["held_out_per_client"] == last(whole)["held_out_per_client"]


# who they are ---------------------------------------------------------------------------------------------------------


def test_a_number_of_clients_is_drawn_by_the_seed() -> None:
    drawn = {}
    for seed in range(6):
        federation = usual(Local()).federation(Local(), evaluation=Evaluation(held_out=2), seed=seed)
        drawn[seed] = sorted(federation.held_out)
        assert len(drawn[seed]) == 2
        assert federation.present(1) == [number for number in range(6) if number not in drawn[seed]]
        assert federation.facts["evaluation"]["held_out"] == drawn[seed]
    assert len({tuple(numbers) for numbers in drawn.values()}) > 1
    same = usual(FedAvg()).federation(FedAvg(), evaluation=Evaluation(held_out=2), seed=3)
    assert sorted(same.held_out) == drawn[3]


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        (6, "expected fewer than the 6 clients, as one at least trains, got 6"),
        (9, "expected fewer than the 6 clients, as one at least trains, got 9"),
        ([*range(6)], "expected fewer than the 6 clients"),
        ([6], "expected numbers of clients from 0 to 5, got 6"),
        ([-1], "expected numbers of clients from 0 to 5, got -1"),
        (["north"], "got 'north'; groups go by name in a recipe with data.partition 'by_group'"),
    ],
)
def test_who_is_not_there_cannot_be_held_out(held_out: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.held_out: .*{says}"):
        usual(Local()).federation(Local(), evaluation=Evaluation(held_out=held_out))


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="held_out_epochs = 2 does nothing beside held_out = 0; set held_out above 0"):
        Evaluation(held_out_epochs=2)
    with pytest.raises(ConfigError, match="held_out: expected every name once, got one again"):
        Evaluation(held_out=[1, 1])
    assert Evaluation(held_out=0).effective() == Evaluation().effective()
    clients = [Client(torch.nn.Linear(2, 2), (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"expected clients with test rows, got clients 1 without any"):
        Federation(clients, Local(), evaluation=Evaluation(held_out=[1]))


def test_their_models_are_not_handed_out(tmp_path: Path) -> None:
    held = run(FedAvg(), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="expected a client that is present"):
        held.export(LAST)
    assert not list((tmp_path / "run" / "models").glob(f"client-00{LAST}*"))
    table = load_runs(tmp_path)[0].result.clients_table
    assert table is not None
    assert [row.held_out for row in table] == [None] * LAST + [True]
    assert table[LAST].accuracy is None


# recipes --------------------------------------------------------------------------------------------------------------


def recipe(**sections: Mapping[str, Any]) -> Recipe:
    settings = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {**SMALL, **sections}}
    return Recipe.from_dict(settings)


def of_hospitals(tmp_path: Path, evaluation: dict[str, Any], **data: Any) -> Recipe:
    return Recipe.from_dict(hospitals(tmp_path, evaluation=evaluation, data=data))


def test_a_group_goes_by_its_name(tmp_path: Path) -> None:
    found = {}
    for name in ("north", "south", "west"):
        federation = build_federation(of_hospitals(tmp_path, {"held_out": [name]}))
        (found[name],) = federation.held_out
    assert found == {"north": 0, "south": 1, "west": 2}
    with pytest.raises(ConfigError, match=r"expected a value of data.group_by, got 'nort'.*'north'"):
        build_federation(of_hospitals(tmp_path, {"held_out": ["nort"]}))
    both = build_federation(of_hospitals(tmp_path, {}, num_clients=2))
    shared = max(both.clients, key=lambda client: client.n).id
    with pytest.raises(ConfigError, match=rf"got 'south', which shares client {shared} with '.*'; leave out data.num_"):
        build_federation(of_hospitals(tmp_path, {"held_out": ["south"]}, num_clients=2))
    with pytest.raises(ConfigError, match="got 'north'"):
        build_federation(recipe(evaluation={"held_out": ["north"]}))
    with pytest.raises(ConfigError, match="expected every client once"):
        build_federation(of_hospitals(tmp_path, {"held_out": ["north", 0]}))
