"""A method with every client a federation of its own: what it equals, what it refuses, what it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from polyfed import testing
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.engine import method_wrappers as module
from polyfed.engine.federation import Federation
from polyfed.engine.method_wrappers import alone
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FD, FedAvg, FedGH, FedProto, FedRE, FedSA, FedSAF, FedTGP, Local
from polyfed.plugins.settings import Availability, Compression, Devices, RobustAggregation
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import SHORT
from polyfed.testing.kit import ConformanceKit
from tests.helpers.quick import others_slow

THREE = SHORT.model_copy(update={"rounds": 3, "client_fraction": 0.7})


def outcome(federation: Federation) -> dict[str, Tensor]:
    """All that a run leaves behind but what was sent."""
    return worlds.state(federation) | worlds.predictions(federation)


def same(a: Federation, b: Federation) -> bool:
    return worlds.difference(outcome(a), outcome(b)) is None


def test_it_is_the_method_with_another_half_of_the_server() -> None:
    method = alone(FedGH(header_lr=0.3))
    assert isinstance(method, FedGH)
    assert method.header_lr == 0.3
    assert (method.card, FedGH.card.alone) == (dataclasses.replace(FedGH.card, alone=True), False)
    assert (method.name, method.evaluation_stage) == ("fedgh", FedGH().evaluation_stage)
    assert repr(method) == "alone(FedGH(header_lr=0.3))"
    assert type(method).upload is FedGH.upload
    with pytest.raises(ValueError, match="alone already"):
        alone(method)


# what it equals -------------------------------------------------------------------------------------------------------


def test_local_alone_is_local() -> None:
    kit = ConformanceKit(method=Local())
    assert same(kit.run(training=THREE), kit.run(alone(Local()), THREE))


def test_a_server_that_passes_nothing_on_is_worth_nothing() -> None:
    """FedGH whose header stays as it was drawn: every client is sent the same, whoever else is there."""
    method = FedGH(header_lr=0.0)
    kit = ConformanceKit(method=method)
    same_architecture = kit.world(one=True)
    together = same_architecture.run(method, THREE)
    separate = same_architecture.run(alone(method), THREE)
    assert worlds.difference(worlds.weights(together), worlds.weights(separate)) is None
    assert worlds.difference(worlds.predictions(together), worlds.predictions(separate)) is None


OTHERS = [FD(), FedAvg(aggregation="same-shape"), FedGH(), FedProto(), FedRE(), FedSA(), FedSAF(), FedTGP()]


@pytest.mark.parametrize("method", others_slow(OTHERS, quick=[FedGH()]), ids=repr)
def test_the_others_are_gone(method: Method) -> None:
    kit = ConformanceKit(method=method)
    assert not same(kit.run(training=THREE), kit.run(alone(method), THREE))


# executors, resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", others_slow([FedTGP(), FedProto()], quick=[FedProto()]), ids=repr)
def test_processes_do_as_one_after_the_other(method: Method) -> None:
    kit = ConformanceKit(method=method)
    assert same(kit.run(alone(method)), kit.run(alone(method), executor="processes", workers=2))


@pytest.mark.parametrize("method", [FD(), FedProto()], ids=repr)
def test_clients_as_one_do_as_one_after_the_other(method: Method) -> None:
    kit = ConformanceKit(method=method)
    serial = worlds.weights(kit.run(alone(method)))
    stacked = worlds.weights(kit.run(alone(method), executor="vectorized", workers=3))
    assert worlds.difference(serial, stacked, 1e-4) is None


@pytest.mark.parametrize("method", others_slow([FD(), FedTGP()], quick=[FD()]), ids=repr)
def test_resumed_as_if_never_stopped(method: Method, tmp_path: Path) -> None:
    kit = ConformanceKit(method=method)
    four = SHORT.model_copy(update={"rounds": 4})

    class Stop:
        """Stops in round 3."""

        def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises((RunInterrupted, KeyboardInterrupt)):
        kit.usual.federation(alone(method), four, out=tmp_path, checkpoint_every=1, loggers=[Stop()]).run()
    resumed = kit.usual.federation(alone(method), four, out=tmp_path, checkpoint_every=1)
    resumed.run(resume=True)
    assert len(resumed.history) == 4
    assert same(resumed, kit.run(alone(method), four))


# bytes ------------------------------------------------------------------------------------------------------------


def test_no_byte_is_counted() -> None:
    kit = ConformanceKit(method=FedAvg())
    federation = kit.run(alone(FedAvg()), compression=Compression(dtype="float16"))
    for record in federation.history:
        assert record["bytes_up"] == record["bytes_down"] == record["bytes_up_uncompressed"] == 0
        assert record["bytes_up_paper"] == record["bytes_down_paper"] == 0
        assert {tuple(sent.values()) for sent in record["bytes_by_client"].values()} == {(0, 0)}


# refused before round 1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"robust_aggregation": RobustAggregation(aggregator="median")}, r"expected no \[robust_aggregation\]"),
        ({"robust_aggregation": RobustAggregation(max_update_norm=1.0)}, r"expected no \[robust_aggregation\]"),
        ({"availability": Availability(delay_rate=0.5)}, "expected no availability.delay_rate"),
        ({"devices": Devices(profiles=["phone-mid"], round_timeout=3.0)}, "expected no devices.round_timeout"),
    ],
)
def test_what_needs_others_is_refused(settings: dict[str, Any], said: str) -> None:
    kit = ConformanceKit(method=FedAvg(aggregation="same-shape"))
    with pytest.raises(ConfigError, match=f"fedavg, alone: .*{said}"):
        kit.usual.federation(alone(kit.method), **settings)


def test_who_drops_out_or_joins_late_may_be_alone() -> None:
    availability = Availability(dropout_rate=0.3, late_joiners=2, join_round=2)
    federation = ConformanceKit(method=FedTGP()).run(alone(FedTGP()), THREE, availability=availability)
    assert len(federation.history) == 3


# the property bites -----------------------------------------------------------------------------------------------


def test_a_server_that_hears_of_another_client_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: what client 0 sent reaches client 1's server, too."""
    honest: Callable[[Server, int], Server] = Server.of_one

    def leaky(self: Server, client_id: int) -> Server:
        own = honest(self, client_id)
        if client_id == 1:
            own.state |= honest(self, 0).state
        return own

    monkeypatch.setattr(Server, "of_one", leaky)
    found = testing.violations(FedProto(), only=["alone_knows_nobody"])
    assert "client 1 depends on the others' data" in found["alone_knows_nobody"]


def test_a_server_that_serves_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: every client's own server is the common one."""
    monkeypatch.setattr(module, "own_server", lambda server, client_id: server)
    monkeypatch.setattr(module, "own_servers", lambda server, numbers: iter([(0, server)]))
    assert "alone_knows_nobody" in testing.violations(FedAvg(), only=["alone_knows_nobody"])
