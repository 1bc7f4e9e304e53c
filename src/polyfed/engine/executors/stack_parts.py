"""What a stack of clients is made of while it trains: clients' streams and places, groups of them, a phase's data.

Shapes: K clients, B rows.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import first_nonfinite, get_tensor
from polyfed.core.method import Batch, Context, Method, Phase, StepResult
from polyfed.core.optimizers import Optimizer
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Augmentation, augmentation
from polyfed.engine.executors.recorded_step import FixedTensors, RecordedStack, Recordings
from polyfed.engine.executors.stacked_loss import StackedContext, Tensors
from polyfed.engine.local_training import class_weights, phase_data, shuffled_batches
from polyfed.functional.device_copies import move_mappings, move_together

MODULES_OWN = frozenset(vars(nn.Module()))  # attributes that every layer has
_AHEAD = 2**26  # bytes that methods draw at a time for steps to come
_RAW = "raw gradient "  # before a name, among what is summed over the steps


@dataclass(frozen=True)
class StepSignature:
    """What is known of steps of one kind. read: of the context by the loss. fills: rows of weight 0 change nothing."""

    read: frozenset[str]
    fills: bool


@dataclass
class SignatureCache:
    """What was tried before: kinds of steps, and phases whose `inputs` must not look at the weights.

    Refusals are kept as text: an exception that was raised would hold the frames it passed, and these the stack.

    Attributes:
        kinds: what is known of a kind of steps, or why it cannot be stacked.
        inputs: why the inputs of a phase cannot be drawn for a stack; "" where they can.
        recordings: what is recorded of steps on a GPU.
    """

    kinds: dict[Hashable, StepSignature | str] = field(default_factory=dict)
    inputs: dict[Hashable, str] = field(default_factory=dict)
    recordings: Recordings = field(default_factory=Recordings)


def only_of(context: Context, names: frozenset[str]) -> Context:
    return {name: value for name, value in context.items() if name in names}


def floats_of(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


def numbers_and_nonfinite(losses: Sequence[Tensor], rows: Tensors) -> tuple[list[float], list[str | None]]:
    """All losses, and the first tensor of each client that is not finite: asked for together, as that stops a GPU."""
    floats = {name: t.detach() for name, t in floats_of(rows).items()}
    sums = torch.stack([t.reshape(len(t), -1).sum(dim=1).float() for t in floats.values()])
    suspected = (~sums.isfinite()).any(dim=0)  # a sum may also have run over
    values = torch.cat([*(loss.float() for loss in losses), suspected.float()]).tolist()
    first = [
        first_nonfinite({"model": {name: t[place] for name, t in floats.items()}}) if suspect else None
        for place, suspect in enumerate(values[-len(suspected) :])
    ]
    return values[: -len(suspected)], first


def are_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], close: float, least: float) -> bool:
    """Whether all entries agree up to a share `close` of the largest one, and to `least`; NaN agrees with NaN."""
    sizes = [t.float().abs().nan_to_num(0.0, 0.0).amax() for t in expected.values() if t.numel()]
    most = close * float(torch.stack(sizes).max()) + least if sizes else 1.0
    return all(
        found[name].shape == t.shape and torch.allclose(found[name].to(t), t, rtol=0.0, atol=most, equal_nan=True)
        for name, t in expected.items()
    )


@dataclass(frozen=True)
class NextStep:
    """The next step of some clients of a part.

    rows: where they stand in it. counts: how many rows of its data each means. inputs: what the method draws for each;
    empty where it draws nothing. number: of the phase's batches, which one, in a recorded step a tensor (1,); None for
    a trial, of which `chosen` has the rows of data: as many as are meant, or more, which then count nothing.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    inputs: Sequence[Context]
    number: int | Tensor | None = None
    chosen: Sequence[Tensor] = ()

    def drawn(self, place: int) -> Context:
        """What was drawn for one of the clients."""
        return self.inputs[place] if self.inputs else {}

    def some(self, places: Sequence[int]) -> NextStep:
        """The same step of some of the clients."""
        rows, counts = (tuple(numbers[place] for place in places) for numbers in (self.rows, self.counts))
        inputs = [self.inputs[place] for place in places if self.inputs]
        chosen = [self.chosen[place] for place in places if self.chosen]
        return NextStep(rows, counts, inputs, self.number, chosen)


