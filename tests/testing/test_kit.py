"""The conformance kit rejects broken methods, each for its own error, and accepts the sound ones behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed import testing
from polyfed.core.client import Client
from polyfed.core.message import Message, State, get_group, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Method,
    Requirements,
    StepResult,
    TrainingResult,
    hyperparameters,
    loads_message,
)
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.core.upload_forms import as_sent
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.losses import cross_entropy, task_loss
from polyfed.methods import FML, FedAvg, FedGH, FedProto, FedProx, Local
from polyfed.methods.building_blocks import weight_averaging
from polyfed.testing import Reduction
from polyfed.testing.fixtures import tiny_model
from tests.helpers.oracles import averaging_bytes, proximal
from tests.helpers.oracles import cross_entropy as reference_cross_entropy

# one error each, of a kind that was found in published code ----------------------------------------------------------


class HeaderInNoOptimizer(FedGH):
    """The server's header collects gradients that nobody applies; clients get the initial one back for ever."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        header = server.state["header"]
        super().aggregate(server, uploads)
        server.state["header"] = header


class PreviousIsLive(FedAvg):
    """The previous model (MOON) is a view of the network that the next client of this architecture trains in."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        client.state["previous"] = float_state(client.model)
        return super().upload(client, trained)


@hyperparameters
class LastIsUnbound(FedProx):
    """The last client alone is without the proximal term."""

    mu: float = 0.35

    def receive(self, client: Client, message: Message) -> Context:
        return {**super().receive(client, message), "bound": torch.tensor(client.id != 5)}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        method = super() if context["bound"] else Local()
        return method.gradients(model, batch, context)


@hyperparameters
class DeadKnob(FedAvg):
    """The coefficient is multiplied by 0 on its way, so that the method is FedAvg."""

    mu: float = 0.01

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        off = 0.0 * self.mu * sum(p.sum() for p in model.parameters())
        return cross_entropy(model(batch.x), batch.y, batch.w) + off


@hyperparameters
class HeadsBeginApart(FedAvg):
    """The heads of unlike networks are averaged, though each network's was drawn for itself."""

    aggregation: weight_averaging.Aggregation = "same-shape"

    @property
    def requirements(self) -> Requirements:
        return Requirements(split_model=True, same_head=True)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        models = [get_group(message, "model") for message in uploads.values()]
        heads = [{name: t for name, t in model.items() if name.startswith("head.")} for model in models]
        for architecture in server.architectures if heads else ():
            mean = weighted_mean(heads, [1.0] * len(heads))
            weight_averaging.set_tensors(server, self.aggregation, architecture, mean)


class UncountedPrototypes(FedProto):
    """Class means averaged over clients as if every client had equally many samples of the class."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, {i: {**m, "counts": torch.ones_like(m["counts"])} for i, m in uploads.items()})


class UndetachedTeacher(FML):
    """Both divergences push both networks."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        p, m = model.own(batch.x), model.auxiliary_model(batch.x)
        lp, lm = F.log_softmax(p, 1), F.log_softmax(m, 1)
        kl_p = F.kl_div(lp, lm, reduction="batchmean", log_target=True)
        kl_m = F.kl_div(lm, lp, reduction="batchmean", log_target=True)
        task = self.alpha * cross_entropy(p, batch.y, batch.w) + self.beta * cross_entropy(m, batch.y, batch.w)
        return task + (1 - self.alpha) * kl_p + (1 - self.beta) * kl_m


class BuffersOfTheFirst(FedAvg):
    """The shared model takes the BatchNorm statistics of the first upload."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        for message in list(uploads.values())[:1]:
            first = {n: t.clone() for n, t in get_group(message, "model").items() if "running_" in n}
            server.state["model union"] = {**get_group(server.state, "model union"), **first}


class SeedInConstructor(Local):
    """Every network is built after torch.manual_seed(0); repeats with other seeds are the same run."""

    def build(self, model: Any, variant: str) -> nn.Module:
        torch.manual_seed(0)
        return super().build(model, variant)


class GlobalSeed(Local):
    """Seeds the global generator for everybody else, too."""

    def receive(self, client: Client, message: Message) -> Context:
        torch.manual_seed(client.id)
        return {}


class DrawsInTheLastLoss(Local):
    """A random draw inside the loss of the last client."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"last": torch.tensor(client.id == 5)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        noise = 0.1 * torch.randn(batch.x.shape) if context["last"] else 0.0
        return cross_entropy(model(batch.x + noise), batch.y, batch.w)


