"""Whether clients' steps may be taken as one: a step of two clients on copies, one by one and as one, is compared.

Tried once for each network, phase and kind of context: a loss that vectorizes wrongly is never wrong in silence.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.method import Batch, Context, NotVectorizable, StepResult
from polyfed.core.modules import load_state
from polyfed.core.randomness import drawn_of_others, seeded_global_rng
from polyfed.engine.executors.stack_data import ClientProgress, PhaseData
from polyfed.engine.executors.stacked_loss import Gradients, StackedContext, StackedLoss, Tensors, all_sums
from polyfed.errors import kind_and_line
from polyfed.functional.modes import has_batchnorm, without_dropout

_MODULES_OWN = frozenset(vars(nn.Module()))  # attributes that every layer has
_CLOSE = {"cpu": 1e-4}  # of the largest entry: how far a gradient may be off, by type of device
_ELSEWHERE, _HALF = 1e-2, 1e-1  # where products may be taken in reduced precision, and where they are asked to be


@dataclass(frozen=True)
class Pair:
    """Two clients of a phase; twice the same one, where it is alone.

    places: in the phase. tensors: copies of theirs, (2, ...) by name; those that train take a gradient. chosen: the
    rows of the batch that each has in this step. hidden: names in their contexts that the loss does not get. static,
    inputs: their contexts, in the phase and in this step alone.
    """

    places: Sequence[int]
    walks: Sequence[ClientProgress]
    tensors: Tensors
    chosen: Sequence[Tensor]
    static: StackedContext
    inputs: Sequence[Context]


def try_step(loss: StackedLoss, pair: Pair, data: PhaseData) -> bool:
    """Take a step with the pair one after the other, and as one.

    Returns:
        Whether rows of weight 0 change nothing, so that batches may be filled up with them.

    Raises:
        NotVectorizable: the results differ, or the step cannot be taken as one.
    """
    try:
        with seeded_global_rng(0):  # dropout draws nothing of the training's
            return _Trial(loss, pair, data).fills()
    except (NotVectorizable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # also one of the method's own, which shows when the client trains alone
        what = "its own way to take gradients" if loss.has_own_gradients else "its loss"
        raise NotVectorizable(f"{what} cannot be vectorized ({kind_and_line(error)})") from error


class _Trial:
    """Of one step: as many rows of each of the pair, few enough for others to be added with weight 0."""

    def __init__(self, loss: StackedLoss, pair: Pair, data: PhaseData) -> None:
        self._loss, self._pair, self._data = loss, pair, data
        self._can_fill = not has_batchnorm(loss.network)
        count = min(map(len, pair.chosen))
        if self._can_fill:
            most = max(data.counts[place] for place in pair.places)
            count = max(1, min(count, pair.walks[0].client.training.batch_size // 2, most // 2))
        self._count = count
        self._chosen = [rows[:count] for rows in pair.chosen]

    def fills(self) -> bool:
        """See `try_step`."""
        with without_dropout(self._loss.network):
            expected = self._taken_alone()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*performance drop")  # client by client in truth
                different = self._difference(self._chosen, expected)
            if different:
                raise NotVectorizable(f"the {different} of two clients as one are not those of one after the other")
            fills = self._can_fill and self._is_same_when_filled(expected)
        if self._loss.drops:
            self._as_one(self._chosen)
        return fills

    def _taken_alone(self) -> list[tuple[StepResult, Tensors]]:
        """Each client's own step, and the buffers that it leaves."""
        network, tensors = self._loss.network, self._pair.tensors
        found = []
        before = drawn_of_others()
        for row, (place, walk) in enumerate(zip(self._pair.places, self._pair.walks, strict=True)):
            load_state(network, {name: t[row].detach() for name, t in tensors.items()})
            stacked, _ = self._data.trial_batch([place], [self._chosen[row]], self._count)
            batch = Batch(*(t[0] for t in stacked if t is not None))
            with self._loss.block():
                step = self._loss.method.gradients(network, batch, {**walk.client.context, **self._pair.inputs[row]})
            left = own_tensors(network).items()
            found.append((step, {name: t.clone() for name, t in left if not tensors[name].requires_grad}))
        if drawn_of_others() != before:
            raise NotVectorizable("its network draws from Python's or NumPy's generator, once for all clients as one")
        return found

    def _as_one(self, chosen: Sequence[Tensor]) -> Gradients:
        batch, shares = self._data.trial_batch(self._pair.places, chosen, self._count)
        return self._loss(self._pair.tensors, batch, shares, self._pair.static, StackedContext(self._pair.inputs))

    def _difference(self, chosen: Sequence[Tensor], expected: Sequence[tuple[StepResult, Tensors]]) -> str:
        """What of a step as one is not that of the clients one by one, "" where all is; the pair keeps its buffers.

        A buffer that forward assigns anew (self.x = ...), and does not write into, would be dropped.
        """
        tensors = self._pair.tensors
        begun = {name: t.clone() for name, t in tensors.items() if not t.requires_grad}
        found = self._as_one(chosen)
        left = {name: tensors[name] for name in begun}
        tensors.update(begun)
        kind = found.losses.device.type
        with self._loss.block():
            close = _HALF if torch.is_autocast_enabled(kind) else _CLOSE.get(kind, _ELSEWHERE)
        for row, (step, buffers) in enumerate(expected):
            if not _is_same_step(found, row, step, close):
                return "gradients"
            if not all(are_near({n: left[n][row]}, {n: t}, close, 1e-6) for n, t in buffers.items()):
                return "buffers"
        return ""

    def _is_same_when_filled(self, expected: Sequence[tuple[StepResult, Tensors]]) -> bool:
        """Whether other rows of weight 0, as many as there are rows, change nothing for one of the pair."""
        for row, place in enumerate(self._pair.places):
            extra = self._data.unlike(place, self._chosen[row])
            if not len(extra):
                continue
            chosen = [*self._chosen]
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
    """What layers note in their attributes within the block is gone afterwards.

    Tensors that `torch.vmap` has made could be neither used nor copied outside it.
    """
    before = [(layer, _attributes(layer)) for layer in network.modules()]
    filled = [(v, copy.copy(v)) for _, own in before for v in own.values() if isinstance(v, list | dict)]
    try:
        yield
    finally:
        for layer, own in before:
            for name in _attributes(layer).keys() - own.keys():
                delattr(layer, name)
            vars(layer).update(own)
        for value, content in filled:
            value.clear()
            put_in = value.extend if isinstance(value, list) else value.update
            put_in(content)


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """What a layer has besides what every layer has."""
    return {name: value for name, value in vars(layer).items() if name not in _MODULES_OWN}
