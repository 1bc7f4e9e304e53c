"""A linear model that the server has solved: how a client keeps it, and predicts by it.

In a client's state: "solution", W (D, C) and b (C,) as "weight" and "bias", of classes also the federation's shares as
"shares" (C,); "own shares" (C,), the client's; "temperature", t, where its validation rows have chosen one.

Shapes: N rows, D features, C classes; where numbers are predicted C is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, get_tensor
from polyfed.core.method import Context
from polyfed.functional.closed_forms import fit_temperature


def class_shares(counts_C: Tensor) -> Tensor:
    """Shares n / N, so that a model that is passed on tells no number of rows; 0 without rows."""
    return counts_C.double() / counts_C.sum().clamp(min=1)


def keep(client: Client, solution: Group, scores: Callable[[Tensor], Tensor], chooses_temperature: bool = True) -> None:
    """Keep a solution and, of classes, the shares of the client's own rows, and a temperature for `scores`."""
    client.state["solution"] = {name: tensor.clone() for name, tensor in solution.items()}
    if client.classes:
        client.state["own shares"] = class_shares(client.data.train.y.bincount(minlength=client.classes))
        shares = get_tensor(solution, "shares"), get_tensor(client.state, "own shares")
        if chooses_temperature:
            choose_temperature(client, "temperature", scores, *shares)


def choose_temperature(
    client: Client, name: str, scores: Callable[[Tensor], Tensor], known_C: Tensor, prior_C: Tensor
) -> None:
    """Keep the temperature that the client's validation rows choose, if it has any, under this name; else it is 1/2.

    Args:
        scores: prepared inputs to (N, C), without class shares. known_C, prior_C: as for `closed_forms.log_posterior`.
    """
    rows = client.data.validation
    if len(rows):
        scores_NC = inference.map_batches(scores, client.model, rows, client.prepare).cpu()
        chosen = fit_temperature(scores_NC, rows.y, known_C, prior_C)
        client.state[name] = torch.tensor(chosen, dtype=torch.float64)


def linear_scores(solution: Group, phi_ND: Tensor) -> Tensor:
    """phi(x)' W + b (N, C): scores of classes without their shares, or numbers."""
    return phi_ND @ solution["weight"].to(phi_ND) + solution["bias"].to(phi_ND)


def shares_of(context: Context, prior: Literal["own", "federation"], device: torch.device) -> tuple[Tensor, Tensor]:
    """The federation's shares of classes (C,), and pi (C,): these or the client's own."""
    known_C: Tensor = context["solution"]["shares"].to(device)
    return known_C, known_C if prior == "federation" else context["own shares"].to(device)