class BranchesOnValues(Local):
    """A Python branch on a tensor's value inside the loss: right for one client, impossible for many at once."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        value = cross_entropy(model(batch.x), batch.y, batch.w)
        return value if value.item() < 10 else 0.1 * value


class DropsTheLastBatch(Local):
    """A batch that is not full is dropped: a small client never learns, and nobody says so."""

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        found = super().gradients(model, batch, context)
        return found if len(batch.y) >= 8 else StepResult(dict.fromkeys(found.grads), found.loss, found.sums)


class UploadsInPlace(FedAvg):
    """What came up is scaled, where a single client has answered, by an array that shares its memory: PyTorch counts
    no write.
    """

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        for message in uploads.values() if len(uploads) == 1 else ():
            for value in get_group(message, "model").values():
                array = value.numpy()
                array *= 0


class LabelsInPlace(Local):
    """A client's own labels are written into, for good."""

    def receive(self, client: Client, message: Message) -> Context:
        client.data.train.y[0] = 0 if client.data.train.y[0] else 1
        return {}


class FloatComesDown(FedAvg):
    """A plain number comes down, in a group."""

    def broadcast(self, server: Server, client_id: int) -> Message:
        message: Any = {**super().broadcast(server, client_id), "rate": {"of the server": 0.5}}
        return message


class NoDecorator(FedAvg):
    """Its field is no hyperparameter, as `hyperparameters` does not stand above the class."""

    strength: float = 0.5


_momentum: dict[str, Tensor] = {}


class HiddenState(FedAvg):
    """What must outlive a round (here the server's momentum) is in no state, so no checkpoint has it."""

    def init_server(self, server: Server) -> None:
        super().init_server(server)
        _momentum.clear()

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        old = get_group(server.state, "model union")
        super().aggregate(server, uploads)
        new = {}
        for name, value in get_group(server.state, "model union").items():
            _momentum[name] = 0.5 * _momentum.get(name, torch.zeros_like(value)) + value - old[name]
            new[name] = old[name] + _momentum[name]
        server.state["model union"] = new


class BroadcastCounts(FedAvg):
    """A broadcast with a side effect: scoring calls it again, and the count is wrong."""

    def broadcast(self, server: Server, client_id: int) -> Message:
        server.state["sent"] = get_tensor(server.state, "sent") + 1 if "sent" in server.state else torch.tensor(1)
        return super().broadcast(server, client_id)


class DividesByAll(FedAvg):
    """The sum over those who answered is divided by the number of all clients."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        share = len(uploads) / len(server.clients)
        if uploads:
            union = get_group(server.state, "model union")
            server.state["model union"] = {name: share * value for name, value in union.items()}


class CrashesWithoutAnswers(FedAvg):
    """Nobody answers, and the mean of nothing is an error deep inside."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        counts = [float(get_tensor(message, "n")) for message in uploads.values()]
        for i, message in uploads.items():
            assert get_tensor(message, "n") / sum(counts) > 0, i
        if 0.0 in (sum(counts) / len(counts),):
            return
        super().aggregate(server, uploads)


class PlansInSilence(FedAvg):
    """How far the server goes depends on how many rounds are planned, and nobody is told."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        old = get_group(server.state, "model union")
        super().aggregate(server, uploads)
        share = server.round / server.rounds
        new = get_group(server.state, "model union")
        server.state["model union"] = {name: old[name] + share * (new[name] - old[name]) for name in new}


class WeightsByPlace(FedAvg):
    """Counts are paired with uploads by place: with other clients answering, each gets another's weight."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sizes = [member.num_samples for member in server.clients.values()]
        weights = {i: float(n) for i, n in zip(uploads, sizes, strict=False)}
        weight_averaging.average(server, "layer-wise", weight_averaging.client_weights(uploads), weights)


class FirstClientIsSpecial(FedAvg):
    """Client 0 counts ten times."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        weights = {i: float(get_tensor(m, "n")) * (10 if i == 0 else 1) for i, m in uploads.items()}
        weight_averaging.average(server, "layer-wise", weight_averaging.client_weights(uploads), weights)


class SwallowsNaN(FedAvg):
    """NaN is turned into 0 wherever it shows: the client's nonsense is averaged in, and nobody is told."""

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        found = super().gradients(model, batch, context)
        grads = {name: None if g is None else g.nan_to_num() for name, g in found.grads.items()}
        return StepResult(grads, found.loss.nan_to_num(), found.sums)


