"""The local loop of several clients of one network as one: what `local_training.train` does, on stacked tensors.

Parameters and buffers are stacked, (K, ...); the losses of all clients are one vectorized call, their gradients one
backward pass, and the optimizer, being elementwise, takes one step on the stack. Every client draws from its own
streams what it draws in `train`. A batch with fewer rows than others is filled up with rows of weight 0; where that
would change the result (BatchNorm, a loss that does not weigh its rows), clients with as many rows are taken together,
and so are those whose inputs of the step are alike. The clients with most steps stand first, so that those who are left
are always the first rows.

Shapes: K clients, B rows, S steps of a phase.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import get_group
from polyfed.core.method import Batch, Context, Method, NotVectorizable, Phase, StepResult, TrainingResult
from polyfed.core.modules import trainable_parameters
from polyfed.engine.executors.stack_data import ClientProgress, PhaseData, StackState
from polyfed.engine.executors.stack_trial import padding_changes_nothing
from polyfed.engine.executors.stacked_loss import StackedContext, StackedLoss, Tensors, structure
from polyfed.engine.local_training import train_only
from polyfed.functional.device_copies import move_mappings


class StackedClients:
    """Clients of one network at work.

    Args:
        clients: K, whose `loss_context` have one `structure`. tensors: their networks', (K, ...) by name, trained in
            place. loss: of the method. template: the network; what it holds means nothing.
        label: the network and the exchange. fills: what is known of them, whether rows of weight 0 change nothing, by
            phase and entries of the context.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        tensors: Tensors,
        loss: StackedLoss,
        template: nn.Module,
        label: Hashable,
        fills: dict[Hashable, bool],
    ) -> None:
        self.tensors, self.template, self.label = tensors, template.train(), label
        self.loss, self.fills = loss, fills
        self.device = next(iter(tensors.values())).device
        self.progresses = [ClientProgress(client, place) for place, client in enumerate(clients)]
        self.linear = {f"{name}.weight" for name, each in template.named_modules() if isinstance(each, nn.Linear)}
        self.sums: dict[tuple[str, str], Tensor] = {}  # see `StackState`
        for client in clients:
            client.bound = self.loss.network  # what a method draws for a step must not depend on weights

    def train(self, phases: Sequence[Phase]) -> list[TrainingResult]:
        """Go through the phases; each client's result.

        Raises:
            NotVectorizable: they cannot be trained as one; `tensors` mean nothing then.
        """
        contexts = [loss_context(progress.client, phases) for progress in self.progresses]
        for number, phase in enumerate(phases):
            with train_only(self.loss.network, phase), train_only(self.template, phase):
                names, _ = trainable_parameters(self.loss.network)
                if not names:
                    continue
                for progress in self.progresses:
                    progress.client.phase = phase.name
                    progress.start(phase)
                if any(progress.batches for progress in self.progresses):
                    StackedPhase(self, number, phase, names, contexts).train()
        for progress in self.progresses:
            progress.client.phase = ""
        return self._results()

    def _results(self) -> list[TrainingResult]:
        losses = self.sums.pop(("loss", ""), torch.zeros(len(self.progresses), device=self.device))
        floats = [t.detach().reshape(len(t), -1) for t in self.tensors.values() if t.is_floating_point()]
        weights = torch.stack([t.sum(dim=1).float() for t in floats]).sum(dim=0)  # NaN where any entry is not finite
        values = torch.stack([losses, weights.to(losses)], dim=1).tolist()  # at once, as asking a GPU stops it
        results = []
        for place, (progress, (loss, weight)) in enumerate(zip(self.progresses, values, strict=True)):
            own: dict[str, Tensors] = {"sums": {}, "raw": {}}
            for (kind, name), total in self.sums.items():
                own[kind][name] = total[place]
            loss /= max(progress.samples, 1)
            results.append(
                TrainingResult(progress.steps, progress.samples, loss, **own, is_finite=math.isfinite(weight))
            )
        return results


