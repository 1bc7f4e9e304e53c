"""What a stack trains on and what it trains, of all clients of a phase in tensors on the device.

Shapes: S steps of the phase, K clients, B rows of the widest batch.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import get_tensor
from polyfed.core.method import Batch, NotVectorizable, Phase
from polyfed.core.optimizers import Optimizer
from polyfed.core.settings import Training
from polyfed.data.transforms import augmentation
from polyfed.engine.executors.stacked_loss import Tensors
from polyfed.engine.local_training import class_weights, phase_data, shuffled_batches


class ClientProgress:
    """A client on its way through its local training, with the streams that it would have alone.

    place: among the stack's clients. batches: of the phase, the rows of each. sizes: how many rows those are.
    steps: taken in the phases before.
    """

    def __init__(self, client: Client, place: int) -> None:
        self.client, self.place = client, place
        self.draws, self.noise, self._order = (client.generator(name) for name in ("inputs", "augment", "batches"))
        self.steps = self.samples = 0
        self.summed: set[str] = set()  # names of what its losses have summed
        self.batches: Sequence[Tensor] = ()
        self.sizes: Sequence[int] = ()

    def start(self, phase: Phase) -> None:
        """Draw the batches of a phase."""
        rows = None if phase.rows is None else get_tensor(self.client.context, phase.rows)
        held = len(phase_data(self.client, phase)[0])
        self.batches = list(shuffled_batches(self.client, phase, held, rows, self._order))
        self.sizes = [len(batch) for batch in self.batches]


class PhaseData:
    """What all clients train on in a phase, and in which order: one copy to the device, so that a step waits for none.

    Args:
        progresses: K clients, those with most steps first.

    Attributes:
        tensors: all that a batch is made of: "x" and "y" of all samples; "rows" (S, K, 2, B), those of each client's
            data and of all data; "weights" (S, K, 3, B), each row's, its share in the sum over the batch, and minus
            that; "labels" (S, K, B); "drawn", for augmentation; "by class", weights of classes.
        counts: how many samples each client has. width: B.

    Raises:
        NotVectorizable: the clients' samples differ in shape or preparation.
    """

    def __init__(self, progresses: Sequence[ClientProgress], phase: Phase, device: torch.device) -> None:
        pairs = [phase_data(progress.client, phase) for progress in progresses]
        held = {id(samples): samples for samples, _ in pairs if len(samples)}
        kinds = {(samples.x.shape[1:], samples.x.dtype) for samples in held.values()}
        self.prepare = pairs[0][1]
        if len(kinds) > 1 or any(prepare != self.prepare for _, prepare in pairs):
            raise NotVectorizable(f"inputs of phase '{phase.name or 'training'}' differ in shape or preparation")
        there = [samples.at(device) for samples in held.values()]
        self.stays = all(samples.x.device == device for samples in there)  # else it is uploaded each time
        begins = dict(zip(held, [0, *itertools.accumulate(map(len, held.values()))], strict=False))
        self._begins = torch.tensor([begins.get(id(samples), 0) for samples, _ in pairs]).unsqueeze(1)
        self._device = device
        self.counts = [len(samples) for samples, _ in pairs]
        self.width = max(size for progress in progresses for size in progress.sizes)
        self.augment = augmentation(progresses[0].client.training.augmentation)
        self.tensors: Tensors = {
            "x": torch.cat([samples.x.to(device) for samples in there]),
            "y": torch.cat([samples.y.to(device) for samples in there]),
        }
        by_class = [
            weights for progress in progresses if (weights := class_weights(progress.client, phase)) is not None
        ]
        if by_class:
            self.tensors["by class"] = torch.stack(by_class).to(device)
        self._plan(progresses)

    def _plan(self, progresses: Sequence[ClientProgress]) -> None:
        steps = len(progresses[0].sizes)
        sizes = torch.tensor([[*progress.sizes, *[0] * (steps - len(progress.sizes))] for progress in progresses])
        before = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
        sizes, before = (numbers.T.unsqueeze(2) for numbers in (sizes, before))  # (S, K, 1)
        # a batch is filled up with its last row; where there is none stands row 0
        places = torch.where(sizes > 0, 1 + before + torch.arange(self.width).minimum(sizes - 1), 0)
        rows = torch.cat([torch.tensor([0]), *(batch for progress in progresses for batch in progress.batches)])[places]
        self.tensors["rows"], self.tensors["weights"] = self._uploaded(rows, self._begins, sizes)
        self.tensors["labels"] = self.tensors["y"][self.tensors["rows"][..., 1, :]]
        if self.augment is None:
            return
        drawn = self.augment.draw(0, torch.Generator())
        whole = drawn.new_zeros(steps, len(progresses), self.width, *drawn.shape[1:])
        for place, progress in enumerate(progresses):
            for step, size in enumerate(progress.sizes):
                whole[step, place, :size] = self.augment.draw(size, progress.noise)
        self.tensors["drawn"] = whole.to(self._device)

    def _uploaded(self, rows: Tensor, begins: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (..., B) of clients' data, of which the first `sizes` count, as `tensors` has rows and weights."""
        counted = torch.arange(rows.shape[-1]) < sizes
        whole = torch.stack([rows, rows + begins, counted.long()], dim=-2).to(self._device)
        return whole[..., :2, :], _with_shares(whole[..., 2, :].float(), dim=-2)

    def batch(self, places: Sequence[int], number: int | Tensor, width: int) -> tuple[Batch, Tensor]:
        """A step's batch of x (K, B, ...) as the network takes it, y, w and rows (K, B), of some of the clients.

        And the rows' shares in the sum of their client's weights, and minus these, (K, 2, B).

        Args:
            number: of the step; in a recorded one a tensor (1,). width: B; rows that a client has not weigh 0.
        """

        def planned(name: str) -> Tensor:
            return pick(_at(self.tensors[name], number), places)

        own, where = planned("rows")[..., :width].unbind(1)
        x = self.tensors["x"][where].flatten(0, 1)
        if self.augment is not None:
            x = self.augment.apply(x, planned("drawn")[:, :width].flatten(0, 1))
        return self._made(places, x, planned("labels")[:, :width], own, planned("weights")[..., :width])

    def trial_batch(self, places: Sequence[int], chosen: Sequence[Tensor], count: int) -> tuple[Batch, Tensor]:
        """As `batch`, of these rows of the clients' data, not augmented, of which the first `count` count."""
        width = max(map(len, chosen))
        rows = torch.stack([torch.cat([each, each[-1:].expand(width - len(each))]) for each in chosen])
        both, weights = self._uploaded(rows, self._begins[list(places)], torch.full((len(rows), 1), count))
        own, where = both.unbind(1)
        return self._made(places, self.tensors["x"][where].flatten(0, 1), self.tensors["y"][where], own, weights)

    def _made(self, places: Sequence[int], x: Tensor, y: Tensor, own: Tensor, weights: Tensor) -> tuple[Batch, Tensor]:
        if "by class" in self.tensors:
            weights = _with_shares(weights[:, 0] * pick(self.tensors["by class"], places).gather(1, y), dim=1)
        return Batch(self.prepare(x).unflatten(0, own.shape), y, weights[:, 0], own), weights[:, 1:]

    def unlike(self, place: int, chosen: Tensor) -> Tensor:
        """The rows of a client's data, besides `chosen`, whose inputs differ from those of the last row chosen."""
        begin = int(self._begins[place])
        count = self.counts[place]
        own = self.tensors["x"][begin : begin + count].reshape(count, -1)
        differs = (own != own[int(chosen[-1])]).any(dim=1).cpu()
        differs[chosen] = False
        return differs.nonzero().flatten()


