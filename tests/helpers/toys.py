"""Tiny federations on Gaussian data, and a watcher that keeps every message, every model and every server state."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client, PublicData
from polyfed.core.message import Message, clone, shallow_copy
from polyfed.core.method import Batch, Context, Method
from polyfed.core.settings import Evaluation, Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.client_work import working_copy
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Task
from polyfed.models import zoo
from polyfed.models.split import SequentialSplit, SplitModel

INPUTS, CLASSES = 4, 3


def net(
    depth: int = 1, width: int = 6, features: int = 5, batchnorm: bool = False, dropout: float = 0.0
) -> SequentialSplit:
    """Linear extractor, `depth` inner blocks, and a last layer; a shallow one's tensors are those of a deeper one."""

    def layers(outputs: int, inputs: int) -> nn.Sequential:
        parts: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(inputs, outputs))
        if batchnorm:
            parts["bn"] = nn.BatchNorm1d(outputs)
        parts["tanh"] = nn.Tanh()
        if dropout:
            parts["dropout"] = nn.Dropout(dropout)
        return nn.Sequential(parts)

    body = OrderedDict((f"block{i + 1}", layers(width, width)) for i in range(depth))
    body["last"] = layers(features, width)
    return SequentialSplit(layers(width, INPUTS), nn.Sequential(body), nn.Linear(features, CLASSES), architecture="net")


class Two(nn.Module):
    """Two parameters: logits (a x, b x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class Flat(nn.Module):
    """Logits W x, W being 3 x 2: of two classes the rows would move alike, and ties would be broken by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.3, -0.2], [0.1, -0.4], [0.5, 0.2]]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def flat_clients() -> list[Client]:
    """Two, of one sample and of three."""
    one = Client("flat", (torch.tensor([[2.0, -1.3]]), torch.tensor([0])))
    x = torch.tensor([[1.0, 0.5], [-3.0, 1.0], [0.5, -2.0]])
    return [one, Client("flat", (x, torch.tensor([1, 0, 2])))]


class Forward(nn.Module):
    """Some layers, and any function of them as forward."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def two_parameter_clients(count: int = 2) -> list[Client]:
    """Clients of `Two` with 1, 3 and 2 samples, that pull its parameters either way."""
    data = [([2.0], [0]), ([1.0, -3.0, 0.5], [1, 0, 1]), ([-1.5, 0.7], [0, 0])]
    return [Client("two", (torch.tensor(x)[:, None], torch.tensor(y))) for x, y in data[:count]]


def two_gradient(w: np.ndarray, data: LabeledSamples) -> np.ndarray:
    """Gradient of the mean cross entropy of `Two`."""
    x, y = data.x.double().numpy(), data.y.numpy()
    p = np.exp(x * w - (x * w).max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return ((p - np.eye(2)[y]) * x).mean(0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draws of the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def samples(n: int, seed: int, classes: Sequence[int] = range(CLASSES)) -> LabeledSamples:
    """Gaussian inputs around a center per class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor(list(classes))[torch.randint(0, len(classes), (n,), generator=g)]
    centers = 2 * torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(99))
    return LabeledSamples(torch.randn(n, INPUTS, generator=g) + centers[y], y)


def clients(architectures: Sequence[str], sizes: Sequence[int] | int = 12, test: int = 0) -> list[Client]:
    """One client per architecture name, with data of its own."""
    counts = [sizes] * len(architectures) if isinstance(sizes, int) else sizes
    held = [samples(test, 1000 + i) if test else None for i in range(len(counts))]
    return [Client(a, samples(n, i), held[i]) for i, (a, n) in enumerate(zip(architectures, counts, strict=True))]


def public(n: int = 40, seed: int = 500) -> PublicData:
    """Hold-out rows."""
    return PublicData(samples(n, seed))


@dataclass
class Round:
    """All that happened in a round."""

    down: dict[int, Message]
    up: dict[int, Message]
    weights: dict[int, dict[str, Tensor] | None]  # of all clients, after the round
    before: dict[str, Any]  # server state while the clients worked
    after: dict[str, Any]
    record: Mapping[str, Any]
    trained: dict[int, Mapping[str, Tensor]]  # weights right after training, also of those whose upload was lost
    states: dict[int, Any]  # of all clients, after the round


class Watch:
    """Stands in for the executor and the logger of a federation; loses the uploads that `lose(round, id)` says.

    `around` puts it around an executor; `federation` is to be set before the run.
    """

    federation: Federation

    def __init__(self, lose: Callable[[int, int], bool] | None = None) -> None:
        self.lose = lose
        self._now: dict[str, Any] = {}
        self.rounds: list[Round] = []

    def around(self, run: Any) -> Any:
        self._run = run
        return self.run

    def run(self, jobs: Any, done: Any) -> list[JobResult]:
        server = self.federation.server
        self._now = {"down": {job.client.id: clone(job.message) for job in jobs}, "before": shallow_copy(server.state)}
        outcomes = self._run(jobs, done)
        self._now["trained"] = {o.client_id: o.weights for o in outcomes}
        if self.lose is not None:
            lost = [self.lose(server.round, o.client_id) for o in outcomes]
            outcomes = [
                dataclasses.replace(o, refused="lost") if gone else o for o, gone in zip(outcomes, lost, strict=True)
            ]
        self._now["up"] = {o.client_id: o.message for o in outcomes}
        return outcomes

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        after = shallow_copy(self.federation.server.state)
        weights = {client.id: client.weights for client in self.federation.clients}
        states = {client.id: shallow_copy(client.state) for client in self.federation.clients}
        self.rounds.append(Round(weights=weights, after=after, record=record, states=states, **self._now))

    def start(self, info: Any) -> None: ...
    def client_done(self, done: int, total: int) -> None: ...
    def message(self, text: str) -> None: ...
    def end(self, result: Any) -> None: ...


