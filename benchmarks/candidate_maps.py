"""Maps for the common closed form that are learnt in rounds, for `closed_form_candidates.py`.

grow    phi <- phi + relu(phi B) Omega, B random, as in DeepAFL (ICLR 2026, arXiv:2603.00579).  W solves Y ~ phi W;
        Omega is that of least |Y - (phi + relu(phi B) Omega) W|^2 + gamma |Omega|^2. All of it comes of sums of rows:
        phi'phi, phi'Y, H'H, H'(Y - phi W) with H = relu(phi B), two exchanges a block.
learn   phi joined with what a small network represents, which all clients average for some rounds (FedAvg).

Sums of all rows are the sums over clients, so rows of all clients are joined here.
Shapes: N rows, D features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Features = Callable[[Tensor], Tensor]  # of rows of phi


def grow(
    phi_ND: Tensor, y_N: Tensor, classes: int, blocks: int, gamma: float, draws: torch.Generator
) -> list[Features]:
    """What turns phi into the features after 0, 1, ..., `blocks` blocks.

    Args:
        gamma: relative to the mean eigenvalue of H'H times that of W W'.
    """
    mean_D = phi_ND.mean(dim=0)
    deviation_D = phi_ND.std(dim=0).clamp(min=1e-6)
    target_NC = F.one_hot(y_N, classes).double()
    target_NC = target_NC - target_NC.mean(dim=0)
    found: list[Features] = [lambda phi: (phi - mean_D) / deviation_D]
    now_ND = found[0](phi_ND)
    for _ in range(blocks):
        width = now_ND.shape[1]
        b_DD = torch.randn(width, width, generator=draws, dtype=torch.float64) / math.sqrt(width)
        w_DC = ridge(now_ND, target_NC)
        hidden_ND = torch.relu(now_ND @ b_DD)
        center_D = hidden_ND.mean(dim=0)
        omega_DD = sandwiched(hidden_ND - center_D, target_NC - now_ND @ w_DC, w_DC, gamma)
        found.append(_block(found[-1], b_DD, center_D, omega_DD))
        now_ND = now_ND + (hidden_ND - center_D) @ omega_DD
    return found


def _block(before: Features, b_DD: Tensor, center_D: Tensor, omega_DD: Tensor) -> Features:
    def features(phi_ND: Tensor) -> Tensor:
        now_ND = before(phi_ND)
        return now_ND + (torch.relu(now_ND @ b_DD) - center_D) @ omega_DD

    return features


def ridge(phi_ND: Tensor, target_NC: Tensor, shrinkage: float = 0.1) -> Tensor:
    """W (D, C) of least squares on centered rows, with a multiple of the mean variance on the diagonal."""
    second_DD = phi_ND.T @ phi_ND / len(phi_ND)
    scale = second_DD.trace() / len(second_DD)
    shrunk_DD = (1 - shrinkage) * second_DD + shrinkage * scale * torch.eye(len(second_DD), dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(shrunk_DD, phi_ND.T @ target_NC / len(phi_ND))
    return solved


def sandwiched(hidden_ND: Tensor, rest_NC: Tensor, w_DC: Tensor, gamma: float) -> Tensor:
    """Omega (D, D) of least |rest - hidden Omega W|^2 + gamma |Omega|^2, in the bases of H'H and W W'."""
    values_D, left_DD = torch.linalg.eigh(hidden_ND.T @ hidden_ND)
    right_DC, singular_C, _ = torch.linalg.svd(w_DC, full_matrices=False)
    squares_C = singular_C.square()
    middle_DC = left_DD.T @ (hidden_ND.T @ rest_NC) @ w_DC.T @ right_DC
    least = gamma * values_D.mean() * squares_C.mean()
    return left_DD @ (middle_DC / (values_D.unsqueeze(1) * squares_C + least)) @ right_DC.T


def joined(parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Features side by side, each part with the same mean variance. like: rows by which they are scaled."""
    scaled = [(part - one.mean(dim=0)) / one.var(dim=0).mean().sqrt() for part, one in zip(parts, like, strict=True)]
    return torch.cat(scaled, dim=1)
