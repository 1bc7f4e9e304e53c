"""The contract carries methods that come later: each in miniature, on the engine as it is.

Two exchanges per round, phases and masks, private beside shared networks, slices that change, control variates,
downloads made for one client, prediction from prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Exchange,
    Method,
    Phase,
    Requirements,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.errors import RunError
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import eval_mode
from polyfed.methods import FedAvg, Local
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import (
    CLASSES,
    SHORT,
    SIZES,
    difference,
    draw,
    received,
    tiny_model,
)
from tests.helpers.mutants import sound


def one_kind(method: Method, training: Training = SHORT, norm: bool = False, **options: Any) -> Federation:
    """A run among clients of one architecture."""
    return ConformanceKit(method=method).world(one=True, norm=norm).run(method, training, **options)


# two exchanges in a round: a pass over everybody's data for BatchNorm statistics (HeteroFL) --------------------------


@hyperparameters
class Statistics(FedAvg):
    """FedAvg; then all clients, also those not drawn, report the mean of their inputs, without training."""

    card = replace(FedAvg.card, name="statistics", form=None, ignores_initial_weights=False)

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return Exchange(), Exchange("statistics", who="all", trains=False)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return super().broadcast(server, client_id) if server.exchange == "train" else {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == "train":
            super().aggregate(server, uploads)
            return
        means = [{"mean": get_tensor(m, "mean")} for m in uploads.values()]
        server.state["input"] = weighted_mean(means, [float(get_tensor(m, "n")) for m in uploads.values()])["mean"]

    def receive(self, client: Client, message: Message) -> Context:
        return super().receive(client, message) if client.exchange == "train" else {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if client.exchange == "train":
            return super().upload(client, trained)
        assert trained == TrainingResult()
        return {"mean": client.data.train.x.mean(dim=0), "n": torch.tensor(client.n)}


def test_a_second_exchange_reaches_everybody_and_trains_nobody() -> None:
    training = Training(rounds=2, batch_size=8, lr=0.1, client_fraction=0.5)
    federation = one_kind(Statistics(), training)
    everything = torch.cat([client.data.train.x for client in federation.clients])
    assert torch.allclose(get_tensor(federation.server.state, "input"), everything.mean(dim=0), atol=1e-6)
    plain = one_kind(FedAvg(), training)
    assert difference(received(plain, 0), received(federation, 0)) is None
    for record, other in zip(federation.history, plain.history, strict=True):
        statistics = 36 * 4 + 8  # bytes up
        assert record["bytes_up"] == other["bytes_up"] + 6 * statistics
        assert record["bytes_down"] == other["bytes_down"]
        assert sorted(map(int, record["bytes_by_client"])) == list(range(6))
        assert record["samples"] == other["samples"]


def test_the_streams_of_two_exchanges_differ() -> None:
    client = Client("a", draw(4, (0, 1), 0))
    client.id = 3
    first = torch.rand(4, generator=client.generator("batches"))
    client.exchange = "statistics"
    assert not torch.equal(first, torch.rand(4, generator=client.generator("batches")))


# phases: the head alone, then the extractor alone (FedRep) ----------------------------------------------------------


def test_a_phase_with_its_own_rate_and_data() -> None:
    class OnValidation(Local):
        def phases(self, training: Training) -> Sequence[Phase]:
            return (Phase(3, data="validation", lr=0.0),)

    federation = one_kind(OnValidation())
    assert federation.history[0]["samples"] == 6 * 3 * 4
    assert all(torch.equal(t, federation.server.client_weights(0)[n]) for n, t in federation.clients[0].weights.items())


# public rows with everybody's targets (FedMD), and a part of one's own rows (FedL2G) ------------------------------


@hyperparameters
class Consensus(Local):
    """Match the mean of all clients' logits on eight public rows, then learn from the first half of one's own."""

    card = replace(Local.card, name="consensus", form=None, ignores_initial_weights=False)

    @property
    def requirements(self) -> Requirements:
        return Requirements(public=8)

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        assert server.public is not None
        drawn = torch.randperm(len(server.public), generator=server.generator("subset"))[:8]
        server.state["subset"] = drawn.sort().values

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return Exchange("logits", who="all", trains=False), Exchange()

    def broadcast(self, server: Server, client_id: int) -> Message:
        known = {"subset": server.state["subset"]}
        return known if server.exchange == "logits" else {**known, "consensus": server.state["consensus"]}

    def receive(self, client: Client, message: Message) -> Context:
        subset = get_tensor(message, "subset").clone()
        if client.exchange == "logits":
            return {"subset": subset}
        targets = torch.zeros(len(client.public or ()), CLASSES)
        targets[subset] = get_tensor(message, "consensus")
        return {"subset": subset, "study": torch.arange(client.n // 2), "targets": targets}

    def phases(self, training: Training) -> Sequence[Phase]:
        return Phase(2, data="public", rows="subset", name="match"), Phase(1, rows="study", name="study")

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"matches": client.phase == "match"}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        if context["matches"]:
            return (model(batch.x) - context["targets"][batch.rows]).abs().mean()
        assert batch.rows is not None
        assert set(batch.rows.tolist()) <= set(context["study"].tolist())
        return cross_entropy(model(batch.x), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        if client.exchange != "logits":
            return {}
        assert client.public is not None
        x = client.public.prepare(client.public.samples.x[client.context["subset"]])
        with torch.no_grad(), eval_mode(client.model):
            return {"logits": client.model(x)}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == "logits":
            server.state["consensus"] = torch.stack([get_tensor(m, "logits") for m in uploads.values()]).mean(dim=0)


def test_phases_on_public_rows_and_on_some_of_ones_own() -> None:
    federation = one_kind(Consensus())
    halves = sum(size // 2 for size in SIZES)
    assert [record["samples"] for record in federation.history] == [2 * 8 * len(SIZES) + halves] * 2
    assert not any(record["refused"] for record in federation.history)


def test_a_phase_on_public_rows_that_nobody_has_is_refused() -> None:
    class Careless(Consensus):
        requirements = Requirements()  # type: ignore[assignment]
        start_round = Local.start_round
        exchanges = Local.exchanges
        broadcast = Local.broadcast

        def receive(self, client: Client, message: Message) -> Context:
            return {"subset": torch.arange(2)}

    with pytest.raises(RunError, match=r"client 0, round 1, training: expected data that everybody may see"):
        ConformanceKit(method=Careless()).world(one=True).run(Careless(), SHORT, public=False)


# a private network and an auxiliary model (FML) ----------------------------------------------------------------------


def test_a_model_of_ones_own_is_wrapped_and_not_changed() -> None:
    mine = tiny_model(1, 4, 6)
    before = {n: t.clone() for n, t in mine.state_dict().items()}
    clients = [Client(mine, draw(12, (0, 1, 2), i), draw(6, (0, 1, 2), 9)) for i in range(2)]
    run = Federation(clients, sound.FML(), SHORT).run()
    assert difference(before, dict(mine.state_dict())) is None
    assert difference(before, dict(run.models[0].state_dict())) is not None


def test_build_may_cut_what_it_is_given() -> None:
    class Cuts(Local):
        def build(self, model: Any, variant: str) -> nn.Module:
            model.intermediate = model.intermediate[1:]  # without its first block
            return model

        def init_server(self, server: Server) -> None:
            server.store_weights(0, server.client_weights(0))

    mine = tiny_model(1, 4, 6)
    Federation([Client(mine, draw(12, (0, 1, 2), 0), draw(6, (0, 1, 2), 9))], Cuts(), SHORT).run()
    assert len(mine.intermediate) == 4


# a method in a handful of lines, on clients of one's own ------------------------------------------------------------


def test_the_smallest_method() -> None:
    class Mine(Method):
        def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
            return nn.functional.cross_entropy(model(batch.x), batch.y)

    samples = draw(20, (0, 1, 2), 0)
    client = Client(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), (samples.x, samples.y), (samples.x, samples.y))
    run = Federation([client], Mine(), Training(rounds=5, lr=0.1)).run()
    assert run.result["accuracy"] > 0.8
    assert run.result["method"] == "Mine"
    assert run.result["bytes_up"] == run.result["bytes_down"] == 0
