"""BatchNorm that keeps no running statistics in training; somebody takes them afterwards, in a pass over data.

Sub-models of different widths see different activations, so that statistics kept in training would be nobody's
(HeteroFL, section 3). Such a layer normalises by the batch in training and by its buffers in eval mode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.client import Prepare
from polyfed.functional.modes import evaluating


def norms(module: nn.Module) -> list[_BatchNorm]:
    """All BatchNorm layers, in the module's order."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def make_static(module: nn.Module) -> None:
    """From now on the BatchNorm layers keep no statistics in training; their buffers stay where they are."""
    for layer in norms(module):
        layer.track_running_stats = False


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of the static layers, by name, not copied."""
    static = {id(buffer) for layer in norms(module) if not layer.track_running_stats for buffer in layer.buffers()}
    return {name: t.detach() for name, t in module.named_buffers() if id(t) in static and t.is_floating_point()}


def fresh(module: nn.Module) -> dict[str, Tensor]:
    """The same of a new network, on the CPU: means 0, variances 1."""
    of = statistics_of(module)
    return {name: torch.full(t.shape, float(name.endswith("running_var")), dtype=t.dtype) for name, t in of.items()}


def collect(module: nn.Module, x: Tensor, prepare: Prepare, size: int) -> tuple[dict[str, Tensor], int]:
    """Fills the static layers' statistics with the plain means over batches of what the layers see.

    All else runs in eval mode: nothing is dropped out. A batch of a single row is left out.

    Args:
        module: its statistics are replaced. x: (N, ...) stored inputs, taken in order. size: rows per batch.

    Returns:
        The statistics by name, variances unbiased; and of how many batches they are the mean.
    """
    static = [layer for layer in norms(module) if not layer.track_running_stats]
    momenta = [layer.momentum for layer in static]
    device = next(module.parameters()).device
    batches = [rows for rows in x.split(size) if len(rows) > 1]
    with torch.no_grad(), evaluating(module):
        for layer in static:
            layer.training, layer.track_running_stats, layer.momentum = True, True, None  # None: the plain mean
            layer.reset_running_stats()
        try:
            for rows in batches:
                module(prepare(rows.to(device)))
        finally:
            for layer, momentum in zip(static, momenta, strict=True):
                layer.track_running_stats, layer.momentum = False, momentum
    return {name: t.clone() for name, t in statistics_of(module).items()}, len(batches)
