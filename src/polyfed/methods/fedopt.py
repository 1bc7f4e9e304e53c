"""FedOpt: averaging with an adaptive server optimizer: FedAdam, FedYogi, FedAdagrad (Reddi et al., ICLR 2021).

client k:  w_k <- w;  E epochs of  w_k <- w_k - eta grad CE(f(x; w_k), y)
server:    D = sum over responding clients of p_k (w_k - w),   m <- beta1 m + (1 - beta1) D
           v <- v + D^2                               "adagrad"
           v <- beta2 v + (1 - beta2) D^2             "adam"
           v <- v - (1 - beta2) D^2 sign(v - D^2)     "yogi"
           w <- w + server_lr m / (sqrt(v) + tau),    m = 0 and v = tau^2 before round 1
beta1 = 0.9 (0 with "adagrad") and beta2 = 0.99 are the paper's.
Sent: down P; up P + 1. Kept: server: w, m, v.
Deviations from the paper (arXiv:2003.00295): (1) Clients are weighted by samples; in algorithm 2 all count alike
(`weighting = "uniform"`). (2) Different architectures are averaged layer by layer or within each architecture. (3)
BatchNorm's running statistics are averaged, not stepped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.message import Group, Message, get_group
from polyfed.core.method import follows_device, hyperparameters
from polyfed.core.server import Server
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg
from polyfed.validation.effect import ActsWith

BETA1 = 0.9  # share of the last mean change that is kept; with "adagrad" none
BETA2 = 0.99  # share of the last mean square
_ADAPTIVE = ActsWith("server_optimizer", ("adam", "yogi", "adagrad"))


class Moments(NamedTuple):
    """What the server remembers of a parameter: m and v."""

    mean: Tensor
    square: Tensor


@hyperparameters
class FedOpt(FedAvg):
    """Federated averaging with an adaptive server optimizer."""

    server_optimizer: Literal["adam", "yogi", "adagrad", "none"] = "adam"  # "none": FedAvg, bit for bit
    server_lr: Annotated[float, Field(gt=0), _ADAPTIVE] = 0.01  # learning rate of the server's step
    tau: Annotated[float, Field(gt=0), _ADAPTIVE] = 0.001  # added to the root of v; larger is less adaptive

    # server ------------------------------------------------------------------------------------------------
    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        step = None if self.server_optimizer == "none" else functools.partial(self._step, server)
        weight_averaging.average(server, self.aggregation, models, shares, step=step)

    def _step(self, server: Server, shared: str, change: Group) -> dict[str, Tensor]:
        """What is added to the parameters of a shared model, by the mean change D of each; keeps m and v."""
        means = self._kept(server, f"mean {shared}")
        squares = self._kept(server, f"square {shared}")
        steps = {}
        for name, d in change.items():
            before = Moments(means.get(name, torch.zeros_like(d)), squares.get(name, torch.full_like(d, self.tau**2)))
            after = self.moments(d, before)
            means[name], squares[name] = after
            steps[name] = self.server_lr * after.mean / (after.square.sqrt() + self.tau)
        server.state |= {f"mean {shared}": means, f"square {shared}": squares}
        return steps

    def _kept(self, server: Server, key: str) -> dict[str, Tensor]:
        return dict(get_group(server.state, key)) if key in server.state else {}

    def moments(self, d: Tensor, before: Moments) -> Moments:
        """M and v after the change d of a parameter."""
        beta1 = 0.0 if self.server_optimizer == "adagrad" else BETA1
        square = d.square()
        if self.server_optimizer == "adagrad":
            v = before.square + square
        elif self.server_optimizer == "adam":
            v = BETA2 * before.square + (1 - BETA2) * square
        else:
            v = before.square - (1 - BETA2) * square * (before.square - square).sign()
        return Moments(beta1 * before.mean + (1 - beta1) * d, v)

    # declared -------------------------------------------------------------------------------------------------
    staleness_weighting = "changes"
