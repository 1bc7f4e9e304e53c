"""FedAvg: averaging of weights (McMahan et al., AISTATS 2017, arXiv:1602.05629), also among differing networks.

Client k:  w <- what the server sends;  E local epochs of SGD on CE(f(x; w), y).
Server:    w <- sum_k p_k w_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Sent per round, P floats of weights and float buffers: down 4 P bytes; up 4 P + 8 (n_k, int64).
Deviations from the paper: (1) where architectures differ, tensors are averaged layer-wise over the clients that have
them, or within each architecture (FedIN's eq. 19 and 21): the paper has one architecture only. (2) BatchNorm's running
statistics are averaged like weights; its batch counter stays with the client. (3) The loss is that of Local.
"""

from __future__ import annotations

from typing import ClassVar

from polyfed.core.method import knobs
from polyfed.methods.building_blocks import weight_averaging


@knobs
class FedAvg(weight_averaging.Averaging):
    """Averaging of weights."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
