"""The local loop: the only place where a client's minibatches are taken one by one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.client import Client, Prepare
from polyfed.core.message import get_group, get_tensor, numbers_of
from polyfed.core.method import Batch, Context, Method, Phase, TrainingResult
from polyfed.core.modules import as_split_model, cache_trainable
from polyfed.core.optimizers import Optimizer
from polyfed.data.augmentation import augmentation
from polyfed.data.samples import LabeledSamples
from polyfed.engine.dp_sgd import draws_of, per_sample_gradients
from polyfed.errors import RunError
from polyfed.functional.device_copies import move_mappings, move_together
from polyfed.functional.modes import has_batchnorm
from polyfed.functional.noise import KeyedUniforms


def train(
    client: Client,
    method: Method,
    context: Context,
    most: int | None = None,
    phases: Sequence[Phase] | None = None,
) -> TrainingResult:
    """Train `client.model` in place, as `client.training` and the phases say.

    Args:
        client: at work. method: whose gradients. context: what `receive` returned, by `contexts_on`.
        most: so many batches of each phase at most, for a trial; None: all.
        phases: those of the exchange; None: the method's own.

    Returns:
        Steps, samples, mean loss and the method's sums. The loss may be NaN: the caller judges.
    """
    model = client.model.train()
    device = next(model.parameters()).device
    draws = client.generator("inputs")
    order = client.generator("batches")
    noise = client.generator("augment")
    hiding = draws_of(client, order)
    steps = samples = 0
    # by chance drawn: how many rows there were would tell of each whether it was among them
    planned = min(client.training.batch_size, client.n) if client.privacy.poisson else None
    losses: list[tuple[Tensor, int]] = []  # loss of each step, and how many samples it had
    sums: dict[str, Tensor] = {}
    raw_sums: dict[str, Tensor] = {}
    if phases is None:
        phases = method.phases(client.training)
    for phase in phases:
        client.phase = phase.name
        rows = None if phase.rows is None else get_tensor(context, phase.rows)
        mask = None if phase.mask is None else get_group(context, phase.mask)
        with (
            train_only(model, phase),
            cache_trainable(model) as (names, parameters),
            per_sample_gradients(client, hiding.noise) as bounded,
        ):
            if not parameters:
                continue
            named = dict(zip(names, parameters, strict=True))
            optimizer = Optimizer(parameters, client.training, phase.rate(client.training, client.round))
            for batch in itertools.islice(_batches(client, phase, rows, order, noise, hiding.chance), most):
                (inputs,) = move_mappings([method.step_inputs(client, steps, draws)], device)
                with_inputs = {**context, **bounded, **inputs}
                grads, loss, extra, raw = method.gradients(model, batch, with_inputs)
                before = {} if mask is None else {n: p.detach().clone() for n, p in named.items() if n in mask}
                optimizer.step([grads.get(name) for name in names])
                del grads  # at once: the next step's gradients then lie where these did, in the caches
                if mask is not None:
                    with torch.no_grad():  # entries whose mask is 0 are what they were, bit for bit
                        for name, old in before.items():
                            kept = torch.where(mask[name].to(old.device).bool(), named[name], old)
                            named[name].copy_(kept)
                steps += 1
                samples += len(batch.y) if planned is None else planned
                losses.append((loss.detach(), len(batch.y)))
                _add(sums, extra)
                _add(raw_sums, raw)
    client.phase = ""
    weights = [t.detach().sum() for t in model.state_dict().values() if t.is_floating_point()]
    values = numbers_of([*(loss for loss, _ in losses), *weights])  # now and at once, as asking a GPU stops it
    total = sum(value * count for value, (_, count) in zip(values, losses, strict=False))
    seen = sum(count for _, count in losses)
    is_finite = all(map(math.isfinite, values[len(losses) :]))
    return TrainingResult(steps, samples, total / max(seen, 1), sums, raw_sums, is_finite)


def contexts_on(contexts: Sequence[Context], device: torch.device) -> Sequence[Context]:
    """What `receive` returned with its floats and masks on a device, for the loss."""
    return move_mappings(contexts, device, lambda tensor: tensor.is_floating_point() or tensor.dtype == torch.bool)


def _add(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value


def phase_data(client: Client, phase: Phase) -> tuple[LabeledSamples, Prepare]:
    """What a phase trains on, and how it becomes input."""
    if phase.data != "public":
        return getattr(client.data, phase.data), client.prepare
    if client.public is None:
        raise RunError("expected data that everybody may see for a phase on 'public', got none; set data.holdout")
    return client.public.samples, client.public.prepare


def _batches(
    client: Client,
    phase: Phase,
    rows: Tensor | None,
    order: torch.Generator,
    noise: torch.Generator,
    chance: torch.Generator | KeyedUniforms,
) -> Iterator[Batch]:
    """The minibatches of a phase, see `shuffled_batches` and `poisson_batches`."""
    samples, prepare = phase_data(client, phase)
    device = next(iter(client.model.parameters())).device
    augment = augmentation(client.training.augmentation)
    held = len(samples)
    there = samples.at(device)
    shape = there.x.shape[1:]
    batches_of_rows = (
        poisson_batches(client, phase, held, rows, chance)
        if client.privacy.poisson
        else shuffled_batches(client, phase, held, rows, order)
    )
    nothing = torch.empty(0, dtype=torch.int64)
    planned = (
        (rows, nothing if augment is None else augment.draw(len(rows), shape, noise)) for rows in batches_of_rows
    )
    for chosen, places, drawn in _placed(planned, device, there.x.device):
        x = there.x[chosen if there.x.is_cpu else places]
        if augment is not None:
            x = augment.apply(x, drawn)
        x = prepare(x.to(device))
        y = there.y[chosen].to(device) if there.y.is_cpu else there.y[places]
        yield Batch(x, y, torch.ones(len(chosen), device=device), places)


def _placed(
    planned: Iterator[tuple[Tensor, Tensor]], device: torch.device, inputs: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each batch's rows in main memory and on the device, and what was drawn for it, where the inputs are.

    Those of a whole phase reach a GPU in one copy, as each copy waits for it.
    """
    if device.type == "cpu":
        yield from ((rows, rows, drawn) for rows, drawn in planned)
        return
    every = list(planned)
    rows = [chosen for chosen, _ in every]
    draws = [drawn for _, drawn in every]
    moved = move_together([*rows, *draws], [device] * len(rows) + [inputs] * len(draws))
    yield from zip(rows, moved[: len(rows)], moved[len(rows) :], strict=True)


