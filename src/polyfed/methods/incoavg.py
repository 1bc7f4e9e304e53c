"""InCoAvg: deep layers' updates steered by shallow ones (InCo Aggregation: Chan et al., ICLR 2024, arXiv:2308.11464).

Client k:  w <- received;  E local epochs of SGD on CE(f(x; w), y).
Server:    g = mean of w_k - w, tensor by tensor over the clients that have it;  w <- w + g', where for convolutions of
           all blocks of a stage but the first, with g_0 the update of the stage's first block (its last convolution of
           that shape),  g_k' = (g_k / ||g_k|| + theta g_0 / ||g_0||) (||g_k|| + ||g_0||) / 2,  else g' = g.
theta = min(|<g_0, g_k>| / (||g_0||^2 + 1e-7), 5), for every kernel by itself, and entries of g' are at most 0.1 in
size: so the authors' code ("code"), which made the published figures. The paper's theorem ("paper") has
g_k' = g_k + theta g_0, theta = max(0, -<g_0, g_k> / ||g_0||^2), the nearest to g_k that does not point against g_0.
Deviations from the paper: (1) "code" is the default; even with theta = 0 it scales a step by (1 + ||g_0||/||g_k||) / 2.
(2) Clients send weights, of which the server knows the differences; so what is not corrected, BatchNorm's statistics
too, is the plain mean. (3) A layer that nobody sent, or a kernel that did not change, is neither corrected nor a
reference. (4) Convolutions alone, larger than 1 x 1; transformers (one norm layer in the paper) are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from polyfed.core.message import Group, Message
from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.functional.cross_layer import correct_updates, shallow_references
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class InCoAvg(FedAvg):
    """Averaging, with updates of deep layers corrected by those of shallow ones."""

    card = replace(FedAvg.card, name="incoavg", paper="Chan et al., ICLR 2024")

    # correction of g_k: the authors' code, the paper's theorem, or "none" (FedAvg)
    theta_rule: Literal["code", "paper", "none"] = "code"
    weighting: weight_averaging.Weighting = "uniform"  # equal weights; "samples": by training samples

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        before = weight_averaging.all_weights(server)
        super().aggregate(server, uploads)
        for name, mean in weight_averaging.all_weights(server).items():
            server.state[name] = {**mean, **self._corrected(before[name], mean)}

    def _corrected(self, w: Group, mean: Group) -> dict[str, Tensor]:
        """Convolutions whose update is corrected."""
        moved: dict[str, Tensor] = {}
        for name, reference in shallow_references(w).items():
            g_k = mean[name] - w[name]
            g_0 = mean[reference] - w[reference]
            if self.theta_rule != "none" and g_k.any() and g_0.any():
                moved[name] = w[name] + correct_updates(g_k, g_0, self.theta_rule)
        return moved
