"""What a stack trains on and what it trains, of all clients of a phase in tensors on the device.

Shapes: S steps of the phase, K clients, B rows of the widest batch, C classes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polyfed.core.client import Client
from polyfed.core.message import get_tensor
from polyfed.core.method import Batch, Phase, StepResult
from polyfed.core.optimizers import Optimizer
from polyfed.core.settings import Training
from polyfed.data.augmentation import augmentation
from polyfed.engine.executors.stacked_loss import Tensors
from polyfed.engine.local_training import phase_data, shuffled_batches


class ClientProgress:
    """A client on its way through its local training, with the streams that it would have alone.

    place: among the stack's clients. batches: of the phase, the rows of each. steps, samples: of the phases before.
    """

    def __init__(self, client: Client, place: int) -> None:
        self.client, self.place = client, place
        self.draws, self.order, self.noise = (client.generator(name) for name in ("inputs", "batches", "augment"))
        self.steps = self.samples = 0
        self.batches: Sequence[Tensor] = ()

    def start(self, phase: Phase) -> None:
        """Draw the batches of a phase."""
        rows = None if phase.rows is None else get_tensor(self.client.context, phase.rows)
        held = len(phase_data(self.client, phase)[0])
        self.batches = list(shuffled_batches(self.client, phase, held, rows, self.order))


class PhaseData:
    """What all clients train on in a phase, and in which order, on the device: no step waits for a copy.

    A batch with fewer rows than others is filled up with its first row, of weight 0.

    Args:
        progresses: K clients, those with most steps first.

    Attributes:
        sizes: (S, K) rows of each batch, in main memory; 0 where a client is through.
        tensors: "x" of all samples; "rows" (S, K, B) of each client's own data, "where" in all data, "labels" and
            "weights"; "drawn" for augmentation; "sizes".
    """

    def __init__(self, progresses: Sequence[ClientProgress], phase: Phase, device: torch.device) -> None:
        pairs = [phase_data(progress.client, phase) for progress in progresses]
        self._prepare = pairs[0][1]
        self._augment = augmentation(progresses[0].client.training.augmentation)
        held = {id(samples): samples for samples, _ in pairs if len(samples)}
        begins = dict(zip(held, itertools.accumulate(map(len, held.values()), initial=0), strict=False))
        begin_K1 = torch.tensor([[begins.get(id(samples), 0)] for samples, _ in pairs])
        plan_SKB = _laid_out([progress.batches for progress in progresses], -1)
        rows_SKB = torch.where(plan_SKB < 0, plan_SKB[..., :1], plan_SKB).clamp(min=0)
        rows, where, weights = torch.stack([rows_SKB, rows_SKB + begin_K1, (plan_SKB >= 0).long()]).to(device)
        self.sizes = (plan_SKB >= 0).sum(dim=2)
        there = [samples.at(device) for samples in held.values()]
        self.tensors: Tensors = {
            "x": torch.cat([samples.x.to(device) for samples in there]),
            "rows": rows,
            "where": where,
            "labels": torch.cat([samples.y.to(device) for samples in there])[where],
            "weights": weights.float(),
            "sizes": self.sizes.to(device, torch.float32 if device.type == "mps" else torch.float64),
        }
        if self._augment is not None:
            shape = self.tensors["x"].shape[1:]
            drawn = [[self._augment.draw(len(rows), shape, p.noise) for rows in p.batches] for p in progresses]
            self.tensors["drawn"] = _laid_out(drawn, 0).to(device)

    def planned(self, name: str, rows: slice | Tensor, step: int) -> Tensor:
        """What is planned for a step of some of the clients, (K, ...)."""
        return self.tensors[name][step][rows]

    def batch(self, rows: slice | Tensor, step: int, width: int) -> Batch:
        """A step's batch of some of the clients: x (K, B, ...) as the network takes it, y, w and rows (K, B)."""
        where, y, w, own = (
            self.planned(name, rows, step)[:, :width] for name in ("where", "labels", "weights", "rows")
        )
        x = self.tensors["x"][where].flatten(0, 1)
        if self._augment is not None:
            x = self._augment.apply(x, self.planned("drawn", rows, step)[:, :width].flatten(0, 1))
        return Batch(self._prepare(x).unflatten(0, where.shape), y, w, own)


def _laid_out(batches: Sequence[Sequence[Tensor]], fill: int) -> Tensor:
    """(S, K, B, ...): each client's batches, filled up to the most steps and the widest batch."""
    whole = pad_sequence([each for own in batches for each in own], batch_first=True, padding_value=fill)
    return pad_sequence(list(whole.split([len(own) for own in batches])), padding_value=fill)


class StackState:
    """What the steps of a phase read and write.

    Args:
        tensors: by name, (K, ...). masks: of some of them, likewise. trained: names of those that move.
        training: how. rate: the learning rate.

    Attributes:
        sums: over the steps, (K, ...), by kind ("loss" over all rows, "sums" and "raw") and name.
    """

    def __init__(
        self, tensors: Tensors, masks: Tensors, trained: Sequence[str], training: Training, rate: float
    ) -> None:
        self.tensors = {n: t.detach().requires_grad_(n in trained) for n, t in tensors.items()}
        self.masks, self.trained = masks, trained
        self.sums: dict[tuple[str, str], Tensor] = {}
        self._count = len(next(iter(self.tensors.values())))
        self.optimizer = Optimizer([self.tensors[name] for name in trained], training, rate)
        self.optimizer.begin()
        self._first: dict[int, StackState] = {}

    def first(self, count: int) -> StackState:
        """That of the first `count` clients, in the same memory."""
        if count not in self._first:
            part = self._first[count] = copy.copy(self)
            part.tensors = {n: t.detach()[:count].requires_grad_(t.requires_grad) for n, t in self.tensors.items()}
            part.masks = {name: mask[:count] for name, mask in self.masks.items()}
            part.optimizer = self.optimizer.first(count)
        return self._first[count]

    def move(self, grads: Mapping[str, Tensor | None]) -> None:
        """One step of the optimizer; entries whose mask is 0 stay bit for bit."""
        before = {name: self.tensors[name].detach().clone() for name in self.masks}
        self.optimizer.step([grads.get(name) for name in self.trained])
        with torch.no_grad():
            for name, old in before.items():
                self.tensors[name].copy_(torch.where(self.masks[name], self.tensors[name], old))

    def add(self, rows: slice | Tensor, sizes: Tensor, found: StepResult) -> None:
        """Take in losses and sums of some clients in a step. sizes: (K,) how many rows each had."""
        values = {("loss", ""): found.loss * sizes}
        values |= {("sums", name): value for name, value in found.sums.items()}
        values |= {("raw", name): value for name, value in found.raw.items()}
        with torch.no_grad():
            for key, value in values.items():
                if key not in self.sums:
                    self.sums[key] = value.new_zeros(self._count, *value.shape[1:])
                self.sums[key][rows] += value
