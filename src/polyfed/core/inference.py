"""Passes over many inputs without gradient, in chunks, so that a method file holds no loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.client import Prepare, PublicData
from polyfed.core.message import Group
from polyfed.core.modules import trainable_parameters
from polyfed.core.server import PublicOutputs, PublicPass, Server
from polyfed.data.samples import LabeledSamples, SelectedSamples
from polyfed.errors import RunError
from polyfed.functional.modes import eval_mode
from polyfed.functional.tied_tensors import call_with

CHUNK = 128  # rows per pass: what goes in and out of a layer then fits the caches
_MOST_ROWS = 1024  # rows of a pass on a GPU: fewer, and launching takes longer than computing
_ENTRIES = 2**22  # numbers in the inputs of such a pass, unless it has few rows
BACKWARD_ROWS = 64  # rows of a pass whose graph, and what went in and out of every layer, is kept
_GRADIENTS = 2**24  # numbers that samples' gradients may be together: 64 MiB


def rows_at_once(x: Tensor, device: torch.device) -> int:
    """How many rows like those of `x` (N, ...) go through a network in one pass there."""
    return CHUNK if device.type == "cpu" else max(CHUNK, min(_MOST_ROWS, _ENTRIES // max(x.shape[1:].numel(), 1)))


def map_batches(
    function: Callable[[Tensor], Tensor],
    model: nn.Module,
    x: Tensor | LabeledSamples | SelectedSamples,
    prepare: Prepare,
) -> Tensor:
    """`function` over all rows of `x` (N, ...), stored as they are; eval mode, no gradient, nothing else changed.

    Samples stay on a GPU from then on, where it has room for them.

    Returns:
        (N, ...) outputs on the model's device.
    """
    held = x if isinstance(x, Tensor) else x.whole.x
    device = next(iter(model.parameters()), held).device
    size = rows_at_once(held, device)
    chunks = x.split(size) if isinstance(x, Tensor) else x.chunks(size, device)
    with torch.no_grad(), eval_mode(model):
        outputs = [function(prepare(rows.to(device))) for rows in chunks]
    return torch.cat(outputs)


def map_rows(
    function: Callable[[Tensor], Tensor],
    model: nn.Module,
    samples: LabeledSamples,
    rows: Tensor | None,
    prepare: Prepare,
) -> Tensor:
    """`map_batches` over some rows of samples; None: over all."""
    return map_batches(function, model, samples if rows is None else SelectedSamples(samples, rows), prepare)


def representations(model: nn.Module, x: Tensor | LabeledSamples, prepare: Prepare) -> Tensor:
    """Representations (N, D) of all rows of `x`, see `map_batches`."""
    function: Callable[[Tensor], Tensor] = model.represent  # type: ignore[assignment]
    return map_batches(function, model, x, prepare)


def fisher_diagonal(model: nn.Module, x_B: Tensor, y_B: Tensor) -> dict[str, Tensor]:
    """sum_n (d log p(y_n | x_n) / d w)^2, entry by entry: the square of each sample's gradient, not of their sum.

    By the name of each trainable parameter. In eval mode, where no sample depends on another.

    Source: Yang et al. (FedDPA), NeurIPS 2023 (the empirical Fisher information, before the mean).
    """
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(w) for name, w in weights.items()}

    def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call_with(model, w, (x[None],)), y[None].long())

    gradient = torch.func.grad(loss)
    rows = max(1, _GRADIENTS // sum(w.numel() for w in weights.values()))
    with eval_mode(model):
        for x, y in zip(x_B.split(rows), y_B.split(rows), strict=True):
            try:
                grads = torch.func.vmap(gradient, in_dims=(None, 0, 0))(weights, x, y)
            except RuntimeError:  # vmap has no rule for an operation, as for LSTMs
                each = [gradient(weights, *sample) for sample in zip(x, y, strict=True)]
                grads = {name: torch.stack([g[name] for g in each]) for name in weights}
            for name, g in grads.items():
                total[name] += g.square().sum(dim=0)
    return total


def fisher_information(model: nn.Module, samples: LabeledSamples, prepare: Prepare) -> dict[str, Tensor]:
    """The diagonal of the Fisher information: the mean of `fisher_diagonal` over all rows of the samples.

    Returns:
        Trainable parameter -> tensor of its shape.
    """
    device = next(iter(model.parameters())).device
    total: dict[str, Tensor] = {}
    x, y = samples.at(device)
    for some, labels in zip(x.split(BACKWARD_ROWS), y.split(BACKWARD_ROWS), strict=True):
        found = fisher_diagonal(model, prepare(some.to(device)), labels.to(device))
        total = {name: total[name] + t if name in total else t for name, t in found.items()}
    return {name: t / len(x) for name, t in total.items()}


def chunked_gradients(
    model: nn.Module, x: Tensor, value: Callable[[Tensor], Tensor], chunk: int
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """``value(model.represent(x))`` and its gradient in the model's parameters, with the graph of one chunk at a time.

    First all representations without gradient, and the gradient of `value` in them; then chunk by chunk the product of
    that with the representations' own derivative. The same numbers as one pass, up to rounding: in eval mode no row
    depends on another. Costs one forward pass more, and memory for `chunk` rows instead of all.

    Args:
        model: has `represent`. x: (N, ...) as the model takes it. value: representations (N, D) to a 0-d tensor.
        chunk: rows at a time.
    """
    names, parameters = trainable_parameters(model)
    total: list[Tensor | None] = [None] * len(names)
    with eval_mode(model):
        represent_: Callable[[Tensor], Tensor] = model.represent  # type: ignore[assignment]
        with torch.no_grad():
            z = torch.cat([represent_(rows) for rows in x.split(chunk)])
        z.requires_grad_()
        outcome = value(z)
        (dz,) = torch.autograd.grad(outcome, z)
        for rows, direction in zip(x.split(chunk), dz.split(chunk), strict=True):
            z_rows = represent_(rows)
            if not z_rows.requires_grad:  # all that trains is the head
                break
            grads = torch.autograd.grad(z_rows, parameters, direction, allow_unused=True)
            total = [_sum(a, b) for a, b in zip(total, grads, strict=True)]
    return outcome.detach(), dict(zip(names, total, strict=True))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients; None stands for none."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


# passes of clients' networks over public inputs, by the server itself or in the workers of its run -------------------


def public_outputs(
    server: Server, models: Mapping[int, Group], outputs: PublicOutputs, rows: Tensor | None = None
) -> list[Tensor]:
    """The outputs of clients' networks on public inputs, on the server's device, in the order of `models`.

    The same bits wherever they are computed. All are in memory at the same time.

    Args:
        models: client number -> weights. outputs, rows: as in `PublicPass`.
    """
    passes = [PublicPass(i, weights, outputs, rows, server.round) for i, weights in models.items()]
    if server.run_passes is not None:
        return server.run_passes(passes)
    found = []
    for one in passes:
        model = server.model(server.clients[one.client_id].architecture, one.weights)
        found.append(run_pass(one, model, server.public, server.prepare).to(server.device))
    return found


def run_pass(asked: PublicPass, model: nn.Module, public: PublicData | None, prepare: Prepare) -> Tensor:
    """The outputs of a pass, on the model's device.

    Args:
        model: holds the weights. prepare: converts the clients' own stored inputs to model inputs.
    """
    if public is None:
        raise RunError("expected data that everybody may see, got none")
    is_scores = asked.outputs == "scores"
    function: Callable[[Tensor], Tensor] = model if is_scores else model.represent  # type: ignore[assignment]
    convert = public.prepare if is_scores else prepare
    return map_rows(function, model, public.samples, asked.rows, convert)