def federation(  # noqa: PLR0913 - what tests vary, each by its name
    method: Method,
    members: Sequence[Client],
    builders: Mapping[str, Callable[[], nn.Module]] | None = None,
    *,
    seed: int = 0,
    held: PublicData | None = None,
    lose: Callable[[int, int], bool] | None = None,
    classes: int = CLASSES,
    evaluation: Evaluation | None = None,
    out: Path | None = None,
    plugins: Sequence[object] = (),
    watch: type[Watch] = Watch,
    **training: Any,
) -> tuple[Federation, Watch]:
    """A federation and its watcher; two rounds of one epoch in batches of 4 at rate 0.1 unless told."""
    settings = Training(**{"rounds": 2, "batch_size": 4, "lr": 0.1, **training})
    watching = watch(lose)
    watching.federation = Federation(
        members,
        method,
        settings,
        evaluation,
        plugins=plugins,
        task=Task(public=held, classes=classes),
        executor=Execution(wrap=watching.around),
        out=out,
        seed=seed,
        builders=builders or NETS,
        loggers=[watching],
    )
    return watching.federation, watching


def rounds(*args: Any, **kwargs: Any) -> list[Round]:
    """Run such a federation."""
    fed, watch = federation(*args, **kwargs)
    fed.run()
    return watch.rounds


class Step(NamedTuple):
    """A step of client 0: its round, its phase, the network's tensors before it, and the client's context."""

    round: int
    phase: str
    before: dict[str, Tensor]
    context: Context


def watch_steps(monkeypatch: pytest.MonkeyPatch, kind: type[Method]) -> list[Step]:
    """The steps of client 0 under methods of this class from now on."""
    steps: list[Step] = []
    inputs = kind.step_inputs

    def step_inputs(self: Method, client: Client, step: int, generator: torch.Generator) -> Context:
        if client.id == 0:
            before = {name: t.clone() for name, t in client.model.state_dict().items()}
            steps.append(Step(client.round, client.phase, before, client.context))
        return inputs(self, client, step, generator)

    monkeypatch.setattr(kind, "step_inputs", step_inputs)
    return steps


NETS: dict[str, Callable[[], nn.Module]] = {
    "shallow": lambda: net(depth=1),
    "deep": lambda: net(depth=3),
    "wide": lambda: net(width=9),  # other cuts, same representation
    "broad": lambda: net(features=8),  # same cut, another representation
    "bn": lambda: net(batchnorm=True),
    "deep-bn": lambda: net(depth=3, batchnorm=True),
    "dropout": lambda: net(batchnorm=True, dropout=0.4),
}


def zoo_weights(name: str) -> dict[str, Tensor]:
    """The tensors of a network of the zoo for CIFAR-10's images, without memory."""
    with torch.device("meta"):
        return zoo.build(name, (3, 32, 32), 10).state_dict()


def worker(fed: Federation, number: int, round: int = 1, weights: Mapping[str, Tensor] | None = None) -> Client:
    """A client at work, as the executor would hand it to the method."""
    client = fed.clients[number]
    if weights is not None:
        client.weights = dict(weights)
    at = working_copy(client, "", fed.model_factory)
    at.round = round
    fed.server.round = round
    return at


def model_with(builder: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> SplitModel:
    """A fresh network holding these weights, in eval mode."""
    model = builder()
    model.load_state_dict(dict(weights), strict=False)
    return model.eval()  # type: ignore[return-value]


def batch(data: LabeledSamples, rows: slice = slice(None)) -> Batch:
    """These rows as a batch."""
    return Batch(data.x[rows], data.y[rows], torch.ones(len(data.y[rows])))


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest change of any entry."""
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def numpy_mean(models: Sequence[Mapping[str, Tensor]], shares: Sequence[float], name: str) -> np.ndarray:
    """The weighted mean of one tensor over those who have it."""
    held = [(m[name].double().numpy(), s) for m, s in zip(models, shares, strict=True) if name in m]
    return sum(t * s for t, s in held) / sum(s for _, s in held)


def softmax(scores: Any) -> Any:
    """Of each row of a NumPy array."""
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def shared(state: Mapping[str, Any]) -> Any:
    """The one model in a server's state."""
    (model,) = (state[name] for name in state if name.startswith("model"))
    return model
