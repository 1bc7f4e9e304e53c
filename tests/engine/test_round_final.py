"""The final round, and exchanges with phases of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Context, Exchange, Method, Phase, TrainingResult
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.run import best_by_validation
from polyfed.errors import RunInterrupted
from polyfed.experiments.estimate import estimate_costs
from polyfed.methods import FedAvg
from polyfed.plugins.settings import Availability
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records, weights
from polyfed.testing.spy import Spy
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

ALL = list(range(6))
HEADS = Phase(2, trains=lambda name: name.startswith("head."), lr=0.05, name="heads")
THREE = Training(rounds=3, batch_size=8, lr=0.1, client_fraction=0.5)


class Finish(FedAvg):
    """FedAvg whose clients take the last model and train its head alone, and then say that they are done."""

    def final_exchanges(self) -> Sequence[Exchange]:
        return (Exchange("tune", phases=(HEADS,)), Exchange("report", who="all", trains=False))

    @property
    def evaluation_stage(self) -> Any:
        return "personal"

    def receive(self, client: Client, message: Message) -> Context:
        return {} if client.exchange == "report" else super().receive(client, message)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {} if server.exchange == "report" else super().broadcast(server, client_id)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if client.exchange == "train":
            return super().upload(client, trained)
        return {"done": torch.tensor(client.round)} if client.exchange == "report" else {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == "train":
            super().aggregate(server, uploads)
        elif server.exchange == "report":
            server.state["done"] = torch.tensor([int(m["done"]) for m in uploads.values()])  # type: ignore[arg-type]
            server.log["done"] = len(uploads)


def federation(method: Method, training: Training = THREE, **options: Any) -> Federation:
    return ConformanceKit(method=FedAvg()).usual.federation(method, training, **options)


def ran(*arguments: Any, **options: Any) -> Federation:
    made = federation(*arguments, **options)
    made.run()
    return made


# the final round ----------------------------------------------------------------------------------------------------


def test_it_comes_after_the_last_round_for_everybody() -> None:
    planned: list[tuple[int, list[int], int]] = []

    def plan(call: Callable[..., None], server: Server, selected: Sequence[int]) -> None:
        planned.append((server.round, list(selected), server.rounds))
        call(server, selected)

    made = ran(Spy(Finish(), start_round=plan), evaluation=Evaluation(every_n_rounds=10))
    assert [record["round"] for record in made.history] == [1, 2, 3, 4]
    assert [record["final_round"] for record in made.history] == [False, False, False, True]
    assert [len(record["clients"]) for record in made.history] == [3, 3, 3, 6]
    assert planned[-1] == (4, ALL, 3)
    assert [record["evaluated"] for record in made.history] == [False, False, True, True]
    last = made.history[-1]
    assert last["server"] == {"done": 6.0}
    assert made.server.state["done"].tolist() == [4] * 6  # type: ignore[union-attr]
    assert (made.server.round, made.server.exchange) == (4, "train")


def test_its_bytes_and_samples_count() -> None:
    plain = ran(FedAvg())
    made = federation(Finish())
    result = made.run().result
    last = made.history[-1]
    assert last["bytes_up"] == 6 * 8  # "done", one int64 each
    assert last["bytes_down"] == sum(4 * sum(t.numel() for t in sent(made, i).values()) for i in ALL)
    assert result["bytes_up"] == sum(r["bytes_up"] for r in plain.history) + last["bytes_up"]
    assert result["bytes_down"] == sum(r["bytes_down"] for r in plain.history) + last["bytes_down"]
    assert last["samples"] == 2 * sum(client.n for client in made.clients)  # two epochs of everybody


def sent(made: Federation, number: int) -> Mapping[str, Tensor]:
    return get_group(made.method.broadcast(made.server, number), "model")


def test_the_rounds_before_are_those_of_the_method_without() -> None:
    plain, made = ran(FedAvg()), ran(Finish())
    keys = ("clients", "bytes_by_client", "train_loss", "lr")
    for one, other in zip(plain.history, made.history, strict=False):
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}
    for number in ALL:
        assert difference(dict(sent(plain, number)), dict(sent(made, number))) is None


def test_phases_of_an_exchange_stand_in_for_the_methods_own() -> None:
    """Only the head moves, from the model that was received."""
    made = ran(Finish())
    for client in made.clients:
        assert client.weights is not None
        for name, tensor in sent(made, client.id).items():
            assert torch.equal(tensor, client.weights[name]) == (not name.startswith("head.")), name


def test_the_result_is_of_the_end_and_tells_what_was_before(tmp_path: Path) -> None:
    made = federation(Finish(), evaluation=Evaluation(extra_stages=["received"]), out=tmp_path / "run")
    result = made.run().result
    third, last = made.history[2:]
    assert result["accuracy"] == last["accuracy"]["personal"]["mean"]
    assert result["accuracy_per_client"] == last["accuracy_per_client"]
    assert result["accuracy_before_final_round"] == third["accuracy"]["personal"]["mean"] != result["accuracy"]
    assert result["accuracy_best_by_validation"] == best_by_validation(made.history, "personal")
    assert (result["rounds"], result["stopped_after"]) == (3, None)
    for client in made.clients:
        model = made.export(client.id)
        with torch.no_grad():
            right = (model(client.data.test.x).argmax(1) == client.data.test.y).double().mean()
        assert float(right) == pytest.approx(result["accuracy_per_client"][client.id])
    assert ran(FedAvg()).history[-1]["final_round"] is False
    assert federation(FedAvg()).run().result["accuracy_before_final_round"] is None


STORM = Availability(dropout_rate=0.5, delay_rate=0.5, late_joiners=2, join_round=3)


@pytest.mark.parametrize(
    "where",
    others_slow([{"after": 2}, {"after": 3}, {"within": 4}, {"after": 4}], quick=[{"after": 3}, {"within": 4}]),
)
def test_resuming_anywhere(tmp_path: Path, where: dict[str, int]) -> None:
    whole = ran(Finish(), availability=STORM)
    first = federation(Finish(), availability=STORM, out=tmp_path / "run", loggers=[Interrupt(**where)])
    with pytest.raises(RunInterrupted):
        first.run()
    second = federation(Finish(), availability=STORM, out=tmp_path / "run")
    result = second.run(resume=True).result
    assert records(second) == records(whole)
    assert difference(all_state(second), all_state(whole)) is None
    assert result["accuracy_before_final_round"] is not None
    third = federation(Finish(), availability=STORM, out=tmp_path / "run")
    read = third.run(resume=True)
    assert read.result == result
    assert [record["round"] for record in read.history] == [1, 2, 3, 4]
    assert difference(read.models[1].state_dict(), second.export(1).state_dict()) is None


def test_everybody_present_is_reached_in_time() -> None:
    made = ran(Finish(), availability=Availability(dropout_rate=1.0, delay_rate=1.0))
    assert [len(record["dropped"]) for record in made.history] == [3, 3, 3, 0]
    assert made.history[-1]["late"] == []
    assert made.history[-1]["clients"] == ALL
    assert made.history[-1]["server"] == {"done": 6.0}
    assert len(weights(made)) > 0


def test_it_follows_an_early_stop() -> None:
    settings = Training(rounds=9, batch_size=8, lr=0.0, lr_schedule="exponential", lr_gamma=0.5)
    evaluation = Evaluation(patience=2)
    whole = federation(Finish(), settings, evaluation=evaluation)
    result = whole.run().result
    assert [record["final_round"] for record in whole.history] == [False, False, False, True]
    assert (result["stopped_after"], result["rounds"]) == (3, 9)
    assert result["accuracy_before_final_round"] is not None


def test_a_check_knows_its_cost() -> None:
    """Bytes of the whole run, the final round included, are those of a run."""
    full = THREE.model_copy(update={"client_fraction": 1.0})
    made = federation(Finish(), full)
    result = made.run().result
    found = estimate_costs(federation(Finish(), full))
    assert found.bytes_up == pytest.approx(result["bytes_up"])
    assert found.bytes_down == pytest.approx(result["bytes_down"])
    assert all(kind.final_round[1] == 8 and kind.final_round[2] > 0 for kind in found.architectures)
    assert all(kind.final_round == (0, 0, 0.0) for kind in estimate_costs(federation(FedAvg(), full)).architectures)
