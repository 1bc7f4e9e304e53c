"""Whether clients' steps may be taken as one: a step of two clients on copies, one by one and as one, is compared.

Tried once for each network, phase and kind of context: a loss that vectorizes wrongly is never wrong in silence.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, NotVectorizable, StepResult
from polyfed.core.modules import load_state
from polyfed.core.randomness import drawn_of_others, seeded_global_rng
from polyfed.engine.executors.stack_data import ClientProgress, PhaseData
from polyfed.engine.executors.stacked_loss import Gradients, StackedContext, StackedLoss, Tensors, all_sums
from polyfed.functional.modes import has_batchnorm, without_dropout

_CLOSE = {"cpu": 1e-4}  # of the largest entry: how far a gradient may be off, by type of device
_ELSEWHERE = 1e-2  # where products may be taken in reduced precision


@dataclass
class Trial:
    """A step of a pair of clients of a phase; twice the same one, where it is alone.

    places: in the phase. progresses: theirs. tensors: copies of theirs, (2, ...) by name; those that train take a
    gradient. chosen: the rows of the batch that each has in this step. static, inputs: their contexts, in the phase
    and in this step alone.
    """

    loss: StackedLoss
    data: PhaseData
    places: Sequence[int]
    progresses: Sequence[ClientProgress]
    tensors: Tensors
    chosen: Sequence[Tensor]
    static: StackedContext
    inputs: Sequence[Context]

    def __post_init__(self) -> None:
        count = min(map(len, self.chosen))
        self._can_fill = not has_batchnorm(self.loss.network)
        if self._can_fill:  # few enough rows for others to be added with weight 0
            most = max(self.data.counts[place] for place in self.places)
            count = max(1, min(count, self.progresses[0].client.training.batch_size // 2, most // 2))
        self._count = count
        self.chosen = [rows[:count] for rows in self.chosen]

    def fills(self) -> bool:
        """Take the step with the pair one after the other, and as one.

        Returns:
            Whether rows of weight 0 change nothing, so that batches may be filled up with them.

        Raises:
            NotVectorizable: the results differ.
        """
        with seeded_global_rng(0), without_dropout(self.loss.network):  # nothing is drawn of the training's
            expected = self._taken_alone()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*performance drop")  # client by client in truth
                different = self._difference(self.chosen, expected)
            if different:
                raise NotVectorizable(f"the {different} of two clients as one are not those of one after the other")
            fills = self._can_fill and self._is_same_when_filled(expected)
        if self.loss.drops:
            with seeded_global_rng(0):
                self._as_one(self.chosen)
        return fills

    def _taken_alone(self) -> list[tuple[StepResult, Tensors]]:
        """Each client's own step, and the buffers that it leaves."""
        network, tensors = self.loss.network, self.tensors
        found = []
        before = drawn_of_others()
        for row, (place, progress) in enumerate(zip(self.places, self.progresses, strict=True)):
            load_state(network, {name: t[row].detach() for name, t in tensors.items()})
            stacked, _ = self.data.trial_batch([place], [self.chosen[row]], self._count)
            batch = Batch(*(t[0] for t in stacked if t is not None))
            step = self.loss.method.gradients(network, batch, {**progress.client.context, **self.inputs[row]})
            left = own_tensors(network).items()
            found.append((step, {name: t.clone() for name, t in left if not tensors[name].requires_grad}))
        if drawn_of_others() != before:
            raise NotVectorizable("its network draws from Python's or NumPy's generator, once for all clients as one")
        return found

    def _as_one(self, chosen: Sequence[Tensor]) -> Gradients:
        batch, shares = self.data.trial_batch(self.places, chosen, self._count)
        return self.loss(self.tensors, batch, shares, self.static, StackedContext(self.inputs))

    def _difference(self, chosen: Sequence[Tensor], expected: Sequence[tuple[StepResult, Tensors]]) -> str:
        """What of a step as one is not that of the clients one by one, "" where all is; the pair keeps its buffers.

        A buffer that forward assigns anew (self.x = ...), and does not write into, would be dropped.
        """
        tensors = self.tensors
        begun = {name: t.clone() for name, t in tensors.items() if not t.requires_grad}
        found = self._as_one(chosen)
        left = {name: tensors[name] for name in begun}
        tensors.update(begun)
        close = _CLOSE.get(found.losses.device.type, _ELSEWHERE)
        for row, (step, buffers) in enumerate(expected):
            if not _is_same_step(found, row, step, close):
                return "gradients"
            if not all(are_near({n: left[n][row]}, {n: t}, close, 1e-6) for n, t in buffers.items()):
                return "buffers"
        return ""

    def _is_same_when_filled(self, expected: Sequence[tuple[StepResult, Tensors]]) -> bool:
        """Whether other rows of weight 0, as many as there are rows, change nothing for one of the pair."""
        for row, place in enumerate(self.places):
            extra = self.data.unlike(place, self.chosen[row])
            if not len(extra):
                continue
            chosen = [*self.chosen]
            chosen[row] = torch.cat([chosen[row], extra[: self._count]])
            try:
                return not self._difference(chosen, expected)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a loss that wants batches of one size
                return False
        return False  # nothing to try it with: copies of the rows that count would change no mean


def _is_same_step(found: Gradients, row: int, alone: StepResult, close: float) -> bool:
    """Whether gradients, loss and sums of one of the clients are those that it has alone; overflows tell nothing."""
    grads = {name: grad for name, grad in alone.grads.items() if grad is not None}
    if not all(bool(t.isfinite().all()) for t in (alone.loss, *grads.values())):
        return True
    numbers = {**all_sums(alone), "": alone.loss}
    theirs = {**{name: t[row] for name, t in found.sums.items()}, "": found.losses[row]}
    if found.grads.keys() != grads.keys() or theirs.keys() != numbers.keys():
        return False
    return are_near({name: found.grads[name][row] for name in grads}, grads, close, 1e-9) and all(
        are_near({name: theirs[name]}, {name: number}, close, 1e-6) for name, number in numbers.items()
    )


def are_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], close: float, least: float) -> bool:
    """Whether all entries agree up to a share `close` of the largest one, and to `least`; NaN agrees with NaN."""
    sizes = [t.float().abs().nan_to_num(0.0, 0.0).amax() for t in expected.values() if t.numel()]
    most = close * float(torch.stack(sizes).max()) + least if sizes else 1.0
    return all(
        found[name].shape == t.shape and torch.allclose(found[name].to(t), t, rtol=0.0, atol=most, equal_nan=True)
        for name, t in expected.items()
    )


def own_tensors(module: nn.Module) -> Tensors:
    """Parameters and buffers that are part of a client's weights, tied ones once."""
    held = module.state_dict()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t for name, t in named.items() if name in held}


@contextlib.contextmanager
def attributes_kept(network: nn.Module) -> Iterator[None]:
    """What layers note in their attributes within the block is gone afterwards, also in lists and dictionaries.

    Tensors that `torch.vmap` has made could be neither used nor copied outside it.
    """
    ours = vars(nn.Module()).keys()  # what every layer has is kept as it is
    before = [(vars(layer), {k: v for k, v in vars(layer).items() if k not in ours}) for layer in network.modules()]
    copies = [{name: copy.copy(v) if type(v) in (list, dict) else v for name, v in own.items()} for _, own in before]
    try:
        yield
    finally:
        for (held, own), copied in zip(before, copies, strict=True):
            for name in held.keys() - ours - own.keys():
                del held[name]
            held.update(copied)
