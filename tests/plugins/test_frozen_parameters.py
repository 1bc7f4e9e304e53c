"""Frozen parameters are not sent up, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.message import nbytes
from polyfed.core.settings import Privacy
from polyfed.methods import FedAvg, FedHeNN, FedProx, Local
from polyfed.plugins.frozen_parameters import FrozenParameters
from polyfed.plugins.settings import Compression
from tests.helpers.toys import NETS, Round, clients, federation, numpy_mean, public, rounds, shared

FROZEN = ("extractor.linear.weight", "extractor.linear.bias")


def frozen() -> nn.Module:
    network = NETS["deep"]()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    return network


BUILDERS = {"frozen": frozen, "deep": NETS["deep"]}


def ran(method: Any, architectures: list[str], **options: Any) -> list[Round]:
    return rounds(method, clients(architectures, [8, 12, 10][: len(architectures)]), BUILDERS, **options)


@pytest.mark.parametrize("method", [FedAvg(), FedProx(), FedAvg(aggregation="same-shape")])
def test_they_stay_with_the_client_and_the_mean_is_of_all(method: Any) -> None:
    for round in ran(method, ["frozen"] * 3):
        before, after = shared(round.before), shared(round.after)
        assert before.keys() == after.keys()
        for i, message in round.up.items():
            assert set(before) - set(message["model"]) == set(FROZEN)
            assert nbytes(message) == 4 * sum(t.numel() for n, t in before.items() if n not in FROZEN) + 8
            assert set(round.down[i]["model"]) == set(before)
        assert round.record["bytes_up"] == sum(nbytes(message) for message in round.up.values())
        for name in after:
            expected = numpy_mean([round.trained[i] for i in range(3)], [8, 12, 10], name)
            np.testing.assert_allclose(after[name].numpy(), expected, atol=1e-6)


def test_networks_without_any_send_all_of_theirs() -> None:
    for round in ran(FedAvg(), ["frozen", "deep"]):
        assert set(shared(round.before)) - set(round.up[0]["model"]) == set(FROZEN)
        assert set(round.up[1]["model"]) == set(shared(round.before))
        assert not torch.equal(shared(round.before)[FROZEN[0]], shared(round.after)[FROZEN[0]])


@pytest.mark.parametrize(
    "plugin", [Compression(dtype="int8"), Privacy(upload_clip_norm=1.0, upload_noise_multiplier=0.5)]
)
def test_they_are_neither_rounded_nor_noised(plugin: Any) -> None:
    for round in ran(FedAvg(), ["frozen"] * 2, plugins=[plugin]):
        sent = [name for entry in round.up[0].values() if not isinstance(entry, torch.Tensor) for name in entry]
        assert not set(FROZEN) & set(sent)
        assert all(torch.allclose(shared(round.before)[name], shared(round.after)[name], atol=1e-6) for name in FROZEN)


def test_what_did_not_come_down_goes_up_whole() -> None:
    """FedHeNN's networks are the clients' own."""
    kernel = FedHeNN(alignment_data={"size": 10}, eta0=0.1)
    (round,) = ran(kernel, ["frozen"] * 2, held=public(), rounds=1)
    assert set(FROZEN) <= set(round.up[0]["model"])
    assert not ran(Local(), ["frozen"])[0].up[0]


def test_only_frozen_ones_may_be_missing() -> None:
    """An upload that lacks another tensor is read as it came."""
    made, _ = federation(FedAvg(), clients(["frozen"]), BUILDERS)
    plugin = made.plugin("frozen parameters")
    assert isinstance(plugin, FrozenParameters)
    job: Any = type("Job", (), {"client": made.clients[0], "message": {"model": dict(frozen().state_dict())}})()
    read = plugin.decode({"model": {}}, job, FedAvg())
    assert set(read["model"]) == set(FROZEN)
    assert "model" not in plugin.decode({}, job, FedAvg())
