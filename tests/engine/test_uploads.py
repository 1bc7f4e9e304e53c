"""`[privacy]` and `[compression]` in a run: what is metered, what the server has, who agrees, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.settings import Privacy, Training
from polyfed.engine.executors.client_work import Serial
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import (
    FD,
    SCAFFOLD,
    FedAvg,
    FedFomo,
    FedGH,
    FedHeNN,
    FedIN,
    FedKD,
    FedLoRA,
    FedSelect,
    HeteroFL,
    HomogeneousFedHeNN,
)
from polyfed.plugins.settings import Compression
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TinyFederation, all_state, difference, records
from polyfed.testing.spy import Spy
from tests.helpers.interrupt import Interrupt

TWO = Training(rounds=2, batch_size=8, lr=0.1)
THREE = Training(rounds=3, batch_size=8, lr=0.1)
HALVES, BYTES = Compression(dtype="float16"), Compression(dtype="int8")
FEW = Compression(top_k_fraction=0.1)
ALL = {
    "privacy": Privacy(upload_clip_norm=1.0, upload_noise_multiplier=0.01),
    "compression": Compression(top_k_fraction=0.2, dtype="int8"),
}


def among(method: Method, **kinds: Any) -> TinyFederation:
    return ConformanceKit(method=method).world(**kinds)


def ran(method: Method, training: Training = TWO, **options: Any) -> Federation:
    return among(method).run(method, training, **options)


def watched(method: Method, **options: Any) -> list[tuple[Message, Message]]:
    """What went down to a client, and what of it came up, of all clients and rounds."""
    down: dict[tuple[int, int], Message] = {}
    pairs: list[tuple[Message, Message]] = []

    def receive(call: Callable[..., Any], client: Client, message: Message) -> Any:
        down[client.id, client.round] = message
        return call(client, message)

    def aggregate(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        pairs.extend((down[i, server.round], message) for i, message in uploads.items())
        call(server, uploads)

    among(method).run(Spy(method, receive=receive, aggregate=aggregate), TWO, **options)
    return pairs


# off ----------------------------------------------------------------------------------------------------------------


def test_off_is_as_if_there_were_no_such_settings() -> None:
    plain, off = (
        ran(FedAvg()),
        ran(FedAvg(), privacy=Privacy(), compression=Compression(top_k_fraction=1.0, error_feedback=False)),
    )
    assert difference(all_state(plain), all_state(off)) is None
    assert records(plain) == records(off)
    assert plain.settings == off.settings
    assert not {"privacy", "compression"} & (plain.settings.keys() | plain.facts.keys())
    assert "bytes_up_uncompressed" not in plain.history[0]


# bytes --------------------------------------------------------------------------------------------------------------


def int8_bytes(message: Message) -> int:
    """Of an upload of weights: a byte a number, a scale for each row, where that is less."""
    sizes = [(t.numel(), 4 * (len(t) if t.dim() > 1 else 1)) for t in flatten(message).values() if t.dim()]
    return sum(min(4 * n, n + scales) for n, scales in sizes) + 8  # n_k


def test_bytes_are_those_that_travel() -> None:
    plain, packed = ran(FedAvg()), ran(FedAvg(), compression=BYTES)
    messages = [up for _, up in watched(FedAvg())]
    for number, (before, record) in enumerate(zip(plain.history, packed.history, strict=True)):
        assert record["bytes_up_uncompressed"] == before["bytes_up"] == record["bytes_up_paper"]
        own = messages[6 * number : 6 * number + 6]
        by_client = [record["bytes_by_client"][str(i)]["up"] for i in range(6)]
        assert by_client == [int8_bytes(message) for message in own]
        assert record["bytes_up"] == sum(by_client) < 0.45 * before["bytes_up"]
        assert record["bytes_down"] == before["bytes_down"]


# bounds -------------------------------------------------------------------------------------------------------------


# who agrees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg(), pytest.param(FedIN(), marks=pytest.mark.slow)])
def test_workers_give_the_serial_result(method: Method) -> None:
    serial, pool = (
        ran(method, **ALL, executor=name, workers=count) for name, count in (("serial", 1), ("processes", 2))
    )
    assert difference(all_state(serial), all_state(pool)) is None
    assert records(serial) == records(pool)
    assert "unsent model" in serial.clients[0].state


def test_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight = ran(FedAvg(), THREE, **ALL)
    with pytest.raises(RunInterrupted):
        ran(FedAvg(), THREE, **ALL, out=tmp_path / "run", loggers=[Interrupt(2)])
    resumed = among(FedAvg()).federation(FedAvg(), THREE, **ALL, out=tmp_path / "run")
    resumed.run(resume=True)
    assert difference(all_state(straight), all_state(resumed)) is None
    assert records(straight) == records(resumed)
    other = among(FedAvg()).federation(FedAvg(), THREE, compression=HALVES, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds another recipe's run"):
        other.run(resume=True)


def test_an_upload_that_cannot_be_read_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Serial.run

    def torn(self: Serial, jobs: Any, done: Any) -> list[JobResult]:
        first, *rest = run(self, jobs, done)
        message = {**first.message, "model change scale": {"head.weight": torch.ones(99)}}
        return [dataclasses.replace(first, message=message), *rest]

    monkeypatch.setattr(Serial, "run", torn)
    made = ran(FedAvg(), compression=BYTES)
    for record in made.history:
        assert [entry["client"] for entry in record["refused"]] == [0]
        assert record["refused"][0]["reason"].startswith("the upload cannot be read ('model change/")
        assert record["bytes_by_client"]["0"]["up"] > 0
    assert made.clients[0].weights is None


# what is refused ----------------------------------------------------------------------------------------------------

BOUND, SHARE = {"privacy": Privacy(upload_clip_norm=1.0)}, {"compression": FEW}
KERNELS = {"uploads": "kernels", "alignment_data": {"refresh": 0, "size": 8}}


@pytest.mark.parametrize(
    ("method", "settings", "line"),
    [
        (FedFomo(), BOUND, "privacy: expected uploads that can be clipped, got fedfomo, which sends 'model': whole"),
        (FedKD(), BOUND, "got fedkd, which sends 'raw': an update in low rank"),
        (FedSelect(), BOUND, "got fedselect, which sends 'model': entries of weights"),
        (SCAFFOLD(), BOUND, "got scaffold, which sends 'control': changes of control variates"),
        (FedLoRA(), BOUND, "got fedlora, which sends 'adapters': factors A that the client drew.*method.aggregation"),
        (FD(), BOUND, "got fd, which sends 'outputs': probabilities.*use method.outputs = 'logits'"),
        (FedHeNN(alignment_data={"size": 8}), BOUND, "got fedhenn, which sends 'model': whole weights"),
        (FedHeNN(**KERNELS, kernel={"precision": "int8"}), BOUND, "sends 'kernel': numbers packed as int8"),
        (HomogeneousFedHeNN(alignment_data={"size": 8}, final_average=True), BOUND, "sends 'model'"),
        (FedGH(), SHARE, "compression.top_k_fraction: expected a method that sends changes of weights .*, got fedgh"),
        (FedKD(), SHARE, "got fedkd"),
        (FedFomo(), SHARE, "got fedfomo"),
        (FedHeNN(alignment_data={"size": 8}), SHARE, "got fedhenn"),
        (FedHeNN(**KERNELS), SHARE, "got fedhenn"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    method: Method, settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line):
        among(method, one=method.requirements.same_architecture).federation(method, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [FedAvg(), FedIN(), HeteroFL()], ids=lambda method: method.name)
def test_statistics_are_not_bounded(method: Method) -> None:
    world = among(method, norm=True, one=method.requirements.same_architecture)
    with pytest.raises(ConfigError, match=r"networks without BatchNorm.* sends '.*running_mean'"):
        world.federation(method, THREE, **BOUND)
    world.federation(method, THREE, **SHARE)


class Undeclared(FedAvg):
    """Weights that nobody says are weights."""

    card = replace(FedAvg.card, delta_entries=())


def test_weights_of_ones_own_method_must_be_declared(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^client 0, round 1, uploading: privacy: .* .see MethodCard.delta_entries.$"
    ):
        ran(Undeclared(), **BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_bounded_and_thinned_or_says_why_not(name: str) -> None:
    slow = THREE.model_copy(update={"lr": 0.01})  # at which ProtoNorm does not diverge among these clients
    for settings in (BOUND, SHARE, {"privacy": Privacy(upload_clip_norm=10.0, upload_noise_multiplier=1e-4)}):
        try:
            made = among(METHODS[name]()).federation(METHODS[name](), slow, **settings)
        except ConfigError:
            continue
        made.run()
        assert not any(record["refused"] for record in made.history)


# the page -----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "uploads.md").read_text(encoding="utf-8")


def test_the_page_names_every_method_as_it_is() -> None:
    told = {}
    for line in PAGE.partition("| method | top_k_fraction |")[2].partition("\n\n")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        told |= {name: cells[1:3] for name in cells[0].split(", ") if name in METHODS}
    for name, kind in METHODS.items():
        method = kind()
        share, bound = told.pop(name)
        silent = method.card.up == "nothing"
        thins = bool(set(method.card.delta_entries) - method.fixed_entries.keys())
        assert (share, bound) == tuple("yes" if can else "no" for can in (thins or silent, not method.fixed_entries)), (
            name
        )
    assert not told
