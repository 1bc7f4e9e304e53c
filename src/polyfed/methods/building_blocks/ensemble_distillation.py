"""Distillation at the server: scores of clients' networks on public inputs, and a network that learns from them.

Shapes: S clients, N public inputs, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from polyfed.core.client import PublicData
from polyfed.core.randomness import seeded_global_rng

Loss = Callable[[Tensor, Tensor], Tensor]  # scores of a batch, its rows among the public inputs -> a 0-d tensor


def distill(
    model: nn.Module,
    public: PublicData,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    steps: int,
    inputs: int,
    draws: torch.Generator,
    schedule: LRScheduler | None = None,
) -> float:
    """Train a network in place on public inputs, whose labels are not looked at; returns the mean loss.

    Args:
        model: left in eval mode. optimizer: of its parameters. loss: of a batch.
        steps: at least one. inputs: of a batch, no more than there are.
        draws: for the order of the inputs, all of them before any again, and for the seed of dropout.
        schedule: of the learning rate, step by step.
    """
    held = len(public)
    wanted = steps * inputs
    order = torch.cat([torch.randperm(held, generator=draws) for _ in range(-(-wanted // held))])
    device = next(model.parameters()).device
    losses = []
    model.train()
    with seeded_global_rng(int(torch.randint(2**62, (), generator=draws))):
        for rows in order[:wanted].split(inputs):
            one = loss(model(public.prepare(public.samples.x[rows].to(device))), rows)
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
            losses.append(one.detach())
            if schedule is not None:
                schedule.step()
    optimizer.zero_grad()
    model.eval()
    return float(sum(torch.stack(losses).tolist())) / len(losses)


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a network's weights and statistics, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
