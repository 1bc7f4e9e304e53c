"""The local loop of several clients of one network as one: what `training.train` does, on stacked tensors.

Parameters and buffers are stacked, (K, ...); the losses of all clients are one vectorized call, their gradients one
backward pass (no client's loss depends on another's weights), and the optimizer, being elementwise, takes one step on
the stack. Every client draws from its own streams what it draws in `train`. A batch with fewer rows than others is
filled up with rows of weight 0; where that would change the result (BatchNorm, a loss that does not weigh its rows),
and where contexts differ in more than values, a step is taken in groups that agree. Who has no batch left leaves.
On a GPU the steps of a whole group are recorded and replayed, see `recorded_step`; there the clients with most steps
stand first, so that those who are left are the first rows, and others may be computed with them for nothing.

Whether all this gives what `train` gives is tried on one batch of two clients whenever a step of a new kind comes up.

Shapes: K clients, B rows.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import get_group
from polyfed.core.method import (
    Batch,
    Context,
    Method,
    NotVectorizable,
    Phase,
    PrecomputedGradients,
    StepResult,
    TrainingResult,
)
from polyfed.core.modules import load_state, trainable_parameters
from polyfed.core.randomness import drawn_of_others, seeded_global_rng
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.recorded_step import RecordedStack, Recording
from polyfed.engine.executors.stack_parts import (
    ActiveGroup,
    ClientProgress,
    NextStep,
    PhaseData,
    RowIndices,
    SignatureCache,
    StepSignature,
    are_near,
    floats_of,
    laid_out,
    linear_weights,
    numbers_and_nonfinite,
    only_of,
    own_tensors,
    parted,
    rate_of,
    summed,
)
from polyfed.engine.executors.stacked_loss import (
    LossOf,
    RecordingContext,
    StackedContext,
    StackedLoss,
    Tensors,
    structure,
)
from polyfed.engine.local_training import phase_data, train_only
from polyfed.errors import kind_and_line
from polyfed.functional.device_copies import move_together
from polyfed.functional.modes import dropout_layers, has_batchnorm, without_dropout
from polyfed.profiling import timed

_CLOSE = {"cpu": 1e-4}  # of the largest entry: how far a gradient may be off, by type of device
_StepAlone = tuple[StepResult, Tensors]  # what it gives where a client takes it alone, and the buffers that it leaves
_ELSEWHERE, _HALF = 1e-2, 1e-1  # where products may be taken in reduced precision, and where they are asked to be


class StackedClients:
    """Clients of one network at work.

    Args:
        clients: K, each with its `context`. rows: their networks' tensors, (K, ...) by name, trained in place.
        method: whose loss. template: the network; what it holds means nothing.
        known: what was tried before; grows. label: what that may depend on: the network, the exchange.
        step: gives a block for the passes of each step, see `training.train`.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        rows: Tensors,
        method: Method,
        template: nn.Module,
        known: SignatureCache,
        label: Hashable = None,
        step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.rows = rows
        self._method = method
        self._template = template
        self._known = known
        self._label = label
        self._block = step
        self._walks = [ClientProgress(client, place) for place, client in enumerate(clients)]
        self._loss = LossOf(method, template)
        self._device = next(iter(rows.values())).device
        self._indices = RowIndices(self._device)
        # of all steps: who took them, how many rows each of them had in each, and the losses, (steps, K)
        self._losses: list[tuple[Sequence[ClientProgress], Sequence[Sequence[int]], Tensor]] = []
        self._sums: Tensors = {}
        self._own_gradients = type(method).gradients is not Method.gradients
        self._normed = has_batchnorm(template)
        self._linear = linear_weights(template) & rows.keys()
        self._drops = bool(dropout_layers(template))
        self._numbers: dict[Hashable, int] = {}  # of outlines, which are long
        self._kinds: dict[Hashable, StepSignature] = {}
        self._riding: dict[Hashable, tuple[ActiveGroup, StackedContext, Hashable]] = {}  # of a phase's recorded steps
        for walk in self._walks:
            walk.outline = self._number(structure(walk.client.context))

    @property
    def records(self) -> bool:
        """Whether steps are to be recorded."""
        return self._known.recordings.worthwhile(self._label, self._template)

    def train(self, phases: Sequence[Phase]) -> Iterator[None]:
        """Go through the phases, step by step."""
        self._template.train()
        for place, phase in enumerate(phases):
            for walk in self._walks:
                walk.client.phase = phase.name
            with train_only(self._template, phase):
                names, _ = trainable_parameters(self._template)
                if names:
                    yield from self._pass(place, phase, names)
        for walk in self._walks:
            walk.client.phase = ""

    @timed("train")
    def outcome(self) -> tuple[list[TrainingResult], list[str | None]]:
        """What the training left behind and the first tensor that is not finite, client by client."""
        totals, nonfinite = self._judged()
        trained = [
            TrainingResult(
                walk.steps,
                walk.samples,
                total / max(walk.samples, 1),
                *parted({name: sums[walk.place] for name, sums in self._sums.items() if name in walk.summed}),
            )
            for walk, total in zip(self._walks, totals, strict=True)
        ]
        return trained, nonfinite

    def _judged(self) -> tuple[list[float], list[str | None]]:
        """The losses of all steps, times their samples, and the first tensor that is not finite, client by client."""
        rows = {name: self.rows[name] for name in self._template.state_dict() if name in self.rows}
        values, nonfinite = numbers_and_nonfinite([loss.flatten() for _, _, loss in self._losses], rows)
        losses = iter(values)
        totals = [0.0] * len(self._walks)
        for walks, steps, _ in self._losses:
            for counts in steps:
                for walk, count in zip(walks, counts, strict=True):
                    totals[walk.place] += next(losses) * count
        return totals, nonfinite

    # a phase --------------------------------------------------------------------------------------------------

    def _pass(self, place: int, phase: Phase, names: Sequence[str]) -> Iterator[None]:
        pairs = [phase_data(walk.client, phase) for walk in self._walks]
        for walk, (samples, _) in zip(self._walks, pairs, strict=True):
            walk.start(phase, len(samples))
        label = (self._label, place)
        if self.records and not self._lie_there(pairs):
            self._known.recordings.refuse(self._label, "its samples stay in main memory")
        fixed = self._fixed((label, tuple(names))) if self.records else None
        walks = self._walks if fixed is None else sorted(self._walks, key=lambda walk: -len(walk.sizes))
        for row, walk in enumerate(walks):
            walk.row = row
        samples_kind = (pairs[0][0].x.shape[1:], pairs[0][0].x.dtype, pairs[0][0].y.dtype)
        data = None if fixed is None else self._known.recordings.data(self._label, samples_kind)
        held = PhaseData([walk.client for walk in walks], phase, self._device, self._indices, data, fixed)
        held.plan(walks)
        self._look_at_inputs(label)
        masks = self._masks(walks, phase.mask, names)
        if fixed is None:
            tensors = {name: t.clone() for name, t in self.rows.items()}
        else:
            tensors, masks = self._begun(fixed, walks, masks, names, phase)
        self._riding = {}
        together = [ActiveGroup(walks, tensors, names, phase, masks, self._indices, self._linear, fixed=fixed)]
        while together:
            part = together.pop()
            step = part.next_step(self._method)
            if len(step.rows) < len(part.walks):
                self._sum_up(part)
                part.write_back(self.rows)
                if not step.rows:
                    continue
                part = part.take(step.rows)
                step = replace(step, rows=tuple(range(len(part.walks))))
            groups = self._groups(part, step, held, label)
            recorded = self._recording(part, step, held, groups, walks)
            if recorded is None:
                together += self._step(part, groups, held)
                yield
            else:
                yield from self._replay(part, step, *recorded)
                together.append(part)

    def _masks(self, walks: Sequence[ClientProgress], group_name: str | None, names: Sequence[str]) -> Tensors:
        """Everybody's masks of the parameters `names`, (K, ...); a client without a mask moves all of its tensor."""
        if group_name is None:
            return {}
        each = [get_group(walk.client.context, group_name) for walk in walks]
        masked = [name for name in names if any(name in masks for masks in each)]
        whole = torch.tensor(True)
        found = {}
        for name in masked:
            shape = self.rows[name].shape[1:]
            rows = [masks.get(name, whole).to(self._device).bool().expand(shape) for masks in each]
            found[name] = torch.stack(rows)
        return found

    def _step(
        self, part: ActiveGroup, groups: Sequence[tuple[StepSignature, NextStep]], held: PhaseData
    ) -> list[ActiveGroup]:
        """One step of everybody. Parts that differ in which parameters have a gradient go on apart from each other."""
        found = [self.gradients(part, members, held, kind) for kind, members in groups]
        for (_, members), (_, loss, sums) in zip(groups, found, strict=True):
            self._account([part.walks[row] for row in members.rows], members.counts, loss, sums)
        if len(found) == 1:
            part.move(found[0][0])
            return [part]
        rows = [members.rows for _, members in groups]
        if all(grads.keys() == found[0][0].keys() for grads, _, _ in found):
            placed = [row for some in rows for row in some]
            order = self._indices.at(sorted(range(len(placed)), key=placed.__getitem__))
            part.move({n: torch.cat([grads[n] for grads, _, _ in found])[order] for n in found[0][0]})
            return [part]
        self._sum_up(part)
        parts = [part.take(some) for some in rows]
        for one, (grads, _, _) in zip(parts, found, strict=True):
            one.move(grads)
        return parts

    def _groups(
        self, part: ActiveGroup, step: NextStep, held: PhaseData, label: Hashable
    ) -> list[tuple[StepSignature, NextStep]]:
        """The step of those who can be taken together, for all, and what is known of it."""
        groups = part.groups.get(step.counts)
        if groups is None:
            members: dict[tuple[StepSignature, Hashable], list[int]] = {}
            for place in range(len(step.rows)):
                members.setdefault(self._group(part, step, place, held, label), []).append(place)
            groups = [(kind, places) for (kind, _), places in members.items()]
            if not step.inputs:
                part.groups[step.counts] = groups
        if len(groups) == 1:
            return [(groups[0][0], step)]
        return [(kind, step.some(places)) for kind, places in groups]

    def _group(
        self, part: ActiveGroup, step: NextStep, place: int, held: PhaseData, label: Hashable
    ) -> tuple[StepSignature, Hashable]:
        """What a client's step must have in common with another's, to be taken with it."""
        walk = part.walks[step.rows[place]]
        number, given = self._alike(part, step, place)
        alike = (label, number, given)
        if alike not in self._kinds:
            full = (label, structure(walk.client.context), given)
            if full not in self._known.kinds:
                others = [other for other, _ in enumerate(step.rows) if self._alike(part, step, other) == alike[1:]]
                others.remove(place)
                sizes = [held.counts[part.walks[row].row] for row in step.rows]
                other = max(others, key=sizes.__getitem__, default=place)
                self._known.kinds[full] = self._tried(part, step.some([place, other]), held)
            known = self._known.kinds[full]
            if isinstance(known, str):
                raise NotVectorizable(known)
            self._kinds[alike] = known
        kind = self._kinds[alike]
        if kind not in walk.exact:
            walk.exact[kind] = self._number(structure(only_of(walk.client.context, kind.read), exact=True))
        inputs = structure(only_of(step.drawn(place), kind.read), exact=True)
        return kind, (alike, walk.exact[kind], inputs, 0 if kind.fills else step.counts[place])

    def _alike(self, part: ActiveGroup, step: NextStep, place: int) -> tuple[int, Hashable]:
        return part.walks[step.rows[place]].outline, structure(step.drawn(place))

    def _number(self, found: Hashable) -> int:
        return self._numbers.setdefault(found, len(self._numbers))

    def _account(self, walks: Sequence[ClientProgress], counts: Sequence[int], loss: Tensor, sums: Tensors) -> None:
        self._losses.append((walks, [counts], loss))
        self._add(walks, sums)
        for walk, count in zip(walks, counts, strict=True):
            walk.steps += 1
            walk.samples += count
            walk.summed.update(sums)

    def _add(self, walks: Sequence[ClientProgress], sums: Tensors) -> None:
        if sums:
            rows = self._indices.at([walk.place for walk in walks])
        for name, value in sums.items():
            if name not in self._sums:
                self._sums[name] = value.new_zeros(len(self._walks), *value.shape[1:])
            self._sums[name].index_add_(0, rows, value)

    # recorded steps -------------------------------------------------------------------------------------------

    def _lie_there(self, pairs: Sequence[tuple[LabeledSamples, Any]]) -> bool:
        """Whether all samples of a phase stay on the device."""
        return all(samples.at(self._device).x.device == self._device for samples, _ in pairs)

    def _fixed(self, kind: Hashable) -> RecordedStack:
        shapes = tuple((name, t.shape, t.dtype) for name, t in self.rows.items())
        return self._known.recordings.stack(self._label, (kind, shapes), self._device)

    def _begun(
        self,
        fixed: RecordedStack,
        walks: Sequence[ClientProgress],
        masks: Tensors,
        names: Sequence[str],
        phase: Phase,
    ) -> tuple[Tensors, Tensors]:
        """Everybody's tensors and masks where recorded steps look for them."""
        order = [walk.place for walk in walks]
        rows = self.rows
        if order != sorted(order):
            index = self._indices.at(order)
            rows = {name: t[index] for name, t in rows.items()}
        training = walks[0].client.training
        rate = rate_of(walks, phase)
        fixed.begin(laid_out(rows, self._linear), masks, names, training, rate, len(walks[0].sizes))
        return fixed.tensors, fixed.masks

    def _recording(
        self,
        part: ActiveGroup,
        step: NextStep,
        held: PhaseData,
        groups: Sequence[tuple[StepSignature, NextStep]],
        walks: Sequence[ClientProgress],
    ) -> tuple[Recording, int] | None:
        """The step as a graph, and how many steps from this one on it takes; None where it is to be launched.

        Where some are through, it is the graph of as many clients as there were, or of half as many.

        Args:
            walks: of the whole phase, in its order.
        """
        fixed = part.fixed
        if fixed is None or len(groups) > 1 or self._label in self._known.recordings.refused:
            return None
        assert isinstance(step.number, int)
        kind = groups[0][0]
        riding, static, constants = self._riders(part, step, kind, walks)
        moving, inputs = self._moving(part, step, kind, len(riding.walks))
        width = held.width if kind.fills else max(step.counts)
        count = len(riding.walks)
        planned = NextStep(tuple(range(count)), (width,) * count, (), fixed.number)
        names = {**walks[0].client.context, **step.drawn(0)}.keys()

        def taken() -> frozenset[str]:
            riding.contexts = static, moving[0].holding([fixed.of_step(t) for t in inputs]), names
            grads, losses, sums = self.gradients(riding, planned, held, kind)
            riding.contexts = None
            riding.move(grads)
            return fixed.take_in(losses, sums)

        networks = tuple(map(id, static.networks + moving[0].networks))
        drawn = structure(step.drawn(0), exact=True)
        given = [*static.tensors, *inputs]
        places = tuple(t.data_ptr() for t in given)
        shapes = (static.shapes, moving[0].shapes)
        key = (count, kind, width, constants, shapes, places, networks, drawn, tuple(riding.masks))
        try:
            keeps = (given, static.form, moving[0].form, held.looked_into, self._loss)
            recording = fixed.recording((key, held.kind()), step.number, taken, keeps)
        except Exception as error:
            self._known.recordings.refuse(self._label, kind_and_line(error))
            return None
        if recording is None:
            return None
        alike = part.steps_alike(step.number, kind.fills)
        return recording, min(alike, len(moving)) if step.inputs else alike

    def _riders(
        self, part: ActiveGroup, step: NextStep, kind: StepSignature, walks: Sequence[ClientProgress]
    ) -> tuple[ActiveGroup, StackedContext, Hashable]:
        """Those for whom a step is recorded, their contexts where it finds them, and what is constant in these.

        Who is through may ride along, as what comes of that is not looked at.
        """
        assert part.fixed is not None
        count = len(walks)
        while count >= 2 * len(part.walks):
            count //= 2
        if any(walk.exact.get(kind) != walks[0].exact[kind] for walk in walks[:count]):
            count = len(part.walks)
        names = kind.read.difference(step.drawn(0))
        place = (count, kind, names)
        if place not in self._riding:
            riding = part.first(walks[:count])
            static = riding.packed(riding.walks, names)
            # a graph has the values of numbers in main memory, whatever they are later
            there = move_together(static.tensors, [self._device] * len(static.tensors))
            static.tensors = part.fixed.hold_of_shape(("context", *place), there, room=None)
            constants = structure(only_of(walks[0].client.context, names), exact=True)
            self._riding[place] = riding, static, constants
        return self._riding[place]

    def _moving(
        self, part: ActiveGroup, step: NextStep, kind: StepSignature, count: int
    ) -> tuple[list[StackedContext], list[Tensor]]:
        """What was drawn for `count` clients for this step and the next ones that are alike; all where it is fixed.

        Those who ride along get what the last one gets.
        """
        assert part.fixed is not None
        assert isinstance(step.number, int)
        found: list[StackedContext] = []
        form = structure(step.drawn(0), exact=True)
        for number in itertools.count(step.number):
            drawn = [walk.drawn.get(number) for walk in part.walks] if step.inputs else [{}]
            if number > step.number and any(one is None or structure(one, exact=True) != form for one in drawn):
                break
            read = [only_of(one, kind.read) for one in drawn if one is not None]
            found.append(StackedContext([*read, *[read[-1]] * (count - len(read))]))
            if not step.inputs or found[-1].shapes != found[0].shapes:
                break
        found = [one for one in found if one.shapes == found[0].shapes]
        tensors = [torch.stack(list(each)) for each in zip(*(one.tensors for one in found), strict=True)]
        return found, part.fixed.hold_of_shape(("inputs", count, kind), tensors, room=len(part.walks[0].drawn))

    def _replay(self, part: ActiveGroup, step: NextStep, recording: Recording, count: int) -> Iterator[None]:
        """Take this step, and so many in all, which differ in nothing but the batch and what was drawn."""
        assert part.fixed is not None
        assert isinstance(step.number, int)
        first, walks = step.number, part.walks
        yield from part.fixed.replay(recording, first, count)
        part.number = first + count
        steps = [[walk.sizes[number] for walk in walks] for number in range(first, part.number)]
        self._losses.append((walks, steps, part.fixed.losses[first : part.number, : len(walks)]))
        for walk in walks:
            walk.steps += count
            walk.samples += sum(walk.sizes[first : part.number])
            walk.summed.update(recording.sums)

    def _sum_up(self, part: ActiveGroup) -> None:
        """What recorded steps have summed counts for those who took them."""
        if part.fixed is not None and part.fixed.sums:
            self._add(part.walks, {name: t[: len(part.walks)] for name, t in part.fixed.sums.items()})
            part.fixed.clear_sums()

    # a step -----------------------------------------------------------------------------------------------------

    def gradients(
        self, part: ActiveGroup, step: NextStep, held: PhaseData, kind: StepSignature
    ) -> tuple[Tensors, Tensor, Tensors]:
        with self._block():
            return self._passes(part, step, held, kind)

    def _passes(
        self, part: ActiveGroup, step: NextStep, held: PhaseData, kind: StepSignature
    ) -> tuple[Tensors, Tensor, Tensors]:
        """Gradients by name, losses and sums of some of the part's clients, (K, ...) each."""
        rows = step.rows
        walks = [part.walks[row] for row in rows]
        whole = rows == tuple(range(len(part.walks)))
        tensors = part.tensors if whole else part.some(rows)
        batch, shares = held.batch(walks, step)
        drawn = step.drawn(0)
        static, moving, names = part.contexts or (
            part.packed(walks, kind.read.difference(drawn)),
            StackedContext([only_of(inputs, kind.read) for inputs in step.inputs] or [{}]),
            {**walks[0].client.context, **drawn}.keys(),
        )
        function = StackedLoss(self._loss, static, moving, names, self._drops)
        losses, sums = function(tensors, batch, shares)
        leaves = {name: tensors[name] for name in part.names}
        taken = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(leaves, taken, strict=True) if grad is not None}
        losses = losses.detach()
        sums = {name: value.detach() for name, value in sums.items()}
        if not whole:
            part.put_back(rows, tensors)
        if not self._own_gradients:
            return grads, losses, sums

        def changed(
            own: Tensors, grads: Tensors, loss: Tensor, sums: Tensors, batch: Batch, *given: Sequence[Tensor]
        ) -> Any:
            context = function.context(*given)
            step = StepResult({name: grads.get(name) for name in own}, loss, sums)
            solved = PrecomputedGradients(step, context, own)
            made = self._method.gradients(solved, batch, context)
            return {name: g for name, g in made.grads.items() if g is not None}, made.loss, summed(made)

        found: tuple[Tensors, Tensor, Tensors] = torch.func.vmap(changed, in_dims=(0, 0, 0, 0, 0, *function.axes))(
            {name: t.detach() for name, t in leaves.items()}, grads, losses, sums, batch, *function.given
        )
        return found

    # trials -----------------------------------------------------------------------------------------------------

    def _tried(self, part: ActiveGroup, step: NextStep, held: PhaseData) -> StepSignature | str:
        """Take a step of this kind with two clients, one after the other and as one, on copies, and compare."""
        walks = [part.walks[row] for row in step.rows]
        count = min(step.counts)
        if not self._normed:  # few enough for other rows to be added with weight 0
            most = max(held.counts[walk.row] for walk in walks)
            count = max(1, min(count, part.walks[0].client.training.batch_size // 2, most // 2))
        assert isinstance(step.number, int)
        chosen = [walk.batches[step.number][:count] for walk in walks]
        pair = ActiveGroup(walks, part.some(step.rows), part.names, part.phase, {}, self._indices)
        step = NextStep((0, 1), (count, count), step.inputs, chosen=chosen)
        try:
            with seeded_global_rng(0):  # dropout draws nothing of the training's
                with without_dropout(self._template):
                    kind, expected = self._compared(pair, step, held)
                    fills = not self._normed and self._fills(pair, step, held, kind, expected)
                if self._drops:
                    self.gradients(pair, step, held, kind)
        except NotVectorizable as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # also one of the method's own, which shows when the client trains alone
            return self._no_way(error)
        return replace(kind, fills=fills)

    def _compared(
        self, pair: ActiveGroup, step: NextStep, held: PhaseData
    ) -> tuple[StepSignature, Sequence[_StepAlone]]:
        """What the step of a pair reads, and what it gives one by one, which is what it gives as one."""
        read: set[str] = set()
        expected = []
        before = drawn_of_others()
        for row, walk in enumerate(pair.walks):
            load_state(self._template, {name: t[row].detach() for name, t in pair.tensors.items()})
            watched = RecordingContext({**walk.client.context, **step.drawn(row)})
            batch, _ = held.batch([walk], step.some([row]))
            alone = Batch(*(t[0] for t in batch if t is not None))
            with self._block():
                result = self._method.gradients(self._template, alone, watched)
            left = own_tensors(self._template).items()
            expected.append((result, {name: t.clone() for name, t in left if name not in pair.names}))
            read |= watched.read
        if drawn_of_others() != before:
            raise NotVectorizable("its network draws from Python's or NumPy's generator, once for all clients as one")
        kind = StepSignature(frozenset(read), fills=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop")  # client by client in truth
            different = self._difference(pair, step, held, kind, expected)
        if different:
            raise NotVectorizable(f"the {different} of two clients as one are not those of one after the other")
        return kind, expected

    def _fills(
        self,
        pair: ActiveGroup,
        step: NextStep,
        held: PhaseData,
        kind: StepSignature,
        expected: Sequence[_StepAlone],
    ) -> bool:
        """Whether other rows of weight 0 change nothing, as many as there are rows, for one of a pair."""
        for place, count in enumerate(step.counts):
            extra = held.unlike(pair.walks[place], step.chosen[place])
            if not len(extra):
                continue
            chosen = [*step.chosen]
            chosen[place] = torch.cat([chosen[place], extra[:count]])
            try:
                return not self._difference(pair, replace(step, chosen=chosen), held, kind, expected)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a loss that wants batches of one size
                return False
        return False  # nothing to try it with: copies of the rows that count would change no mean

    def _no_way(self, error: Exception) -> str:
        what = "its own way to take gradients" if self._own_gradients else "its loss"
        return f"{what} cannot be vectorized ({kind_and_line(error)})"

    def _difference(
        self,
        pair: ActiveGroup,
        step: NextStep,
        held: PhaseData,
        kind: StepSignature,
        expected: Sequence[_StepAlone],
    ) -> str:
        """What of a step as one is not that of the clients one by one, "" where all is; the pair keeps its buffers.

        A buffer that forward assigns anew (self.x = ...), and does not write into, would be dropped.
        """
        begun = {name: t.clone() for name, t in pair.tensors.items() if name not in pair.names}
        found = self.gradients(pair, step, held, kind)
        left = {name: pair.tensors[name] for name in begun}
        pair.tensors.update(begun)
        if not self._agree(found, [result for result, _ in expected]):
            return "gradients"
        for row, (_, buffers) in enumerate(expected):
            if not all(are_near({n: left[n][row]}, {n: t}, self._close(), 1e-6) for n, t in buffers.items()):
                return "buffers"
        return ""

    def _close(self) -> float:
        """How far entries may be off, of the largest."""
        with self._block():
            half = torch.is_autocast_enabled(self._device.type)
        return _HALF if half else _CLOSE.get(self._device.type, _ELSEWHERE)

    def _agree(self, found: tuple[Tensors, Tensor, Tensors], expected: Sequence[StepResult]) -> bool:
        """Whether stacked gradients, losses and sums are those of the clients one by one; overflows tell nothing."""
        grads, losses, sums = found
        close = self._close()
        for row, one in enumerate(expected):
            plain = {name: grad for name, grad in one.grads.items() if grad is not None}
            if not all(bool(t.isfinite().all()) for t in (one.loss, *plain.values())):
                continue
            if grads.keys() != plain.keys() or sums.keys() != summed(one).keys():
                return False
            if not are_near({n: grads[n][row] for n in grads}, plain, close, 1e-9):
                return False
            own = {n: sums[n][row] for n in sums} | {"": losses[row]}
            theirs = {**summed(one), "": one.loss}
            if not all(are_near({n: own[n]}, {n: theirs[n]}, close, 1e-6) for n in own):
                return False
        return True

    def _look_at_inputs(self, label: Hashable) -> None:
        """Raise where a phase's `inputs` have been seen to look at the weights, or are now."""
        if label not in self._known.inputs:
            try:
                self._try_inputs()
                self._known.inputs[label] = ""
            except NotVectorizable as reason:
                self._known.inputs[label] = str(reason)
        if self._known.inputs[label]:
            raise NotVectorizable(self._known.inputs[label])

    def _try_inputs(self) -> None:
        """Whether `inputs` leaves the network's weights alone, which it is not given here."""
        for walk in self._walks[:2]:
            seen = []
            for scale in (1.0, 0.5):
                load_state(self._template, {name: scale * t[walk.place] for name, t in floats_of(self.rows).items()})
                seen.append(self._drawn(walk))
            first, second = (StackedContext([context]) for context in seen)
            same = structure(seen[0], exact=True) == structure(seen[1], exact=True)
            if not same or not all(map(torch.equal, first.tensors, second.tensors)):
                raise NotVectorizable("what its `inputs` draws depends on the weights, or changes from call to call")

    def _drawn(self, walk: ClientProgress) -> Context:
        """What `inputs` would give next, from a copy of the client's stream."""
        draws = torch.Generator()
        draws.set_state(walk.draws.get_state())
        try:
            return self._method.step_inputs(walk.client, walk.steps, draws)
        except Exception as error:
            raise NotVectorizable(self._no_way(error)) from error
