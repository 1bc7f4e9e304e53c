"""What the tests of methods with sub-models share: the toys' networks at other widths, and a watcher of training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.federation import Federation
from polyfed.functional.channel_slices import OUTPUT, WHOLE, Axis, ChannelPlan
from tests.helpers.toys import Round, Watch, federation, net

NARROW = {"a": (6, 5), "b": (3, 3), "c": (2, 2), "d": (1, 1), "e": (1, 1)}  # width, features: halves rounded up
# the deep toy's blocks
LAYERS = ("extractor", "intermediate.block1", "intermediate.block2", "intermediate.block3", "intermediate.last")


def small(kind: str, letter: str) -> nn.Module:
    """The toys' "shallow" or "bn", made narrow from the start."""
    width, features = NARROW[letter]
    return net(width=width, features=features, batchnorm=kind == "bn")


def prefix(tensor: Tensor, like: Tensor) -> Tensor:
    """The first entries in every dimension."""
    for dim, size in enumerate(like.shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def order_of(member: Client, number: int, seed: int = 0, round: int = 1) -> Tensor:
    """The order in which a client walks through its data."""
    at = copy.copy(member)
    at.id, at.seed, at.round, at.exchange = number, seed, round, "train"
    return torch.randperm(member.n, generator=at.generator("batches"))


def mean_of_entries(name: str, whole: Tensor, sent: Sequence[Mapping[str, Tensor]], counts: Sequence[float]) -> Any:
    """Each entry's weighted mean over those whose prefix holds it, in NumPy; of nobody, what it was."""
    total, count = np.zeros(tuple(whole.shape)), np.zeros(tuple(whole.shape))
    for model, share in zip(sent, counts, strict=True):
        if name in model:
            value = model[name].double().numpy()
            inside = tuple(slice(0, size) for size in value.shape)
            total[inside] += share * value
            count[inside] += share
    return np.where(count > 0, total / np.maximum(count, 1), whole.double().numpy())


def exit_logits(
    weights: Mapping[str, Tensor],
    x: Tensor,
    blocks: int,
    batchnorm: bool = False,
    kept: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """All exits of a toy up to so many of its blocks, layer by layer; kept: BatchNorm's statistics, or the batch's."""
    found = []
    for count, name in enumerate(LAYERS[:blocks], 1):
        x = F.linear(x, weights[f"{name}.linear.weight"], weights[f"{name}.linear.bias"])
        if batchnorm:
            mean, var = (None if kept is None else kept[f"{name}.bn.running_{what}"] for what in ("mean", "var"))
            x = F.batch_norm(x, mean, var, weights[f"{name}.bn.weight"], weights[f"{name}.bn.bias"], kept is None)
        x = x.tanh()
        if count > 1:  # the first block has no exit
            own = "head" if count == len(LAYERS) else f"early_exits.block{count}.linear"
            found.append(F.linear(x, weights[f"{own}.weight"], weights[f"{own}.bias"]))
    return found


class TrainingWatch(Watch):
    """Keeps what happens in training; what is lost is lost in every exchange."""

    def run(self, jobs: Any, done: Any) -> list[JobResult]:
        if not jobs or jobs[0].exchange.trains:
            return super().run(jobs, done)
        outcomes, round = self._run(jobs, done), self.federation.server.round
        lost = [self.lose is not None and self.lose(round, o.client_id) for o in outcomes]
        return [dataclasses.replace(o, refused="lost") if gone else o for o, gone in zip(outcomes, lost, strict=True)]


def watched(method: Method, members: Sequence[Client], *args: Any, **kwargs: Any) -> tuple[Federation, Watch]:
    """A federation and such a watcher."""
    return federation(method, members, *args, watch=TrainingWatch, **kwargs)


def rounds(*args: Any, **kwargs: Any) -> list[Round]:
    """Run such a federation."""
    fed, watch = watched(*args, **kwargs)
    fed.run()
    return watch.rounds


# a large model without a network, whose cuts are worked out by hand
PLAN = ChannelPlan(
    axes={
        "conv": (Axis(2), Axis(WHOLE), Axis(WHOLE)),
        "inner": (Axis(3), Axis(2)),
        "flat": (Axis(OUTPUT), Axis(3, repeat=2)),
        "bias": (Axis(OUTPUT),),
        "count": (),
    },
    sizes={2: 5, 3: 4},
)
SHAPES = {"conv": (5, 2, 3), "inner": (4, 5), "flat": (3, 8), "bias": (3,), "count": ()}


def tensors(seed: int) -> dict[str, Tensor]:
    """Numbers for each of its tensors."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def kept(**groups: list[int]) -> dict[int, Tensor]:
    """Channels by group, as "g2=[0, 1]" has them."""
    return {int(name[1:]): torch.tensor(channels) for name, channels in groups.items()}


def places(name: str, channels: dict[int, Tensor]) -> list[list[int]]:
    """Per dimension which entries of the large tensor a part holds, by hand."""
    return [
        [c * axis.repeat + i for c in channels[axis.group].tolist() for i in range(axis.repeat)]
        if axis.group in channels
        else list(range(size))
        for axis, size in zip(PLAN.axes[name], SHAPES[name], strict=True)
    ]
