"""Tiny federations for the conformance kit: six clients, three classes of 1 x 6 x 6 images, small networks.

The data are synthetic and separable, the clients unequal: 10 to 24 samples, some classes missing. The networks have
some 400 numbers, and a federation of two rounds takes some 50 ms.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client, Prepare, PublicData, to_float
from polyfed.core.message import flatten, freeze
from polyfed.core.method import Method, Requirements
from polyfed.core.settings import Evaluation, Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.client_work import working_copy
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Output, Task
from polyfed.functional.modes import eval_mode
from polyfed.models.split import SequentialSplit

CLASSES = 3
SIZES = (24, 16, 10, 20, 13, 17)
LABELS = ((0, 1), (1, 2), (0, 1, 2), (2,), (0, 2), (0, 1, 2))
SHORT = Training(rounds=2, local_epochs=1, batch_size=8, lr=0.1)

TIMES = ("seconds", "processor_seconds")  # of a round, which equal runs do not share

_PLUGINS = ("availability", "privacy", "devices", "robust_aggregation", "adversaries", "secure_sums")

Build = Callable[[], nn.Module]
Flat = Mapping[str, Tensor]


class _Block(nn.Module):
    """A residual step of constant shape, so that networks of any depth share their tensors' names."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.relu(self.norm(self.conv(x)))
        return out


def tiny_model(depth: int, width: int, features: int, norm: bool = False) -> SequentialSplit:
    """A convolution, `depth` residual blocks and a projection, a linear head."""
    extractor: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(1, width, 3, stride=2, padding=1))
    if norm:
        extractor["norm"] = nn.BatchNorm2d(width)
    extractor["relu"] = nn.ReLU()
    body: OrderedDict[str, nn.Module] = OrderedDict((f"block{i}", _Block(width, norm)) for i in range(depth))
    body.update(flat=nn.Flatten(), project=nn.Linear(9 * width, features), relu=nn.ReLU())
    name = f"tiny-{depth}-{width}-{features}{'-bn' if norm else ''}"
    return SequentialSplit(nn.Sequential(extractor), nn.Sequential(body), nn.Linear(features, CLASSES), name)


def plain_model() -> nn.Module:
    """A network without parts."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))


def model_family(needs: Sequence[Requirements], one: bool = False, norm: bool = False) -> list[Build]:
    """Networks as different as the needs allow."""
    if one or any(n.same_architecture for n in needs):
        kinds = [(1, 4, 6)]
    elif any(n.shared_shapes or n.same_cut_shapes for n in needs):
        kinds = [(1, 4, 6), (2, 4, 6), (0, 4, 6)]
    elif any(n.same_feature_dim or n.same_head for n in needs):
        kinds = [(1, 4, 6), (2, 3, 6), (0, 5, 6)]
    else:
        kinds = [(1, 4, 6), (2, 3, 5), (0, 5, 7)]
    return [functools.partial(tiny_model, *kind, norm) for kind in kinds]


def draw(size: int, labels: Sequence[int], place: int) -> LabeledSamples:
    """`size` samples of the given classes: a pattern of the class and noise; every class comes up where it can."""
    patterns = torch.randn(CLASSES, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([labels[i % len(labels)] for i in range(size)])
    noise = torch.randn(size, 1, 6, 6, generator=torch.Generator().manual_seed(100 + place))
    return LabeledSamples(patterns[y] + 0.4 * noise, y)


def grouped(**options: Any) -> dict[str, Any]:
    """What `Federation` takes for these: fields of its task, executor and output, and plugins' settings, each by name.

    >>> sorted(grouped(classes=3, executor="serial", out="run", seed=1))
    ['executor', 'out', 'plugins', 'seed', 'task']
    """
    if "out" in options:
        options["path"] = options.pop("out")
    known: list[list[str]] = [[field.name for field in fields(Task)], [*Execution.model_fields], [*Output.model_fields]]
    task, execution, output = ({name: options.pop(name) for name in names if name in options} for names in known)
    plugins = [options.pop(name) for name in _PLUGINS if name in options]
    return {
        "task": Task(**task),
        "executor": Execution(**execution),
        "out": Output(**output),
        "plugins": [*(plugin for plugin in plugins if plugin is not None), *options.pop("plugins", ())],
        **options,
    }


@dataclass(frozen=True)
class TinyFederation:
    """Who takes part. clients: not yet numbered. public: rows that everybody sees. device: where networks compute."""

    clients: Sequence[Client]
    builders: Mapping[str, Build]
    public: PublicData | None
    device: str = "cpu"

    def federation(
        self,
        method: Method,
        training: Training = SHORT,
        *,
        evaluation: Evaluation | None = None,
        public: bool = True,
        **options: Any,
    ) -> Federation:
        """A federation of these clients, scored after the last round only; in this process, where it can be watched.

        options: see `grouped`.
        """
        given = {"executor": "serial", "device": self.device, "checkpoint_every": 100, **options}
        return Federation(
            self.clients,
            method,
            training,
            evaluation or Evaluation(every_n_rounds=training.rounds),
            builders=self.builders,
            **grouped(classes=CLASSES, public=self.public if public else None, **given),
        )

    def run(self, method: Method, training: Training = SHORT, **options: Any) -> Federation:
        """A federation that has run."""
        federation = self.federation(method, training, **options)
        federation.run()
        return federation


def world(
    builds: Sequence[Build],
    public: int,
    *,
    sizes: Sequence[int] = SIZES,
    labels: Sequence[Sequence[int]] = LABELS,
    data: Sequence[LabeledSamples] | None = None,
    prepare: Mapping[int, Prepare] | None = None,
    device: str = "cpu",
) -> TinyFederation:
    """Clients with the given networks in turn, sizes and classes; or with the training samples `data`."""
    builders = {f"net{i}": build for i, build in enumerate(builds)}
    names = list(builders)
    train = data or [draw(size, own, place) for place, (size, own) in enumerate(zip(sizes, labels, strict=True))]
    clients = [
        Client(
            names[place % len(names)],
            samples,
            draw(12, sorted({int(y) for y in samples.y}), 50 + place),
            draw(4, sorted({int(y) for y in samples.y}), 70 + place),
            prepare=(prepare or {}).get(place, to_float),
        )
        for place, samples in enumerate(train)
    ]
    return TinyFederation(clients, builders, PublicData(draw(public, range(CLASSES), 99)) if public else None, device)


# results ----------------------------------------------------------------------------------------------------------


def weights(federation: Federation) -> dict[str, Tensor]:
    """All clients' own weights; nothing of those who have none."""
    return {
        f"client {client.id}: {name}": tensor
        for client in federation.clients
        for name, tensor in (client.weights or {}).items()
    }


