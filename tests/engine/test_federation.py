"""The round loop: selection, refusal, undoing, scoring only what changed, resuming."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, Phase, TrainingResult
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine import scoring
from polyfed.engine.federation import Federation
from polyfed.engine.task import Task
from polyfed.errors import ConfigError, RunError, RunInterrupted
from polyfed.functional.modes import eval_mode
from polyfed.methods import FedAvg, FedGH, Local
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import SHORT, all_state, difference, draw, received, records, state, tiny_model, weights
from polyfed.testing.observation import Spy
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow


def usual(method: Method, training: Training = SHORT, **options: Any) -> Federation:
    return ConformanceKit(method=method).usual.federation(method, training, **options)


# selection ----------------------------------------------------------------------------------------------------------


def test_the_draw_differs_by_round_and_seed_and_not_by_method() -> None:
    training = Training(rounds=8, lr=0.0, client_fraction=0.5)
    drawn = {}
    for method, seed in ((Local(), 0), (FedAvg(), 0), (Local(), 1)):
        federation = usual(method, training, seed=seed)
        federation.run()
        drawn[method.name, seed] = [record["clients"] for record in federation.history]
    assert drawn["local", 0] == drawn["fedavg", 0] != drawn["local", 1]
    assert len({tuple(clients) for clients in drawn["local", 0]}) > 3
    assert {number for clients in drawn["local", 0] for number in clients} == set(range(6))


def test_a_clients_stream_does_not_depend_on_who_else_is_there() -> None:
    """Local training of a client in round 1 is the same, whoever else is drawn."""
    some = usual(Local(), Training(rounds=1, lr=0.1, client_fraction=0.34))
    everyone = usual(Local(), Training(rounds=1, lr=0.1))
    some.run()
    everyone.run()
    for number in some.history[0]["clients"]:
        mine, other = some.clients[number].weights, everyone.clients[number].weights
        assert mine is not None
        assert other is not None
        assert difference(mine, other) is None


# refusal ------------------------------------------------------------------------------------------------------------


def sick(*numbers: int) -> dict[int, Callable[[Tensor], Tensor]]:
    return dict.fromkeys(numbers, lambda x: x * float("inf"))


def test_a_refused_client_is_reported_and_counts_for_nothing() -> None:
    federation = ConformanceKit(method=FedAvg()).world(prepare=sick(2)).federation(FedAvg(), SHORT)
    result = federation.run().result
    assert result["refused"] == 2
    for record in federation.history:
        assert [entry["client"] for entry in record["refused"]] == [2]
        assert "loss" in record["refused"][0]["reason"]
    assert federation.clients[2].weights is None
    assert all(bool(torch.isfinite(t).all()) for t in weights(federation).values())


def test_the_others_learn_as_if_the_refused_one_had_not_been_asked() -> None:
    kit = ConformanceKit(method=FedAvg())
    ill = kit.world(prepare=sick(0)).run(FedAvg(), Training(rounds=1, lr=0.1))

    def without(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        call(server, {number: message for number, message in uploads.items() if number != 0})

    well = kit.usual.run(Spy(FedAvg(), aggregate=without), Training(rounds=1, lr=0.1))
    assert difference(received(ill, 1), received(well, 1)) is None


def test_an_upload_that_is_not_finite_is_refused_and_stays_with_its_client() -> None:
    class Overflows(FedAvg):
        def upload(self, client: Client, trained: TrainingResult) -> Message:
            message = dict(super().upload(client, trained))
            if client.id == 1:
                message["n"] = torch.tensor(float("nan"))
            return message

    federation = usual(Overflows())
    federation.run()
    record = federation.history[0]
    assert record["refused"] == [{"client": 1, "reason": "the upload is not finite ('n')"}]
    assert record["bytes_by_client"]["1"]["up"] == 0, "no plugin has put noise on it"


def test_one_sample_and_batchnorm_cannot_train_and_is_said_so() -> None:
    among = ConformanceKit(method=FedAvg()).world(one=True, norm=True, sizes=(1, 9, 10, 20, 13, 17))
    federation = among.federation(FedAvg())
    federation.run()
    (entry,) = federation.history[0]["refused"]
    assert entry["client"] == 0
    assert "no training step" in entry["reason"]
    assert federation.history[0]["samples"] == 68 - 1  # 9 = 8 + 1, the single row of client 1 is left out, 17 = 2*8 + 1


def test_an_error_names_client_round_and_stage() -> None:
    class Fails(FedAvg):
        def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
            if len(batch.y) == 5:
                raise ValueError("five")
            return super().loss(model, batch, context)

    federation = usual(Fails())
    with pytest.raises(RunError, match=r"client 4 \(net1\), round 1, training: ValueError: five"):
        federation.run()
    assert all(client.weights is None for client in federation.clients)  # the round is undone
    assert federation.history == []


def test_an_error_of_the_server_names_round_and_stage() -> None:
    class Fails(FedAvg):
        def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
            super().aggregate(server, uploads)
            if server.round == 2:
                raise ValueError("two")

    federation = usual(Fails())
    with pytest.raises(RunError, match="server, round 2, aggregation: ValueError: two"):
        federation.run()
    once = usual(FedAvg(), Training(rounds=1, batch_size=8, lr=0.1))
    once.run()
    assert difference(state(federation), state(once)) is None  # round 1 stands, round 2 is undone


# scoring ------------------------------------------------------------------------------------------------------------


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients that were really scored, or the first of those who were together, for each part of the data."""
    scored: list[int] = []
    plain = scoring.evaluate_model

    def score(client: Client, method: Method, parts: Sequence[scoring.Part], *rest: Any) -> Any:
        scored.extend([client.id] * len(parts))
        return plain(client, method, parts, *rest)

    monkeypatch.setattr(scoring, "evaluate_model", score)
    return scored


