"""BatchNorm that keeps no running statistics in training; somebody takes them afterwards, in a pass over data.

Sub-models of different widths see different activations, so that statistics kept in training would be nobody's
(HeteroFL, section 3). Such a layer normalizes by the batch in training and by its buffers in eval mode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyfed.core.client import Prepare
from polyfed.core.modules import batchnorm_layers, static_statistics
from polyfed.functional.modes import eval_mode


def disable_running_stats(module: nn.Module) -> None:
    """From now on the BatchNorm layers keep no statistics in training; their buffers stay where they are."""
    for layer in batchnorm_layers(module):
        layer.track_running_stats = False


def init_stats(module: nn.Module) -> dict[str, Tensor]:
    """The same of a new network, on the CPU: means 0, variances 1."""
    of = static_statistics(module)
    return {name: torch.full(t.shape, float(name.endswith("running_var")), dtype=t.dtype) for name, t in of.items()}


def estimate_stats(module: nn.Module, x: Tensor, prepare: Prepare, size: int) -> tuple[dict[str, Tensor], int]:
    """Fills the static layers' statistics with the plain means over batches of what the layers see.

    All else runs in eval mode: nothing is dropped out. A batch of a single row is left out.

    Args:
        module: its statistics are replaced. x: (N, ...) stored inputs, taken in order. size: rows per batch.

    Returns:
        The statistics by name, variances unbiased; and of how many batches they are the mean.
    """
    static = [layer for layer in batchnorm_layers(module) if not layer.track_running_stats]
    momenta = [layer.momentum for layer in static]
    device = next(module.parameters()).device
    batches = [rows for rows in x.split(size) if len(rows) > 1]
    with torch.no_grad(), eval_mode(module):
        for layer in static:
            layer.training = True
            layer.track_running_stats = True
            layer.momentum = None  # None: the plain mean
            layer.reset_running_stats()
        try:
            for rows in batches:
                module(prepare(rows.to(device)))
        finally:
            for layer, momentum in zip(static, momenta, strict=True):
                layer.track_running_stats, layer.momentum = False, momentum
    return {name: t.clone() for name, t in static_statistics(module).items()}, len(batches)
