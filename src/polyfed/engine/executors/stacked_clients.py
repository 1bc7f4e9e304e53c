"""The local loop of several clients of one network as one: what `local_training.train` does, on stacked tensors.

Parameters and buffers are stacked, (K, ...); the losses of all clients are one vectorized call, their gradients one
backward pass (no client's loss depends on another's weights), and the optimizer, being elementwise, takes one step on
the stack. Every client draws from its own streams what it draws in `train`. A batch with fewer rows than others is
filled up with rows of weight 0; where that would change the result (BatchNorm, a loss that does not weigh its rows),
clients with as many rows are taken together. The clients with most steps stand first, so that those who are left are
always the first rows.

Shapes: K clients, B rows, S steps of a phase.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import get_group
from polyfed.core.method import Context, Method, NotVectorizable, Phase, TrainingResult
from polyfed.core.modules import trainable_parameters
from polyfed.engine.executors.recorded_step import Recordings
from polyfed.engine.executors.stack_data import ClientProgress, PhaseData, StackState, index_of, pick
from polyfed.engine.executors.stack_trial import Trial
from polyfed.engine.executors.stacked_loss import (
    Gradients,
    StackedContext,
    StackedLoss,
    Tensors,
    split_sums,
    structure,
)
from polyfed.engine.local_training import train_only
from polyfed.functional.device_copies import move_mappings

_NOTHING = StackedContext([{}])


class Known:
    """What a run has found out about its stacks.

    Attributes:
        refused: why clients of a kind train one after the other, by kind.
        fills: whether rows of weight 0 change nothing, by phase and kind of context.
        outlines: networks without values, for `step_inputs`, which must not look at weights.
        recordings: what is recorded of steps on a GPU.
    """

    def __init__(self) -> None:
        self.refused: dict[Hashable, str] = {}
        self.fills: dict[Hashable, bool] = {}
        self.outlines: dict[Hashable, nn.Module] = {}
        self.recordings = Recordings()


class StackedClients:
    """Clients of one network at work.

    Args:
        clients: K, whose `loss_context` have one `structure`. rows: their networks' tensors, (K, ...) by name, trained
            in place.
        method: whose loss. template: the network; what it holds means nothing.
        known: what was found out before; grows. label: what that may depend on: the network, the exchange.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        rows: Tensors,
        method: Method,
        template: nn.Module,
        known: Known,
        label: Hashable = None,
    ) -> None:
        self.rows, self.known, self.label = rows, known, label
        self.loss = StackedLoss(method, template)
        self.device = next(iter(rows.values())).device
        self.progresses = [ClientProgress(client, place) for place, client in enumerate(clients)]
        self.linear = {f"{name}.weight" for name, each in template.named_modules() if isinstance(each, nn.Linear)}
        self.draws = type(method).step_inputs is not Method.step_inputs
        if self.draws and label not in known.outlines:
            known.outlines[label] = without_values(template)
        self.sums: Tensors = {}
        self.losses: list[tuple[Sequence[ClientProgress], Tensor, Tensor]] = []  # and how many rows each step had

    def train(self, phases: Sequence[Phase]) -> list[TrainingResult]:
        """Go through the phases; each client's result.

        Raises:
            NotVectorizable: they cannot be trained as one; `rows` mean nothing then.
        """
        template = self.loss.network
        template.train()
        static = StackedContext([loss_context(progress.client, phases) for progress in self.progresses])
        for number, phase in enumerate(phases):
            for progress in self.progresses:
                progress.client.phase = phase.name
            with train_only(template, phase):
                names, _ = trainable_parameters(template)
                if not names:
                    continue
                for progress in self.progresses:
                    progress.start(phase)
                if any(progress.sizes for progress in self.progresses):
                    StackedPhase(self, number, phase, names, static).train()
        for progress in self.progresses:
            progress.client.phase = ""
        return self._results()

    def _results(self) -> list[TrainingResult]:
        floats = [t.detach().reshape(len(t), -1) for t in self.rows.values() if t.is_floating_point()]
        weights = torch.stack([t.sum(dim=1).float() for t in floats]).sum(dim=0)  # NaN where any entry is not finite
        # asked for together, as that stops a GPU
        values = torch.cat([*(losses.flatten() for _, losses, _ in self.losses), weights]).cpu()
        totals = torch.zeros(len(self.progresses), dtype=torch.float64)
        for progresses, losses, sizes in self.losses:
            found = values[: losses.numel()].view_as(losses)
            values = values[losses.numel() :]
            each = torch.where(sizes > 0, found.double() * sizes, 0.0).sum(dim=0)
            totals += torch.empty_like(each).index_copy_(
                0, torch.tensor([progress.place for progress in progresses]), each
            )
        return [
            TrainingResult(
                progress.steps,
                progress.samples,
                total / max(progress.samples, 1),
                *split_sums(
                    {name: sums[progress.place] for name, sums in self.sums.items() if name in progress.summed}
                ),
                is_finite,
            )
            for progress, total, is_finite in zip(
                self.progresses, totals.tolist(), values.isfinite().tolist(), strict=True
            )
        ]


