"""Clients' networks teach one at the server, on inputs without labels (Fed-ET)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core import inference
from polyfed.core.client import Public
from polyfed.core.message import Group
from polyfed.core.randomness import scoped_global
from polyfed.core.server import Server
from polyfed.functional.consensus import Consensus, consensus, transfer_loss


@dataclass(frozen=True)
class Transfer:
    """How the server's network learns.

    steps: of plain SGD. batch: inputs in each. lr: its rate. diversity: weight of those who disagree.
    """

    steps: int
    batch: int
    lr: float
    diversity: float


def agreed(server: Server, models: Mapping[int, Group], public: Public) -> Consensus:
    """What clients' networks (client number -> weights) agree on, over all public inputs; on the CPU."""
    scores = []
    for i, weights in models.items():
        model = server.model(server.clients[i].architecture, weights)
        scores.append(inference.apply(model, model, public.samples.x, public.prepare).cpu())
    return consensus(torch.stack(scores))


def fit(
    model: nn.Module, public: Public, targets: Consensus, how: Transfer, draws: torch.Generator
) -> tuple[dict[str, Tensor], float]:
    """Train a network on what others agree on; its last weights and statistics, on the CPU, and its mean loss.

    Args:
        model: holds the weights to start from, and is trained in place. public: inputs; their labels are not looked at.
        targets: for all of them. how: at least one step, and no more inputs in a batch than there are.
        draws: for the order of the inputs, all of them before any again, and for the seed of dropout.
    """
    held, wanted = len(public), how.steps * how.batch
    order = torch.cat([torch.randperm(held, generator=draws) for _ in range(-(-wanted // held))])
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), how.lr)
    total = 0.0
    model.train()
    with scoped_global(int(torch.randint(2**62, (), generator=draws))):
        for rows in order[:wanted].split(how.batch):
            scores = model(public.prepare(public.samples.x[rows].to(device)))
            loss = transfer_loss(scores, Consensus(*(t[rows].to(device) for t in targets)), how.diversity)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
    optimizer.zero_grad()
    weights = {name: t.detach().cpu().clone() for name, t in model.eval().state_dict().items()}
    return weights, total / how.steps