def direct(federation: Federation, number: int, weights_of: Mapping[str, Tensor]) -> float:
    """Accuracy of a client's test samples, by hand."""
    model = copy.deepcopy(federation.model_factory.module(federation.clients[number].architecture))
    model.load_state_dict({**model.state_dict(), **weights_of})
    test = federation.clients[number].data.test
    with torch.no_grad(), eval_mode(model):
        return float((model(test.x).argmax(dim=1) == test.y).float().mean())


def test_only_who_changed_is_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = counting(monkeypatch)
    training = Training(rounds=4, batch_size=8, lr=0.1, client_fraction=0.5)
    federation = usual(Local(), training, evaluation=Evaluation(stage="personal"))
    federation.run()
    tests = 2  # test and validation rows are scored
    drawn = [record["clients"] for record in federation.history]
    assert len(scored) == tests * (6 + sum(len(clients) for clients in drawn[1:]))
    for number, value in enumerate(federation.history[-1]["accuracy_per_client"]):
        own = federation.clients[number].weights
        held = federation.server.client_weights(number) if own is None else own
        assert value == pytest.approx(direct(federation, number, held))


def test_what_is_received_is_scored_again_when_the_server_sends_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = counting(monkeypatch)
    training = Training(rounds=3, batch_size=8, lr=0.1, client_fraction=0.17)
    federation = usual(FedAvg(), training, evaluation=Evaluation(stage="received"))
    federation.run()
    assert len(scored) == 3 * 2 * 6  # one client moves everybody's model
    for number, value in enumerate(federation.history[-1]["accuracy_per_client"]):
        assert value == pytest.approx(direct(federation, number, received(federation, number)))


def test_equal_models_are_scored_once_on_a_shared_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = counting(monkeypatch)
    clients = [Client("a", draw(12, (0, 1, 2), i)) for i in range(4)]
    test = draw(30, (0, 1, 2), 9)
    federation = Federation(clients, FedAvg(), SHORT, task=Task(test=test), builders={"a": lambda: tiny_model(1, 4, 6)})
    result = federation.run().result
    assert len(scored) == 2
    assert len(set(result["accuracy_per_client"])) == 1
    assert result["evaluation"]["test"] == "global"


def test_equal_models_that_differ_by_what_clients_keep_are_scored_by_themselves() -> None:
    class Tilted(FedAvg):
        """Clients with an odd number always answer with class 2."""

        def receive(self, client: Client, message: Message) -> Context:
            client.state["tilt"] = torch.tensor([0.0, 0.0, 1e6 * (client.id % 2)])
            return super().receive(client, message)

        def predict(self, model: Any, x: torch.Tensor, context: Context) -> torch.Tensor:
            return model(x) + context["tilt"]  # type: ignore[no-any-return]

    test, builders = draw(30, (0, 1, 2), 9), {"a": lambda: tiny_model(1, 4, 6)}
    clients = [Client("a", draw(12, (0, 1, 2), i)) for i in range(4)]
    found = (
        Federation(clients, Tilted(), SHORT, task=Task(test=test), builders=builders)
        .run()
        .result["accuracy_per_client"]
    )
    assert found[1] == found[3] == 1 / 3 != found[0] == found[2]


def test_who_never_took_part_is_exported_as_it_would_receive(tmp_path: Path) -> None:
    half = Training(rounds=1, batch_size=8, lr=0.1, client_fraction=0.5)
    made = usual(FedAvg(), half, out=tmp_path)
    (record,) = made.run().history
    idle = [i for i in range(6) if i not in record["clients"]]
    assert len(idle) == 3
    for i in idle:
        assert made.clients[i].weights is None
        assert difference(made.export(i).state_dict(), received(made, i)) is None
        kept = json.loads((tmp_path / "models" / "index.json").read_text())[str(i)]["stages"]
        written = safetensors.torch.load_file(tmp_path / "models" / kept["personal"]["weights"])
        assert kept["received"] == kept["personal"]
        assert difference(written, received(made, i)) is None


# resuming -----------------------------------------------------------------------------------------------------------

