"""Rounds: clients that drop out or join later, what is under way in checkpoints; the final round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Context, Exchange, Method, Phase, TrainingResult
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.plugin import Plugin
from polyfed.engine.round_state import Round
from polyfed.errors import ConfigError, RunError, RunInterrupted
from polyfed.methods import FedAvg, FedGH, FedHeNN, FedIN, Local
from polyfed.plugins.availability import ClientAvailability
from polyfed.plugins.settings import Availability
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, received, records, weights
from polyfed.testing.observation import Spy
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

ALL = range(6)
METHODS = (Local(), FedAvg(), FedGH(), FedHeNN(alignment_data={"size": 8}, eta0=0.1), FedIN())


def federation(
    method: Method, availability: Availability | None = None, rounds: int = 2, share: float = 1.0, **options: Any
) -> Federation:
    training = Training(rounds=rounds, batch_size=8, lr=0.1, client_fraction=share)
    return ConformanceKit(method=method).usual.federation(method, training, availability=availability, **options)


def ran(*arguments: Any, **options: Any) -> Federation:
    made = federation(*arguments, **options)
    made.run()
    return made


# off ----------------------------------------------------------------------------------------------------------------


def test_off_draws_nothing_and_says_so() -> None:
    """The clients of a round are those of a plain permutation; the numbers are those of the first version."""
    drawn = [record["clients"] for record in ran(Local(), rounds=4, share=0.5).history]
    orders = [torch.randperm(6, generator=generator(0, "selection", t)).tolist() for t in range(1, 5)]
    assert drawn == [sorted(order[:3]) for order in orders] == [[2, 3, 4], [1, 2, 5], [0, 1, 5], [0, 1, 2]]
    for record in ran(FedAvg()).history:
        assert not any(record[key] for key in ("dropped", "final_round"))


def selections(settings: Availability, count: int, seed: int) -> Callable[[int], Round]:
    """Number of a round -> who is present, unreachable and silenced in it."""

    class Setup:
        method, clients, training = FedAvg(), [None] * count, Training(rounds=1000)
        held_out: frozenset[int] = frozenset()

    plugin, setup = ClientAvailability(settings), Setup()
    setup.seed = seed  # type: ignore[attr-defined]
    plugin.validate(setup)  # type: ignore[arg-type]

    def select(number: int) -> Round:
        present = [i for i in range(count) if i not in plugin.absent(number)]
        round = Round(number, False, Local(), cast(Any, None), [], present, True)
        plugin.select(round)
        return round

    return select


# draws --------------------------------------------------------------------------------------------------------------


def test_so_many_drop_out_as_was_asked() -> None:
    select = selections(Availability(dropout_rate=0.3), 20, seed=3)
    rolls = [select(t) for t in range(1, 101)]
    dropped = sum(len(r.unreachable) for r in rolls) / 2000
    assert dropped == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 2000))
    assert not any(r.silenced for r in rolls)
    assert len({tuple(sorted(r.unreachable)) for r in rolls}) > 50


def test_drops_depend_on_round_client_and_seed_only() -> None:
    some = Availability(dropout_rate=0.4)
    by_seed = [selections(some, 6, seed=seed) for seed in (0, 0, 1)]
    dropped = [[sorted(select(t).unreachable) for t in range(1, 9)] for select in by_seed]
    assert dropped[0] == dropped[1] != dropped[2]
    more = selections(Availability(dropout_rate=0.4, late_joiners=2, join_round=3), 40, seed=0)
    assert [[i for i in sorted(more(t).unreachable) if i < 6] for t in range(3, 9)] == dropped[0][2:]
    for method, share in ((Local(), 1.0), (Local(), 0.5), (FedAvg(), 0.5)):
        for record, out in zip(ran(method, some, 8, share).history, dropped[0], strict=True):
            asked = {*record["clients"], *record["dropped"]}
            assert record["dropped"] == sorted(asked & set(out))
            assert len(asked) == round(6 * share)


# dropping out -------------------------------------------------------------------------------------------------------


def without(numbers: Sequence[int]) -> Callable[..., None]:
    """An aggregation that does not hear some clients."""

    def aggregate(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        call(server, {number: message for number, message in uploads.items() if number not in numbers})

    return aggregate


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_server_hears_nothing_of_who_drops_out(when: Any) -> None:
    half = ran(FedAvg(), Availability(dropout_rate=0.5, dropout_stage=when), rounds=1)
    (record,) = half.history
    gone = record["dropped"]
    assert 0 < len(gone) < 6
    full = ran(Spy(FedAvg(), aggregate=without(gone)), rounds=1)
    assert difference(received(half, 0), received(full, 0)) is None
    assert difference(received(half, 0), received(ran(FedAvg(), rounds=1), 0)) is not None
    for client in half.clients:
        kept, other = client.weights, full.clients[client.id].weights
        assert (kept is None) == (when == "before" and client.id in gone)
        assert kept is None or difference(kept, other or {}) is None  # what it learned is its own
    assert record["clients"] == [i for i in ALL if i not in gone or when == "after"]


def test_bytes_of_who_drops_out() -> None:
    plain = ran(FedAvg(), rounds=1).history[0]
    before = ran(FedAvg(), Availability(dropout_rate=0.5), rounds=1).history[0]
    after = ran(FedAvg(), Availability(dropout_rate=0.5, dropout_stage="after"), rounds=1).history[0]
    gone = [str(i) for i in before["dropped"]]
    assert before["dropped"] == after["dropped"]
    there = {i: sizes for i, sizes in plain["bytes_by_client"].items() if i not in gone}
    assert before["bytes_by_client"] == there
    silent = {i: {**plain["bytes_by_client"][i], "up": 0} for i in gone}
    assert after["bytes_by_client"] == there | silent
    for record in (before, after):
        assert record["bytes_up"] == sum(sizes["up"] for sizes in there.values()) == record["bytes_up_paper"]
    assert after["bytes_down"] == plain["bytes_down"] == after["bytes_down_paper"]
    assert after["samples"] == plain["samples"] > before["samples"]


@pytest.mark.parametrize("method", others_slow(METHODS, quick=METHODS[:3]), ids=lambda method: method.name)
@pytest.mark.parametrize("when", ["before", "after"])
def test_all_may_drop_out(method: Method, when: Any) -> None:
    made = ran(method, Availability(dropout_rate=1.0, dropout_stage=when))
    for record in made.history:
        assert record["dropped"] == [*ALL]
        assert record["bytes_up"] == 0
        assert record["clients"] == ([] if when == "before" else [*ALL])
        assert (record["train_loss"] is None) == (when == "before")
    assert made.history[-1]["accuracy"]
    assert bool(weights(made)) == (when == "after")


# keeping and undoing ------------------------------------------------------------------------------------------------


class WritesIntoUploads(FedAvg):
    """In round 2 the server scales what came up, in place."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        if server.round == 2:
            get_group(uploads[3], "model")["head.bias"].mul_(2)


