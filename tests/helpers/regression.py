"""A small regression problem: clients whose numbers to predict differ in mean and spread."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.models.adapt import split
from polyfed.models.split import SplitModel

FEATURES = 3


def rows(count: int, seed: int, mean: float = 0.0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Inputs (N, 3) and numbers that are nearly linear in them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=g)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(count, generator=g)
    return x, mean + spread * y


def network(width: int = 4) -> SplitModel:
    """One hidden layer and one output."""
    return split(nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1)), head="2", extractor="0")


def clients(widths: tuple[int, ...] = (4, 4, 6), validation: bool = True) -> list[Client]:
    """One per width, with numbers around 0."""
    torch.manual_seed(0)
    made = []
    for place, width in enumerate(widths):
        parts = [rows(count, 10 * place + part) for part, count in enumerate((24, 8, 8))]
        made.append(Client(network(width), parts[0], parts[1], parts[2] if validation else None))
    return made


def write_table(path: Path, groups: int = 3) -> Path:
    """A CSV file with columns a, b, c, the number to predict "cost", and the column "site" by which rows differ."""
    lines = ["a,b,c,cost,site"]
    for group in range(groups):
        x, y = rows(30, group, mean=100.0 * group, spread=1.0 + group)
        lines += [f"{a},{b},{c},{cost},{group}" for (a, b, c), cost in zip(x.tolist(), y.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