FIVE = Training(rounds=5, batch_size=8, lr=0.1, momentum=0.9, client_fraction=0.67)


@pytest.mark.parametrize("number", others_slow([1, 2, 5], quick=[2]))
@pytest.mark.parametrize(
    "method", [FedGH(header_lr=0.1), pytest.param(FedAvg(), marks=pytest.mark.slow)], ids=lambda method: method.name
)
def test_interrupted_anywhere_and_resumed_it_is_the_same_run(tmp_path: Path, method: Method, number: int) -> None:
    straight = usual(method, FIVE, out=tmp_path / "straight")
    straight.run()
    with pytest.raises(RunInterrupted):
        usual(method, FIVE, out=tmp_path / "run", loggers=[Interrupt(within=number)]).run()
    again = usual(method, FIVE, out=tmp_path / "run")
    result = again.run(resume=True).result
    assert difference(all_state(straight), all_state(again)) is None
    assert records(straight) == records(again)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert result["bytes_up"] == sum(record["bytes_up"] for record in straight.history)
    for path in (tmp_path / "straight" / "models").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "run" / "models" / path.name).read_bytes()


def test_ctrl_c_while_a_round_is_undone_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = usual(FedAvg(), FIVE)
    straight.run()

    def stop(made: Federation, *_: object) -> None:
        made.server.state = {}  # half undone
        raise KeyboardInterrupt

    monkeypatch.setattr("polyfed.engine.federation.restore", stop)
    run = usual(FedAvg(), FIVE, out=tmp_path / "run", loggers=[Interrupt(within=3)], checkpoint_every=2)
    with pytest.raises(RunInterrupted, match="interrupted; 2 whole rounds kept in"):
        run.run()
    monkeypatch.undo()
    again = usual(FedAvg(), FIVE, out=tmp_path / "run")
    again.run(resume=True)
    assert difference(all_state(straight), all_state(again)) is None


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    usual(Local(), out=out).run()
    kept = (out / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run"):
        usual(Local(), out=out).run()
    with pytest.raises(ConfigError, match="seed"):
        usual(Local(), out=out, seed=1).run(resume=True)
    with pytest.raises(ConfigError, match="method"):
        usual(FedAvg(), out=out).run(resume=True)
    assert (out / "result.json").read_bytes() == kept
    usual(FedAvg(), out=out).run(overwrite=True)
    assert json.loads((out / "result.json").read_text())["method"] == "fedavg"


def test_force_removes_nothing_that_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "attempt"  # a library that deletes folders with "temp" in their names
    usual(Local(), out=out).run()
    (out / "notes.txt").write_text("mine")
    (out / "analysis").mkdir()
    (out / "analysis" / "thesis.tex").write_text("mine")
    usual(Local(), out=out).run(overwrite=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "attack.json").write_text("mine")
    (out / "attack").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="got a link"):
        usual(Local(), out=out).run(overwrite=True)
    for kept in (out / "notes.txt", out / "analysis" / "thesis.tex", tmp_path / "elsewhere" / "attack.json"):
        assert kept.read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="other files"):
            usual(Local(), out=other).run(overwrite=overwrite)
    assert sorted(path.name for path in other.iterdir()) == ["thesis.tex"]


def test_two_processes_never_share_a_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    out = tmp_path / "run"

    class Second:
        def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(ConfigError, match="another process is at work"):
                    usual(Local(), out=out).run(**options)

    alone = usual(Local(), out=tmp_path / "alone").run()
    disturbed = usual(Local(), out=out, loggers=[Second()]).run()
    assert disturbed.result["accuracy_per_client"] == alone.result["accuracy_per_client"]
    assert usual(Local(), out=out).run(resume=True).result == disturbed.result


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    federation = usual(FedAvg(), FIVE, out=tmp_path / "run", checkpoint_every=1)
    federation.run()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())
    assert names == ["round-000004", "round-000005"]
    shutil.rmtree(tmp_path / "run")


# clients with networks of their own ---------------------------------------------------------------------------------


def test_a_user_s_client_may_join_two_federations() -> None:
    client = Client(tiny_model(1, 4, 6), draw(12, (0, 1, 2), 0), draw(6, (0, 1, 2), 9))
    first, second = (Federation([client, client], Local(), SHORT) for _ in range(2))
    first.run()
    second.run()
    assert difference(state(first), state(second)) is None
    assert client.weights is None
    assert client.state == {}


def test_a_phase_with_its_own_rate_and_data() -> None:
    class OnValidation(Local):
        def phases(self, training: Training) -> Sequence[Phase]:
            return (Phase(3, data="validation", lr=0.0),)

    federation = ConformanceKit(method=OnValidation()).world(one=True).run(OnValidation(), SHORT)
    assert federation.history[0]["samples"] == 6 * 3 * 4
    assert all(torch.equal(t, federation.server.client_weights(0)[n]) for n, t in federation.clients[0].weights.items())
