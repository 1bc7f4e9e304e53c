"""A small network that makes features from a class and noise, and how a server trains it on clients' heads (FedGen).

Its weights are named tensors like any others: made by `fresh`, used by `generate`, trained by `fit`.
Shapes: B rows made, Z numbers of noise, C classes, H hidden units, D features, S clients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.message import Group
from polyfed.core.modules import split

_LEAST = 1e-4  # what `decayed` leaves
_TOO_MUCH = 10.0  # times the loss on the clients' own data; from here on it hardly counts
_WEIGHT_DECAY = 0.01  # L2 penalty in Adam
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what Adam keeps of every parameter


@dataclass(frozen=True)
class Fitting:
    """How a generator is trained. steps: of Adam, on `batch` rows each. diversity: weight of `likeness`."""

    steps: int
    batch: int
    lr: float
    diversity: float


def fresh(noise: int, classes: int, hidden: int, features: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Initial weights and statistics: layers uniform within 1 / sqrt(inputs), drawn from `draws`."""
    made = {f"norm.{name}": torch.ones(hidden) for name in ("weight", "running_var")}
    made |= {f"norm.{name}": torch.zeros(hidden) for name in ("bias", "running_mean")}
    for layer, inputs, outputs in (("hidden", noise + classes, hidden), ("output", hidden, features)):
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
            made[f"{layer}.{name}"] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draws)
    return made


def generate(weights: Group, z_BZ: Tensor, y_B: Tensor, training: bool = False) -> Tensor:
    """Features (B, D) for classes y from noise z: Linear (Z + C to H), BatchNorm, ReLU, Linear (H to D).

    Normalised by the running statistics; `training`: by the batch, and then the statistics are written into.
    """
    w, classes = weights, weights["hidden.weight"].shape[1] - z_BZ.shape[1]
    given = torch.cat([z_BZ, F.one_hot(y_B, classes).to(z_BZ)], dim=1)
    hidden_BH = F.linear(given, w["hidden.weight"], w["hidden.bias"])
    statistics = w["norm.running_mean"], w["norm.running_var"]
    hidden_BH = F.batch_norm(hidden_BH, *statistics, w["norm.weight"], w["norm.bias"], training)
    return F.linear(F.relu(hidden_BH), w["output.weight"], w["output.bias"])


def frozen_head(model: nn.Module) -> nn.Module:
    """A copy of a split model's head that only passes gradients on: eval mode, no gradient of its own, float64."""
    head = copy.deepcopy(split(model).head).to("cpu", torch.float64)
    return head.eval().requires_grad_(False)


def known_classes(counts_SC: Tensor) -> Tensor:
    """Samples (C,) of each class among the clients, 0 where there is no more than one: of these nothing is made."""
    totals_C = counts_SC.sum(0)
    return totals_C * (totals_C > 1)


def likeness(z_BZ: Tensor, made_BD: Tensor) -> Tensor:
    """exp(-mean over pairs of |z_a - z_b|^2 |G_a - G_b|), distances as means over the entries: 1 if all G are alike."""
    noise_BB = (z_BZ[:, None] - z_BZ[None]).square().mean(-1)
    features_BB = torch.cdist(made_BD, made_BD, p=1) / made_BD.shape[1]
    return (-noise_BB * features_BB).mean().exp()


def decayed(weight: float, decay: float, round: int) -> float:
    """A weight of round 1 in a later round (1-based), never less than 1e-4 unless it was less at first."""
    return max(weight * decay ** (round - 1), min(weight, _LEAST))


def outweighed(sums: Mapping[str, float]) -> str:
    """A line where generated features count many times as much as the clients' own data; else "".

    Args:
        sums: "own_loss", on the clients' own data, and "generated_loss", on generated features, as weighted.

    >>> outweighed({"own_loss": 2.0, "generated_loss": 84.0})
    "generated features count 42 times as much as the clients' own data (loss 84, own 2); lower alpha and beta"
    >>> outweighed({"own_loss": 2.0, "generated_loss": 8.0})
    ''
    """
    own, generated = sums.get("own_loss", 0.0), sums.get("generated_loss", 0.0)
    if not own or generated < _TOO_MUCH * own:
        return ""
    times = f"{generated / own:.0f} times as much as the clients' own data"
    return f"generated features count {times} (loss {generated:.3g}, own {own:.3g}); lower alpha and beta"


def fit(
    weights: Group,
    moments: Group,
    heads: Sequence[nn.Module],
    counts_SC: Tensor,
    how: Fitting,
    draws: torch.Generator,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Train a generator so that the clients' heads see the class that it was asked for.

    In float64, so that the order of the clients does not show. Heads only pass gradients on.

    Args:
        weights: see `fresh`. moments: what an earlier call left; empty at first.
        heads: the clients' (`frozen_head`). counts_SC: their samples of each class, more than one of some class in all.
        how: see `Fitting`. draws: for noise and classes, the latter in proportion to their samples.

    Returns:
        New weights, new moments, and the mean loss over the steps.
    """
    known_C, shares_SC = known_classes(counts_SC), counts_SC / counts_SC.sum(0).clamp(min=1)
    noise = weights["hidden.weight"].shape[1] - counts_SC.shape[1]
    now = {name: t.double().clone() for name, t in weights.items()}
    trained = {name: t.requires_grad_() for name, t in now.items() if "running" not in name}
    optimizer = torch.optim.Adam(trained.values(), how.lr, weight_decay=_WEIGHT_DECAY)
    if moments:
        for name, t in trained.items():
            optimizer.state[t] = {what: moments[f"{name}.{what}"].clone() for what in _MOMENTS}
    total = 0.0
    for _ in range(how.steps):
        y_B = torch.multinomial(known_C.double(), how.batch, replacement=True, generator=draws)
        z_BZ = torch.randn(how.batch, noise, generator=draws).double()
        made_BD = generate(now, z_BZ, y_B, training=True)
        logits_SBC = torch.stack([head(made_BD) for head in heads])
        loss = _summed_losses(logits_SBC, y_B, shares_SC.double())
        loss = loss + how.diversity * likeness(z_BZ, made_BD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    new = {name: t.detach().to(weights[name].dtype) for name, t in now.items()}
    left = {f"{name}.{what}": optimizer.state[t][what] for name, t in trained.items() for what in _MOMENTS}
    return new, left, total / how.steps


def _summed_losses(logits_SBC: Tensor, y_B: Tensor, shares_SC: Tensor) -> Tensor:
    """The sum over clients of their losses, each by its share of the class's samples."""
    losses_SB = torch.stack([F.cross_entropy(logits_BC, y_B, reduction="none") for logits_BC in logits_SBC])
    return (shares_SC[:, y_B] * losses_SB).sum(0).mean()
