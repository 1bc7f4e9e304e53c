"""Modes of modules for a while: scoring, another memory layout, BatchNorm's running statistics left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[nn.Module]:
    """Eval mode inside; afterwards every submodule has its own training flag back (a frozen part stays frozen)."""
    with _kept_flags(list(module.modules())):
        yield module.eval()


def train_mode(module: nn.Module) -> nn.Module:
    """`module.train()`, which takes longer than to see that all of it is in this mode already."""
    return module if all(part.training for part in module.modules()) else module.train()


@contextmanager
def represented_once(model: nn.Module) -> Iterator[None]:
    """Asked twice in a row for the representation of an input, a split model gives the one it has. Without gradient."""
    represent = getattr(model, "represent", None)
    if represent is None or "represent" in vars(model):  # the network has one of its own making
        yield
        return
    last: list[torch.Tensor] = []

    def remembered(x: torch.Tensor) -> torch.Tensor:
        if not last or last[0] is not x:
            last[:] = x, represent(x)
        return last[1]

    model.represent = remembered  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.represent


@contextmanager
def frozen_running_stats(module: nn.Module) -> Iterator[nn.Module]:
    """BatchNorm layers inside ``module`` normalize by the batch and update neither running statistics nor counters.

    Holds whatever mode the module is in; all other layers keep theirs. Used for FedIN's pass over received features.
    """
    layers = [(m, m.training, m.track_running_stats) for m in module.modules() if isinstance(m, _BatchNorm)]
    try:
        for m, _, _ in layers:
            m.training, m.track_running_stats = True, False  # then torch hands no buffers to batch_norm
        yield module
    finally:
        for m, training, track in layers:
            m.training, m.track_running_stats = training, track


@contextmanager
def channels_first(module: nn.Module) -> Iterator[nn.Module]:
    """Convolutions inside lie channels first in memory; afterwards those that lay channels last do so again.

    The numbers are the same. Opacus takes wrong gradients by row of a convolution whose inputs lie channels last.

    >>> net = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    >>> with channels_first(net):
    ...     net.weight.is_contiguous()
    True
    >>> net.weight.is_contiguous()
    False
    """
    # with one input channel both layouts count as contiguous; only the strides tell them apart
    turned = [p for p in module.parameters() if p.dim() == 4 and p.stride() == _strides(p, torch.channels_last)]
    try:
        for p in turned:
            p.data = p.data.clone(memory_format=torch.contiguous_format)
        yield module
    finally:
        for p in turned:
            p.data = p.data.clone(memory_format=torch.channels_last)


def _strides(tensor: torch.Tensor, layout: torch.memory_format) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta", memory_format=layout).stride()


def has_batchnorm(module: nn.Module) -> bool:
    """Whether any layer normalizes by the batch (BatchNorm1d to 3d, SyncBatchNorm and their subclasses).

    >>> has_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    True
    """
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def dropout_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that drop entries in training."""
    return [m for m in module.modules() if isinstance(m, _DropoutNd) and m.p > 0]


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[nn.Module]:
    """Dropout layers drop nothing inside; afterwards each has its own training flag back."""
    layers = dropout_layers(module)
    with _kept_flags(layers):
        for layer in layers:
            layer.training = False
        yield module


@contextmanager
def _kept_flags(layers: list[nn.Module]) -> Iterator[None]:
    """Afterwards each layer has its own training flag back."""
    flags = [layer.training for layer in layers]
    try:
        yield
    finally:
        for layer, flag in zip(layers, flags, strict=True):
            layer.training = flag