class Scaling(Plugin):
    """Scales what goes up, in place."""

    name = "scaling"

    def encode(self, upload: Message, client: Client, method: Any, received: Message) -> Message:
        get_group(upload, "model")["head.bias"].mul_(2)
        return upload


def test_who_writes_into_an_upload_is_stopped_and_the_round_undone() -> None:
    made = federation(WritesIntoUploads(), rounds=3)
    with pytest.raises(RunError, match=r"server, round 2, aggregation: client 3's upload was written into"):
        made.run()
    assert difference(all_state(made), all_state(ran(FedAvg(), rounds=1))) is None
    with pytest.raises(RunError, match=r"round 1, uploading: a plugin wrote into the upload"):
        ran(FedAvg(), plugins=[Scaling()])


# joining later ------------------------------------------------------------------------------------------------------


def test_a_joiner_is_as_one_that_never_took_part() -> None:
    """Two clients that join in round 2 start from the same weights as clients that nobody asked in round 1."""
    made = ran(Local(), Availability(late_joiners=2), 2)
    late = set(ALL) - set(made.present(1))
    assert made.history[0]["clients"] == sorted(set(ALL) - late)
    assert made.history[1]["clients"] == [*ALL]
    asked = [{*map(int, record["bytes_by_client"])} for record in made.history]
    assert asked == [set(ALL) - late, set(ALL)]
    plain = ran(Local(), rounds=2)
    for client in made.clients:
        same = difference(client.weights or {}, plain.clients[client.id].weights or {}) is None
        assert same == (client.id not in late)


