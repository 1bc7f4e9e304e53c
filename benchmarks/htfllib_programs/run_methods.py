"""polyfed's methods on different networks, in its own ways or in some of HtFLlib's (`benchmarks/htfllib.py`).

python run_methods.py FILE --method fedproto --ways order,prototypes
"""

from __future__ import annotations

import functools
from typing import Any

import methods_job
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Batch, Context, StepResult, TrainingResult
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.engine.task import Execution
from polyfed.functional.class_prototypes import batch_class_sums, to_dense


class RawFD(pf.methods.FD):
    """FD with raw scores, a client's own among them, as targets of a cross entropy, taken in the training."""

    def broadcast(self, server: Any, client_id: int) -> Message:
        """Means over all clients; `client_id` is of nobody, so that nobody is left out."""
        return super().broadcast(server, -1)

    def receive(self, client: Client, message: Message) -> Context:
        """The scores as they are."""
        if "outputs" not in message:
            return {}
        targets, _ = to_dense(message["outputs"], message["labels"], client.classes)
        return {"targets": targets}

    def loss(self, model: Any, batch: Batch, context: Context) -> Any:
        """Two cross entropies, the second with targets that are no distributions."""
        scores = model(batch.x)
        rows, weights = batch_class_sums(scores.detach(), batch.y, batch.w, scores.shape[1])
        task = functional.cross_entropy(scores, batch.y)
        if "targets" in context:
            task = task + self.distillation_weight * functional.cross_entropy(scores, context["targets"][batch.y])
        return task, {"rows": rows, "weights": weights}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """Means over the training."""
        labels = client.data.train.y.unique()
        return {"labels": labels.int(), "outputs": trained.sums["rows"][labels] / trained.sums["weights"][labels, None]}


class ClippedByNetwork:
    """A method that clips the gradients of each network of a client apart, to a norm of 10."""

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        """Of the loss, clipped."""
        found: StepResult = super().gradients(model, batch, context)  # type: ignore[misc]
        for network, _ in model.named_children():
            own = [grad for name, grad in found.grads.items() if grad is not None and name.startswith(f"{network}.")]
            norm = torch.nn.utils.get_total_norm(own)
            torch._foreach_mul_(own, (10 / (norm + 1e-6)).clamp(max=1))
        return found


class EntangledFML(ClippedByNetwork, pf.methods.FML):
    """FML whose losses move both networks, by a divergence that is divided by the number of classes."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        """Both losses; each teacher is moved, too."""
        private, common = model.own(batch.x), model.auxiliary_model(batch.x)
        total = torch.zeros(())
        for own, other, labels in ((private, common, self.alpha), (common, private, self.beta)):
            divergence = functional.kl_div(own.log_softmax(1), other.softmax(1), reduction="mean")
            total = total + labels * functional.cross_entropy(own, batch.y) + (1 - labels) * divergence
        return total


class LateFedTGP(pf.methods.FedTGP):
    """FedTGP whose clients send the means of their networks before training."""

    def init_server(self, server: Server) -> None:
        """Draw the server's network as HtFLlib does."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            classes, width = methods_job.CLASSES, methods_job.WIDTH
            embedding, hidden, output = nn.Embedding(classes, width), nn.Linear(width, width), nn.Linear(width, width)
        layers = {f"{n}.{k}": t for n, m in (("hidden", hidden), ("output", output)) for k, t in m.state_dict().items()}
        server.state["network"] = {"embedding": embedding.weight.detach(), **layers}

    def receive(self, client: Client, message: Message) -> Context:
        """Before the first training."""
        if "before" not in client.state:
            client.state["before"] = dict(self._means(client, counts=False))
        return super().receive(client, message)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """The network that has now been trained is what the next training begins with."""
        before = get_group(client.state, "before")
        client.state["before"] = dict(self._means(client, counts=False))
        return dict(before)


def in_low_rank(weights: Tensor, energy: float) -> Tensor:
    """What HtFLlib's compression leaves: of convolutions each kernel in low rank; zeros where all values are needed."""
    if weights.dim() < 2 or len(weights) < 2:
        return weights.clone()
    left, scale, right = torch.linalg.svd(weights, full_matrices=False)
    kept = scale.square().flatten(0, -2).sum(0) if weights.dim() > 2 else scale.square()
    enough = kept.cumsum(0)[:-1] > energy * kept.sum()
    rank = int(enough.int().argmax()) + 1 if enough.any() else 0
    found: Tensor = left[..., :rank] * scale[..., None, :rank] @ right[..., :rank, :]
    return found