class SendsTheWholeUnion(FedAvg):
    """The message is larger than the paper's; everybody is sent all architectures' tensors."""

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {**super().broadcast(server, client_id), "spare": get_group(server.state, "model union")}


class ForgetsWhatNobodySent(FedAvg):
    """The server starts from nothing in each round, so that who did not answer is forgotten."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        union: State = {
            "model union": {n: torch.zeros_like(t) for n, t in get_group(server.state, "model union").items()}
        }
        server.state = {**server.state, **union}
        super().aggregate(server, uploads)


@hyperparameters
class UnknownStage(FedAvg):
    """Which model is scored is not said in the house's words."""

    @property
    def evaluation_stage(self) -> Any:
        return "global"


class SaysHalfOfWhatItSends(FedAvg):
    """Its form has no number of samples, which its upload has: a server would refuse everybody."""

    upload_form = {"model": as_sent}


class IgnoresRowWeights(Local):
    """The loss is a plain mean over the batch: rows of padding count, too."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)


class KeepsWhatIsItsOwn(FedAvg):
    """A receive that leaves an odd client's network as it is, though it is marked as one that loads the message."""

    ignores_initial_weights = True

    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        return super().receive(client, message) if client.id % 2 == 0 else {}


class ReadsItsStart(KeepsWhatIsItsOwn):
    """An odd client trains on from its own initial weights, which it declares that nobody reads."""


class MisspelledEntry(FedAvg):
    """Nobody uploads this."""

    delta_entries = ("modle",)


# the kit rejects each of them -----------------------------------------------------------------------------------------

# what each sound method is asked with; its mutants are asked the same
OPTIONS: dict[type[Method], dict[str, Any]] = {
    Local: {"reference_loss": reference_cross_entropy},
    FedAvg: {"counted": "updates", "expected_bytes": averaging_bytes},
    FedGH: {"skip": dict.fromkeys(("order_of_uploads", "client_order_invariant"), "pair by pair")},
    DeadKnob: {"changed_values": {"mu": 0.7}},  # one value, where the kit would try five
    FedProx: {"reference_loss": proximal},
    FedProto: {"counted": "statistics"},
    FML: {"reductions": [Reduction({"alpha": 1.0}, Local(), part="own.")]},
}

REJECTED: dict[type[Method], str] = {  # method -> the property that does not hold
    HeaderInNoOptimizer: "learns",
    PreviousIsLive: "nothing_aliased",
    UploadsInPlace: "nothing_written_in_place",
    LabelsInPlace: "nothing_written_in_place",
    LastIsUnbound: "oracle",
    IgnoresRowWeights: "row_weights_count",
    DeadKnob: "hyperparameters_matter",
    HeadsBeginApart: "begins_alike",
    UncountedPrototypes: "samples_counted_once",
    DividesByAll: "missing_upload_is_not_zero",
    UndetachedTeacher: "reductions",
    BuffersOfTheFirst: "batchnorm",
    SeedInConstructor: "other_seed_other_result",
    GlobalSeed: "global_generators_untouched",
    DrawsInTheLastLoss: "loss_is_pure",
    BranchesOnValues: "loss_is_pure",
    DropsTheLastBatch: "degenerate_clients",
    FloatComesDown: "speaks_in_tensors",
    NoDecorator: "has_hyperparameters",
    HiddenState: "state_is_explicit",
    BroadcastCounts: "broadcast_without_side_effects",
    PlansInSilence: "goes_on_after_its_end",
    CrashesWithoutAnswers: "any_subset",
    ForgetsWhatNobodySent: "any_subset",
    WeightsByPlace: "order_of_uploads",
    FirstClientIsSpecial: "client_order_invariant",
    SwallowsNaN: "nan_is_rejected",
    SendsTheWholeUnion: "expected_bytes",
    UnknownStage: "declared",
    KeepsWhatIsItsOwn: "scored_together_alike",
    ReadsItsStart: "initial_weights_are_ignored",
    MisspelledEntry: "uploads_have_their_form",
    SaysHalfOfWhatItSends: "uploads_have_their_form",
}