class StackedPhase:
    """One phase of all clients of a stack.

    Args:
        number: of the phase. names: of the parameters that train. contexts: what the loss finds, of each client.
    """

    def __init__(
        self, stack: StackedClients, number: int, phase: Phase, names: Sequence[str], contexts: Sequence[Context]
    ) -> None:
        self._stack, self._number = stack, number
        self._progresses = sorted(stack.progresses, key=lambda progress: -len(progress.batches))
        places = [progress.place for progress in self._progresses]
        self._order = torch.tensor(places).to(stack.device)
        self._contexts = [contexts[place] for place in places]
        self._static = StackedContext(self._contexts)
        self._data = PhaseData(self._progresses, phase, stack.device)
        self._fills = False  # whether batches of the present step are filled up with rows of weight 0
        tensors = {name: t[self._order] for name, t in stack.tensors.items()}
        # linear layers' weights are laid as their gradients come out of the vectorized product
        tensors |= {name: t.mT.contiguous().mT for name, t in tensors.items() if name in stack.linear}
        client = self._progresses[0].client
        rate = phase.rate(client.training, client.round)
        self._state = StackState(tensors, self._masks(phase.mask, names), names, client.training, rate)

    def _masks(self, group: str | None, names: Sequence[str]) -> Tensors:
        """Everybody's masks of the parameters `names`, (K, ...); a client without a mask moves all of its tensor."""
        if group is None:
            return {}
        each = [get_group(progress.client.context, group) for progress in self._progresses]
        whole = torch.tensor(True)
        found = {}
        for name in names:
            if any(name in masks for masks in each):
                shape = self._stack.tensors[name].shape[1:]
                rows = [masks.get(name, whole).to(self._stack.device).bool().expand(shape) for masks in each]
                found[name] = torch.stack(rows)
        return found

    def train(self) -> None:
        """Take all steps; everybody's tensors then lie in the stack's."""
        before = len(self._progresses)
        for step, sizes in enumerate(self._data.sizes.tolist()):
            going = sum(size > 0 for size in sizes)
            if going < before:
                self._leave(going, before)
                before = going
            inputs = self._inputs(step, going)
            groups = self._groups(step, sizes, inputs)
            parts = []
            for places in groups:
                rows = slice(going) if len(groups) == 1 else torch.tensor(places).to(self._stack.device)
                context = self._static.some(rows).with_inputs([inputs[place] for place in places])
                parts.append((rows, max(sizes[place] for place in places), context))
            self._take(step, going, parts)
        self._leave(0, before)
        for progress, samples in zip(self._progresses, self._data.sizes.sum(dim=0).tolist(), strict=True):
            progress.steps += len(progress.batches)
            progress.samples += samples

    def _inputs(self, step: int, going: int) -> Sequence[Context]:
        """What the method draws for the step of each who goes on."""
        method = self._stack.loss.method
        if type(method).step_inputs is Method.step_inputs:
            return [{}] * going
        drawn = [method.step_inputs(p.client, p.steps + step, p.draws) for p in self._progresses[:going]]
        return move_mappings(drawn, self._stack.device)

    def _groups(self, step: int, sizes: Sequence[int], inputs: Sequence[Context]) -> list[list[int]]:
        """The places of clients whose steps are taken as one. sizes: how many rows each has."""
        kinds = [structure(given) if given else () for given in inputs]
        names = frozenset([*self._contexts[0], *inputs[0]])
        key = (self._stack.label, self._number, names)
        if key not in self._stack.fills:
            alike = [place for place, kind in enumerate(kinds) if kind == kinds[0]]
            self._stack.fills[key] = self._try(step, alike, sizes, inputs)
        self._fills = self._stack.fills[key]
        groups: dict[Hashable, list[int]] = {}
        for place, kind in enumerate(kinds):
            groups.setdefault((kind, None if self._fills else sizes[place]), []).append(place)
        return list(groups.values())

    def _try(self, step: int, places: Sequence[int], sizes: Sequence[int], inputs: Sequence[Context]) -> bool:
        """Whether rows of weight 0 change nothing, once it is known that these clients' steps can be taken as one."""
        widest = sorted(places, key=lambda place: -sizes[place])
        pair = [widest[0], widest[1 % len(widest)]]  # twice the same one, where it is alone
        rows = torch.tensor(pair).to(self._stack.device)
        tensors = {n: t.detach()[rows].requires_grad_(t.requires_grad) for n, t in self._state.tensors.items()}
        batch = self._data.batch(rows, step, sizes[pair[0]])
        contexts = [{**self._contexts[place], **inputs[place]} for place in pair]
        counted = [sizes[place] for place in pair]
        return padding_changes_nothing(self._stack.loss, self._stack.template, tensors, batch, counted, contexts)

    def _take(self, step: int, going: int, parts: Sequence[tuple[slice | Tensor, int, StackedContext]]) -> None:
        """A step of the first `going` clients. parts: which of them, the width of their batches, their contexts."""
        state = self._state.first(going)
        found = []
        for rows, width, context in parts:
            found.append(self._gradients(state.tensors, rows, self._data.batch(rows, step, width), context))
        grads = found[0].grads
        if any(each.grads.keys() != grads.keys() for each in found):
            raise NotVectorizable("some of its parameters have a gradient in the steps of some clients only")
        if len(found) > 1:
            joined = {name: torch.empty_like(state.tensors[name]) for name in grads}
            for (rows, _, _), each in zip(parts, found, strict=True):
                for name, whole in joined.items():
                    whole[rows] = each.grads[name]  # type: ignore[assignment]
            grads = joined
        state.move(grads)
        for (rows, _, _), each in zip(parts, found, strict=True):
            state.add(rows, self._data.planned("sizes", rows, step), each)

    def _gradients(self, tensors: Tensors, rows: slice | Tensor, batch: Batch, context: StackedContext) -> StepResult:
        """What a step of some of the clients gives; buffers are written in place."""
        if isinstance(rows, slice):
            return self._stack.loss.gradients(tensors, batch, context)
        own = {name: t.detach()[rows].requires_grad_(t.requires_grad) for name, t in tensors.items()}
        found = self._stack.loss.gradients(own, batch, context)
        for name, t in tensors.items():
            if not t.requires_grad:
                t[rows] = own[name]
        return found

    def _leave(self, going: int, before: int) -> None:
        """Write the tensors and sums of those who are through to the stack's."""
        through = slice(going, before)
        index = self._order[through]
        for name, t in self._state.tensors.items():
            self._stack.tensors[name][index] = t[through].detach()
        for key, total in self._state.sums.items():
            if key not in self._stack.sums:
                self._stack.sums[key] = torch.zeros_like(total)
            self._stack.sums[key][index] += total[through]


def loss_context(client: Client, phases: Sequence[Phase]) -> Context:
    """What a stacked loss finds in a client's context: all but rows and masks, which may differ in shape."""
    named = {name for phase in phases for name in (phase.rows, phase.mask)}
    return {name: value for name, value in client.context.items() if name not in named}