class StackedPhase:
    """One phase of all clients of a stack.

    Args:
        number: of the phase. names: of the parameters that train. static: what the loss finds in the contexts.
    """

    def __init__(
        self, stack: StackedClients, number: int, phase: Phase, names: Sequence[str], static: StackedContext
    ) -> None:
        self._stack, self._loss, self._number = stack, stack.loss, number
        self._progresses = sorted(stack.progresses, key=lambda progress: -len(progress.sizes))
        self._order = index_of(tuple(progress.place for progress in self._progresses), stack.device)
        self._data = PhaseData(self._progresses, phase, stack.device)
        tensors = {name: t[self._order] for name, t in stack.rows.items()}
        # linear layers' weights are laid as their gradients come out of the vectorized product
        tensors |= {name: t.mT.contiguous().mT for name, t in tensors.items() if name in stack.linear}
        static = static.some(lambda t: t[self._order])
        values: dict[tuple[str, Any], Tensor] = {("tensor", name): t for name, t in tensors.items()}
        values |= {("mask", name): t for name, t in self._masks(phase.mask, names).items()}
        client = self._progresses[0].client
        rate = client.training.lr_at(client.round, phase.lr)
        recordings = stack.known.recordings
        if recordings.worthwhile(stack.label, self._loss.network):
            if self._data.stays:
                values |= {("data", name): with_room(t, name) for name, t in self._data.tensors.items()}
                values |= {("context", place): t.clone() for place, t in enumerate(static.tensors)}
            else:
                recordings.refused[stack.label] = "its samples stay in main memory"
        steps = len(values.get(("data", "rows"), self._progresses[0].sizes))
        self._is_recorded = ("data", "rows") in values
        self._state = StackState(values, names, client.training, rate, steps, self._is_recorded)
        if self._is_recorded:
            self._state = recordings.state(stack.label, number, self._state)
            self._data.tensors = self._state.named("data")
            static = static.holding(list(self._state.named("context").values()))
        self._static = static
        self._constants = structure(loss_context(client, [phase])) if self._is_recorded else None
        self._fills: dict[Hashable, bool] = {}  # by what is drawn for a step
        self._groups: dict[tuple[int, ...], list[list[int]]] = {}  # by how many rows each has, where nothing is drawn

    def train(self) -> None:
        """Take all steps; everybody's tensors then lie in the stack's rows."""
        progresses = self._progresses
        steps = len(progresses[0].sizes)
        sizes = torch.tensor([[*progress.sizes, *[0] * (steps - len(progress.sizes))] for progress in progresses]).T
        going = len(progresses)
        for step, count in enumerate((sizes > 0).sum(dim=1).tolist()):
            if count < going:
                self._finish(range(count, going))
                going = count
            inputs = self._inputs(step, going)
            groups = self._together(step, going, inputs)
            if len(groups) > 1 or not self._replayed(step, going, inputs):
                self._launched(step, groups, inputs)
        self._finish(range(going))
        for progress in progresses:
            progress.steps += len(progress.sizes)
            progress.samples += sum(progress.sizes)
        self._stack.losses.append((progresses, self._state.losses[:steps], sizes))

    def _masks(self, group: str | None, names: Sequence[str]) -> Tensors:
        """Everybody's masks of the parameters `names`, (K, ...); a client without a mask moves all of its tensor."""
        if group is None:
            return {}
        each = [get_group(progress.client.context, group) for progress in self._progresses]
        whole = torch.tensor(True)
        found = {}
        for name in names:
            if any(name in masks for masks in each):
                shape = self._stack.rows[name].shape[1:]
                rows = [masks.get(name, whole).to(self._stack.device).bool().expand(shape) for masks in each]
                found[name] = torch.stack(rows)
        return found

    def _finish(self, places: Sequence[int]) -> None:
        """Write the tensors and sums of those who are through to the stack's."""
        stack = self._stack
        own = slice(places[0], places[-1] + 1)
        index = self._order[own]
        for name, t in self._state.tensors.items():
            stack.rows[name][index] = t[own].detach()
        for name, t in self._state.sums.items():
            if name not in stack.sums:
                stack.sums[name] = t.new_zeros(t.shape)
            stack.sums[name][index] += t[own]

    def _inputs(self, step: int, going: int) -> Sequence[Context]:
        """What the method draws for the step of each who goes on; nothing where it draws nothing."""
        stack = self._stack
        if not stack.draws:
            return ()
        found = []
        for progress in self._progresses[:going]:
            client = copy.copy(progress.client)
            client.bound = stack.known.outlines[stack.label]
            found.append(self._loss.method.step_inputs(client, progress.steps + step, progress.draws))
        return move_mappings(found, stack.device)

    def _together(self, step: int, going: int, inputs: Sequence[Context]) -> list[list[int]]:
        """The places of those whose steps are taken as one."""
        sizes = tuple(progress.sizes[step] for progress in self._progresses[:going])
        if not inputs and sizes in self._groups:
            return self._groups[sizes]
        groups: dict[Hashable, list[int]] = {}
        kinds = [structure(each) for each in inputs] or [()] * going
        for place, kind in enumerate(kinds):
            if kind not in self._fills:
                self._fills[kind] = self._try(step, place, kinds, inputs)
            groups.setdefault((kind, 0 if self._fills[kind] else sizes[place]), []).append(place)
        found = list(groups.values())
        if not inputs:
            self._groups[sizes] = found
        return found

    def _try(self, step: int, place: int, kinds: Sequence[Hashable], inputs: Sequence[Context]) -> bool:
        """Whether rows of weight 0 change nothing in steps of a client's kind, once it is known that they vectorize."""
        progress = self._progresses[place]
        outlines = [structure(each, exact=False) for each in (progress.client.context, inputs[place] if inputs else {})]
        key = (self._stack.label, self._number, *outlines)
        known = self._stack.known.fills
        if key not in known:
            others = [other for other, kind in enumerate(kinds) if kind == kinds[place] and other != place]
            pair = sorted([place, max(others, key=self._data.counts.__getitem__, default=place)])
            index = index_of(tuple(pair), self._stack.device)
            tensors = self._state.first(len(self._progresses)).tensors
            known[key] = Trial(
                self._loss,
                self._data,
                pair,
                [self._progresses[each] for each in pair],
                {n: t.detach()[index].requires_grad_(t.requires_grad) for n, t in tensors.items()},
                [self._progresses[each].batches[step] for each in pair],
                self._static.some(lambda t: t[index]),
                [inputs[each] if inputs else {} for each in pair],
            ).fills()
        return known[key]

    def _launched(self, step: int, groups: Sequence[Sequence[int]], inputs: Sequence[Context]) -> None:
        going = sum(map(len, groups))
        found = []
        for places in groups:
            moving = StackedContext([inputs[place] for place in places]) if inputs else _NOTHING
            width = max(self._progresses[place].sizes[step] for place in places)
            found.append(self._gradients(going, places, step, width, moving))
        grads = found[0].grads
        if len(found) > 1:
            if any(each.grads.keys() != grads.keys() for each in found):
                raise NotVectorizable("some of its parameters have a gradient in the steps of some clients only")
            placed = [place for places in groups for place in places]
            order = index_of(tuple(sorted(range(going), key=placed.__getitem__)), self._stack.device)
            grads = {name: torch.cat([each.grads[name] for each in found])[order] for name in grads}
        self._state.first(going).move(grads)
        for places, each in zip(groups, found, strict=True):
            self._state.add(places, step, each.losses, each.sums)
            if each.sums:
                for place in places:
                    self._progresses[place].summed.update(each.sums)

    def _gradients(
        self, going: int, places: Sequence[int], step: int | Tensor, width: int, moving: StackedContext
    ) -> Gradients:
        """The gradients of some of the first `going` clients; buffers are written in place."""
        tensors = self._state.first(going).tensors
        own = tensors
        if len(places) < going:
            own = {n: pick(t.detach(), places).clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
        batch, shares = self._data.batch(places, step, width)
        found = self._loss(own, batch, shares, self._static.some(lambda t: pick(t, places)), moving)
        if len(places) < going:
            index = index_of(tuple(places), self._stack.device)
            for name, t in tensors.items():
                if not t.requires_grad:
                    t[index] = own[name]
        return found

    def _replayed(self, step: int, going: int, inputs: Sequence[Context]) -> bool:
        """Take a step of all who go on by its graph, if there is one.

        It is the graph of as many clients as there were, or of half as many: who is through is computed with the others
        for nothing.
        """
        state, stack = self._state, self._stack
        recordings = stack.known.recordings
        if not self._is_recorded or stack.label in recordings.refused:
            return False
        count = len(self._progresses)
        while count >= 2 * going:
            count //= 2
        kind = structure(inputs[0]) if inputs else ()
        width = self._data.width if self._fills[kind] else self._progresses[0].sizes[step]
        moving = StackedContext([*inputs, *[inputs[-1]] * (count - going)]) if inputs else _NOTHING
        prepare = self._data.prepare
        networks = [*self._static.networks, *moving.networks]
        prepared = prepare if isinstance(prepare, Hashable) else id(prepare)
        key = (count, width, kind, moving.shapes, self._constants, tuple(map(id, networks)), prepared)

        def taken(moving: StackedContext) -> frozenset[str]:
            found = self._gradients(count, range(count), state.number, width, moving)
            state.first(count).move(found.grads)
            state.add(range(count), state.number, found.losses, found.sums)
            return frozenset(found.sums)

        keeps = (self._loss, self._static, networks, prepare)
        sums = recordings.replay(stack.label, state, key, step, moving, taken, keeps)
        if sums:
            for progress in self._progresses[:going]:
                progress.summed |= sums
        return sums is not None


def loss_context(client: Client, phases: Sequence[Phase]) -> Context:
    """What a stacked loss finds in a client's context: all but rows and masks, which may differ in shape."""
    named = {name for phase in phases for name in (phase.rows, phase.mask)}
    return {name: value for name, value in client.context.items() if name not in named}


def without_values(network: nn.Module) -> nn.Module:
    """A copy of the network whose tensors have shapes alone."""
    held = [*network.parameters(), *network.buffers()]
    empty = {id(t): torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for t in held}
    return copy.deepcopy(network, empty)


def with_room(tensor: Tensor, name: str) -> Tensor:
    """(N', ...): the tensor with room for some more rows, so that cohorts of almost as many have one shape."""
    if name == "by class":
        return tensor
    grain = 1 << max(0, len(tensor).bit_length() - 3)
    room = -(-len(tensor) // grain) * grain
    return torch.cat([tensor, tensor.new_zeros(room - len(tensor), *tensor.shape[1:])])
