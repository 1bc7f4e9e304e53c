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
from polyfed.core.message import Message, flatten, get_group, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Exchange,
    Method,
    MethodCard,
    Phase,
    Requirements,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.errors import RunError
from polyfed.experiments.estimate import estimate_costs
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import eval_mode
from polyfed.methods import FedAvg, FedHeNN, Local
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import (
    CLASSES,
    SHORT,
    SIZES,
    ReorderedClient,
    difference,
    draw,
    received,
    sent,
    state,
    tiny_model,
    weights,
    world,
)
from polyfed.testing.spy import Spy
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


@hyperparameters
class FedRep(FedAvg):
    """The head stays at home; it is trained first, then the rest."""

    card = replace(FedAvg.card, name="toy-fedrep", form=None, ignores_initial_weights=False)
    head_epochs: int = 2
    extractor_epochs: int = 1

    @property
    def evaluation_stage(self) -> Any:
        return "personal"

    def phases(self, training: Training) -> Sequence[Phase]:
        head = Phase(self.head_epochs, lambda name: name.startswith("head."), lr=0.05, name="head")
        return head, Phase(self.extractor_epochs, lambda name: not name.startswith("head."), name="extractor")

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        seen.append((client.id, client.phase, {n: t.clone() for n, t in client.model.state_dict().items()}))
        return {}

    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, {n: t for n, t in get_group(message, "model").items() if not n.startswith("head.")})
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        body = {n: t for n, t in float_state(client.model).items() if not n.startswith("head.")}
        return {"model": body, "n": torch.tensor(client.n)}


seen: list[tuple[int, str, dict[str, Tensor]]] = []


def test_phases_train_one_part_after_the_other() -> None:
    seen.clear()
    federation = one_kind(FedRep(aggregation="layer-wise"), Training(rounds=1, batch_size=8, lr=0.1), norm=True)
    mine = [(phase, held) for number, phase, held in seen if number == 0]
    assert [phase for phase, _ in mine] == ["head"] * 6 + ["extractor"] * 3  # 24 samples in batches of 8
    start, turn, end = mine[0][1], mine[6][1], federation.clients[0].weights
    assert end is not None
    for name in start:
        if name.startswith("head."):
            assert not torch.equal(start[name], turn[name])
            assert torch.equal(turn[name], end[name])
        else:  # running statistics of the resting part rest, too
            assert torch.equal(start[name], turn[name]), name
            if not name.endswith("conv.bias"):  # BatchNorm takes a bias before it away
                assert not torch.equal(turn[name], end[name]), name
    assert federation.history[0]["samples"] == 3 * (sum(SIZES) - 1)  # BatchNorm takes no single row: 17 = 2 * 8 + 1
    assert not any("head" in name for name in flatten({"m": federation.clients[0].state}))


def test_a_phase_without_epochs_does_nothing() -> None:
    federation = one_kind(FedRep(extractor_epochs=0), Training(rounds=1, batch_size=8, lr=0.1))
    start = federation.server.initial_state("net0")
    assert all(torch.equal(t, start[n]) for n, t in received(federation, 0).items() if not n.startswith("head."))


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


def test_a_check_costs_such_phases_too() -> None:
    found = estimate_costs(ConformanceKit(method=Consensus()).world(one=True).federation(Consensus()))
    (kind,) = found.architectures
    assert kind.seconds_batch > 0
    assert kind.down == (8 * 8 + (8 * 8 + 4 * 8 * CLASSES),) * 2  # the subset twice, the consensus once
    assert kind.up == (4 * 8 * CLASSES,) * 2


def test_a_check_trains_with_what_was_received() -> None:
    seen = []

    def inputs(call: Any, client: Client, step: int, generator: torch.Generator) -> Context:
        seen.append((client.round, *client.context))
        return call(client, step, generator)

    method = Spy(FedHeNN(eta0=0.1, alignment_data={"size": 8}), step_inputs=inputs)
    estimate_costs(ConformanceKit(method=FedHeNN()).world(one=True).federation(method))
    assert set(seen) == {(1,), (2, "rad", "target")}


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


# masks (FedSelect, FedDPA) ------------------------------------------------------------------------------------------


@hyperparameters
class Masked(Local):
    """Every other entry of every tensor stays as it is."""

    card = replace(Local.card, name="masked", ignores_initial_weights=False)

    def receive(self, client: Client, message: Message) -> Context:
        every_other = {n: (torch.arange(p.numel()) % 2).reshape(p.shape) for n, p in client.model.named_parameters()}
        return {"mask": every_other}

    def phases(self, training: Training) -> Sequence[Phase]:
        return (Phase(training.local_epochs, mask="mask"),)


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}])
def test_masked_entries_stay_bit_for_bit(settings: dict[str, Any]) -> None:
    federation = one_kind(Masked(), Training(rounds=2, batch_size=8, lr=0.1, **settings))
    start, end = federation.server.client_weights(0), federation.clients[0].weights
    assert end is not None
    for name, before in start.items():
        old, new = before.flatten(), end[name].flatten()
        assert torch.equal(old[::2], new[::2])
        assert not torch.equal(old[1::2], new[1::2])