class ClientProgress:
    """A client on its way through its local training, with the streams that it would have alone.

    place: among the stack's clients. row: among them in the order of the phase.
    """

    def __init__(self, client: Client, place: int) -> None:
        self.client, self.place = client, place
        self.row = place
        self.draws, self.noise, self._order = (client.generator(name) for name in ("inputs", "augment", "batches"))
        self.steps = self.samples = 0
        self.summed: set[str] = set()
        self.batches: Sequence[Tensor] = ()  # of the phase, and how many rows each has
        self.sizes: Sequence[int] = ()
        self.drawn: dict[int, Context] = {}  # by the method, for steps to come
        self.outline = 0  # the number of its context's outline, and of that of what the loss reads of it
        self.exact: dict[StepSignature, int] = {}

    def start(self, phase: Phase, held: int) -> None:
        """A phase; `held` samples of its data."""
        rows = None if phase.rows is None else get_tensor(self.client.context, phase.rows)
        self.batches = list(shuffled_batches(self.client, phase, held, rows, self._order))
        self.sizes = [batch.shape[0] for batch in self.batches]
        self.drawn = {}


def draw_inputs(method: Method, walks: Sequence[ClientProgress], number: int, device: torch.device, ahead: int) -> None:
    """Draw what the method does for the step of this number, and for so many more as take `ahead` bytes."""
    first = [method.step_inputs(walk.client, walk.steps, walk.draws) for walk in walks]
    nbytes = sum(value.nbytes for each in first for value in each.values() if isinstance(value, Tensor))
    end = number + 1 + ahead // max(1, nbytes)
    for walk, one in zip(walks, first, strict=True):
        later = range(number + 1, min(end, len(walk.sizes)))
        others = {n: method.step_inputs(walk.client, walk.steps + n - number, walk.draws) for n in later}
        walk.drawn = {number: one, **others}
    placed = iter(move_mappings([each for walk in walks for each in walk.drawn.values()], device))
    for walk in walks:
        walk.drawn = {step: next(placed) for step in walk.drawn}


class RowIndices:
    """Row numbers on a device, brought there once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], Tensor] = {}

    def at(self, rows: Sequence[int]) -> Tensor:
        """(M,) int64: these numbers."""
        key = tuple(rows)
        if key not in self._known:
            self._known[key] = torch.tensor(key).to(self._device)
        return self._known[key]


@dataclass
class ActiveGroup:
    """Those who still go through a phase together.

    tensors: (K, ...) by name; those of `names` are what moves. linear: names of linear layers' weights, which are laid
    as their gradients come out of the vectorized product, so that these need not be copied. number: of the next batch.
    groups: who is taken together in steps for which nothing is drawn, by how many rows each means. fixed: where
    tensors, masks and the optimizer's memory are views of. contexts: those of a step that is recorded, and their names.
    """

    walks: Sequence[ClientProgress]
    tensors: Tensors
    names: Sequence[str]
    phase: Phase
    masks: Tensors
    indices: RowIndices
    linear: Collection[str] = ()
    number: int = 0
    groups: dict[tuple[int, ...], Sequence[tuple[StepSignature, Sequence[int]]]] = field(default_factory=dict)
    fixed: RecordedStack | None = None
    contexts: tuple[StackedContext, StackedContext, Collection[str]] | None = None
    optimizer: Optimizer = field(init=False)
    _contexts: dict[Hashable, StackedContext] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fixed is not None:
            self.optimizer = self.fixed.optimizer.first(len(self.walks))
        else:
            self.tensors = laid_out(self.tensors, self.linear)
        self.tensors |= {name: self.tensors[name].detach().requires_grad_() for name in self.names}
        if self.fixed is None:
            moving = [self.tensors[name] for name in self.names]
            self.optimizer = Optimizer(moving, self.walks[0].client.training, rate_of(self.walks, self.phase))

    def next_step(self, method: Method) -> NextStep:
        """The next step of everybody who has one."""
        number = self.number
        self.number += 1
        rows = tuple(row for row, walk in enumerate(self.walks) if number < len(walk.sizes))
        walks = [self.walks[row] for row in rows]
        inputs: list[Context] = []
        if walks and type(method).step_inputs is not Method.step_inputs:
            if number not in walks[0].drawn:
                device = next(iter(self.tensors.values())).device
                draw_inputs(method, walks, number, device, ahead=_AHEAD if self.fixed is not None else 0)
            inputs = [walk.drawn[number] for walk in walks]
        return NextStep(rows, tuple(walk.sizes[number] for walk in walks), inputs, number)

    def some(self, rows: Sequence[int]) -> Tensors:
        """Copies of the tensors of some clients; those that move take a gradient."""
        index = self.indices.at(rows)
        found = {name: t.detach()[index] for name, t in self.tensors.items()}
        return found | {name: found[name].requires_grad_() for name in self.names}

    def put_back(self, rows: Sequence[int], tensors: Tensors) -> None:
        """Take over what a forward pass has changed in such copies: buffers."""
        index = self.indices.at(rows)
        for name, t in self.tensors.items():
            if not t.requires_grad:
                t[index] = tensors[name]

    def packed(self, walks: Sequence[ClientProgress], names: frozenset[str]) -> StackedContext:
        """The contexts of some clients, as far as they have these names."""
        key = (names, *(walk.place for walk in walks))
        if key not in self._contexts:
            if len(self._contexts) >= 2:  # groups that change from step to step
                self._contexts.clear()
            self._contexts[key] = StackedContext([only_of(walk.client.context, names) for walk in walks])
        return self._contexts[key]

    def steps_alike(self, number: int, fills: bool) -> int:
        """How many steps, from that one on, everybody takes with as many rows; `fills`: with any number of rows."""
        end = min(len(walk.sizes) for walk in self.walks)
        last = number + 1
        while last < end and (fills or all(walk.sizes[last] == walk.sizes[number] for walk in self.walks)):
            last += 1
        return last - number

    def move(self, grads: Tensors) -> None:
        """One step of the optimizer; entries whose mask is 0 stay bit for bit."""
        before = {name: self.tensors[name].detach().clone() for name in self.masks}
        self.optimizer.step([grads.get(name) for name in self.names])
        with torch.no_grad():
            for name, old in before.items():
                self.tensors[name].copy_(torch.where(self.masks[name], self.tensors[name], old))

    def first(self, walks: Sequence[ClientProgress]) -> ActiveGroup:
        """These, the first of the phase's clients, on the fixed tensors."""
        assert self.fixed is not None
        tensors = {name: t[: len(walks)] for name, t in self.fixed.tensors.items()}
        masks = {name: t[: len(walks)] for name, t in self.fixed.masks.items()}
        return replace(self, walks=walks, tensors=tensors, masks=masks, groups={}, _contexts={})

    def take(self, rows: Sequence[int]) -> ActiveGroup:
        """Some of the clients, with what the optimizer remembers of them."""
        if self.fixed is not None and rows == tuple(range(len(rows))):
            return self.first(self.walks[: len(rows)])
        index = self.indices.at(rows)
        masks = {name: mask[index] for name, mask in self.masks.items()}
        walks = [self.walks[row] for row in rows]
        tensors = self.some(rows)
        part = ActiveGroup(walks, tensors, self.names, self.phase, masks, self.indices, self.linear, self.number)
        part.optimizer.copy_state_from(self.optimizer, index)
        return part

    def write_back(self, rows: Tensors) -> None:
        """Write everybody's tensors to their places in `rows`."""
        index = self.indices.at([walk.place for walk in self.walks])
        for name, t in self.tensors.items():
            rows[name][index] = t.detach()


