"""polyfed's methods on different networks, in its own ways or in some of HtFLlib's (`benchmarks/htfllib.py`).

python run_methods.py FILE --method fedproto --ways order,prototypes
"""

from __future__ import annotations

import functools
from typing import Any

import methods_job
import torch
from torch import Tensor
from torch.nn import functional

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, TrainingResult
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


class EntangledFML(pf.methods.FML):
    """FML whose losses move both networks, by a divergence that is divided by the number of classes."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        """Both losses; each teacher is moved, too."""
        private, common = model.own(batch.x), model.auxiliary_model(batch.x)
        total = torch.zeros(())
        for own, other, labels in ((private, common, self.alpha), (common, private, self.beta)):
            divergence = functional.kl_div(own.log_softmax(1), other.softmax(1), reduction="mean")
            total = total + labels * functional.cross_entropy(own, batch.y) + (1 - labels) * divergence
        return total


def split_network(number: int) -> Any:
    """A client's network, cut before its head."""
    layers = methods_job.network(number)
    return pf.split(layers, head=str(len(layers) - 1), extractor=None)


def method_of(job: methods_job.MethodsJob, ways: list[str]) -> Any:
    """The method with HtFLlib's settings, where polyfed's are others, in HtFLlib's ways."""
    header = {"header_epochs": methods_job.SERVER_EPOCHS, "header_lr": methods_job.HEADER_LR}
    own = {
        "fedgh": pf.methods.FedGH(header_batch=job.batch_size, **header),
        "fedproto": pf.methods.FedProto(),
        "lgfedavg": pf.methods.LGFedAvg(),
        "fd": pf.methods.FD(),
        "fml": pf.methods.FML(shared="cnn0"),
    }
    theirs = {
        ("fedproto", "prototypes"): pf.methods.FedProto(weighting="uniform", collected="during"),
        ("fd", "targets"): RawFD(weighting="uniform", outputs="logits"),
        ("fml", "divergence"): EntangledFML(shared="cnn0", weighting="uniform"),
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
        executor=Execution("serial"),
        builders={f"cnn{i}": functools.partial(split_network, i) for i in range(job.clients)},
        loggers=[round_ends],
    )
    federation.run()
    methods_job.report(laps.last(job.rounds - 1), accuracies)


if __name__ == "__main__":
    main()
