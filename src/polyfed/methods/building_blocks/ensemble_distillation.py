"""Distillation at the server: scores of clients' networks on public inputs, and a network that learns from them.

Shapes: S clients, N public inputs, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyfed.core.client import PublicData
from polyfed.core.modules import trainable_parameters
from polyfed.core.optimizers import Optimizer
from polyfed.core.randomness import seeded_global_rng
from polyfed.core.settings import Training

Loss = Callable[[Tensor, Tensor], Tensor]  # scores of a batch, its rows among the public inputs -> a 0-d tensor


def distill(model: nn.Module, public: PublicData, loss: Loss, training: Training, draws: torch.Generator) -> float:
    """Train a network in place on public inputs, whose labels are not looked at; returns the mean loss.

    Args:
        model: left in eval mode.
        training: its rounds are the steps, and a batch has no more inputs than there are.
        draws: for the order of the inputs, all of them before any again, and for the seed of dropout.
    """
    held = len(public)
    wanted = training.rounds * training.batch_size
    order = torch.cat([torch.randperm(held, generator=draws) for _ in range(-(-wanted // held))])
    device = next(model.parameters()).device
    _, parameters = trainable_parameters(model)
    optimizer = Optimizer(parameters, training, training.lr)
    losses = []
    model.train()
    with seeded_global_rng(int(torch.randint(2**62, (), generator=draws))):
        for step, rows in enumerate(order[:wanted].split(training.batch_size), 1):
            one = loss(model(public.prepare(public.samples.x[rows].to(device))), rows)
            optimizer.rate = training.lr_at(step)
            optimizer.step(torch.autograd.grad(one, parameters, allow_unused=True))
            losses.append(one.detach())
    model.eval()
    return float(sum(torch.stack(losses).tolist())) / len(losses)


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a network's weights and statistics, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
