"""Methods that are wrong on purpose: does the conformance kit tell them from the right ones?

Each has one error, of a kind that was found in published code for federated learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, State, get_group, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Method,
    MethodCard,
    Requirements,
    StepResult,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.modules import as_split_model, float_state
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import as_sent
from polyfed.functional.averaging import weighted_mean
from polyfed.functional.losses import cross_entropy
from polyfed.methods import FML, FedAvg, FedGH, FedProto, FedProx, Local
from polyfed.methods.building_blocks import weight_averaging


class HeaderInNoOptimizer(FedGH):
    """The server's header collects gradients that nobody applies; clients get the initial one back for ever."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        header = server.state["header"]
        super().aggregate(server, uploads)
        server.state["header"] = header


class HeaderIsClient0s(FedGH):
    """The server's header is the module that client 0 trains, not a copy of it."""

    def init_server(self, server: Server) -> None:
        model = server.model(server.clients[0].architecture, server.client_weights(0))
        server.state["header"] = {name: t.detach() for name, t in as_split_model(model).head.state_dict().items()}


class ReceivedIsKept(FedProx):
    """What the server sent is kept as it is, not as a copy, and averaged into in place."""

    def receive(self, client: Client, message: Message) -> Context:
        context = super().receive(client, message)
        client.state["average"] = dict(get_group(message, "model"))
        return context

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        for name, value in float_state(client.model).items():
            get_group(client.state, "average")[name].mul_(0.5).add_(value, alpha=0.5)
        return super().upload(client, trained)


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


class AbsentClassesAreZero(FedProto):
    """A class that a client lacks is sent as a mean of zeros and averaged like any other."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = super().upload(client, trained)
        rows, means = get_tensor(message, "labels").long(), get_tensor(message, "prototypes")
        dense = means.new_zeros(client.classes, means.shape[1]).index_copy(0, rows, means)
        labels = torch.arange(client.classes, dtype=torch.int32)
        return {"labels": labels, "prototypes": dense, "counts": torch.ones_like(labels)}


class UndetachedTeacher(FML):
    """Both divergences push both networks."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        p, m = model.own(batch.x), model.auxiliary_model(batch.x)
        lp, lm = F.log_softmax(p, 1), F.log_softmax(m, 1)
        kl_p = F.kl_div(lp, lm, reduction="batchmean", log_target=True)
        kl_m = F.kl_div(lm, lp, reduction="batchmean", log_target=True)
        task = self.alpha * cross_entropy(p, batch.y, batch.w) + self.beta * cross_entropy(m, batch.y, batch.w)
        return task + (1 - self.alpha) * kl_p + (1 - self.beta) * kl_m


class BuffersStayAtHome(FedAvg):
    """Only parameters() travel; the shared model's BatchNorm statistics stay as they were initialized."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        start = {n: b for n, b in client.state.items() if isinstance(b, Tensor)}
        own = {n: start.get(n.replace(".", "_"), t) for n, t in float_state(client.model).items()}
        return {"model": own, "n": torch.tensor(client.n)}

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        buffers = dict(client.model.named_buffers())
        client.state = {n.replace(".", "_"): b.clone() for n, b in buffers.items() if b.is_floating_point()}
        return {}


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


@hyperparameters
class Drift(Method):
    """Every client moves along a random direction beside its loss: a method that draws, in the allowed way."""

    card = MethodCard(name="toy-drift", paper="none")
    size: float = 0.1

    @property
    def evaluation_stage(self) -> Stage:
        return "personal"

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        shape = (client.training.batch_size, *client.data.train.x.shape[1:])
        return {"noise": torch.randn(shape, generator=generator)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        x = batch.x + self.size * context["noise"][: len(batch.x)]
        return cross_entropy(model(x), batch.y, batch.w)


class SeededDraws(Drift):
    """A generator of its own with a fixed seed in place of the one handed in."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return super().step_inputs(client, step, torch.Generator().manual_seed(0))


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


class Unshuffled(Local):
    """Takes its rows from the data as they lie instead of the batch that was drawn."""

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        size = client.training.batch_size
        start = step * size % client.n
        train = client.data.train
        return {"x": train.x[start : start + size], "y": train.y[start : start + size]}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return F.cross_entropy(model(context["x"]), context["y"])


class DropsTheLastBatch(Local):
    """A batch that is not full is dropped: a small client never learns, and nobody says so."""

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        found = super().gradients(model, batch, context)
        return found if len(batch.y) >= 8 else StepResult(dict.fromkeys(found.grads), found.loss, found.sums)


class StateInPlace(FedAvg):
    """State written into: a round that is interrupted cannot be undone, and what was sent changes afterwards."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        before = get_group(server.state, "model union")
        super().aggregate(server, uploads)
        for name, value in get_group(server.state, "model union").items():
            before[name].copy_(value)
        server.state["model union"] = dict(before)


class NobodyInPlace(FedAvg):
    """State written into where nobody has answered: what a copy of the server holds changes with it."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if uploads:
            return super().aggregate(server, uploads)
        for value in get_group(server.state, "model union").values():
            value.mul_(0.9)
        return None


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


class ShrinksInTheLoss(Local):
    """The loss writes into the weights, behind the optimizer's back."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        return cross_entropy(model(batch.x), batch.y, batch.w)


class FloatInAMessage(FedAvg):
    """A plain number goes up, in place of a tensor."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message: Any = {**super().upload(client, trained), "n": float(client.n)}
        return message


class FloatComesDown(FedAvg):
    """A plain number comes down, in a group."""

    def broadcast(self, server: Server, client_id: int) -> Message:
        message: Any = {**super().broadcast(server, client_id), "rate": {"of the server": 0.5}}
        return message


class FloatInAState(FedAvg):
    """A plain number is kept in the server's state."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        server.state["count"] = len(uploads)  # type: ignore[assignment]


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


class StateInTheMethod(FedAvg):
    """The same in an attribute of the method object, which the next run finds there."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        object.__setattr__(self, "rounds_seen", getattr(self, "rounds_seen", 0) + 1)


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

    card = replace(FedAvg.card, name="unknown-stage")

    @property
    def evaluation_stage(self) -> Any:
        return "global"


class NeedsNothing(FedGH):
    """Says that it fits any model, and then copies headers of other shapes."""

    @property
    def requirements(self) -> Requirements:
        return Requirements()


class SaysHalfOfWhatItSends(FedAvg):
    """Its form has no number of samples, which its upload has: a server would refuse everybody."""

    card = replace(FedAvg.card, form={"model": as_sent})


class IgnoresRowWeights(Local):
    """The loss is a plain mean over the batch: class weights change nothing."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)