TO_DO: dict[type[Method], str] = {  # what its line must name, for somebody who is to change it
    UploadsInPlace: "aggregate writes into",
    IgnoresRowWeights: "batch.w",
    DeadKnob: "'mu' changes no weights, messages or scores",
    DividesByAll: "divide by those who answered",
    UndetachedTeacher: "is not Local(): a term that is switched off",
    GlobalSeed: "client.generator",
    BranchesOnValues: "torch.func",
    FloatComesDown: "write torch.tensor(",
    HiddenState: "neither in client.state nor in server.state",
    BroadcastCounts: "start_round or aggregate",
    MisspelledEntry: "did you mean 'model'",
    CrashesWithoutAnswers: "when nobody answers",
}


def options(kind: type[Method]) -> dict[str, Any]:
    """Those of the sound method that it was made from."""
    return next(OPTIONS[parent] for parent in kind.__mro__ if parent in OPTIONS)


@pytest.mark.parametrize("kind", REJECTED, ids=lambda kind: kind.__name__)
def test_the_broken_method_is_rejected(kind: type[Method]) -> None:
    name = REJECTED[kind]
    found = testing.violations(kind(), [name], **options(kind))
    assert TO_DO.get(kind, "") in found[name]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (FloatComesDown, "'rate/of the server'"),
        (NoDecorator, "'strength'"),
    ],
)
def test_what_all_else_rests_on_is_one_line_alone(kind: type[Method], names: str) -> None:
    """And not the same error again for every other property."""
    (line,) = testing.violations(kind()).values()
    assert names in line
    assert "\n" not in line


@hyperparameters
class Undeclared(Method):
    """Wants a representation and does not say so; with `split`, it does, but not that all need one width."""

    split: bool = False

    @property
    def requirements(self) -> Requirements:
        return Requirements(split_model=self.split)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return task_loss(model.head(model.represent(batch.x)), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"weight": client.model.head.weight.detach().clone()}  # type: ignore[union-attr]

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sum(message["weight"] for message in uploads.values())  # type: ignore[misc]


@pytest.mark.parametrize(("split", "says"), [(False, "no attribute 'head'"), (True, "must match the size")])
def test_needs_that_are_not_declared_are_one_line(split: bool, says: str) -> None:
    found = testing.violations(Undeclared(split=split))
    assert list(found) == ["runs"]
    assert says in found["runs"]
    assert "split_model" in found["runs"]


@hyperparameters
class SendsAlike(Local):
    """The server sends a mask, which never changes, or numbers that nothing trains."""

    value: float = 1.0

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"known": torch.tensor([0.0, self.value, self.value])}


@pytest.mark.parametrize(("value", "allowed"), [(1.0, True), (0.5, False), (0.0, False)])
def test_a_mask_or_count_may_be_the_same_in_every_round(value: float, allowed: bool) -> None:
    found = testing.violations(SendsAlike(value=value), ["learns"])
    assert allowed or "the server sends the same 'known'" in found["learns"]
    assert bool(found) != allowed


def half_frozen(trained: str) -> nn.Module:
    """A network of which only parameters with this beginning train."""
    network = tiny_model(1, 4, 6)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(bool(trained) and name.startswith(trained))
    return network


def test_a_frozen_network_is_told_in_one_line() -> None:
    (line,) = testing.violations(FedAvg(), models=[lambda: half_frozen("")]).values()
    assert "no parameter of its network takes a gradient" in line
    assert "Exchange(trains=False)" in line
    some = ["runs", "learns", "degenerate_clients", "expected_bytes"]
    assert not testing.violations(FedAvg(), some, models=[lambda: half_frozen("head")])


def test_nan_is_not_what_the_oracle_says() -> None:
    found = testing.violations(Local(), ["oracle"], reference_loss=lambda model, batch, context: float("nan"))
    assert "the oracle says nan" in found["oracle"]


def test_a_class_in_place_of_a_method_is_one_line() -> None:
    (line,) = testing.violations(FedAvg).values()  # type: ignore[arg-type]
    assert "got its class" in line


def test_pytest_asks_nothing_else_either() -> None:
    asked = testing.conformance(FloatComesDown())
    with pytest.raises(testing.ConformanceError):
        asked("speaks_in_tensors")
    with pytest.raises(pytest.skip.Exception, match="speaks_in_tensors"):
        asked("learns")
    testing.conformance(FedAvg())("declared")