def shuffled_batches(
    client: Client, phase: Phase, held: int, rows: Tensor | None, order: torch.Generator
) -> Iterator[Tensor]:
    """Which of the `held` samples of a phase's data make up each of its minibatches, (B,) each, the last one ragged.

    rows: (M,) those that the phase is about; None: all. A single one is left out where BatchNorm could not take it.
    """
    rows = torch.arange(held) if rows is None else rows.cpu()
    size = client.training.batch_size
    smallest = 2 if has_batchnorm(client.model) else 1
    for _ in range(phase.epochs):
        batches = rows[torch.randperm(len(rows), generator=order)].split(size)
        yield from (batch for batch in batches if len(batch) >= smallest)


def poisson_batches(
    client: Client, phase: Phase, held: int, rows: Tensor | None, chance: torch.Generator | KeyedUniforms
) -> Iterator[Tensor]:
    """As `shuffled_batches`, but every row is in each minibatch by itself, with probability B / M; one may be empty.

    There are as many of them, and B rows in each on average.
    """
    rows = torch.arange(held) if rows is None else rows.cpu()
    size = client.training.batch_size
    for _ in range(phase.epochs * math.ceil(len(rows) / size)):
        if isinstance(chance, torch.Generator):
            drawn = torch.rand(len(rows), generator=chance, dtype=torch.float64)
        else:
            drawn = chance((len(rows),))
        yield rows[drawn < size / len(rows)]


@contextlib.contextmanager
def train_only(model: nn.Module, phase: Phase) -> Iterator[None]:
    """Within the block only the phase's parameters take a gradient; layers of which none does run in eval mode."""
    if phase.trains is None:
        yield
        return
    parts = phase.trains
    trains = (lambda name: as_split_model(model).part_of(name) in parts) if isinstance(parts, tuple) else parts
    still = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not trains(name)]
    for _, parameter in still:
        parameter.requires_grad_(False)
    learning = {m: [p.requires_grad for p in m.parameters()] for m in model.modules()}
    resting = [module for module, flags in learning.items() if flags and not any(flags)]
    for module in resting:
        module.eval()
    try:
        yield
    finally:
        for _, parameter in still:
            parameter.requires_grad_(True)
        model.train()
