"""How far a local optimizer goes for its gradient: FedNova's normalizer."""

from __future__ import annotations


def normalizer(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """How many gradients long the way of `steps` steps is, a = ||a||_1: lr a g under a gradient g that stays the same.

    Plain SGD: a = tau. Heavy-ball momentum rho: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho).
    Proximal, b = lr mu: [1 - (1 - b)^tau] / b. Both: m <- rho m + 1 - b a, a <- a + m, from 0.

    Args:
        steps: tau, optimizer steps taken, at least 0. momentum: rho in [0, 1). pull: b, from 0 to below 1.

    Raises:
        ValueError: an argument is out of its range.

    Source: Wang et al. (FedNova), NeurIPS 2020, section 4.1.

    >>> normalizer(5), round(normalizer(2, momentum=0.9), 9), normalizer(2, pull=0.5)
    (5.0, 2.9, 1.5)
    """
    if steps < 0 or not 0 <= momentum < 1 or not 0 <= pull < 1:
        given = f"{steps}, {momentum} and {pull}"
        raise ValueError(f"expected steps of at least 0, momentum and pull in [0, 1), got {given}")
    a = m = 0.0
    for _ in range(steps):
        m = momentum * m + 1 - pull * a
        a += m
    return a