def sent(federation: Federation) -> dict[str, Tensor]:
    """What the server would send now."""
    return {
        f"to client {client.id}: {name}": tensor
        for client in federation.clients
        for name, tensor in flatten(federation.method.broadcast(federation.server, client.id)).items()
    }


def _at_work(federation: Federation, number: int, receives: bool) -> Client:
    """A client with its network, which has received what it would be sent now, or is as the client keeps it."""
    method, server = federation.method, federation.server
    worker = working_copy(federation.clients[number], method.variant(server, number), federation.model_factory)
    worker.round = server.round
    if receives:
        method.receive(worker, freeze(method.broadcast(server, number)))
    return worker


def received(federation: Federation, number: int) -> dict[str, Tensor]:
    """The float weights of a client's network after receiving what it would be sent now."""
    state = _at_work(federation, number, receives=True).model.state_dict()
    return {name: t.detach().to("cpu", copy=True) for name, t in state.items() if t.is_floating_point()}


def predictions(federation: Federation) -> dict[str, Tensor]:
    """Scores of the test samples by the models that the method's paper scores."""
    method = federation.method
    found = {}
    for client in federation.clients:
        worker = _at_work(federation, client.id, method.evaluation_stage == "received" or client.weights is None)
        model = method.personal_model(worker.model)
        with torch.inference_mode(), eval_mode(model):
            x = client.prepare(client.data.test.x.to(federation.model_factory.device))
            scores = method.predict(model, x, worker.state)
        found[f"client {client.id}: scores"] = scores.cpu()
    return found


def state(federation: Federation) -> dict[str, Tensor]:
    """Everything that outlives a round: weights and states."""
    found = weights(federation) | {
        f"server: {name}": tensor for name, tensor in flatten(federation.server.state).items()
    }
    for client in federation.clients:
        found |= {f"client {client.id}: state {name}": tensor for name, tensor in flatten(client.state).items()}
    return found


def effect(federation: Federation) -> dict[str, Tensor]:
    """Everything that shows outside: weights, messages, scores, bytes, the method's sums."""
    last = federation.history[-1]
    figures = {f"record: {name}": torch.tensor(float(value)) for name, value in last["sums"].items()}
    figures["record: bytes up"] = torch.tensor([r["bytes_up"] for r in federation.history])
    figures["record: bytes down"] = torch.tensor([r["bytes_down"] for r in federation.history])
    return weights(federation) | sent(federation) | predictions(federation) | figures


def all_state(federation: Federation) -> dict[str, Tensor]:
    """What shows outside, and all state."""
    return state(federation) | effect(federation)


def records(federation: Federation) -> list[dict[str, Any]]:
    """The history but for its times."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in federation.history]


def difference(a: Flat, b: Flat, tolerance: float = 0.0) -> str | None:
    """Where two results differ, in words; None where they agree (tolerance 0: bit for bit), on whatever device."""
    if a.keys() != b.keys():
        return f"only one side has {sorted(a.keys() ^ b.keys())[0]}"
    for name, first in a.items():
        first = first.cpu()
        other = b[name].cpu()
        if first.shape != other.shape or first.dtype != other.dtype:
            return f"{name} has shape {tuple(first.shape)} here and {tuple(other.shape)} there"
        same = torch.equal(first, other) if not tolerance else close(first, other, tolerance)
        if not same and not (torch.isnan(first).any() and torch.equal(first.nan_to_num(), other.nan_to_num())):
            gap = float((first.double() - other.double()).abs().max())
            return f"{name} differs (largest difference {gap:.2g})"
    return None


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Equal up to `tolerance` times the largest entry."""
    scale = max(1.0, float(b.double().abs().max()) if b.numel() else 1.0)
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale)