def rate_of(walks: Sequence[ClientProgress], phase: Phase) -> float:
    """The learning rate of clients of one run in one round."""
    client = walks[0].client
    return client.training.lr_at(client.round, phase.lr)


def laid_out(tensors: Tensors, linear: Collection[str]) -> Tensors:
    """The tensors, with those of linear layers as their gradients will lie."""
    return tensors | {name: tensors[name].detach().mT.contiguous().mT for name in linear}


def linear_weights(network: nn.Module) -> set[str]:
    """The names of linear layers' weights."""
    return {f"{name}.weight" for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}


class PhaseData:
    """The data of a phase, of all its clients in one tensor on the device.

    Args:
        data, fixed: where samples and plan are to stay, for recorded steps; None: anywhere.

    Attributes:
        counts: how many samples each client has for the phase.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        phase: Phase,
        device: torch.device,
        indices: RowIndices,
        data: FixedTensors | None = None,
        fixed: RecordedStack | None = None,
    ) -> None:
        self._indices = indices
        self._fixed = fixed
        pairs = [phase_data(client, phase) for client in clients]
        self.counts = [len(samples) for samples, _ in pairs]
        self._prepare: Callable[[Tensor], Tensor] = pairs[0][1]
        self._augment = augmentation(clients[0].training.augmentation)
        found = [class_weights(client, phase) for client in clients]
        by_class = [weights for weights in found if weights is not None]
        self._by_class = torch.stack(by_class).to(device) if by_class else None
        self._device = device
        distinct = {id(samples): samples for samples, _ in pairs if len(samples)}
        first_rows = dict(zip(distinct, begins([len(samples) for samples in distinct.values()]), strict=True))
        self._begins = [first_rows.get(id(samples), 0) for samples, _ in pairs]
        if distinct:
            self._x, self._y = _together(list(distinct.values()), device, data)
        self._rows = self._weights = self._labels = torch.empty(0)
        self._drawn: Tensor | None = None
        self._planned: Sequence[Tensor] = ()  # all of it, where it stays
        self._data = data

    @property
    def looked_into(self) -> object:
        """What a recorded step reads that the stack does not hold for good."""
        return self._data, self._prepare, self._augment, self._planned

    def kind(self) -> Hashable:
        """What recorded steps on this data have in common."""
        places = (self._x.shape, *(t.data_ptr() for t in (self._x, *self._planned)))
        prepare = self._prepare if isinstance(self._prepare, Hashable) else id(self._prepare)
        return (prepare, self._augment is None, self._by_class is None, *places)

    @property
    def width(self) -> int:
        """Rows in the widest batch."""
        return self._rows.shape[-1]

    def plan(self, walks: Sequence[ClientProgress]) -> None:
        """Bring all batches of all clients to the device, in one copy: a step then waits for none."""
        steps = max(len(walk.sizes) for walk in walks)
        width = max((size for walk in walks for size in walk.sizes), default=0)
        sizes = torch.tensor([[*walk.sizes, *[0] * (steps - len(walk.sizes))] for walk in walks], dtype=torch.int64)
        before = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
        counts, before = (numbers.T.unsqueeze(2) for numbers in (sizes, before))  # (steps, K, 1)
        # a batch is filled up with its last row; where there is none stands row 0
        places = torch.where(counts > 0, 1 + before + torch.arange(width).minimum(counts - 1), 0)
        rows = torch.cat([torch.tensor([0]), *(batch for walk in walks for batch in walk.batches)])[places]
        self._rows, self._weights = self._uploaded(rows, self._begins, counts)
        if width:
            self._labels = self._y[self._rows[..., 1, :]]
        if self._augment is not None:
            self._drawn = self._draw(walks, self._augment, width).to(self._device)
        if self._fixed is not None:
            self._stay(self._fixed)

    def _stay(self, fixed: RecordedStack) -> None:
        """Put what is planned where batches as wide were planned before."""
        drawn = [] if self._drawn is None else [self._drawn]
        self._planned = fixed.hold_of_shape("plan", [self._rows, self._weights, self._labels, *drawn])
        self._rows, self._weights, self._labels, *drawn = self._planned
        self._drawn = drawn[0] if drawn else None
        if self._by_class is not None:
            (self._by_class,) = fixed.hold("by class", [self._by_class])

    def _draw(self, walks: Sequence[ClientProgress], augment: Augmentation, width: int) -> Tensor:
        """What augmentation draws for all batches, (steps, K, B, ...); zeros where batches are filled up."""
        drawn = augment.draw(0, torch.Generator())
        whole = drawn.new_zeros(len(self._rows), len(walks), width, *drawn.shape[1:])
        for place, walk in enumerate(walks):
            for step, count in enumerate(walk.sizes):
                whole[step, place, :count] = augment.draw(count, walk.noise)
        return whole

    def unlike(self, walk: ClientProgress, chosen: Tensor) -> Tensor:
        """The rows of a client's data, besides `chosen`, whose inputs differ from those of the last row chosen."""
        begin = self._begins[walk.row]
        count = self.counts[walk.row]
        own = self._x[begin : begin + count].reshape(count, -1)
        differs = (own != own[int(chosen[-1])]).any(dim=1).cpu()
        differs[chosen] = False
        return differs.nonzero().flatten()

    def batch(self, walks: Sequence[ClientProgress], step: NextStep) -> tuple[Batch, Tensor]:
        """A batch of x (K, B, ...) as the network takes it, y, w and rows (K, B), filled up with rows of weight 0.

        And the rows' shares in the sum of their client's weights, and minus these, (K, 2, B).

        Rows that are no batch of the phase's, those of a trial, are not augmented.
        """
        number = step.number
        places = [walk.row for walk in walks]
        width = max(step.counts)
        if number is None:
            rows, weights = self._chosen(places, step)
        else:
            rows, weights = (self._of(places, _at(t, number)[..., :width]) for t in (self._rows, self._weights))
        own, where = rows.unbind(1)
        x = self._x[where].flatten(0, 1)
        if self._drawn is not None and self._augment is not None and number is not None:
            x = self._augment.apply(x, self._of(places, _at(self._drawn, number)[:, :width]).flatten(0, 1))
        x = self._prepare(x).unflatten(0, own.shape)
        y = self._y[where] if number is None else self._of(places, _at(self._labels, number)[:, :width])
        if self._by_class is not None:
            w = weights[:, 0] * self._of(places, self._by_class).gather(1, y)
            weights = _with_shares(w, dim=1)
        return Batch(x, y, weights[:, 0], own), weights[:, 1:]

    def _of(self, places: Sequence[int], planned: Tensor) -> Tensor:
        """(K, ...): what is planned for these of all clients."""
        is_first = places == list(range(len(places)))
        return planned[: len(places)] if is_first else planned[self._indices.at(places)]

    def _chosen(self, places: Sequence[int], step: NextStep) -> tuple[Tensor, Tensor]:
        """Rows (K, 2, B) and what they count (K, 3, B), as in the plan, of rows that a trial chooses."""
        width = max(map(len, step.chosen))
        rows = torch.stack([_filled(chosen, width) for chosen in step.chosen])
        counts = torch.tensor(step.counts).unsqueeze(1)
        return self._uploaded(rows, [self._begins[place] for place in places], counts)

    def _uploaded(self, rows: Tensor, begins: Sequence[int], counts: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of each client's data and of all clients' data, (..., K, 2, B), on the device, and what each counts.

        That is (..., K, 3, B): weights, 1 for `counts`, their shares in the sum over a batch, and minus these.
        """
        counted = torch.arange(rows.shape[-1]) < counts
        whole = torch.stack([rows, rows + torch.tensor(begins).unsqueeze(1), counted.long()], dim=-2).to(self._device)
        return whole[..., :2, :], _with_shares(whole[..., 2, :].float(), dim=-2)


def _together(samples: Sequence[LabeledSamples], device: torch.device, data: FixedTensors | None) -> Sequence[Tensor]:
    """Inputs and labels of all samples, on the device."""
    found = None if data is None else data.made_of("samples", samples)
    if found is not None:
        return found
    there = [each.at(device) for each in samples]
    pair = torch.cat([each.x.to(device) for each in there]), torch.cat([each.y.to(device) for each in there])
    return pair if data is None else data.hold("samples", pair, samples)


def _at(planned: Tensor, number: int | Tensor) -> Tensor:
    """What is planned for a step; that a tensor says which, a recorded step finds out each time."""
    return planned[number] if isinstance(number, int) else planned.index_select(0, number).squeeze(0)


def _with_shares(weights: Tensor, dim: int) -> Tensor:
    """Weights (..., B), their shares in the sum over a batch, and minus these, stacked."""
    total = weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    shares = weights / total
    return torch.stack([weights, shares, -shares], dim=dim)


def _filled(chosen: Tensor, width: int) -> Tensor:
    """(width,): the rows, and the last of them again and again."""
    return torch.cat([chosen, chosen[-1:].expand(width - len(chosen))])


def begins(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][: len(counts)]


def summed(step: StepResult) -> Tensors:
    """All that is summed over the steps: numbers, and raw gradients under names of their own."""
    return {**step.sums, **{f"{_RAW}{name}": grad for name, grad in step.raw.items()}}


def parted(sums: Tensors) -> tuple[Tensors, Tensors]:
    """The sums of numbers, and those of raw gradients."""
    raw = {name.removeprefix(_RAW): total for name, total in sums.items() if name.startswith(_RAW)}
    return {name: total for name, total in sums.items() if not name.startswith(_RAW)}, raw


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
    before = [(layer, attributes(layer)) for layer in network.modules()]
    filled = [
        (value, copy.copy(value)) for _, own in before for value in own.values() if isinstance(value, list | dict)
    ]
    try:
        yield
    finally:
        for layer, own in before:
            for name in attributes(layer).keys() - own.keys():
                delattr(layer, name)
            vars(layer).update(own)
        for value, content in filled:
            value.clear()
            put_in = value.extend if isinstance(value, list) else value.update
            put_in(content)


def attributes(layer: nn.Module) -> dict[str, Any]:
    """What a layer has besides what every layer has."""
    return {name: value for name, value in vars(layer).items() if name not in MODULES_OWN}


def weights_on(weights: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """Several clients' weights on the device, in one copy for each type."""
    tensors = [tensor for each in weights for tensor in each.values()]
    there = iter(move_together(tensors, [device] * len(tensors)))
    return [{name: next(there) for name in each} for each in weights]


def put_row(stacked: Tensors, place: int, count: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a client's tensors into those of `count` clients, which the first one's make."""
    if not stacked:
        stacked.update({name: torch.stack([t.detach()] * count) for name, t in tensors.items()})
    torch._foreach_copy_([t[place] for t in stacked.values()], [t.detach() for t in tensors.values()])