class StackState:
    """What the steps of a phase read and write.

    Args:
        values: by kind and name: ("tensor", name) and ("mask", name), (K, ...); others that are only read.
        trained: names of the tensors that move. training: how. rate: the learning rate. steps: S.
        is_recorded: steps may be recorded, and look the rate up.

    Attributes:
        losses: of the steps so far, (S, K). sums: over the steps since they were last zeroed, (K, ...) by name.
        number: (1,), which step it is, for a recorded one. graphs: the recorded ones, by kind.
    """

    def __init__(
        self,
        values: Mapping[tuple[str, Any], Tensor],
        trained: Sequence[str],
        training: Training,
        rate: float,
        steps: int,
        is_recorded: bool,
    ) -> None:
        self.values, self.trained = values, trained
        self.tensors = {n: t.detach().requires_grad_(n in trained) for n, t in self.named("tensor").items()}
        self.masks = self.named("mask")
        some = next(iter(self.tensors.values()))
        self.losses = torch.zeros(steps, len(some), device=some.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=some.device)
        self.rate = torch.tensor(rate, device=some.device)
        moving = [self.tensors[name] for name in trained]
        self.optimizer = Optimizer(moving, training, self.rate if is_recorded else rate)
        self.optimizer.clear()
        self.graphs: dict[Hashable, Any] = {}
        self.sums: Tensors = {}
        self._first: dict[int, StackState] = {}

    def named(self, kind: str) -> Tensors:
        """The values of a kind, by name."""
        return {name: t for (of, name), t in self.values.items() if of == kind}

    def first(self, count: int) -> StackState:
        """That of the first `count` clients, in the same memory."""
        if count not in self._first:
            part = self._first[count] = copy.copy(self)
            part.tensors = {n: t.detach()[:count].requires_grad_(t.requires_grad) for n, t in self.tensors.items()}
            part.masks = {name: mask[:count] for name, mask in self.masks.items()}
            part.optimizer = self.optimizer.first(count)
        return self._first[count]

    def move(self, grads: Tensors) -> None:
        """One step of the optimizer; entries whose mask is 0 stay bit for bit."""
        before = {name: self.tensors[name].detach().clone() for name in self.masks}
        self.optimizer.step([grads.get(name) for name in self.trained])
        with torch.no_grad():
            for name, old in before.items():
                self.tensors[name].copy_(torch.where(self.masks[name], self.tensors[name], old))

    def add(self, places: Sequence[int], number: int | Tensor, losses: Tensor, sums: Tensors) -> None:
        """Take in losses and sums of some clients in a step."""
        with torch.no_grad():
            pick_rows = slice(len(places)) if is_first(places) else index_of(tuple(places), losses.device)
            self.losses[number, pick_rows] = losses.to(self.losses.dtype)
            for name, value in sums.items():
                if name not in self.sums:
                    self.sums[name] = value.new_zeros(self.losses.shape[1], *value.shape[1:])
                self.sums[name][pick_rows] += value

    def clear(self) -> None:
        """Nothing is summed, and the optimizer remembers nothing, in the same memory."""
        self.optimizer.clear()
        torch._foreach_zero_([self.losses, *self.sums.values()])

    def written(self) -> list[Tensor]:
        """All that steps write into: tensors, what the optimizer remembers, losses and sums."""
        return [*self.tensors.values(), *self.optimizer.tensors(), self.losses, *self.sums.values()]


def is_first(places: Sequence[int]) -> bool:
    """Whether places, which grow, are those of the first clients."""
    return places[0] == 0 and places[-1] == len(places) - 1


def pick(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """(K, ...): what belongs to these clients, whose places grow; a view where they are the first ones."""
    return tensor[: len(places)] if is_first(places) else tensor[index_of(tuple(places), tensor.device)]


@functools.lru_cache(maxsize=256)
def index_of(places: tuple[int, ...], device: torch.device) -> Tensor:
    """(K,) int64 on the device, brought there once."""
    return torch.tensor(places).to(device)


def _at(planned: Tensor, number: int | Tensor) -> Tensor:
    """What is planned for a step; that a tensor says which, a recorded step finds out each time."""
    return planned[number] if isinstance(number, int) else planned.index_select(0, number).squeeze(0)


def _with_shares(weights: Tensor, dim: int) -> Tensor:
    """Weights (..., B), their shares in the sum over a batch, and minus these, stacked."""
    total = weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    shares = weights / total
    return torch.stack([weights, shares, -shares], dim=dim)
