"""Devices: profiles, simulated time by hand, deadlines, memory; nothing of it changes what is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import get_group
from polyfed.core.method import Method
from polyfed.core.randomness import deal, generator
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation, Run
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FedAvg, FedHeNN, Local
from polyfed.plugins.settings import Devices, Profile
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TIMES, grouped
from tests.helpers.interrupt import Interrupt
from tests.helpers.refusals import refusal

FAST = Profile(flops=1e6, memory_bytes=1e6, download_bps=8e4, upload_bps=4e4, latency=0.5)
SLOW = Profile(flops=1e3, memory_bytes=1e6, download_bps=8e3, upload_bps=4e3)
TWO = Devices(profiles=["fast", "slow"], custom={"fast": FAST, "slow": SLOW})
ROWS, STEP = (12, 7), 2 * (4 * 5 + 5 * 3) + 2 * (4 * 5 + 2 * 5 * 3)  # operations per row: forward; back, but for inputs


def two(method: Method | None = None, devices: Devices | None = TWO, **options: Any) -> Federation:
    """Two clients with a small network and 12 and 7 rows; two epochs in batches of 5."""
    clients = []
    for place, rows in enumerate(ROWS):
        torch.manual_seed(place)
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        clients.append(
            Client(net, (torch.randn(rows, 4), torch.arange(rows) % 3), (torch.randn(6, 4), torch.arange(6) % 3))
        )
    training = Training(rounds=options.pop("rounds", 2), local_epochs=2, batch_size=5, lr=0.1)
    given = grouped(**{"devices": devices, "classes": 3, "executor": "serial", **options})
    return Federation(clients, method or FedAvg(), training, **given)


def shared_weights(federation: Federation) -> Mapping[str, Any]:
    """What the server would send now."""
    return get_group(federation.method.broadcast(federation.server, 0), "model")


def simulated(run: Run) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key.startswith(("simulated", "straggler"))}
        for record in run.history
    ]


def test_times_by_hand() -> None:
    run = two().run()
    for record in run.history:
        sent = record["bytes_by_client"]
        by_hand = {}
        for number, (profile, rows) in enumerate(zip((FAST, SLOW), ROWS, strict=True)):
            down = profile.latency + 8 * sent[str(number)]["down"] / profile.download_bps
            up = profile.latency + 8 * sent[str(number)]["up"] / profile.upload_bps
            operations = 2 * rows * STEP
            train = operations / profile.flops
            by_hand[str(number)] = {"down": down, "train": train, "up": up, "operations": operations}
        assert sent["0"]["down"] > 100 < sent["0"]["up"]
        assert record["simulated_by_client"].keys() == by_hand.keys()
        for number, told in record["simulated_by_client"].items():
            assert told == pytest.approx(by_hand[number])
        slow = by_hand["1"]
        assert record["simulated_seconds"] == pytest.approx(slow["down"] + slow["train"] + slow["up"])
        assert "stragglers" not in record
    whole = sum(record["simulated_seconds"] for record in run.history)
    assert run.result["simulated_seconds"] == pytest.approx(whole)
    assert [row["device"] for row in run.result["clients_table"]] == ["fast", "slow"]
    assert run.result["clients_table"][1]["simulated_seconds"] == pytest.approx(whole)
    assert run.result["left_out"] == []


def test_who_sends_nothing_has_no_latency_and_is_no_straggler() -> None:
    late = two(Local(), devices=TWO.model_copy(update={"round_timeout": 0.1})).run()
    assert [record["stragglers"] for record in late.history] == [[], []]
    for record in two(Local()).run().history:
        fast = record["simulated_by_client"]["0"]
        assert (fast["down"], fast["up"], fast["train"]) == (0, 0, pytest.approx(2 * 12 * STEP / 1e6))
        assert record["simulated_seconds"] == pytest.approx(2 * 7 * STEP / 1e3)


def test_training_is_the_same_and_exchanges_add_up() -> None:
    method = FedHeNN(alignment_data={"size": 8}, eta0=0.1)
    kit, devices = ConformanceKit(method=method), Devices(profiles=["laptop", "phone-low"])
    training = Training(rounds=2, batch_size=8)
    off, on = (
        kit.usual.federation(method, training, devices=own, evaluation=Evaluation()).run() for own in (None, devices)
    )
    for before, after in zip(off.history, on.history, strict=True):
        assert after.keys() - before.keys() == {"simulated_seconds", "simulated_by_client"}
        assert all(after[key] == before[key] for key in before if key not in TIMES)
        slowest = max(one["down"] + one["train"] + one["up"] for one in after["simulated_by_client"].values())
        assert after["simulated_seconds"] >= slowest > 0
    new = {"devices", "left_out", "simulated_seconds"}
    assert on.result.keys() - off.result.keys() == new
    assert not new & off.result.keys()


def test_a_pool_and_a_resumed_run_tell_the_same(tmp_path: Path) -> None:
    options = {
        "devices": TWO.model_copy(update={"time_jitter": 0.5, "round_timeout": 2.5}),
        "rounds": 4,
    }
    whole = two(**options).run()
    pool = two(executor="processes", workers=2, **options).run()
    assert simulated(pool) == simulated(whole)
    with pytest.raises(RunInterrupted):
        two(out=tmp_path / "run", loggers=[Interrupt(2)], **options).run()
    resumed = two(out=tmp_path / "run", **options).run(resume=True)
    assert simulated(resumed) == simulated(whole)
    assert len({tuple(record["stragglers"]) for record in whole.history}) > 1
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["simulated_seconds"] for line in lines] == [r["simulated_seconds"] for r in whole.history]


def test_a_deadline_makes_stragglers() -> None:
    run = two(devices=TWO.model_copy(update={"round_timeout": 1.2})).run()
    for record in run.history:
        assert record["stragglers"] == [1]
        assert record["simulated_seconds"] == 1.2
        assert record["bytes_by_client"]["1"]["up"] > 0, "it was sent, if too late"
    assert run.result["stragglers"] == 2
    in_time = two(devices=TWO.model_copy(update={"round_timeout": 100.0})).run()
    assert [record["stragglers"] for record in in_time.history] == [[], []]
    assert in_time.history[0]["simulated_seconds"] < 100
    assert in_time.history[-1]["accuracy"] == two(devices=None).run().history[-1]["accuracy"]


def test_what_a_straggler_sends_counts_for_nothing() -> None:
    late, alone = two(devices=TWO.model_copy(update={"round_timeout": 1.2}), rounds=1), two(rounds=1)
    late.run()
    alone.run()
    shared, fast = shared_weights(late), late.clients[0].weights
    assert fast is not None
    assert all(torch.equal(tensor, fast[name]) for name, tensor in shared.items()), "the mean of one"
    assert not all(torch.equal(tensor, shared[name]) for name, tensor in shared_weights(alone).items())
    own, same = late.clients[1].weights, alone.clients[1].weights
    assert own is not None
    assert same is not None
    assert all(torch.equal(own[name], same[name]) for name in same), "it keeps its work"


SMALL = TWO.model_copy(update={"custom": {"fast": FAST, "slow": SLOW.model_copy(update={"memory_bytes": 100.0})}})


def test_a_network_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    line = refusal(lambda: two(devices=SMALL, out=tmp_path / "run"))
    assert "got 1 that do not: clients 1 (slow, 100 B: Sequential takes " in line
    assert not (tmp_path / "run").exists()
    nobody = SMALL.model_copy(update={"profiles": ["slow"], "on_out_of_memory": "leave out"})
    with pytest.raises(ConfigError, match="expected a client whose network fits its memory, got none"):
        two(devices=nobody)


def test_who_is_left_out_counts_untrained(tmp_path: Path) -> None:
    settings = SMALL.model_copy(update={"on_out_of_memory": "leave out"})
    run = two(devices=settings, out=tmp_path / "run").run()
    begun = two(devices=None)
    with torch.no_grad():
        data = begun.clients[1].data.test
        untrained = float((begun.clients[1].given(data.x).argmax(1) == data.y).double().mean())
    assert run.result["left_out"] == [1]
    for record in run.history:
        assert record["clients"] == [0]
        assert list(record["bytes_by_client"]) == list(record["simulated_by_client"]) == ["0"]
        assert record["accuracy_per_client"][1] == pytest.approx(untrained)
        assert record["accuracy"]["received"]["n"] == 2, "accuracies are over all clients"
    assert set(run.models) == {0, 1}
    with torch.no_grad():
        right = float((run.models[1](data.x).argmax(1) == data.y).double().mean())
    assert right == pytest.approx(untrained)
    whole = two(devices=settings, rounds=4).run()
    with pytest.raises(RunInterrupted):
        two(devices=settings, rounds=4, out=tmp_path / "cut", loggers=[Interrupt(2)]).run()
    resumed = two(devices=settings, rounds=4, out=tmp_path / "cut").run(resume=True)
    assert resumed.result["accuracy_per_client"] == whole.result["accuracy_per_client"]
    assert simulated(resumed) == simulated(whole)


def test_jitter_is_drawn_for_each_round_and_client() -> None:
    plain, other = (
        simulated(two(devices=TWO.model_copy(update={"time_jitter": jitter})).run()) for jitter in (0.0, 0.4)
    )
    for number, (before, after) in enumerate(zip(plain, other, strict=True), start=1):
        for client in (0, 1):
            draw = torch.randn((), generator=generator(0, "jitter", number, client), dtype=torch.float64)
            one, same = (found["simulated_by_client"][str(client)] for found in (before, after))
            assert same["train"] == pytest.approx(math.exp(0.4 * float(draw)) * one["train"])
            assert same["down"] / one["down"] == pytest.approx(same["train"] / one["train"])
    assert simulated(two(devices=TWO.model_copy(update={"time_jitter": 0.4}), seed=1).run()) != other


def test_names_are_drawn_by_the_seed() -> None:
    drawn = [deal(["laptop", "gpu"], "random", 50, seed, "devices") for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {"laptop", "gpu"}


def test_a_device_by_a_wrong_name_is_refused() -> None:
    assert "unknown device 'laptob'; did you mean 'laptop'" in refusal(lambda: Devices(profiles=["laptob"]))
