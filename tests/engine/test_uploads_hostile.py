"""`[adversaries]` and `[robust_aggregation]` in a run: who is named and scored, what is refused, who agrees, what
folders say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FedAvg, FedFomo, FedIN, FedL2G, FedProto
from polyfed.plugins.settings import Adversaries, RobustAggregation
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import TinyFederation, all_state, difference, records
from polyfed.testing.spy import Spy
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

TWO = Training(rounds=2, batch_size=8, lr=0.1)
THREE = Training(rounds=3, batch_size=8, lr=0.1)
SIGNS, LABELS = Adversaries(sign_flip_fraction=0.3, attack_scale=2.0), Adversaries(label_flip_fraction=0.3)
MEDIAN = RobustAggregation(aggregator="median")
RULES = ("median", "trimmed_mean", "geometric_median", "multi_krum", "norm_clipping")
ALL: dict[str, Any] = {
    "adversaries": Adversaries(sign_flip_fraction=0.1, label_flip_fraction=0.1, attack_scale=2.0),
    "robust_aggregation": RobustAggregation(aggregator="trimmed_mean", byzantine_fraction=0.3, max_update_norm=50.0),
}
COLLUDE: dict[str, Any] = {
    "adversaries": Adversaries(inner_product_fraction=0.1, alie_fraction=0.1, attack_scale=0.5),
    "robust_aggregation": RobustAggregation(aggregator="geometric_median", bucket_size=2, max_update_norm=50.0),
}


def among(method: Method, **kinds: Any) -> TinyFederation:
    return ConformanceKit(method=method).world(**kinds)


def ran(method: Method, training: Training = TWO, **options: Any) -> Federation:
    return among(method).run(method, training, **options)


def uploaded(**options: Any) -> dict[int, tuple[Message, Message]]:
    """Of the first round of FedAvg, by client: what came down, and what came up."""
    down: dict[int, Message] = {}
    up: dict[int, Message] = {}

    def receive(call: Callable[..., Any], client: Client, message: Message) -> Any:
        down.setdefault(client.id, message)
        return call(client, message)

    def aggregate(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        up.update(uploads)
        call(server, uploads)

    one = Training(rounds=1, batch_size=8, lr=0.1)
    among(FedAvg()).run(Spy(FedAvg(), receive=receive, aggregate=aggregate), one, **options)
    return {i: (down[i], up[i]) for i in up}


def hostile(federation: Federation) -> dict[int, str]:
    return {int(i): kind for i, kind in federation.facts["adversarial_clients"].items()}


# off ----------------------------------------------------------------------------------------------------------------


def test_off_is_as_if_there_were_no_such_settings() -> None:
    plain, off = (
        ran(FedAvg()),
        ran(
            FedAvg(),
            robust_aggregation=RobustAggregation(),
            adversaries=Adversaries(sign_flip_fraction=0.0, attack_scale=5.0),
        ),
    )
    assert difference(all_state(plain), all_state(off)) is None
    assert records(plain) == records(off)
    assert plain.settings == off.settings
    assert plain.facts == off.facts
    assert not {"robust_aggregation", "adversaries", "adversarial_clients"} & plain.facts.keys()
    assert not {"robust_aggregation", "adversaries"} & plain.history[0].keys()
    assert "clients" not in plain.facts["evaluation"]


# hostile clients ----------------------------------------------------------------------------------------------------


def test_signs_are_flipped_on_the_way_and_the_others_send_what_they_did() -> None:
    before, after = uploaded(), uploaded(adversaries=SIGNS)
    bad = hostile(among(FedAvg()).federation(FedAvg(), TWO, adversaries=SIGNS))
    assert list(bad.values()) == ["sign_flip"] * 2
    for i, (down, up) in before.items():
        start = flatten(down)
        for name, sent in flatten(up).items():
            if i in bad and name in start:
                expected = start[name] - 2.0 * (sent - start[name])
                torch.testing.assert_close(flatten(after[i][1])[name], expected, rtol=0, atol=1e-6)
                assert not torch.equal(expected, sent)
            else:
                assert torch.equal(flatten(after[i][1])[name], sent)


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
    made = ran(FedAvg(), few, evaluation=every, **ALL)
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


@pytest.mark.parametrize(
    "method", [FedL2G(), pytest.param(FedAvg(), marks=pytest.mark.slow)], ids=lambda method: method.name
)
def test_every_rule_bites_and_is_another_one(method: Method) -> None:
    shares = {"trimmed_mean": {"byzantine_fraction": 0.1}, "multi_krum": {"byzantine_fraction": 0.1}}
    rules: Any = ("none", *RULES)
    ends = [
        all_state(ran(method, robust_aggregation=RobustAggregation(aggregator=rule, **shares.get(rule, {}))))
        for rule in rules
    ]
    for place, one in enumerate(ends):
        assert all(difference(one, other) is not None for other in ends[place + 1 :])


def test_buckets_and_those_who_know_the_others_bite() -> None:
    world = among(FedAvg(), one=True)
    tries: list[dict[str, Any]] = [
        {},
        {"adversaries": Adversaries(inner_product_fraction=0.1)},
        {"adversaries": Adversaries(alie_fraction=0.1)},
        {"adversaries": Adversaries(alie_fraction=0.1, attack_scale=2.0)},
        {"robust_aggregation": RobustAggregation(aggregator="median")},
        {"robust_aggregation": RobustAggregation(aggregator="median", bucket_size=2)},
    ]
    ends = [all_state(world.run(FedAvg(), TWO, **options)) for options in tries]
    for place, one in enumerate(ends):
        assert all(difference(one, other) is not None for other in ends[place + 1 :])


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
    made = ran(FedAvg(), THREE, adversaries=one, robust_aggregation=RobustAggregation(max_update_norm=5.0))
    (bad,) = hostile(made)
    for record in made.history:
        (refused,) = record["refused"]
        assert refused["client"] == bad
        assert refused["reason"].startswith("the norm of 'model' is ")
        assert refused["reason"].endswith(", above robust_aggregation.max_update_norm = 5")
        assert record["bytes_by_client"][str(bad)]["up"] > 0, "it came"
    assert made.clients[bad].weights is None, "nothing of it counts"
    assert len(made.history) == 3


# who agrees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", others_slow([ALL, COLLUDE], quick=[ALL]), ids=["alone", "colluding"])
def test_serial_pool_and_resumed_are_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    world = among(FedAvg(), one=options is COLLUDE)
    straight = world.run(FedAvg(), THREE, **options)
    pool = world.run(FedAvg(), THREE, **options, executor="processes", workers=2)
    with pytest.raises(RunInterrupted):
        world.run(FedAvg(), THREE, **options, out=tmp_path / "run", loggers=[Interrupt(2)])
    resumed = world.federation(FedAvg(), THREE, **options, out=tmp_path / "run")
    resumed.run(resume=True)
    for other in (pool, resumed):
        assert difference(all_state(straight), all_state(other)) is None
        assert records(straight) == records(other)
    unlike = world.federation(FedAvg(), THREE, robust_aggregation=options["robust_aggregation"], out=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds another recipe's run"):
        unlike.run(resume=True)


# recipes and folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "line"),
    [
        (FedFomo(), {"robust_aggregation": MEDIAN}, "robust_aggregation.aggregator: expected .* got fedfomo"),
        (FedProto(), {"robust_aggregation": MEDIAN}, "expected 'geometric_median', .* got 'median'"),
        (FedAvg(), {"adversaries": Adversaries(label_flip_fraction=0.5, sign_flip_fraction=0.5)}, "at least one of"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    method: Method, options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line):
        among(method).federation(method, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# the page -----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text(encoding="utf-8")


def test_the_page_names_every_method_as_it_is() -> None:
    told = {}
    for line in PAGE.partition("| method | rules |")[2].partition("\n\n")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        told |= {name: cells[1] for name in cells[0].split(", ") if name in METHODS}
    expected = {name: "no" if kind().fixed_entries else "yes" for name, kind in METHODS.items()}
    expected |= {
        name: "geometric_median, multi_krum, norm_clipping"
        for name, kind in METHODS.items()
        if kind.card.unaligned_entries
    }
    assert told == expected