class CompressedFedKD(ClippedByNetwork, pf.methods.FedKD):
    """FedKD with weights, not updates, in low rank, whose losses move both networks, divided by number of classes."""

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        """Draw the projector as HtFLlib does."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            projector = nn.Linear(auxiliary.feature_dim, own.feature_dim, bias=False)
        pair = super().join_models(own, auxiliary)
        pair.projector = projector
        return pair

    def aggregate(self, server: Server, uploads: Any) -> None:
        """The mean of the weights, in low rank."""
        mean = self.average(server, {i: {"model": message["raw"]} for i, message in uploads.items()})
        energy = self._energy(server)
        server.state["auxiliary_model"] = {name: in_low_rank(t, energy) for name, t in mean.items()}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        """Both losses; each teacher is moved, too, and so is what they are divided by."""
        h_w, h_m = model.own.represent(batch.x), model.auxiliary_model.represent(batch.x)
        mentor, mentee = model.own.head(h_w), model.auxiliary_model.head(h_m)
        task = functional.cross_entropy(mentor, batch.y) + functional.cross_entropy(mentee, batch.y)
        taught = 2 * functional.mse_loss(h_w, model.projector(h_m))
        for own, other in ((mentor, mentee), (mentee, mentor)):
            taught = taught + functional.kl_div(own.log_softmax(1), other.softmax(1), reduction="mean")
        return task + taught / task

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """Weights in low rank, as the tensors that they stand for."""
        mentee, energy = float_state(client.model.auxiliary_model), self._energy(client)
        return {"raw": {name: in_low_rank(t, energy) for name, t in mentee.items()}, "n": torch.tensor(client.n)}


def split_network(number: int) -> Any:
    """A client's network, cut before its head."""
    layers = methods_job.network(number)
    return pf.split(layers, head=str(len(layers) - 1), extractor=None)


def method_of(job: methods_job.MethodsJob, ways: list[str]) -> Any:
    """The method with HtFLlib's settings, where polyfed's are others, in HtFLlib's ways."""
    header: dict[str, Any] = {"header_epochs": methods_job.SERVER_EPOCHS, "header_lr": methods_job.HEADER_LR}
    energy: dict[str, Any] = dict(zip(("energy_start", "energy_end"), methods_job.ENERGY, strict=True))
    prototypes: dict[str, Any] = {
        "prototype_weight": 1.0,
        "server_epochs": methods_job.SERVER_EPOCHS,
        "margin": methods_job.MARGIN,
    }
    own = {
        "fedgh": pf.methods.FedGH(header_batch=job.batch_size, **header),
        "fedproto": pf.methods.FedProto(),
        "lgfedavg": pf.methods.LGFedAvg(),
        "fd": pf.methods.FD(),
        "fml": pf.methods.FML(shared="cnn0"),
        "fedkd": pf.methods.FedKD(shared="cnn0", **energy),
        "fedtgp": pf.methods.FedTGP(**prototypes),
    }
    theirs = {
        ("fedproto", "prototypes"): pf.methods.FedProto(weighting="uniform", collected="during"),
        ("fd", "targets"): RawFD(weighting="uniform", outputs="logits"),
        ("fml", "divergence"): EntangledFML(shared="cnn0", weighting="uniform"),
        ("fedkd", "compression"): CompressedFedKD(shared="cnn0", weighting="uniform", **energy),
        ("fedtgp", "late"): LateFedTGP(**prototypes),
    }
    return next(
        (method for (name, way), method in theirs.items() if name == job.method and way in ways), own[job.method]
    )


def main() -> None:
    """Do the job; a lap is a round's training and the scoring of its result."""
    parser = methods_job.parser_for(__doc__)
    parser.add_argument("--ways", metavar="A,B,...", default="", help="of HtFLlib's [none]")
    words = parser.parse_args()
    job = methods_job.load(words)
    ways = [name for name in words.ways.split(",") if name]
    if "order" in ways:
        methods_job.shuffle_nothing()
    laps, accuracies = methods_job.ProcessorLaps(), []

    def round_ends(record: Any) -> None:
        laps.mark()
        accuracies.append(sum(record["accuracy_per_client"]) / job.clients)

    parts = zip(job.inputs, job.labels, job.test_inputs, job.test_labels, strict=True)
    clients = [pf.Client(f"cnn{i}", (x, y), (test_x, test_y)) for i, (x, y, test_x, test_y) in enumerate(parts)]
    federation = pf.Federation(
        clients,
        method_of(job, ways),
        pf.Training(rounds=job.rounds, batch_size=job.batch_size, lr=methods_job.LR),
        pf.Evaluation(stage="received"),  # as HtFLlib tests: with what clients would go on with
        executor=Execution(executor="serial"),
        builders={f"cnn{i}": functools.partial(split_network, i) for i in range(job.clients)},
        loggers=[round_ends],
    )
    federation.run()
    methods_job.report(laps.last(job.rounds - 1), accuracies)


if __name__ == "__main__":
    main()
