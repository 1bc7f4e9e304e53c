"""Sums of uploads in a simulation: the plain solution, thresholds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.core.message import flatten, nbytes
from polyfed.core.method import Method
from polyfed.errors import ConfigError
from polyfed.methods import FD, MOON, ClosedForm, FedAvg, FedNova, FedProx, Local, OwnPlusCommon
from polyfed.plugins.settings import SecureSums
from tests.helpers.toys import Round, clients, federation, rounds

SUMS = SecureSums(enabled=True)
SMALL = ClosedForm(features=20)
SIZES = [9, 14, 7, 12, 20]


def run(method: Method, *plugins: Any, names: str = "shallow", **options: Any) -> list[Round]:
    return rounds(method, clients([names] * 5, SIZES, test=6), plugins=plugins, rounds=2, **options)


@pytest.mark.parametrize(
    "method",
    [
        SMALL,
        ClosedForm(features=20, unit_features=True),
        OwnPlusCommon(features=20),
        FedAvg(),
        FedAvg(aggregation="same-shape"),
        FedProx(mu=0.1),
        MOON(),
    ],
    ids=lambda method: method.name,
)
def test_the_result_is_the_plain_one(method: Method) -> None:
    plain, summed = run(method), run(method, SUMS)
    for one, other in zip(plain, summed, strict=True):
        expected, found = flatten(one.after), flatten(other.after)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
        assert all(nbytes(other.up[i]) <= 1.5 * nbytes(one.up[i]) for i in one.up)
    assert summed[0].record["secure_sums"] == {"asked": [0, 1, 2, 3, 4], "summed": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(("lost", "summed"), [({0}, [1, 2, 3, 4]), ({0, 3}, [])])
@pytest.mark.parametrize("method", [SMALL, FedAvg()], ids=lambda method: method.name)
def test_a_total_is_opened_where_enough_are_left(method: Method, lost: set[int], summed: list[int]) -> None:
    first, second = run(method, SUMS, lose=lambda number, i: number == 1 and i in lost)
    assert first.record["secure_sums"]["summed"] == summed
    if not summed:
        kept = {name: t for name, t in flatten(first.before).items() if "model" in name}
        assert all(torch.equal(flatten(first.after)[name], t) for name, t in kept.items())
        assert "solution" not in first.after
        assert second.record["secure_sums"]["summed"] == [0, 1, 2, 3, 4]


def test_one_who_was_not_summed_waits_for_others() -> None:
    first, second = run(SMALL, SUMS, lose=lambda number, i: number == 1 and i == 2)
    assert first.record["secure_sums"]["summed"] == [0, 1, 3, 4]
    assert second.record.get("secure_sums") is None  # a sum of one would be its own
    assert torch.equal(second.after["sums"]["counts"], first.after["sums"]["counts"])


@pytest.mark.parametrize("client", [0, 4])
def test_one_beyond_the_range_is_left_out(client: int) -> None:
    members = clients(["shallow"] * 5, SIZES, test=6)
    members[client].data.train.x.mul_(1e6)
    (record,) = rounds(ClosedForm(features=20, map="random"), members, plugins=[SUMS], rounds=1)
    assert [one["client"] for one in record.record["refused"]] == [client]
    assert "so that sums fit into fixed point" in record.record["refused"][0]["reason"]
    assert record.record["secure_sums"]["summed"] == [i for i in range(5) if i != client]


@pytest.mark.parametrize(
    ("method", "others", "told"),
    [
        (FD(), [], "a method whose uploads add up .*, got fd"),
        (FedNova(), [], "a method whose uploads add up .*, got fednova"),
        (pf.alone(FedAvg()), [], "got a method alone"),
        (FedAvg(weighting="uniform"), [], "weighting 'uniform'"),
        (ClosedForm(features=20, keep_sums=True), [], "keep_sums = false"),
        (ClosedForm(features=20, second_moments="clients"), [], "second_moments = 'rows'"),
        (FedAvg(), [pf.RobustAggregation(aggregator="median")], "no robust_aggregation"),
        (FedAvg(), [pf.RobustAggregation(max_magnitude=10.0)], "no robust_aggregation"),
        (FedAvg(), [pf.Devices(profiles=["laptop"], buffer_size=2)], "no devices.buffer_size"),
    ],
)
def test_what_needs_single_uploads_is_refused(method: Method, others: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        federation(method, clients(["shallow"] * 5, 12), plugins=[SUMS, *others])


def test_networks_that_differ_do_not_add_up() -> None:
    with pytest.raises(ConfigError, match="clients of one architecture for fedavg"):
        federation(FedAvg(aggregation="same-shape"), clients(["shallow", "wide", "broad"], 12), plugins=[SUMS])


def test_a_method_without_uploads_has_nothing_to_hide() -> None:
    assert "secure_sums" not in run(Local(), SUMS)[0].record