# a private network and an auxiliary model (FML) ----------------------------------------------------------------------


def test_a_private_network_beside_a_shared_one() -> None:
    among = ConformanceKit(method=sound.FML()).world()
    federation, alone = among.run(sound.FML(alpha=1.0)), among.run(Local())
    model = federation.export(2)
    assert type(model) is type(alone.export(2))
    assert difference(dict(model.state_dict()), dict(alone.export(2).state_dict())) is None
    assert federation.history[-1]["accuracy_per_client"] == alone.history[-1]["accuracy_per_client"]
    shared = {n: t for n, t in received(federation, 2).items() if n.startswith("shared.")}
    assert shared
    assert all(torch.equal(shared[n], received(federation, 0)[n]) for n in shared)


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


# slices that change from round to round (HeteroFL, FedRolex) --------------------------------------------------------


class Sliced(nn.Module):
    """One hidden layer of some width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(36, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x.flatten(1))))


@hyperparameters
class Rolling(Method):
    """Every client trains a window of the hidden units; width by (client, round), place by round."""

    card = MethodCard(name="rolling", paper="Alam et al., NeurIPS 2022")

    @property
    def requirements(self) -> Requirements:
        return Requirements(same_architecture=True)

    @property
    def evaluation_stage(self) -> Any:
        return "received"

    def init_server(self, server: Server) -> None:
        server.state["model"] = server.initial_state(server.architectures[0])

    def width(self, server: Server, client_id: int) -> int:
        return (8, 4, 2)[(client_id + server.round) % 3]

    def rows(self, server: Server, client_id: int) -> Tensor:
        return (torch.arange(self.width(server, client_id)) + server.round) % 8

    def variant(self, server: Server, client_id: int) -> str:
        return f"width {self.width(server, client_id)}"

    def build(self, model: Any, variant: str) -> nn.Module:
        return Sliced(int(variant.split()[1])) if variant else model

    def broadcast(self, server: Server, client_id: int) -> Message:
        full, rows = get_group(server.state, "model"), self.rows(server, client_id)
        return {"model": {n: _cut(n, t, rows) for n, t in full.items()}, "rows": rows}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        full = get_group(server.state, "model")
        total = {n: torch.zeros_like(t) for n, t in full.items()}
        count = {n: torch.zeros_like(t) for n, t in full.items()}
        for message in uploads.values():
            for name, value in get_group(message, "model").items():
                _cut(name, total[name], get_tensor(message, "rows"), value)
                _cut(name, count[name], get_tensor(message, "rows"), torch.ones_like(value))
        server.state["model"] = {n: torch.where(count[n] > 0, total[n] / count[n].clamp(min=1), full[n]) for n in full}

    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "model"))
        client.state["rows"] = get_tensor(message, "rows").clone()
        return {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"model": float_state(client.model), "rows": get_tensor(client.state, "rows")}


def _cut(name: str, full: Tensor, rows: Tensor, add: Tensor | None = None) -> Tensor:
    """The part of a tensor that belongs to some hidden units; with `add`, added to there."""
    if name == "out.bias":
        return full if add is None else full.add_(add)
    along = 1 if name == "out.weight" else 0
    return full.index_select(along, rows) if add is None else full.index_add_(along, rows, add)


def slices(training: Training, **options: Any) -> Federation:
    return world([lambda: Sliced(8)], 24).run(Rolling(), training, **options)


def test_slices_that_change_every_round() -> None:
    training = Training(rounds=3, batch_size=8, lr=0.1)
    federation = slices(training)
    for client in federation.clients:
        width = (8, 4, 2)[(client.id + 3) % 3]
        assert client.weights is not None
        assert client.weights["hidden.weight"].shape == (width, 36)
        message = federation.method.broadcast(federation.server, client.id)
        full = get_group(federation.server.state, "model")
        assert torch.equal(get_group(message, "model")["hidden.bias"], full["hidden.bias"][get_tensor(message, "rows")])
    sizes = [sum(t.numel() * 4 for t in Sliced(w).state_dict().values()) + 8 * w for w in (8, 4, 2)]
    assert federation.history[0]["bytes_down"] == 2 * sum(sizes)


def test_slices_learn() -> None:
    federation = slices(Training(rounds=12, local_epochs=2, batch_size=8, lr=0.2))
    assert federation.history[-1]["accuracy"]["received"]["mean"] > 0.7


def test_who_was_not_drawn_keeps_nothing_of_another_width() -> None:
    training = Training(rounds=4, batch_size=8, lr=0.1, client_fraction=0.34)
    federation = slices(training, evaluation=Evaluation(every_n_rounds=1, extra_stages=["personal"]))
    assert "personal" in federation.history[-1]["accuracy"]
    for client in federation.clients:  # what is exported was trained, whatever the width was then
        exported = federation.export(client.id)
        kept = client.weights
        if kept is not None and kept["hidden.weight"].shape == exported.state_dict()["hidden.weight"].shape:
            assert torch.equal(kept["hidden.weight"], exported.state_dict()["hidden.weight"])
        else:
            now = received(federation, client.id)
            assert torch.equal(now["hidden.weight"], exported.state_dict()["hidden.weight"])


# control variates (SCAFFOLD) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_fraction", [1.0, 0.5])
def test_the_servers_control_is_the_mean_of_the_clients(client_fraction: float) -> None:
    training = Training(rounds=3, batch_size=8, lr=0.1, client_fraction=client_fraction)
    federation = one_kind(sound.Scaffold(), training)
    zero = {n: torch.zeros_like(t) for n, t in get_group(federation.server.state, "control").items()}
    own = [get_group(c.state, "control") if "control" in c.state else zero for c in federation.clients]
    for name, value in get_group(federation.server.state, "control").items():
        assert torch.allclose(value, torch.stack([c[name] for c in own]).mean(dim=0), atol=1e-6)


def test_the_control_is_the_mean_of_the_raw_gradients() -> None:
    """With plain SGD option II, (w - w_i) / (tau lr) - c + c_i, is the same."""
    training = Training(rounds=1, batch_size=8, lr=0.1)
    federation = one_kind(sound.Scaffold(), training)
    start, client = federation.server.initial_state("net0"), federation.clients[1]
    assert client.weights is not None
    for name, control in get_group(client.state, "control").items():
        assert torch.allclose(
            (start[name] - client.weights[name]) / (2 * 0.1), control, atol=1e-5
        )  # 16 samples: 2 steps


def test_with_zero_controls_the_first_round_is_fedavg() -> None:
    training = Training(rounds=1, batch_size=8, lr=0.1)
    a, b = one_kind(sound.Scaffold(), training), one_kind(FedAvg(weighting="uniform"), training)
    assert difference(weights(a), weights(b)) is None
    assert difference(received(a, 0), received(b, 0)) is None


# downloads made for one client (FedFomo) ----------------------------------------------------------------------------


@hyperparameters
class Neighbors(Method):
    """Client k is sent the last weights of client k - 1 and starts from the better of the two by validation."""

    card = MethodCard(name="neighbors", paper="Zhang et al., ICLR 2021, in miniature")

    @property
    def requirements(self) -> Requirements:
        return Requirements(same_architecture=True)

    def broadcast(self, server: Server, client_id: int) -> Message:
        other = (client_id - 1) % len(server.clients)
        return {"candidate": server.client_weights(other)} if server.has_weights(other) else {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        for client_id, message in uploads.items():
            server.store_weights(client_id, get_group(message, "model"))

    def receive(self, client: Client, message: Message) -> Context:
        if "candidate" in message:
            mine = {n: t.clone() for n, t in float_state(client.model).items()}
            before = self.value(client)
            load_state(client.model, get_group(message, "candidate"))
            after = self.value(client)
            client.state["took"] = torch.tensor(after < before)
            if after >= before:
                load_state(client.model, mine)
        return {}

    def value(self, client: Client) -> float:
        held = client.data.validation
        with torch.no_grad(), eval_mode(client.model):
            return float(nn.functional.cross_entropy(client.model(client.prepare(held.x)), held.y))

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"model": float_state(client.model)}


def test_every_client_is_sent_its_own() -> None:
    among = ConformanceKit(method=Neighbors()).world(one=True, sizes=(3, 24, 24, 24, 24, 24), labels=((0, 1, 2),) * 6)
    federation = among.run(Neighbors(), Training(rounds=3, batch_size=8, lr=0.05))
    assert federation.history[0]["bytes_down"] == 0
    assert federation.history[1]["bytes_down"] == federation.history[1]["bytes_up"]
    messages = [federation.method.broadcast(federation.server, i) for i in range(6)]
    for number, message in enumerate(messages):
        other = federation.clients[number - 1].weights
        assert other is not None
        assert difference(dict(get_group(message, "candidate")), other) is None
    took = [bool(client.state["took"]) for client in federation.clients]
    assert took[0]  # it has three samples of its own


# prediction from prototypes (FedProto) ------------------------------------------------------------------------------


def test_prediction_by_the_nearest_prototype() -> None:
    among = ConformanceKit(method=sound.FedProto()).world()
    by_means, by_head = (among.run(sound.FedProto(predicts=way)) for way in ("prototype", "head"))
    assert difference(weights(by_means), weights(by_head)) is None
    client = by_means.clients[2]
    model = by_means.export(2)
    z = model.represent(client.data.test.x)
    gaps = torch.cdist(z, get_tensor(client.state, "means"))
    guesses = get_tensor(client.state, "labels").long()[gaps.argmin(dim=1)]
    share = float((guesses == client.data.test.y).float().mean())
    assert by_means.history[-1]["accuracy_per_client"][2] == pytest.approx(share)
    assert by_means.history[-1]["accuracy_per_client"] != by_head.history[-1]["accuracy_per_client"]


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


def test_another_order_of_batches_is_another_client() -> None:
    among = [ConformanceKit(method=Local()).world(kind=kind) for kind in (Client, ReorderedClient)]
    a, b = (one.run(Local()) for one in among)
    assert difference(weights(a), weights(b)) is not None
    assert difference(state(a), state(among[0].run(Local()))) is None
    assert sent(a) == {}
