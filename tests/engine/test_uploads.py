"""Uploads in a run: `[privacy]`, `[adversaries]` and `[robust_aggregation]`; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import (
    FedAvg,
    FedFomo,
    FedIN,
    FedLoRA,
    FedProto,
    HeteroFL,
)
from polyfed.plugins.settings import Adversaries, Availability, RobustAggregation
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TinyFederation, all_state, difference, records
from polyfed.testing.observation import Spy
from tests.helpers.interrupt import Interrupt

TWO = Training(rounds=2, batch_size=8, lr=0.1)
THREE = Training(rounds=3, batch_size=8, lr=0.1)
ALL = {
    "privacy": Privacy(upload_clip_norm=1.0, upload_noise_multiplier=0.01),
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


OFF: dict[str, Any] = {
    "privacy": Privacy(),
    "robust_aggregation": RobustAggregation(),
    "adversaries": Adversaries(sign_flip_fraction=0.0, attack_scale=5.0),
    "availability": Availability(dropout_rate=0.0, dropout_stage="after"),
}


def test_off_is_as_if_there_were_no_such_settings() -> None:
    plain, off = ran(FedAvg()), ran(FedAvg(), **OFF)
    assert difference(all_state(plain), all_state(off)) is None
    assert records(plain) == records(off)
    assert plain.settings == off.settings
    assert plain.facts == off.facts
    assert not {*OFF, "adversarial_clients"} & (plain.settings.keys() | plain.facts.keys())
    assert not OFF.keys() & plain.history[0].keys()
    assert "clients" not in plain.facts["evaluation"]


# what is refused ----------------------------------------------------------------------------------------------------

MEDIAN = RobustAggregation(aggregator="median")
BOUND = {"privacy": Privacy(upload_clip_norm=1.0)}
KERNELS = {"uploads": "kernels", "alignment_data": {"fixed": True, "size": 8}}


@pytest.mark.parametrize(
    ("method", "settings", "line"),
    [
        (FedFomo(), BOUND, "privacy: expected uploads that can be clipped, got fedfomo, which sends 'model': whole"),
        (FedLoRA(), BOUND, "got fedlora, which sends 'adapters': factors A that the client drew.*method.aggregation"),
        (FedFomo(), {"robust_aggregation": MEDIAN}, "robust_aggregation.aggregator: expected .* got fedfomo"),
        (FedProto(), {"robust_aggregation": MEDIAN}, "expected 'geometric_median', .* got 'median'"),
        (FedAvg(), {"adversaries": Adversaries(label_flip_fraction=0.5, sign_flip_fraction=0.5)}, "at least one of"),
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


class Undeclared(FedAvg):
    """Weights that nobody says are weights."""

    delta_entries = ()


def test_weights_of_ones_own_method_must_be_declared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^client 0, round 1, uploading: privacy: .* .see Method.delta_entries.$"):
        ran(Undeclared(), **BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_bounded_and_thinned_or_says_why_not(name: str) -> None:
    slow = THREE.model_copy(update={"lr": 0.01})  # at which no method diverges among these clients
    for settings in (BOUND, {"privacy": Privacy(upload_clip_norm=10.0, upload_noise_multiplier=1e-4)}):
        try:
            made = among(METHODS[name]()).federation(METHODS[name](), slow, **settings)
        except ConfigError:
            continue
        made.run()
        assert not any(record["refused"] for record in made.history)


SIGNS, LABELS = Adversaries(sign_flip_fraction=0.3, attack_scale=2.0), Adversaries(label_flip_fraction=0.3)
RULES = ("median", "trimmed_mean", "geometric_median", "multi_krum", "norm_clipping")
ALL_ROBUST: dict[str, Any] = {
    "adversaries": Adversaries(sign_flip_fraction=0.1, label_flip_fraction=0.1, attack_scale=2.0),
    "robust_aggregation": RobustAggregation(aggregator="trimmed_mean", byzantine_fraction=0.3),
}


def hostile(federation: Federation) -> dict[int, str]:
    return {int(i): kind for i, kind in federation.facts["adversarial_clients"].items()}


# hostile clients ----------------------------------------------------------------------------------------------------


def test_labels_are_flipped_before_training_alone() -> None:
    plain, made = (among(FedAvg()).federation(FedAvg(), TWO, **more) for more in ({}, {"adversaries": LABELS}))
    bad = hostile(made)
    assert list(bad.values()) == ["label_flip"] * 2
    for i, (before, after) in enumerate(zip(plain.clients, made.clients, strict=True)):
        turned = 2 - before.data.train.y if i in bad else before.data.train.y
        assert torch.equal(after.data.train.y, turned)
        assert torch.equal(after.data.test.y, before.data.test.y)
        assert torch.equal(after.data.validation.y, before.data.validation.y)


def test_only_the_honest_are_scored_and_the_hostile_are_named() -> None:
    every = Evaluation(stage="received", extra_stages=["after_training", "personal"])
    few = THREE.model_copy(update={"client_fraction": 0.5})
    made = ran(FedAvg(), few, evaluation=every, **ALL_ROBUST)
    bad = hostile(made)
    assert sorted(bad.values()) == ["label_flip", "sign_flip"]
    assert made.facts["adversaries"] == {"label_flip_fraction": 0.1, "sign_flip_fraction": 0.1, "attack_scale": 2.0}
    assert made.facts["evaluation"]["clients"] == "honest"
    for record in made.history:
        assert record["adversaries"] == sorted(set(record["clients"]) & bad.keys())
        scored = [i for i, value in enumerate(record["accuracy_per_client"]) if value is not None]
        assert scored == [i for i in range(6) if i not in bad]
        assert {stage: found["n"] for stage, found in record["accuracy"].items()} == {
            "received": 4,
            "after_training": len(set(record["clients"]) - bad.keys()),
            "personal": 4,
        }


# the defense --------------------------------------------------------------------------------------------------------


def test_the_record_tells_what_it_did() -> None:
    made = ran(
        FedIN(),
        adversaries=Adversaries(sign_flip_fraction=0.1, attack_scale=50.0),
        robust_aggregation=RobustAggregation(aggregator="multi_krum", byzantine_fraction=0.1),
    )
    (bad,) = hostile(made)
    for record in made.history:
        assert record["robust_aggregation"].keys() == {"left_out", "shortened", "few"}
        assert record["robust_aggregation"]["left_out"] == [bad]
        assert record["robust_aggregation"]["shortened"] > 0, "features of those kept"
    assert made.facts["robust_aggregation"] == {"aggregator": "multi_krum", "byzantine_fraction": 0.1}


def test_an_upload_beyond_the_bound_is_refused_and_named_and_the_run_goes_on() -> None:
    one = Adversaries(sign_flip_fraction=0.1, attack_scale=100.0)
    made = ran(FedAvg(), THREE, adversaries=one, robust_aggregation=RobustAggregation(max_magnitude=1.5))
    (bad,) = hostile(made)
    for record in made.history:
        (refused,) = record["refused"]
        assert refused["client"] == bad
        assert refused["reason"].startswith("a number of 'model/")
        assert refused["reason"].endswith(", above robust_aggregation.max_magnitude = 1.5")
        assert record["bytes_by_client"][str(bad)]["up"] > 0, "it came"
    assert made.clients[bad].weights is None, "nothing of it counts"
    assert len(made.history) == 3


# who agrees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg(), ALL),
        (FedAvg(), ALL_ROBUST),
        pytest.param(FedIN(), ALL, marks=pytest.mark.slow),
    ],
)
def test_serial_pool_and_resumed_are_the_same_bits(tmp_path: Path, method: Method, options: dict[str, Any]) -> None:
    world = among(method)
    straight = world.run(method, THREE, **options)
    pool = world.run(method, THREE, **options, executor="processes", workers=2)
    with pytest.raises(RunInterrupted):
        world.run(method, THREE, **options, out=tmp_path / "run", loggers=[Interrupt(2)])
    resumed = world.federation(method, THREE, **options, out=tmp_path / "run")
    resumed.run(resume=True)
    for other in (pool, resumed):
        assert difference(all_state(straight), all_state(other)) is None
        assert records(straight) == records(other)