# settings and recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"late_joiners": 6}, "availability.late_joiners: expected fewer than the 6 clients, .*, got 6"),
        ({"late_joiners": 1, "join_round": 3}, "join_round: expected at most training.rounds = 2, got 3"),
    ],
)
def test_what_cannot_be_is_said_before_round_1(tmp_path: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        federation(Local(), Availability(**settings), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# the final round ---------------------------------------------------------------------------------------------------

HEADS = Phase(2, trains=lambda name: name.startswith("head."), lr=0.05, name="heads")
THREE: dict[str, Any] = {"rounds": 3, "share": 0.5}


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


def test_it_comes_after_the_last_round_for_everybody() -> None:
    planned: list[tuple[int, list[int], int]] = []

    def plan(call: Callable[..., None], server: Server, selected: Sequence[int]) -> None:
        planned.append((server.round, list(selected), server.rounds))
        call(server, selected)

    made = ran(Spy(Finish(), start_round=plan), **THREE, evaluation=Evaluation(every_n_rounds=10))
    assert [record["round"] for record in made.history] == [1, 2, 3, 4]
    assert [record["final_round"] for record in made.history] == [False, False, False, True]
    assert [len(record["clients"]) for record in made.history] == [3, 3, 3, 6]
    assert planned[-1] == (4, [*ALL], 3)
    assert [record["evaluated"] for record in made.history] == [False, False, True, True]
    last = made.history[-1]
    assert last["server"] == {"done": 6.0}
    assert made.server.state["done"].tolist() == [4] * 6  # type: ignore[union-attr]
    assert (made.server.round, made.server.exchange) == (4, "train")


def test_its_bytes_and_samples_count() -> None:
    plain = ran(FedAvg(), **THREE)
    made = federation(Finish(), **THREE)
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
    plain, made = ran(FedAvg(), **THREE), ran(Finish(), **THREE)
    keys = ("clients", "bytes_by_client", "train_loss", "lr")
    for one, other in zip(plain.history, made.history, strict=False):
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}
    for number in ALL:
        assert difference(dict(sent(plain, number)), dict(sent(made, number))) is None


def test_phases_of_an_exchange_stand_in_for_the_methods_own() -> None:
    """Only the head moves, from the model that was received."""
    made = ran(Finish(), **THREE)
    for client in made.clients:
        assert client.weights is not None
        for name, tensor in sent(made, client.id).items():
            assert torch.equal(tensor, client.weights[name]) == (not name.startswith("head.")), name


def test_the_result_is_of_the_end_and_tells_what_was_before(tmp_path: Path) -> None:
    made = federation(Finish(), **THREE, evaluation=Evaluation(extra_stages=["received"]), out=tmp_path / "run")
    result = made.run().result
    third, last = made.history[2:]
    assert result["accuracy"] == last["accuracy"]["personal"]["mean"]
    assert result["accuracy_per_client"] == last["accuracy_per_client"]
    assert result["accuracy_before_final_round"] == third["accuracy"]["personal"]["mean"] != result["accuracy"]
    best = max(made.history, key=lambda record: record["validation"])
    assert result["accuracy_best_by_validation"] == best["accuracy"]["personal"]["mean"]
    assert result["accuracy_best_test_round"] == max(one["accuracy"]["personal"]["mean"] for one in made.history)
    assert (result["rounds"], result["stopped_after"]) == (3, None)
    for client in made.clients:
        model = made.export(client.id)
        with torch.no_grad():
            right = (model(client.data.test.x).argmax(1) == client.data.test.y).double().mean()
        assert float(right) == pytest.approx(result["accuracy_per_client"][client.id])
    assert ran(FedAvg(), **THREE).history[-1]["final_round"] is False
    assert federation(FedAvg(), **THREE).run().result["accuracy_before_final_round"] is None


STORM = Availability(dropout_rate=0.5, late_joiners=2, join_round=3)


@pytest.mark.parametrize(
    "where", others_slow([{"after": 2}, {"after": 3}, {"within": 4}, {"after": 4}], quick=[{"after": 3}, {"within": 4}])
)
def test_resuming_anywhere(tmp_path: Path, where: dict[str, int]) -> None:
    whole = ran(Finish(), **THREE, availability=STORM)
    first = federation(Finish(), **THREE, availability=STORM, out=tmp_path / "run", loggers=[Interrupt(**where)])
    with pytest.raises(RunInterrupted):
        first.run()
    second = federation(Finish(), **THREE, availability=STORM, out=tmp_path / "run")
    result = second.run(resume=True).result
    assert records(second) == records(whole)
    assert difference(all_state(second), all_state(whole)) is None
    assert result["accuracy_before_final_round"] is not None
    third = federation(Finish(), **THREE, availability=STORM, out=tmp_path / "run")
    read = third.run(resume=True)
    assert read.result == result
    assert [record["round"] for record in read.history] == [1, 2, 3, 4]
    assert difference(read.models[1].state_dict(), second.export(1).state_dict()) is None


def test_everybody_present_is_reached() -> None:
    made = ran(Finish(), **THREE, availability=Availability(dropout_rate=1.0))
    assert [len(record["dropped"]) for record in made.history] == [3, 3, 3, 0]
    assert made.history[-1]["clients"] == [*ALL]
    assert made.history[-1]["server"] == {"done": 6.0}
    assert len(weights(made)) > 0


def test_it_follows_an_early_stop() -> None:
    settings = Training(rounds=9, batch_size=8, lr=0.0)
    evaluation = Evaluation(patience=2)
    whole = ConformanceKit(method=FedAvg()).usual.federation(Finish(), settings, evaluation=evaluation)
    result = whole.run().result
    assert [record["final_round"] for record in whole.history] == [False, False, False, True]
    assert (result["stopped_after"], result["rounds"]) == (3, 9)
    assert result["accuracy_before_final_round"] is not None
